"""Python pickles of arrays, numbers, strings, bytes, lists and dicts, and of nothing that could run code.

A pickle is a program: it may name any function and have it called. Here a name is looked up in a short table of our own
stand-ins for what NumPy writes into the pickle of an array, and any other name is refused before anything is called.
NumPy's own reconstruction functions are not used, as they trust the flags of a forged dtype.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_PLAIN_KINDS = "?bBhHiIlLqQefd"
"""Codes of booleans, integers and floats, whose bytes hold numbers only."""


def load_plain(path: Path) -> Any:
    """The object pickled in `path`, if it is built of arrays, numbers, strings, bytes, lists and dicts only.

    Pickles of Python 2, such as CIFAR's, come back with bytes for strings.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions and the disk") from error
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
