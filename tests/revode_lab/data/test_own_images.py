"""Images of one's own: read whole or not at all, in any size, however many."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from revode_lab.cli import main
from revode_lab.data import hold_out, load, own
from revode_lab.training import configure


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REVODE_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


def picture(file: Path, size: tuple[int, int] = (40, 30), colour: Any = (10, 20, 30), mode: str = "RGB") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(file)


def make(folder: Path, count: int = 10, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    for index in range(count):
        for number, name in enumerate(classes):
            picture(folder / name / f"{index}.png", (20 + index % 17, 44 - index % 23), (40 * number, 5 * index, 7))
    return folder


def test_a_folder_of_classes_is_split_by_class_and_always_alike(tmp_path: Path) -> None:
    name = f"folder:{make(tmp_path / 'pets')}"
    data = load(name)
    assert (data.name, data.class_names, data.channels, data.image_size) == ("pets", ("cat", "dog"), 3, 32)
    assert (len(data.train), len(data.split("test"))) == (data.num_train, data.num_test) == (16, 4)
    test = data.split("test").take(torch.arange(4))
    assert test.labels.bincount().tolist() == [2, 2]
    again = load(name).split("test").take(torch.arange(4))
    assert torch.equal(test.images, again.images)
    assert set(test.images[:, 0].unique().tolist()) == {0, 40}
    pixels = data.train.take(torch.arange(16)).images.double() / 255
    assert data.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=1e-5)
    assert data.std[:2] == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist()[:2], abs=1e-5)
    assert data.std[2] == 1.0  # a channel of one value: nothing to divide by


def test_train_and_test_folders_and_grey_images(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 1)):
        for number in (10, 9):
            for index in range(count):
                picture(tmp_path / "x" / split / str(number) / f"{index}.png", (28, 28), number, "L")
    data = load(f"folder:{tmp_path / 'x'}@28")
    assert (data.class_names, data.channels, len(data.train), len(data.split("test"))) == (("9", "10"), 1, 6, 2)
    assert data.train.take(torch.arange(6)).images[:, 0, 0, 0].tolist() == [10, 10, 10, 9, 9, 9]


def test_the_centre_is_cut_out_or_all_is_squeezed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for index in range(2):
            file = tmp_path / "x" / name / f"{index}.png"
            picture(file, (60, 20), (0, 0, 0))
            image = Image.open(file)
            image.paste((255, 255, 255), (20, 0, 40, 20))  # the middle third
            image.save(file)
    cut, squeezed = (
        load(f"folder:{tmp_path / 'x'}@20{how}").train.take(torch.arange(1)).images for how in ("", ",resize")
    )
    assert int(cut.min()) == 255
    assert squeezed[0, 0, 10, [0, 10, 19]].tolist() == [0, 255, 0]


def test_bad_files_are_all_named_and_nothing_is_kept(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "pets")
    (folder / "cat" / "0.png").write_text("not an image")
    (folder / "dog" / "1.png").write_bytes((folder / "dog" / "2.png").read_bytes()[:60])
    Image.fromarray(np.full((9, 9), 40_000, "uint16")).save(folder / "dog" / "3.png")
    assert main(["data", "check", f"folder:{folder}"]) == 2
    said = capsys.readouterr().err
    assert "3 of 20 files" in said
    assert all(name in said for name in ("cat/0.png (no image)", "dog/1.png (", "dog/3.png (pixels of mode I;16"))
    assert [file.name for file in root.rglob("*") if file.is_file()] == [".lock"]
    for file in ("cat/0.png", "dog/1.png", "dog/3.png"):
        picture(folder / file)
    assert main(["data", "check", f"folder:{folder}"]) == 0
    assert "16 images for training and 4 for testing, 2 classes, 3x32x32" in capsys.readouterr().out


def test_a_folder_that_changes_is_read_anew(tmp_path: Path) -> None:
    folder = make(tmp_path / "pets")
    assert len(load(f"folder:{folder}").train) == 16
    picture(folder / "cat" / "new.png")
    (folder / "cat" / "notes.txt").write_text("no image, and not called one")
    assert load(f"folder:{folder}").num_train + load(f"folder:{folder}").num_test == 21


@pytest.mark.parametrize("images", [(12, 9, 7), (12, 9, 7, 3), (12, 3, 9, 7), (12, 9, 7, 1)])
@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_of_any_order(tmp_path: Path, images: tuple[int, ...], compressed: bool) -> None:
    pixels = np.zeros(images, "uint8") + np.arange(12, dtype="uint8").reshape(12, *[1] * (len(images) - 1))
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "x.npz", images=pixels, labels=np.arange(12)[:, None] % 3 + 5)
    data = load(f"npz:{tmp_path / 'x.npz'}@8")
    assert (data.class_names, data.channels) == (("5", "6", "7"), 3 if 3 in images else 1)
    found = data.train.take(torch.arange(len(data.train)))
    assert torch.equal(found.images[:, 0, 4, 4].long() % 3, found.labels)


@pytest.mark.parametrize(
    "names",
    [("train_images", "train_labels", "test_images", "test_labels"), ("x_train", "y_train", "x_test", "y_test")],
)
def test_arrays_with_a_split_of_their_own(tmp_path: Path, names: tuple[str, ...]) -> None:
    arrays = [np.ones((6, 8, 8), "uint8"), np.arange(6) % 2, np.full((2, 8, 8), 9, "uint8"), np.arange(2)]
    np.savez(tmp_path / "x.npz", **dict(zip(names, arrays, strict=True)))
    test = load(f"npz:{tmp_path / 'x.npz'}@8").split("test")
    assert test.take(torch.arange(2)).images.unique().tolist() == [9]


def refusals(folder: Path) -> dict[str, str]:
    """Return names that are refused, each with what the sentence must say."""
    picture(folder / "alone" / "cat" / "0.png")
    make(folder / "single", 1)
    picture(make(folder / "loose") / "0.png")
    make(folder / "val" / "train")
    make(folder / "val" / "val")
    make(folder / "unseen" / "train")
    make(folder / "unseen" / "test", classes=("cow",))
    np.savez(folder / "float.npz", images=np.zeros((4, 8, 8)), labels=np.arange(4) % 2)
    np.savez(folder / "short.npz", images=np.zeros((4, 8, 8), "uint8"), labels=np.arange(3) % 2)
    np.savez(folder / "names.npz", pictures=np.zeros((4, 8, 8), "uint8"))
    np.savez(folder / "object.npz", images=np.zeros((4, 8, 8), "uint8"), labels=np.array([{}] * 4))
    np.savez(folder / "cut.npz", images=np.zeros((4, 8, 8), "uint8"), labels=np.arange(4) % 2)
    (folder / "cut.npz").write_bytes((folder / "cut.npz").read_bytes()[:200])
    return {
        "folder:nowhere": "there is no folder",
        "npz:nowhere.npz": "there is no file",
        "folder:alone": "1 classes",
        "folder:single": "one image of cat, dog",
        "folder:loose": "in no class: 0.png",
        "folder:val": "in no class: val/cat/0.png",
        "folder:unseen": "without training images: cow",
        "folder:loose@2": "edge of 4 to 4096",
        "npz:float.npz": "images is float64",
        "npz:short.npz": "labels is int64 of shape (3,)",
        "npz:names.npz": "it has the arrays pictures",
        "npz:object.npz": "cannot read images from",
        "npz:cut.npz": "it is no whole .npz file",
        "foldr:pets": "unknown data set",
    }


def test_what_cannot_be_trained_on_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, sentence in refusals(tmp_path).items():
        with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
            load(name)
        assert "\n" not in str(refused.value)


def test_a_run_on_a_folder_trains_scores_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "pets")
    monkeypatch.chdir(tmp_path)
    small = "blocks=[2,2],channels=[4,8]"
    words = [
        "--dataset",
        "folder:pets@8",
        "--options",
        small,
        "--max-steps",
        "2",
        "--batch-size",
        "8",
        "--validation",
        "0",
    ]
    assert main(["train", *words, "--threads", "1"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name == "hamiltonian-74-pets@8-seed0"
    result = json.loads((run / "result.json").read_text())
    assert result["dataset"] == f"folder:{tmp_path / 'pets'}@8"
    assert sum(map(sum, result["confusion"])) == 4
    monkeypatch.chdir("/")  # the run knows where its images are
    assert main(["eval", str(run), "--threads", "1"]) == 0
    page = (run / "report.html").read_text()
    assert "cat" in page
    assert "Parts that need the images are missing" not in page


def test_flips_can_be_left_out() -> None:
    assert configure(dataset="folder:x", flips="none").data.flips == "none"
    assert configure(dataset="folder:x").recipe == "quick"


LIMITED = """
import resource, sys, torch
from revode_lab.data import load, own, batches, augment
in_use = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
limit = in_use + 120_000_000
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.ones(150_000_000, dtype=torch.uint8)
    sys.exit("there is no limit")
except RuntimeError:
    pass
data = load(sys.argv[1])
assert data.train.images.nbytes > 150_000_000, data.train.images.nbytes
for indices in batches(len(data.train), 16, seed=0, epoch=0):
    x = augment(data.train.take(indices).images, indices, data, seed=0, epoch=0)
print(len(data.train), float(x.mean()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are tested on Linux")
def test_a_folder_larger_than_a_limit_of_memory(tmp_path: Path) -> None:
    """150 MB in an array of 224x224 images, where the process may have 120 MB besides torch."""
    name = f"folder:{make(tmp_path / 'large', 530)}@224"
    done = subprocess.run([sys.executable, "-c", LIMITED, name], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("848 ")


@pytest.mark.slow
def test_2000_images_of_mixed_sizes_with_three_broken_ones(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for index in range(2_000):
        file = tmp_path / "x" / ("cat", "dog")[index % 2] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        height, width = generator.integers(8, 120, 2)
        Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype="uint8")).save(file)
    broken = ["cat/1000.png", "dog/1.png", "dog/777.png"]
    for name in broken:
        (tmp_path / "x" / name).write_bytes((tmp_path / "x" / name).read_bytes()[:50])
    with pytest.raises(ValueError, match="3 of 2,000 files") as refused:
        load(f"folder:{tmp_path / 'x'}")
    assert all(name in str(refused.value) for name in broken)
    for name in broken:
        (tmp_path / "x" / name).unlink()
    assert load(f"folder:{tmp_path / 'x'}").num_train == 1_598


def test_holding_out_reads_no_image(tmp_path: Path) -> None:
    data = load(f"folder:{make(tmp_path / 'pets')}")
    rest, held = hold_out(data.train, 4, seed=1)
    assert rest.images.data_ptr() == held.images.data_ptr() == data.train.images.data_ptr()
    joined = torch.cat([part.take(torch.arange(len(part))).images for part in (rest, held)])
    assert sorted(map(bytes, joined.numpy())) == sorted(map(bytes, data.train.take(torch.arange(16)).images.numpy()))
    assert own.EDGE == 32
