"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, data: str | bytes | memoryview, keep_as: Path | None = None) -> None:
    """Write `data` to `path`. Afterwards all of it is there, even after a power cut, or `path` has not changed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder, "notes.txt"), "whole")

    Args:
        path: the file.
        data: bytes, or text (written as UTF-8; paths in it that are not come back as their bytes).
        keep_as: a second name for the file that is at `path` before.

    Raises:
        ValueError: the file cannot be written; the old one is intact.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(unfinished, "wb") as stream:
            stream.write(data.encode(errors="surrogateescape") if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        if keep_as is not None and path.exists():
            _keep(path, keep_as)
        os.replace(unfinished, path)
        _sync_directory(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def unwritable(path: Path, error: Exception) -> ValueError:
    """Return the error for a file that cannot be written, in one sentence.

    >>> str(unwritable(Path("a.txt"), OSError("disk full"))).partition(";")[0]
    'cannot write a.txt (disk full)'
    """
    reason = getattr(error, "strerror", None) or error
    return ValueError(f"cannot write {path} ({reason}); what was there before is intact: make room, or write elsewhere")


def _keep(path: Path, keep_as: Path) -> None:
    """Give the file at `path` the second name `keep_as`, without a moment in which neither exists."""
    link = keep_as.with_name(f".{keep_as.name}.{os.getpid()}.part")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without links: two renames, with a moment in which only `keep_as` is there
        os.replace(path, keep_as)
        return
    try:
        os.replace(link, keep_as)
    finally:
        link.unlink(missing_ok=True)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems cannot
        pass
    finally:
        os.close(descriptor)
