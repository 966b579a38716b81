"""The figures: memory over depth, and time over memory with every method as a point."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from revode.benchmarks.methods import PEERS
from revode.benchmarks.run import Row
from revode.benchmarks.workloads import DEPTHS
from revode.page import chart_style

MARKS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write every figure that the rows suffice for as SVG, and say where.

    Args:
        rows: the measurements.
        folder: where the files go; made if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with chart_style():
        for name, figure in (("memory-over-depth", _memory_over_depth(rows)), ("time-over-memory", _trade(rows))):
            if figure is not None:
                written.append(_save(figure, folder / f"{name}.svg"))
    return written


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return path


def _memory_over_depth(rows: Sequence[Row]) -> Any:
    """Bytes kept, over blocks: lines for what runs at every depth, points for the peers."""
    from matplotlib import pyplot

    found = [row for row in rows if row.workload in DEPTHS]
    methods = list(dict.fromkeys(row.method for row in found))
    if len({row.workload for row in found}) < 2:
        return None
    figure, axes = pyplot.subplots()
    for mark, method in zip(MARKS, methods, strict=False):
        own = [row for row in found if row.method == method]
        x, y = [DEPTHS[row.workload] for row in own], [row.saved_bytes / 1e6 for row in own]
        axes.plot(x, y, mark, linestyle="none" if method in PEERS else "-", markersize=5, label=method)
    axes.set(xscale="log", yscale="log", xlabel="blocks", ylabel="kept for backward (MB)")
    axes.legend(fontsize="small", ncols=2)
    return figure


def _trade(rows: Sequence[Row]) -> Any:
    """Time over bytes kept on hamiltonian-74; the memory budgets join revode to store."""
    from matplotlib import pyplot

    found = [row for row in rows if row.workload == "hamiltonian-74" and row.method != "revode-compiled"]
    if len(found) < 2:
        return None
    figure, axes = pyplot.subplots()
    path = sorted((row for row in found if _on_path(row.method)), key=lambda row: row.saved_bytes)
    axes.plot(
        [row.saved_bytes / 1e6 for row in path],
        [row.seconds * 1e3 for row in path],
        "o-",
        markersize=4,
        label="revode, memory_budget",
    )
    others = (row for row in found if "budget" not in row.method and row.method != "revode")
    for mark, row in zip(MARKS[1:], others, strict=False):
        spread = [[(row.seconds - row.seconds_low) * 1e3], [(row.seconds_high - row.seconds) * 1e3]]
        axes.errorbar(row.saved_bytes / 1e6, row.seconds * 1e3, spread, fmt=mark, markersize=6, label=row.method)
    axes.set(xlabel="kept for backward (MB)", ylabel="step (ms)", title=f"hamiltonian-74, batch {found[0].batch}")
    axes.legend(fontsize="small")
    return figure


def _on_path(method: str) -> bool:
    return method == "revode" or method.startswith("revode-budget-")
