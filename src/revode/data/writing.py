"""Writing data files so that a file either is complete and right, or is not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from revode.data.layouts import DataFile


@contextlib.contextmanager
def write_errors(path: Path, consequence: str) -> Iterator[None]:
    """Turn a failed write (full disk, no permission) into one sentence with its consequence and the way out."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {path} ({error.strerror or error}); {consequence}; "
            "free some space or choose another folder with --data-root"
        ) from error


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents."""
    with write_errors(folder, "nothing was fetched"):
        folder.mkdir(parents=True, exist_ok=True)


def write_verified(folder: Path, file: DataFile, data: bytes) -> None:
    """Put `data` at ``folder/file.name`` in one atomic step, after verifying that they are the official contents."""
    path = folder / file.name
    fault = file.fault(data)
    if fault:
        raise ValueError(f"the fetched {file.name} {fault}; it was not written, try again or use another --source")
    # The process id keeps two processes that fetch at the same time apart; the last rename wins, with equal contents.
    unfinished = folder / f".{file.name}.{os.getpid()}.part"
    try:
        with write_errors(path, "nothing was left half-written"):
            with unfinished.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
