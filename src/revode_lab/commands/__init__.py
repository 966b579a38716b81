"""The commands, one module each: ``add_arguments(parser)`` and ``run(args) -> int``.

A command module imports nothing heavy at its top, so that every ``--help`` answers at once; ``run`` imports the package it
serves. ``cli`` prints a ``ValueError`` of bad input as one sentence.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import tempfile
from pathlib import Path

_PACKAGES = ("filelock", "jinja2", "matplotlib", "onnx", "onnxscript", "scipy", "yaml")
"""Modules that show whether the extra ``lab`` is installed."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""


def require() -> None:
    """Refuse a command if the packages of the laboratory are not installed; the first thing that it does."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"not installed: {', '.join(missing)}; run: pip install 'revode[lab]' (in a clone: pip install '.[lab]')"
        )


def use_threads(number: int) -> None:
    """Set the number of CPU threads; 0 leaves torch's choice."""
    import torch

    from revode_lab.training.config import MOST_THREADS

    if not 0 <= number <= MOST_THREADS:
        raise ValueError(f"--threads is {number}; expected 0 to {MOST_THREADS}")
    if number:
        torch.set_num_threads(number)


def keep_freed_memory() -> None:
    """Have the C library keep the memory of freed tensors for the next ones, up to a gigabyte.

    By default glibc gives it back at every step, and the system hands it out again page by page. Other C libraries, and
    tensors above 32 MB, which have pages of their own, stay as they are.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(_TRIM_THRESHOLD, 1 << 30)


def check_folder(path: str | None) -> None:
    """Refuse a folder for results that cannot be one, before the work that would be lost."""
    if path is None:
        return
    nearest = next((place for place in (Path(path), *Path(path).parents) if place.exists()), Path())
    if not nearest.is_dir():
        raise ValueError(f"--out is {path}, but {nearest} is a file; give a directory")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ValueError(
            f"--out is {path}, but {nearest} cannot be written ({error.strerror}); give another"
        ) from error
