"""The official files read so that every byte is known to be right, or an error that says which is wrong and what to do.

CIFAR also comes as Python pickles. A pickle is a program: it may name any function and have it called. Here the few names in
the pickle of an array stand for a class that only keeps what it is given, and any other name is refused before anything is
called. What was kept is read as bytes, and the bytes must be the official ones.
"""

from __future__ import annotations

import io
import pickle
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from revode_lab.data.catalogue import LAYOUTS, DataFile, data_root

CIFAR_PIXELS = 3 * 32 * 32
"""Bytes of a CIFAR image."""
_ARRAY_NAMES = (
    "numpy.dtype", "numpy.ndarray", "numpy.core.multiarray._reconstruct", "numpy.core.numeric._frombuffer",
)  # fmt: skip
"""The names in the pickle of an array."""


def file_reader(name: str, root: Path) -> Callable[[DataFile], bytes]:
    """Return a function from an official binary file of the data set called `name` to its verified contents.

    Binary files are preferred; where there is not one of them, but the folder of pickles, these are read instead. They
    hold the same images in the same order, so they are put into binary records and meet the same checksums.
    """
    layout = LAYOUTS[name]
    folder, pickles = root / layout.folder, root / (layout.pickle_folder or layout.folder)
    option = "" if root == data_root() else f" --data-root {shlex.quote(str(root))}"
    command = f"`revode data get {name}{option}`"

    def read_binary(file: DataFile) -> bytes:
        data = _read_bytes(folder / file.name, f"get it with {command}")
        fault = file.fault(data)
        if fault:
            raise ValueError(f"{folder / file.name} {fault}, so it is damaged; get it again with {command}")
        return data

    def read_pickle(file: DataFile) -> bytes:
        path, way_out = pickles / Path(file.name).stem, f"get the binary files with {command}"
        batch = _unpickle(path, _read_bytes(path, f"copy it there, or {way_out}"))
        try:
            records = _records(batch, layout.label_keys)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} is not a CIFAR batch ({error}); {way_out}") from error
        fault = file.fault(records)
        if fault:
            raise ValueError(f"{path} does not hold the official images (in binary form it {fault}); {way_out}")
        return records

    has_binaries = any((folder / file.name).exists() for file in layout.files)
    return read_pickle if layout.pickle_folder and pickles.exists() and not has_binaries else read_binary


def find_faults(name: str, root: Path) -> dict[DataFile, Exception]:
    """Return the files of a data set that are missing (FileNotFoundError) or damaged (ValueError), each with its sentence."""
    read, faults = file_reader(name, root), {}
    for file in LAYOUTS[name].files:
        try:
            read(file)
        except (FileNotFoundError, ValueError) as error:
            faults[file] = error
    return faults


def _read_bytes(path: Path, way_out: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; {way_out}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions and the disk") from error


class _ForbiddenName(Exception):
    """The pickle names something that no array needs."""


def _unpickle(path: Path, data: bytes) -> Any:
    """Return the object pickled in `data`, with a `Kept` in the place of every array."""

    # Made anew for every file, because a pickle may set attributes on what it is given.
    class Kept:
        state: tuple[Any, ...] = ()

        def __init__(self, *given: Any) -> None:
            self.given = given

        def __setstate__(self, state: tuple[Any, ...]) -> None:
            self.state = state

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module.replace('numpy._core', 'numpy.core')}.{name}" in _ARRAY_NAMES:
                return Kept
            if (module, name) == ("_codecs", "encode"):
                return lambda text, encoding: str.encode(text, "latin1")  # bytes in protocols below 3
            raise _ForbiddenName(f"{module}.{name}")

    try:
        return Unpickler(io.BytesIO(data), encoding="bytes").load()  # Python 2's strings, as in CIFAR's, become bytes
    except _ForbiddenName as error:
        raise ValueError(
            f"{path} asks for {error}, which no data file needs; it was refused and nothing of it was run"
        ) from None
    # A damaged pickle can fail in any way: an unknown opcode, a missing stack entry, a wrong type, an absurd size.
    except Exception as error:
        raise ValueError(f"{path} is not a readable pickle ({type(error).__name__}: {error})") from error


def _records(batch: Any, label_keys: tuple[str, ...]) -> bytes:
    """Return binary records of a batch as CIFAR pickles it: a dict with `data` (N x 3072) and lists of labels."""
    if not isinstance(batch, dict):
        raise ValueError(f"expected a dict, found a {type(batch).__name__}")
    fields = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    for key in ("data", *label_keys):
        if key not in fields:
            raise ValueError(f"it has no entry {key!r}")
    pixels = _bytes_of(fields["data"])
    if pixels is None or pixels.shape[1:] != (CIFAR_PIXELS,):
        raise ValueError(f"its entry 'data' is not the array expected: uint8 of shape (N, {CIFAR_PIXELS})")
    labels = [np.asarray(fields[key], dtype=np.int64).reshape(len(pixels), 1) for key in label_keys]
    return np.concatenate([*(column.astype(np.uint8) for column in labels), pixels], axis=1).tobytes()


def _bytes_of(kept: Any) -> np.ndarray | None:
    """Return the array of uint8 that a `Kept` stands for; None if it does not stand for one."""
    try:
        # Protocol 5 gives bytes, type, shape and order; those before it set the state of an empty array.
        if kept.state:
            _, shape, dtype, is_fortran, data = kept.state
            order = "F" if is_fortran else "C"
        else:
            data, dtype, shape, order = kept.given[:4]
        is_bytes = dtype.given[0] in ("u1", b"u1")
        return np.frombuffer(data, np.uint8).reshape(shape, order=order) if is_bytes else None
    except (AttributeError, TypeError, ValueError, IndexError):
        return None
