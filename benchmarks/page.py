"""Write docs/benchmarks.md from the rows in docs/benchmarks.json (``make bench-docs`` measures them first)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bars import Blocks, Rows, verdicts
from measure import Row
from report import FIGURES, HEADER, cells, milliseconds, read, tables
from workloads import BOOKKEEPING, DEPTHS, NUM_TINY, WORKLOADS

COMMAND = "make bench-docs"
_INTRODUCTION = """# Benchmarks

How long a training step (forward and backward, no optimizer) takes by each way to get the gradient, how much memory it
keeps, and how right its gradient is. All methods run the same branches with the same parameters on the same input, in
one process, in turn, after a warm-up; times are medians with their quartiles. glibc keeps freed memory for all of them, as
in `revode train`.

| method | is |
|---|---|
| store | the scheme written out in plain PyTorch, everything kept by autograd |
| checkpoint | the same with `torch.utils.checkpoint` around each block, without re-entry and without RNG state |
| checkpoint-sqrt | the same around √N segments |
| revode | `ReversibleSequence` as it comes |
| revode-exact | with `exact=True` |
| revode-budget-N | with a `memory_budget` N % of the way from what `revode` keeps to what `store` keeps |
| revode-compiled, revode-exact-compiled | the same with `compile=True` |
| store-compiled | `ReversibleSequence` with `backprop="store"` and `compile=True` |
| checkpoint-branches | `torch.utils.checkpoint` around each branch, as it comes |
| minimal | a reversible autograd Function that records nothing, so its gradient is wrong if a branch draws random numbers |
| memcnn, revtorch, revlib, momentumnet | the libraries of these names, in their default memory-saving mode |

**saved** counts every tensor kept for backward, without parameters and input. It includes tensors that a library hides from
autograd's hooks. **peak** is the peak resident memory of a step in a fresh process above that of the process before it; it
includes buffers of the convolutions and gradients, and memory that the allocator has not returned. A sequence of ours keeps
its final pair beside its output, so that the output may be changed in place; memcnn and RevTorch walk back from the output
itself: half the bytes, and silently a wrong gradient if it was changed. **error** is
|g - g64| / |g64| over all gradients of the first four samples, g64 being the stored gradient in fp64; for `revode-exact` it
is the rounding of the states to the grid 2^-14, which changes the network a little, not a fault of its backward pass.
**floor** is the time of the step's convolutions and matrix products, called alone on tensors of the same shapes and
strides, over the time of the step. **ops** are aten operations of a step for each branch, forward/backward. Those of stem
and head count, too. Compiled steps have none, since theirs are fused.

Rows in bfloat16 run branches under autocast, beside states and parameters in float32. Networks and stages have batch norm
there, as in training. On a CPU the other libraries do not restore autocast in backward, so they are left out.
`.venv/bin/python benchmarks/bench.py --dtype bfloat16`

The stage and depth workloads are additive couplings of the paper's branches with h folded into the weights, so that
libraries that only add need no further operation. In whole networks their branches are multiplied by ±h. Schemes that a
library does not have leave it out; momentumnet is compared on its own.
"""


def render(rows: Sequence[Row], conditions: dict[str, str], figures: Sequence[str], blocks: Blocks) -> str:
    """The page in Markdown."""
    found = Rows(rows, blocks)
    parts = [_INTRODUCTION, _conditions(conditions), _bars(found), _floors(found), _bookkeeping(found)]
    parts += [f"![{FIGURES[name][1]}](figures/{name}.svg)\n\n{FIGURES[name][1]}\n" for name in figures]
    parts.append("## Measurements\n")
    parts += [_table(*table) for table in tables(rows)]
    return "\n".join(part for part in [*parts, _scaling(blocks)] if part)


def _conditions(conditions: dict[str, str]) -> str:
    lines = ", ".join(f"{name} {value}" for name, value in conditions.items() if name != "processor")
    return (
        f"Regenerate this page with `{COMMAND}` (on an idle machine; about 35 minutes on 2 cores), one table with the command "
        f"above it.\n\nMeasured on: {conditions['processor']}, {lines}.\n"
    )


def _bars(rows: Rows) -> str:
    lines = [verdict.cells() for verdict in verdicts(rows)]
    if not lines:
        return ""
    table = markdown(("what", "bar", "reach for", "measured", "verdict"), lines)
    return f"## What was promised\n\nThe worst of several values decides.\n\n{table}\n"


def _floors(found: Rows) -> str:
    """What the convolutions of a step leave possible, beside what was measured."""
    lines = []
    for name in WORKLOADS:
        if name in BOOKKEEPING:
            continue
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


def _bookkeeping(found: Rows) -> str:
    """Microseconds of a branch whose arithmetic is next to nothing."""
    methods = ("store", "checkpoint-branches", "minimal", "revode", "revode-exact")
    lines = []
    for name in BOOKKEEPING:
        rows = [found.get(name, method) for method in methods]
        if any(rows):
            times = ("" if row is None else f"{row.seconds / NUM_TINY * 1e6:.0f}" for row in rows)
            lines.append([WORKLOADS[name].title.partition(": ")[2], *times])
    if not lines:
        return ""
    table = markdown(("µs for a branch, forward and backward", *methods), lines)
    return f"## What is recorded around a branch\n\nBranches so small that a step is bookkeeping.\n\n{table}\n"


def _table(heading: str, count: str, rows: Sequence[Row]) -> str:
    name, _, title = heading.partition(": ")
    lower = "" if rows[0].dtype == "float32" else f" --dtype {rows[0].dtype}"
    table = markdown(HEADER, [cells(row) for row in rows])
    command = f"`.venv/bin/python benchmarks/bench.py --workload {name}{lower}`"
    return f"### {name}{lower and ', bfloat16'}\n\n{title}; {count}. {command}\n\n{table}\n"


def _scaling(blocks: Blocks) -> str:
    """Time of one block, over depth."""
    lines = [[method, *(f"{times[name] * 1e3:.3f}" for name in DEPTHS)] for method, times in blocks.items()]
    if not lines:
        return ""
    table = markdown(["method", *(f"{depth} blocks" for depth in DEPTHS.values())], lines)
    command = "All depths timed in the same rounds. `.venv/bin/python benchmarks/blocks.py docs`"
    return f"### Time of a step for each block (ms)\n\n{command}\n\n{table}\n"


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, numbers to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def main(folder: Path) -> None:
    """Read benchmarks.json and blocks.json in `folder`, write benchmarks.md beside them."""
    rows, conditions = read(folder / "benchmarks.json")
    figures = [name for name in FIGURES if (folder / "figures" / f"{name}.svg").exists()]
    timed = folder / "blocks.json"
    blocks = json.loads(timed.read_text(encoding="utf-8")) if timed.exists() else {}
    (folder / "benchmarks.md").write_text(render(rows, conditions, figures, blocks), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
