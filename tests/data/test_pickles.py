from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from revode.data import load
from revode.data.catalogue import LAYOUTS, Layout
from revode.data.files import load_plain

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


def test_a_pickle_of_python_2_is_read(tmp_path: Path) -> None:
    """Opcodes as Python 2 wrote them: protocol 2, byte strings, names under numpy.core."""
    path = tmp_path / "batch"
    path.write_bytes(
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x02K\x03\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x06\x01\x02\x03\x04\x05\x06tb"
        b"U\x06labels](K\x07K\x08eu."
    )
    batch = load_plain(path)
    assert batch[b"data"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch[b"labels"] == [7, 8]


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


def test_a_nested_name_is_no_way_around(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    name = b"ndarray.__class__"
    path.write_bytes(b"\x80\x04\x8c\x05numpy\x8c" + bytes([len(name)]) + name + b"\x93.")
    with pytest.raises(ValueError, match=r"asks for numpy.ndarray.__class__"):
        load_plain(path)


@pytest.mark.parametrize("dtype", ["O", "U4", "M8[s]", "u1,O"])
def test_arrays_of_other_than_numbers_are_refused(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(np.zeros(3, dtype=dtype)))
    with pytest.raises(ValueError, match="is not a readable pickle"):
        load_plain(path)


def test_attributes_set_by_one_pickle_do_not_reach_the_next(tmp_path: Path) -> None:
    hostile, honest = tmp_path / "hostile", tmp_path / "honest"
    # Puts the text "x" in place of the class's __setstate__.
    hostile.write_bytes(b"\x80\x02cnumpy\nndarray\n(N}X\x0c\x00\x00\x00__setstate__X\x01\x00\x00\x00xstb.")
    honest.write_bytes(pickle.dumps({"data": np.arange(6, dtype=np.uint8)}))
    with pytest.raises(ValueError, match="hostile"):
        load_plain(hostile)
    assert load_plain(honest)["data"].tolist() == list(range(6))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.asfortranarray(np.arange(12, dtype=np.int64).reshape(3, 4)),
        np.arange(4, dtype=">i4"),
        np.array([True, False]),
    ],
    ids=lambda array: str(array.dtype),
)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays_come_back_as_they_were(tmp_path: Path, value: np.ndarray, protocol: int) -> None:
    path = tmp_path / "array"
    path.write_bytes(pickle.dumps([value, np.int64(3), (1.5, None, "text", b"bytes")], protocol=protocol))
    array, number, rest = load_plain(path)
    assert array.dtype == value.dtype
    assert np.array_equal(array, value)
    assert number == 3
    assert rest == [1.5, None, "text", b"bytes"]


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
        ({"data": np.zeros((2, 3), np.uint8), "labels": [0, 1]}, "expected uint8"),
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
