"""The run directory: who may write it, what lies in it, and how it is read back.

config.yaml metrics.jsonl result.json last.ckpt previous.ckpt best.ckpt model.safetensors report.html
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from revode.training.checkpoint import BEST, LAST, PREVIOUS

CONFIG, METRICS, RESULT, WEIGHTS, REPORT = (
    "config.yaml",
    "metrics.jsonl",
    "result.json",
    "model.safetensors",
    "report.html",
)
FILES = (CONFIG, METRICS, RESULT, LAST, PREVIOUS, BEST, WEIGHTS, REPORT, "plan.json", "diagnosis.txt")
"""What a run writes."""
_DERIVED = ("model.onnx", "stability.html", "stability.json", "events.out.tfevents.*")
"""What ``export``, ``analyze`` and ``--tensorboard`` add by default: of the same network, so it goes with it."""


def holds_run(folder: Path) -> bool:
    """Whether any file of a run lies in `folder`."""
    return any((folder / name).exists() for name in FILES)


def check_vacant(folder: Path) -> None:
    """Refuse a folder that holds a run already, or is none."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a directory; give another --out")
    if holds_run(folder):
        raise ValueError(
            f"{folder} holds a run already; go on with it by --resume auto, replace it by --overwrite, "
            "or give another --out"
        )


def vacant_folder(stem: Path) -> Path:
    """`stem`, or `stem` with the first number behind it that holds no run yet."""
    candidate, number = stem, 1
    while holds_run(candidate):
        number += 1
        candidate = stem.with_name(f"{stem.name}-{number}")
    return candidate


def remove_run(folder: Path) -> None:
    """Remove the files of a run and what was made of it, and nothing else, from `folder`."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    for pattern in (*_DERIVED, ".*.part"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


class MetricsLog:
    """``metrics.jsonl``: one JSON object a line, cut back on resume to what the checkpoint had seen.

    Lines hold no times, so that a resumed run writes the very bytes of an uninterrupted one.

    Args:
        path: The file.
        offset: Bytes to keep.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        try:
            self._stream = open(path, "ab")  # noqa: SIM115 (closed by `close`)
            self._stream.truncate(min(offset, path.stat().st_size))
            self._stream.seek(0, os.SEEK_END)
        except OSError as error:
            raise ValueError(f"cannot write {path} ({error.strerror}); give another --out") from error

    def write(self, **values: Any) -> None:
        """Append one line."""
        self._guarded(lambda: self._stream.write(json.dumps(values, allow_nan=False).encode() + b"\n"))
        self._guarded(self._stream.flush)

    def sync(self) -> int:
        """Make all lines durable and return their length in bytes."""
        self._guarded(lambda: os.fsync(self._stream.fileno()))
        return self._stream.tell()

    def _guarded(self, action: Any) -> None:
        try:
            action()
        except OSError as error:
            raise ValueError(
                f"cannot write {self.path} ({error.strerror}); the last checkpoint is intact: "
                "make room and go on with --resume auto"
            ) from error

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # what could not be written was reported when it was
            self._stream.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``; a last line cut short by a crash is left out."""
    rows = []
    path = folder / METRICS
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def existing_run(folder: str | os.PathLike[str]) -> Path:
    """`folder` as a path, if a run lies in it."""
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise ValueError(
            f"{path} holds no training run (no {CONFIG}); give a directory that `revode train --out` wrote"
        )
    return path
