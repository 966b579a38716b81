"""Time a block over depth, for docs/benchmarks.md: all depths in the same rounds, or a drift would look like depth.

.venv/bin/python benchmarks/blocks.py docs     # writes docs/blocks.json, about 4 minutes on an idle machine
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from cases import Case
from measure import Settings, interleave
from methods import METHODS
from workloads import DEPTHS, WORKLOADS, Workload

METHODS_TIMED = ("store", "revode")
BUDGET = 180.0
"""Seconds for the repetitions of all depths together."""


def _repeated(case: Case, count: int) -> Callable[[], None]:
    case()

    def run() -> None:
        for _ in range(count):
            case()
        case.clear()

    return run


def block_seconds(workloads: Sequence[Workload], settings: Settings) -> dict[str, dict[str, float]]:
    """Return method -> workload -> seconds of a block. A shallow network takes more steps in a round, to last equally long."""
    depths = {workload.name: workload.options["depth"] for workload in workloads}
    counts = {name: max(depths.values()) // depth for name, depth in depths.items()}
    actions = {
        (method, workload.name): _repeated(
            Case(workload, METHODS[method], layout=settings.layout), counts[workload.name]
        )
        for workload in workloads
        for method in METHODS_TIMED
    }
    found: dict[str, dict[str, float]] = {method: {} for method in METHODS_TIMED}
    for (method, name), seconds in interleave(actions, settings.repeats, BUDGET, settings.fewest).items():
        found[method][name] = statistics.median(seconds) / (counts[name] * depths[name])
    return found


if __name__ == "__main__":
    times = block_seconds([WORKLOADS[name] for name in DEPTHS], Settings(threads=torch.get_num_threads()))
    Path(sys.argv[1], "blocks.json").write_text(json.dumps(times, indent=1) + "\n")
