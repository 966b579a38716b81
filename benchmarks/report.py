"""Rows as text in 80 columns and as JSON, with the conditions of the measurement."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import methods
from measure import Row, Settings
from workloads import DTYPES, WORKLOADS

from revode.files import write_atomically
from revode_lab.system import human_bytes, processor, versions

HEADER = ("method", "ms", "quartiles", "/store", "saved", "peak", "error", "floor", "ops")
LEGEND = (
    "ms: median of a step; +-: distance of its quartiles; /store: over store's\n"
    "saved, peak: bytes kept for backward, and resident in a fresh process\n"
    "error: of the gradient, against fp64; floor: bare convolutions over the step\n"
    "ops: aten operations for a branch, forward and backward"
)
_LINE = "{:<22}{:>6}{:>5}{:>7}{:>8}{:>8}{:>6}{:>6}{:>7}"


def conditions(settings: Settings) -> dict[str, str]:
    """Return processor, threads, versions, load and date."""
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "threads": str(settings.threads),
        **versions(),
        "load before": f"{os.getloadavg()[0]:.1f}",
    }
    return found | {name: methods.version(name) for name in methods.PEERS}


def text(rows: Sequence[Row]) -> str:
    """Return a table for each workload."""
    blocks = []
    for heading, count, own in tables(rows):
        lines = [_LINE.format(*HEADER[:2], "+-", *HEADER[3:])]
        for row in own:
            found = cells(row)
            lines.append(_LINE.format(*found[:2], f"{row.spread:.0%}", *found[3:]).rstrip())
        blocks.append("\n".join([heading, count, *lines]))
    return "\n\n".join([*blocks, LEGEND])


def tables(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """Return heading, circumstances and rows of each workload in each precision, in the order of the rows."""
    found = []
    for name, dtype in dict.fromkeys((row.workload, row.dtype) for row in rows):
        own = [row for row in rows if (row.workload, row.dtype) == (name, dtype)]
        title = f": {WORKLOADS[name].title}" if name in WORKLOADS else ""
        norm = ", batch norm" if dtype == "bfloat16" and name in WORKLOADS and WORKLOADS[name].in_bfloat16 else ""
        precision = "" if dtype == DTYPES[0] else f", {dtype}{norm}"
        found.append((f"{name}{title}", f"batch {own[0].batch}, {own[0].repeats} repetitions{precision}", own))
    return found


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row under `HEADER`."""
    return (
        row.method,
        milliseconds(row.seconds),
        f"{milliseconds(row.seconds_low)}-{milliseconds(row.seconds_high)}",
        f"{row.ratio_to_store:.2f}",
        human_bytes(row.saved_bytes),
        human_bytes(row.peak_bytes),
        f"{row.grad_error:.0e}",
        f"{row.roofline:.2f}",
        "" if row.operations is None else "/".join(f"{number:.0f}" for number in row.operations),
    )


def milliseconds(seconds: float) -> str:
    """Return milliseconds with three figures or more."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def write(rows: Sequence[Row], facts: dict[str, str], folder: Path) -> Path:
    """Write benchmarks.json and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"conditions": facts, "rows": [dataclasses.asdict(row) for row in rows]}
    write_atomically(folder / "benchmarks.json", json.dumps(content, indent=1) + "\n")
    return folder / "benchmarks.json"


def read(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Return rows and conditions of a benchmarks.json."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [Row(**row) for row in content["rows"]], content["conditions"]
    except OSError as error:
        raise ValueError(f"cannot read rows from {path}: {error.strerror}") from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a benchmarks.json of this version: {error}") from error


def replaced(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Return both, new rows in place of all old ones of their workload and dtype, in the order of the registry."""
    measured = {(row.workload, row.dtype) for row in new}
    rows = [*(row for row in old if (row.workload, row.dtype) not in measured), *new]
    return sorted(rows, key=lambda row: (DTYPES.index(row.dtype), list(WORKLOADS).index(row.workload)))
