"""The official files read so that every byte is known to be right, or an error that says which is wrong and what to do.

CIFAR also comes as Python pickles. A pickle is a program: it may name any function and have it called. Here a name is looked
up in a short table of our own stand-ins for what NumPy writes into the pickle of an array, and any other name is refused before
anything is called. NumPy's own reconstruction functions are not used, as they trust the flags of a forged dtype.
"""

from __future__ import annotations

import io
import pickle
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from revode.data.catalogue import DataFile, Layout, data_root

CIFAR_PIXELS = 3 * 32 * 32
"""Bytes of a CIFAR image."""


@dataclass(frozen=True)
class FileStatus:
    """Result of checking one file: the official `file`, and `fault`, a sentence, or None where it is right."""

    file: DataFile
    fault: str | None
    absent: bool


def file_reader(name: str, layout: Layout, root: Path) -> Callable[[DataFile], bytes]:
    """A function from an official binary file to its verified contents.

    Binary files are preferred; where there is not one of them, but the folder of pickles, these are read instead. They
    hold the same images in the same order, so they are put into binary records and meet the same checksums.
    """
    pickles = root / layout.pickle_folder if layout.pickle_folder else None
    if pickles and pickles.exists() and not any((root / layout.folder / file.name).exists() for file in layout.files):
        return lambda file: _read_pickle(name, pickles / Path(file.name).stem, file, layout.label_keys)
    return lambda file: _read_binary(name, root / layout.folder / file.name, file)


def check_files(name: str, layout: Layout, root: Path) -> list[FileStatus]:
    """The state of every file of a data set."""
    read = file_reader(name, layout, root)

    def status(file: DataFile) -> FileStatus:
        try:
            read(file)
        except FileNotFoundError as error:
            return FileStatus(file, str(error), absent=True)
        except ValueError as error:
            return FileStatus(file, str(error), absent=False)
        return FileStatus(file, None, absent=False)

    return [status(file) for file in layout.files]


def remedy(name: str, root: Path) -> str:
    """The command that gets data set `name` into `root`."""
    option = "" if root == data_root() else f" --data-root {shlex.quote(str(root))}"
    return f"`revode data get {name}{option}`"


def _read_bytes(path: Path, way_out: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; {way_out}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions and the disk") from error


def _read_binary(name: str, path: Path, file: DataFile) -> bytes:
    data = _read_bytes(path, f"get it with {remedy(name, path.parent.parent)}")
    fault = file.fault(data)
    if fault:
        raise ValueError(f"{path} {fault}, so it is damaged; get it again with {remedy(name, path.parent.parent)}")
    return data


def _read_pickle(name: str, path: Path, file: DataFile, label_keys: tuple[str, ...]) -> bytes:
    """The binary records of a pickled CIFAR batch."""
    way_out = f"get the binary files with {remedy(name, path.parent.parent)}"
    batch = load_plain(path, f"copy it there, or {way_out}")
    try:
        records = _join(batch, label_keys)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not a CIFAR batch ({error}); {way_out}") from error
    fault = file.fault(records)
    if fault:
        raise ValueError(f"{path} does not hold the official images (in binary form it {fault}); {way_out}")
    return records


def _join(batch: Any, label_keys: tuple[str, ...]) -> bytes:
    """Binary records of a batch as CIFAR pickles it: a dict with `data` (N x 3072) and lists of labels."""
    if not isinstance(batch, dict):
        raise ValueError(f"expected a dict, found a {type(batch).__name__}")
    fields = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    for key in ("data", *label_keys):
        if key not in fields:
            raise ValueError(f"it has no entry {key!r}")
    pixels = np.asarray(fields["data"])
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != CIFAR_PIXELS:
        raise ValueError(f"'data' is {pixels.dtype} of shape {pixels.shape}, expected uint8 (N, {CIFAR_PIXELS})")
    labels = [np.asarray(fields[key], dtype=np.int64).reshape(len(pixels), 1) for key in label_keys]
    return np.concatenate([*(column.astype(np.uint8) for column in labels), pixels], axis=1).tobytes()


_PLAIN_KINDS = "?bBhHiIlLqQefd"
"""Codes of booleans, integers and floats, whose bytes hold numbers only."""


def load_plain(path: Path, way_out: str = "check its name") -> Any:
    """The object pickled in `path`, if it is built of arrays, numbers, strings, bytes, lists and dicts only.

    Pickles of Python 2, such as CIFAR's, come back with bytes for strings.
    """
    data = _read_bytes(path, way_out)
    try:
        return _plain(_PlainUnpickler(io.BytesIO(data), encoding="bytes").load())
    except _ForbiddenName as error:
        raise ValueError(
            f"{path} asks for {error}, which no data file needs; it was refused and nothing of it was run"
        ) from None
    # A damaged pickle can fail in any way: an unknown opcode, a missing stack entry, a wrong type, an absurd size.
    except Exception as error:
        raise ValueError(f"{path} is not a readable pickle ({type(error).__name__}: {error})") from error


class _ForbiddenName(Exception):
    """The pickle names something outside the table."""


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, *, encoding: str) -> None:
        super().__init__(file, encoding=encoding)
        # Made anew for every file, because a pickle may set attributes on what it is given.
        self._admitted = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name; every other name is refused."""
        home = module.replace("numpy._core", "numpy.core")
        try:
            return self._admitted[home, name]
        except KeyError:
            raise _ForbiddenName(f"{module}.{name}") from None


def _stand_ins() -> dict[tuple[str, str], Callable[..., Any]]:
    """What a pickled array names, and what answers to these names here."""

    class PickledDtype:
        def __init__(self, code: str | bytes, align: object = False, copy: object = True) -> None:
            self.code = code.decode("ascii") if isinstance(code, bytes) else code

        def __setstate__(self, state: tuple[Any, ...]) -> None:
            order = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
            self.code = order.replace("|", "").replace("=", "") + self.code

        def plain(self) -> np.dtype:
            dtype = np.dtype(self.code)
            if dtype.char not in _PLAIN_KINDS:
                raise ValueError(f"arrays of type {self.code!r} are not admitted")
            return dtype

    class PickledArray:
        array: np.ndarray | None = None

        def __setstate__(self, state: tuple[Any, ...]) -> None:
            _, shape, dtype, fortran, data = state
            self.array = rebuild(data, dtype, shape, "F" if fortran else "C").array

    def rebuild(data: bytes, dtype: PickledDtype, shape: tuple[int, ...], order: str = "C") -> PickledArray:
        result = PickledArray()
        result.array = np.frombuffer(data, dtype.plain()).reshape(shape, order="F" if order == "F" else "C")
        return result

    def reconstruct(subtype: object, shape: object, kind: object) -> PickledArray:
        return PickledArray()

    def scalar(dtype: PickledDtype, data: bytes) -> int | float | bool:
        return np.frombuffer(data, dtype.plain())[0].item()

    def encode(text: str, encoding: str) -> bytes:
        if encoding not in ("latin1", b"latin1"):
            raise ValueError(f"encoding {encoding!r} is not admitted")
        return text.encode("latin1")

    return {
        ("numpy", "dtype"): PickledDtype,
        ("numpy", "ndarray"): PickledArray,
        ("numpy.core.multiarray", "_reconstruct"): reconstruct,
        ("numpy.core.numeric", "_frombuffer"): rebuild,
        ("numpy.core.multiarray", "scalar"): scalar,
        ("_codecs", "encode"): encode,
    }


def _plain(value: Any) -> Any:
    """`value` with stand-ins replaced by their arrays; anything that is not plain data is refused."""
    if isinstance(value, (bool, int, float, str, bytes, bytearray, np.ndarray)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    array = getattr(value, "array", None)
    if isinstance(array, np.ndarray):
        return array
    raise ValueError(f"holds a {type(value).__name__}, which is not an array, number, string, list or dict")
