"""Checkpoints that are whole or not there.

A checkpoint is one file of `torch.save`: a zip archive whose directory stands at its end, so a file cut short at any byte has
none, and whose records carry a CRC-32, so a changed byte shows. `write_checkpoint` writes beside the old file, makes it
durable, and renames; the checkpoint before is kept as ``previous.ckpt``, and `read_newest` falls back to it.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from revode.files import write_atomically

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
    write_atomically(path, stream.getbuffer(), keep_as)


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
