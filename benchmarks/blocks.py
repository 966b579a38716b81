"""The time of a block over depth, for docs/benchmarks.md: all depths in the same rounds, or a drift would look like depth.

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


def several(case: Case, count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            case()
        case.clear()

    return run


def block_seconds(workloads: Sequence[Workload], settings: Settings) -> dict[str, dict[str, float]]:
    """Method -> workload -> seconds of a block. A shallow network takes as many steps in a round as last like the deepest."""
    deepest = max(workload.options["depth"] for workload in workloads)
    actions = {}
    for workload in workloads:
        for method in METHODS_TIMED:
            case = Case(workload, METHODS[method], layout=settings.layout)
            case()
            actions[method, workload.name] = several(case, deepest // workload.options["depth"])
    found: dict[str, dict[str, float]] = {method: {} for method in METHODS_TIMED}
    for (method, name), seconds in interleave(actions, settings.repeats, BUDGET, settings.fewest).items():
        depth = next(workload.options["depth"] for workload in workloads if workload.name == name)
        found[method][name] = statistics.median(seconds) / (deepest // depth * depth)
    return found


if __name__ == "__main__":
    times = block_seconds([WORKLOADS[name] for name in DEPTHS], Settings(threads=torch.get_num_threads()))
    Path(sys.argv[1], "blocks.json").write_text(json.dumps(times, indent=1) + "\n")
