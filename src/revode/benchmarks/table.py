"""Rows as text: a table in 80 columns for people, and Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from revode.benchmarks.run import Row
from revode.benchmarks.workloads import WORKLOADS

HEADER = ("method", "ms", "quartiles", "/store", "saved", "peak", "error", "floor")
LEGEND = (
    "ms: median of a step, and its quartiles; /store: over store-everything's\n"
    "saved, peak: bytes kept for backward, and resident in a fresh process\n"
    "error: of the gradient, against fp64; floor: bare convolutions over the step"
)
_LINE = "{:<18}{:>8}{:>15}{:>7}{:>9}{:>9}{:>8}{:>6}"


def text(rows: Sequence[Row]) -> str:
    """A table for each workload."""
    blocks = []
    for name in workloads_of(rows):
        own = [row for row in rows if row.workload == name]
        lines = [_LINE.format(*cells(row)).rstrip() for row in own]
        blocks.append("\n".join([*_titles(own[0]), _LINE.format(*HEADER), *lines]))
    return "\n\n".join([*blocks, LEGEND])


def _titles(row: Row) -> list[str]:
    title = WORKLOADS[row.workload].title if row.workload in WORKLOADS else ""
    first = f"{row.workload}: {title}" if title else row.workload
    return [first, f"batch {row.batch}, {row.repeats} repetitions"]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, numbers to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def cells(row: Row) -> tuple[str, ...]:
    """What each column of `HEADER` says."""
    return (
        row.method,
        milliseconds(row.seconds),
        f"{milliseconds(row.seconds_low)}-{milliseconds(row.seconds_high)}",
        f"{row.ratio_to_store:.2f}",
        num_bytes(row.saved_bytes),
        num_bytes(row.peak_bytes),
        f"{row.grad_error:.0e}",
        f"{row.roofline:.2f}",
    )


def milliseconds(seconds: float) -> str:
    """Three figures or more."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def num_bytes(number: float) -> str:
    """In kB, MB or GB."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.2f} GB"


def workloads_of(rows: Iterable[Row]) -> list[str]:
    """The names, in the order of the rows."""
    return list(dict.fromkeys(row.workload for row in rows))
