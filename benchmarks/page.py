"""Write docs/benchmarks.md from the rows in docs/benchmarks.json (``make bench-docs`` measures them first)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bars import Rows, verdicts

from revode.bench.measure import SCALING_METHODS, Row
from revode.bench.report import FIGURES, HEADER, cells, milliseconds, read, workloads_of
from revode.bench.workloads import DEPTHS, WORKLOADS

COMMAND = "make bench-docs"
CAPTIONS = {
    "memory-over-depth": "Bytes kept for backward over depth, 32 channels at 16x16; peers are points.",
    "time-over-memory": "Time of a step over bytes kept; the line is revode with rising `memory_budget`.",
}
_INTRODUCTION = """# Benchmarks

How long a training step (forward and backward, no optimizer) takes by each way to get the gradient, how much memory it
keeps, and how right its gradient is. All methods run the same branches with the same parameters on the same input, in
one process, in turn, after a warm-up; times are medians with their quartiles.

| method | is |
|---|---|
| store | the scheme written out in plain PyTorch, everything kept by autograd |
| checkpoint | the same with `torch.utils.checkpoint` around each block, without re-entry and without RNG state |
| checkpoint-sqrt | the same around √N segments |
| revode | `ReversibleSequence` as it comes |
| revode-exact | with `exact=True` |
| revode-budget-N | with a `memory_budget` N % of the way from what `revode` keeps to what `store` keeps |
| revode-compiled | `compile=True` |
| memcnn, revtorch, revlib, momentumnet | the libraries of these names, in their default memory-saving mode |

**saved** counts every tensor kept for backward, without parameters and input. It includes tensors that a library hides from
autograd's hooks. **peak** is the peak resident memory of a step in a fresh process above that of the process before it; it
includes buffers of the convolutions and gradients, and memory that the allocator has not returned. A sequence of ours keeps
its final pair beside its output, so that the output may be changed in place; memcnn and RevTorch walk back from the output
itself: half the bytes, and silently a wrong gradient if it was changed. **error** is
|g - g64| / |g64| over all gradients of the first four samples, g64 being the stored gradient in fp64; for `revode-exact` it
is the rounding of the states to the grid 2^-14, which changes the network a little, not a fault of its backward pass.
**floor** is the time of the step's convolutions and matrix products, called alone on tensors of the same shapes and
strides, over the time of the step.

The stage and depth workloads are additive couplings of the paper's branches with h folded into the weights, so that
libraries that only add need no further operation. In whole networks their branches are multiplied by ±h. Schemes that a
library does not have leave it out; momentumnet is compared on its own.
"""


def render(rows: Sequence[Row], conditions: dict[str, str], figures: Sequence[str]) -> str:
    """The page in Markdown."""
    parts = [_INTRODUCTION, _conditions(conditions), _bars(rows), _floors(rows)]
    for name in figures:
        parts.append(f"![{CAPTIONS[name]}](figures/{name}.svg)\n\n{CAPTIONS[name]}\n")
    parts.append("## Measurements\n")
    parts.extend(_workload(name, [row for row in rows if row.workload == name]) for name in workloads_of(rows))
    scaling = _scaling(rows)
    return "\n".join([*parts, *([scaling] if scaling else [])])


def _conditions(conditions: dict[str, str]) -> str:
    lines = ", ".join(f"{name} {value}" for name, value in conditions.items() if name != "processor")
    return (
        f"Regenerate this page with `{COMMAND}` (on an idle machine; about 20 minutes on 2 cores), one table with the command "
        f"above it.\n\nMeasured on: {conditions['processor']}, {lines}.\n"
    )


def _bars(rows: Sequence[Row]) -> str:
    lines = [verdict.cells() for verdict in verdicts(rows)]
    if not lines:
        return ""
    table = markdown(("what", "bar", "reach for", "measured", "verdict"), lines)
    return f"## What was promised\n\nThe worst of several values decides.\n\n{table}\n"


def _floors(rows: Sequence[Row]) -> str:
    """What the convolutions of a step leave possible, beside what was measured."""
    found = Rows(rows)
    lines = []
    for name in workloads_of(rows):
        store, ours, peer = found.get(name, "store"), found.get(name, "revode"), found.fastest_peer(name)
        if store is None or ours is None:
            continue
        line = [name, milliseconds(store.floor), milliseconds(ours.floor), f"{ours.floor / store.floor:.2f}"]
        line.append(f"{ours.ratio_to_store:.2f}")
        line += ["", ""] if peer is None else [f"{peer.floor / ours.floor:.2f}", f"{peer.seconds / ours.seconds:.2f}"]
        lines.append(line)
    if not lines:
        return ""
    header = ("workload", "store's, ms", "ours, ms", "ours / store's", "steps: ours / store's")
    header += ("fastest peer's / ours", "steps: fastest peer's / ours")
    return f"## What the convolutions alone would take\n\n{_FLOORS}\n\n{markdown(header, lines)}\n"


_FLOORS = """The convolutions and matrix products of a step, called alone (the column **floor** of the tables below, times the
step): 8 convolutions for a branch of a reversible step, 6 where everything is stored. A step's ratio
falls below the convolutions' only where storing wastes time on memory; [speed.md](speed.md) says what was tried to change
the calls. Compare "ours / store's" with "steps": the difference is everything that is not a convolution."""


def _workload(name: str, rows: Sequence[Row]) -> str:
    title = WORKLOADS[name].title if name in WORKLOADS else name
    table = markdown(HEADER, [cells(row) for row in rows])
    count = f"batch {rows[0].batch}, {rows[0].repeats} repetitions"
    return f"### {name}\n\n{title}; {count}. `revode bench --workload {name}`\n\n{table}\n"


def _scaling(rows: Sequence[Row]) -> str:
    """Time of one block, over depth."""
    found = {(row.workload, row.method): row.block_seconds for row in rows}
    lines = []
    for method in SCALING_METHODS:
        times = [found.get((name, method)) for name in DEPTHS]
        if any(time is not None for time in times):
            lines.append([method, *("" if time is None else f"{time * 1e3:.3f}" for time in times)])
    if not lines:
        return ""
    table = markdown(["method", *(f"{depth} blocks" for depth in DEPTHS.values())], lines)
    return f"### Time of a step for each block (ms)\n\nAll depths timed in the same rounds.\n\n{table}\n"


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, numbers to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def main(folder: Path) -> None:
    """Read benchmarks.json in `folder`, write benchmarks.md beside it."""
    rows, conditions = read(folder / "benchmarks.json")
    figures = [name for name in FIGURES if (folder / "figures" / f"{name}.svg").exists()]
    (folder / "benchmarks.md").write_text(render(rows, conditions, figures), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
