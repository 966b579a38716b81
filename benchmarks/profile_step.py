"""Where the time of a step goes: convolutions, pointwise work, reductions, copies, allocation, and the rest in Python.

.venv/bin/python benchmarks/profile_step.py stage-32x32 revode
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from cases import Case
from measure import clock
from methods import METHODS, find
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS

KINDS: dict[str, str] = {
    "convolutions": r"conv",
    "matrix products": r"^(b|add|badd)?mm$|linear|attention",
    "allocation": r"empty|resize|zeros|^zero_$|^fill_$|ones",
    "copies": r"copy|clone|contiguous|^cat$|^to$|flip|stack",
    "reductions": r"^(sum|mean|norm)|batch_norm|layer_norm",
    "views": r"view|strided|transpose|permute|detach|slice|select|narrow|split|chunk|alias|expand|reshape|^t$",
}
"""Kind -> what the names of its operations look like, the first match counts; the rest is pointwise."""
REST = "Python and autograd"


class Share(NamedTuple):
    """One kind of work in a step: seconds, calls, and its heaviest operation."""

    kind: str
    seconds: float
    calls: float
    heaviest: str


def profile_step(case: Case, repeats: int = 3) -> tuple[float, list[Share]]:
    """Seconds of an undisturbed step, and the shares of profiled ones, averaged over `repeats`, the longest first."""
    case()
    seconds = min(clock(case) for _ in range(repeats))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(repeats):
            case()
    groups: dict[str, list[Any]] = {}
    for event in profiler.key_averages():
        if event.key.startswith(("aten::", "mkldnn")):
            groups.setdefault(kind_of(event.key), []).append(event)
    shares = []
    for kind, events in groups.items():
        total = sum(event.self_cpu_time_total for event in events) * 1e-6 / repeats
        heaviest = max(events, key=lambda event: event.self_cpu_time_total)
        shares.append(Share(kind, total, sum(event.count for event in events) / repeats, heaviest.key))
    work = sum(share.seconds for share in shares)
    shares.append(Share(REST, max(0.0, seconds - work), 0.0, "what no operation accounts for"))
    return max(seconds, work), sorted(shares, key=lambda share: -share.seconds)


def kind_of(operation: str) -> str:
    """Which of the kinds an operation such as ``aten::mkldnn_convolution`` belongs to."""
    name = operation.split("::")[-1].lstrip("_")
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "pointwise")


def text(case: Case, seconds: float, shares: Iterable[Share]) -> str:
    """The table, in 80 columns."""
    line = "{:<22}{:>9}{:>7}{:>9}  {}"
    threads = torch.get_num_threads()
    lines = [
        f"{case.workload.name} by {case.method.name}: {seconds * 1e3:.1f} ms a step on {threads} threads",
        line.format("kind", "ms", "share", "calls", "heaviest operation"),
    ]
    for share in shares:
        calls = f"{share.calls:.0f}" if share.calls else ""
        part = f"{share.seconds / seconds:.0%}"
        lines.append(line.format(share.kind, f"{share.seconds * 1e3:.2f}", part, calls, share.heaviest)[:80].rstrip())
    return "\n".join(lines)


def main(workload: str, *methods: str) -> None:
    """Print the table of a workload by each method."""
    for method in find("method", methods or ["revode"], METHODS):
        case = Case(find("workload", [workload], WORKLOADS)[0], method)
        print(text(case, *profile_step(case)))


if __name__ == "__main__":
    main(*sys.argv[1:])
