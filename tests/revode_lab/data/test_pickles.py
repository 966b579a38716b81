from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from revode_lab.data import load
from revode_lab.data.catalogue import LAYOUTS, Layout

Tiny = Callable[[str], tuple[Layout, dict[str, bytes]]]


def write_pickles(root: Path, name: str, contents: dict[str, bytes], protocol: int, keys: type) -> Path:
    """CIFAR's pickles with the images of the binary files in `contents`."""
    layout = LAYOUTS[name]
    folder = root / str(layout.pickle_folder)
    folder.mkdir()
    num_labels = len(layout.label_keys)
    for file, data in contents.items():
        records = np.frombuffer(data, np.uint8).reshape(-1, num_labels + 3072)
        batch: dict[str, Any] = {
            "data": records[:, num_labels:].copy(),
            "batch_label": "a batch",
            "filenames": ["x.png"],
        }
        for position, key in enumerate(layout.label_keys):
            batch[key] = records[:, position].tolist()
        named = {key.encode() if keys is bytes else key: value for key, value in batch.items()}
        (folder / Path(file).stem).write_bytes(pickle.dumps(named, protocol=protocol))
    return folder


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("keys", [str, bytes])
def test_pickles_and_binaries_hold_the_same_data(tmp_path: Path, tiny: Tiny, protocol: int, keys: type) -> None:
    layout, contents = tiny("cifar10")
    write_pickles(tmp_path, "cifar10", contents, protocol, keys)
    from_pickles = load("cifar10", tmp_path)
    (tmp_path / layout.folder).mkdir()
    for file, data in contents.items():
        (tmp_path / layout.folder / file).write_bytes(data)
    from_binaries = load("cifar10", tmp_path)
    assert torch.equal(from_pickles.train.images, from_binaries.train.images)
    assert torch.equal(from_pickles.train.labels, from_binaries.train.labels)


def test_binary_files_are_preferred_and_never_mixed_with_pickles(laid_out: Callable[[str], Path]) -> None:
    root = laid_out("cifar10")
    (root / "cifar-10-batches-py").mkdir()
    load("cifar10", root)
    (root / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"cifar-10-batches-bin/test_batch.bin is missing"):
        load("cifar10", root)


def test_cifar100_pickles_give_the_fine_labels(tmp_path: Path, tiny: Tiny) -> None:
    _, contents = tiny("cifar100")
    write_pickles(tmp_path, "cifar100", contents, 2, bytes)
    assert load("cifar100", tmp_path).train.labels.tolist() == [n % 10 for n in range(20)]


def test_a_pickle_of_python_2_is_read(tmp_path: Path, tiny: Tiny) -> None:
    """Opcodes as Python 2 wrote them: protocol 2, byte strings, names under numpy.core."""
    _, contents = tiny("cifar10")
    folder = write_pickles(tmp_path, "cifar10", contents, 2, bytes)
    images = np.frombuffer(contents["test_batch.bin"], np.uint8).reshape(-1, 3073)
    pixels, labels = images[:, 1:].tobytes(), images[:, 0].tobytes()
    (folder / "test_batch").write_bytes(
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K" + bytes([len(images)]) + b"M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(pixels).to_bytes(4, "little") + pixels
        + b"tbU\x06labels](" + b"".join(b"K" + bytes([label]) for label in labels) + b"eu."
    )  # fmt: skip
    test = load("cifar10", tmp_path).test
    assert test is not None
    assert test.images.numpy().tobytes() == pixels
    assert test.labels.tolist() == list(labels)


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.system, ("touch {}",)),
        (os.mkdir, ("{}",)),
        (eval, ("open('{}', 'w')",)),
        (exec, ("open('{}', 'w')",)),
        (getattr, ("", "join")),
        (np.load, ("{}",)),
        (torch.load, ("{}",)),
        (pickle.loads, (b"",)),
    ],
)
def test_a_pickle_that_wants_to_run_code_is_refused_before_it_does(
    tmp_path: Path, tiny: Tiny, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    _, contents = tiny("cifar10")
    folder = write_pickles(tmp_path, "cifar10", contents, 2, bytes)
    mark = tmp_path / "executed"
    filled = [text.format(mark) if isinstance(text, str) else text for text in arguments]
    (folder / "data_batch_1").write_bytes(pickle.dumps({"data": Calls(function, *filled)}))
    with pytest.raises(ValueError, match=r"data_batch_1 asks for .*refused and nothing of it was run"):
        load("cifar10", tmp_path)
    assert not mark.exists()


@pytest.fixture
def batch(tmp_path: Path, tiny: Tiny) -> Path:
    """The first of CIFAR-10's pickles, all of which are right."""
    _, contents = tiny("cifar10")
    return write_pickles(tmp_path, "cifar10", contents, 2, bytes) / "data_batch_1"


def test_a_nested_name_is_no_way_around(tmp_path: Path, batch: Path) -> None:
    name = b"ndarray.__class__"
    batch.write_bytes(b"\x80\x04\x8c\x05numpy\x8c" + bytes([len(name)]) + name + b"\x93.")
    with pytest.raises(ValueError, match=r"asks for numpy.ndarray.__class__"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("dtype", ["O", "U4", "M8[s]", "u1,O", "i1", "f4"])
def test_arrays_of_other_than_bytes_are_refused(tmp_path: Path, batch: Path, dtype: str) -> None:
    batch.write_bytes(pickle.dumps({"data": np.zeros((20, 3072), dtype=dtype), "labels": [0] * 20}))
    with pytest.raises(ValueError, match="expected: uint8"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("protocol", range(6))
def test_an_array_stored_by_columns_is_the_same_array(tmp_path: Path, batch: Path, protocol: int) -> None:
    images = load("cifar10", tmp_path).train.images
    fields = pickle.loads(batch.read_bytes(), encoding="bytes")
    fields[b"data"] = np.asfortranarray(fields[b"data"])
    batch.write_bytes(pickle.dumps(fields, protocol))
    assert torch.equal(load("cifar10", tmp_path).train.images, images)


def test_attributes_set_by_one_pickle_do_not_reach_the_next(tmp_path: Path, batch: Path) -> None:
    honest = batch.read_bytes()
    # Puts the text "x" in place of the class's __setstate__.
    batch.write_bytes(b"\x80\x02cnumpy\nndarray\n(N}X\x0c\x00\x00\x00__setstate__X\x01\x00\x00\x00xstb.")
    with pytest.raises(ValueError, match="data_batch_1 is not"):
        load("cifar10", tmp_path)
    batch.write_bytes(honest)
    load("cifar10", tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 10, 100, 5000])
def test_a_truncated_pickle_is_an_error_in_words(tmp_path: Path, tiny: Tiny, kept: int) -> None:
    _, contents = tiny("cifar10")
    folder = write_pickles(tmp_path, "cifar10", contents, 2, bytes)
    path = folder / "data_batch_3"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="data_batch_3 is not a readable pickle"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "expected a dict, found a list"),
        ({"data": np.zeros((2, 3072), np.uint8)}, "no entry 'labels'"),
        ({"data": np.zeros((2, 3), np.uint8), "labels": [0, 1]}, "expected: uint8"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, "not a CIFAR batch"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": ["a", "b"]}, "not a CIFAR batch"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}, "does not hold the official images"),
    ],
)
def test_other_pickles_are_refused_in_words(tmp_path: Path, tiny: Tiny, batch: object, message: str) -> None:
    _, contents = tiny("cifar10")
    folder = write_pickles(tmp_path, "cifar10", contents, 2, bytes)
    (folder / "data_batch_1").write_bytes(pickle.dumps(batch))
    with pytest.raises(ValueError, match=message):
        load("cifar10", tmp_path)


def test_a_missing_pickle_is_named(tmp_path: Path, tiny: Tiny) -> None:
    _, contents = tiny("cifar10")
    folder = write_pickles(tmp_path, "cifar10", contents, 2, bytes)
    (folder / "test_batch").unlink()
    with pytest.raises(FileNotFoundError, match=r"test_batch is missing; .*revode data get cifar10"):
        load("cifar10", tmp_path)
