"""Reading official files so that every byte is known to be right, or saying which file is wrong and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from revode.data.layouts import DataFile, Layout, data_root
from revode.data.pickles import load_plain

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


def _read_binary(name: str, path: Path, file: DataFile) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; get it with {remedy(name, path.parent.parent)}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions and the disk") from error
    fault = file.fault(data)
    if fault:
        raise ValueError(f"{path} {fault}, so it is damaged; get it again with {remedy(name, path.parent.parent)}")
    return data


def _read_pickle(name: str, path: Path, file: DataFile, label_keys: tuple[str, ...]) -> bytes:
    """The binary records of a pickled CIFAR batch."""
    way_out = f"get the binary files with {remedy(name, path.parent.parent)}"
    try:
        batch = load_plain(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; copy it there, or {way_out}") from None
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
