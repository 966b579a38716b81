"""Checkpoints that are whole or not there.

A checkpoint is one file of `torch.save`: a zip archive whose directory stands at its end, so a file cut short at any byte has
none, and whose records carry a CRC-32, so a changed byte shows. `write_checkpoint` writes beside the old file, makes it
durable, and renames; the checkpoint before is kept as ``previous.ckpt``, and `read_newest` falls back to it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FORMAT = "revode-training-1"
LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"


def write_checkpoint(path: Path, state: dict[str, Any], keep_as: Path | None = None) -> None:
    """Write `state` to `path` in one atomic, durable step.

    Args:
        path: Where to.
        state: Tensors, numbers, strings, lists and dicts.
        keep_as: A second name that the file now at `path` keeps.
    """
    stream = io.BytesIO()
    torch.save({"format": FORMAT, **state}, stream)
    keep: Callable[[], None] | None = None
    if keep_as is not None and path.exists():
        keep = functools.partial(_keep, path, keep_as)
    write_atomically(path, stream.getbuffer(), before_rename=keep)


def write_atomically(path: Path, data: Any, before_rename: Callable[[], None] | None = None) -> None:
    """Put `data` (bytes or text) at `path`: afterwards it is all there, even after a power cut, or nothing changed.

    Raises:
        ValueError: The file cannot be written; what stood there before still does.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    data = data.encode() if isinstance(data, str) else data
    try:
        with open(unfinished, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if before_rename is not None:
            before_rename()
        os.replace(unfinished, path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def unwritable(path: Path, error: Exception) -> ValueError:
    """The error for a file that cannot be written, in one sentence."""
    reason = getattr(error, "strerror", None) or error
    return ValueError(
        f"cannot write {path} ({reason}); what was there before is intact: make room and go on with --resume auto, "
        "or give another --out"
    )


def _keep(path: Path, keep_as: Path) -> None:
    """Give the file at `path` the second name `keep_as` without a moment in which neither exists."""
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


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state in `path`, verified; no code in it is ever run.

    Raises:
        ValueError: It is missing, cut short, altered, or not a checkpoint of a run.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"cannot read the checkpoint {path} ({error.strerror}); give --resume a run or a .ckpt"
        ) from error
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"its part {damaged} has changed")
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds more than tensors and numbers, so it was not loaded; it is not ours") from error
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"the checkpoint {path} is damaged ({reason}); resume from another") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of `revode train`; give --resume a run directory or its .ckpt")
    return state


def read_newest(folder: Path, note: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest good checkpoint of a run, or None if it has none yet.

    Args:
        folder: The run directory.
        note: Called with a sentence if the newest file is damaged and an older one is taken.

    Raises:
        ValueError: There are checkpoints and all are damaged.
    """
    faults: list[str] = []
    for name in (LAST, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            state = read_checkpoint(path)
        except ValueError as error:
            faults.append(str(error))
            continue
        if faults:
            note(f"{faults[0]}; going back to {path}, step {state.get('step')}")
        return state
    if faults:
        raise ValueError(f"{'; '.join(faults)}; no good checkpoint is left: start again with --overwrite")
    return None
