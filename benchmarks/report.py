"""Rows as text in 80 columns, as JSON, and as figures; with the conditions that they were measured under."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import methods
import torch
from measure import Row, Settings
from workloads import DEPTHS, DTYPES, WORKLOADS

from revode import __version__
from revode.files import write_atomically
from revode_lab import charts
from revode_lab.files import human_bytes, processor

HEADER = ("method", "ms", "quartiles", "/store", "saved", "peak", "error", "floor", "ops")
LEGEND = (
    "ms: median of a step; +-: distance of its quartiles; /store: over store's\n"
    "saved, peak: bytes kept for backward, and resident in a fresh process\n"
    "error: of the gradient, against fp64; floor: bare convolutions over the step\n"
    "ops: aten operations for a branch, forward and backward"
)
_LINE = "{:<22}{:>6}{:>5}{:>7}{:>8}{:>8}{:>6}{:>6}{:>7}"


def conditions(settings: Settings) -> dict[str, str]:
    """What a reader must know to compare: processor, threads, versions, load, date."""
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "threads": str(settings.threads),
        "layout": settings.layout,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "revode": __version__,
    }
    if hasattr(os, "getloadavg"):
        found["load before"] = f"{os.getloadavg()[0]:.1f}"
    return found | {name: methods.version(name) for name in methods.PEERS}


def text(rows: Sequence[Row]) -> str:
    """A table for each workload."""
    blocks = []
    for heading, count, own in tables(rows):
        lines = [_LINE.format(*HEADER[:2], "+-", *HEADER[3:])]
        for row in own:
            found = cells(row)
            lines.append(_LINE.format(*found[:2], f"{row.spread:.0%}", *found[3:]).rstrip())
        blocks.append("\n".join([heading, count, *lines]))
    return "\n\n".join([*blocks, LEGEND])


def tables(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """Heading, circumstances and rows of each workload in each precision, in the order of the rows."""
    found = []
    for name, dtype in dict.fromkeys((row.workload, row.dtype) for row in rows):
        own = [row for row in rows if (row.workload, row.dtype) == (name, dtype)]
        title = f": {WORKLOADS[name].title}" if name in WORKLOADS else ""
        norm = ", batch norm" if dtype == "bfloat16" and name in WORKLOADS and WORKLOADS[name].in_bfloat16 else ""
        precision = "" if dtype == DTYPES[0] else f", {dtype}{norm}"
        found.append((f"{name}{title}", f"batch {own[0].batch}, {own[0].repeats} repetitions{precision}", own))
    return found


def cells(row: Row) -> tuple[str, ...]:
    """What each column of `HEADER` says."""
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
    """Three figures or more."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def write(rows: Sequence[Row], facts: dict[str, str], folder: Path) -> list[Path]:
    """Write benchmarks.json and every figure that the rows are enough for; returns their paths.

    Args:
        rows: the measurements.
        facts: machine and versions.
        folder: where the files go; figures in a folder of that name below it.
    """
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    written = [folder / "benchmarks.json"]
    content: dict[str, Any] = {"conditions": facts, "rows": [dataclasses.asdict(row) for row in rows]}
    write_atomically(written[0], json.dumps(content, indent=1) + "\n")
    for name, (draw, _) in FIGURES.items():
        if (markup := draw(rows)) is not None:
            written.append(folder / "figures" / f"{name}.svg")
            write_atomically(written[-1], charts.standalone(markup))
    return written


def read(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Rows and conditions of a benchmarks.json."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [Row(**row) for row in content["rows"]], content["conditions"]
    except OSError as error:
        raise ValueError(f"cannot read rows from {path}: {error.strerror}") from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a benchmarks.json of this version: {error}") from error


def replaced(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The rows of both, new ones in place of all old ones of their workload and dtype, in the order of the registry."""
    measured = {(row.workload, row.dtype) for row in new}
    rows = [*(row for row in old if (row.workload, row.dtype) not in measured), *new]
    return sorted(rows, key=lambda row: (DTYPES.index(row.dtype), list(WORKLOADS).index(row.workload)))


def _memory_over_depth(rows: Sequence[Row]) -> str | None:
    """Bytes kept, over blocks: lines for what runs at every depth, points for the peers."""
    found = [row for row in rows if row.workload in DEPTHS and row.dtype == DTYPES[0]]
    if len({row.workload for row in found}) < 2:
        return None
    series = {
        method: (
            [DEPTHS[row.workload] for row in found if row.method == method],
            [row.saved_bytes / 1e6 for row in found if row.method == method],
        )
        for method in dict.fromkeys(row.method for row in found)
    }
    label = "kept for backward, MB"
    return charts.lines(series, "blocks", label, log_x=True, log_y=True, mark=True, points=methods.PEERS)


def _time_over_memory(rows: Sequence[Row]) -> str | None:
    """Time over bytes kept on hamiltonian-74; the memory budgets join revode to store."""
    at = ("hamiltonian-74", DTYPES[0])
    found = [row for row in rows if (row.workload, row.dtype) == at and row.method not in methods.COMPILED]
    if len(found) < 2:
        return None
    ours = [row for row in found if row.method == "revode" or row.method in methods.BUDGETS]
    ours_as = "revode" if len(ours) == 1 else "revode, memory_budget"
    groups = {ours_as: sorted(ours, key=lambda row: row.saved_bytes)}
    groups |= {row.method: [row] for row in found if row not in ours}
    series = {
        name: ([row.saved_bytes / 1e6 for row in own], [row.seconds * 1e3 for row in own])
        for name, own in groups.items()
    }
    return charts.lines(
        series, "kept for backward, MB", f"step of {found[0].batch} images, ms", mark=True, from_zero=True
    )


FIGURES = {
    "memory-over-depth": (
        _memory_over_depth,
        "Bytes kept for backward over depth, 32 channels at 16x16; peers are points.",
    ),
    "time-over-memory": (
        _time_over_memory,
        "Time of a step over bytes kept; the line is revode with rising memory_budget.",
    ),
}
"""Name -> the figure, or None where the rows do not suffice; and what one sees in it."""
