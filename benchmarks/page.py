"""Write docs/benchmarks.md, and judge the promised bars, from docs/benchmarks.json (``make bench-docs`` measures it first)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import Row
from methods import PEERS
from report import HEADER, cells, read, tables
from workloads import BOOKKEEPING, DEPTHS, NUM_TINY, STAGES, WORKLOADS

Values = list[tuple[str, float]]
"""(where, value) pairs; the worst decides."""
Blocks = dict[str, dict[str, float]]
"""Method -> workload -> seconds of a block, as ``bench.py --blocks`` writes them."""


class Rows:
    """Rows by workload, method and dtype; and the seconds of a block by method and workload."""

    def __init__(self, rows: Iterable[Row], blocks: Blocks | None = None) -> None:
        self._rows = {(row.workload, row.method, row.dtype): row for row in rows}
        self.blocks = blocks or {}

    def get(self, workload: str, method: str, dtype: str = "float32") -> Row | None:
        """Return the row, or None if it was not measured."""
        return self._rows.get((workload, method, dtype))

    def best(self, workload: str, dtype: str, *methods: str) -> Row | None:
        """Return the fastest row of several methods."""
        found = [row for row in (self.get(workload, method, dtype) for method in methods) if row is not None]
        return min(found, key=lambda row: row.seconds, default=None)


@dataclass(frozen=True)
class Bar:
    """A promise about a ratio.

    Args:
        bar, reach: the value that must be kept, and the value to reach for.
        at_most: smaller is better.
        values: takes the ratio from the rows, wherever they hold enough for it.
    """

    what: str
    bar: float
    reach: float
    at_most: bool
    values: Callable[[Rows], Values]


@dataclass(frozen=True)
class Verdict:
    """A bar with its measured values."""

    bar: Bar
    values: Values

    @property
    def worst(self) -> float:
        return (max if self.bar.at_most else min)(value for _, value in self.values)

    @property
    def kept(self) -> bool:
        return self._holds(self.bar.bar)

    @property
    def reached(self) -> bool:
        return self._holds(self.bar.reach)

    def _holds(self, limit: float) -> bool:
        return self.worst <= limit if self.bar.at_most else self.worst >= limit

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table: what, bar, reach, measured, verdict."""
        sign = "≤" if self.bar.at_most else "≥"
        measured = ", ".join(f"{where} {value:.2f}" if where else f"{value:.2f}" for where, value in self.values)
        verdict = "reached" if self.reached else "kept" if self.kept else "**missed**"
        return self.bar.what, f"{sign} {self.bar.bar:g}", f"{sign} {self.bar.reach:g}", measured, verdict


_NETWORKS = (*STAGES, "hamiltonian-74", "hamiltonian-1202")
_AT_BEST = ("revode-exact", "revode-exact-compiled")


def _ratios(workloads: Iterable[str], above: str, below: str, column: str = "seconds") -> Callable[[Rows], Values]:
    """Return a function from rows to column(above) / column(below) on each workload that has both."""

    def values(rows: Rows) -> Values:
        pairs = [(name, rows.get(name, above), rows.get(name, below)) for name in workloads]
        return [(name, getattr(a, column) / getattr(b, column)) for name, a, b in pairs if a and b]

    return values


def _fastest_peer(*workloads: str) -> Callable[[Rows], Values]:
    def values(rows: Rows) -> Values:
        pairs = [(name, rows.get(name, "revode"), rows.best(name, "float32", *PEERS)) for name in workloads]
        return [(f"{name} ({peer.method})", peer.seconds / ours.seconds) for name, ours, peer in pairs if ours and peer]

    return values


def _memory_over_depth(rows: Rows) -> Values:
    """Return the ratio of bytes for an image, since the two networks run different batches."""
    deep, shallow = rows.get("hamiltonian-1202", "revode"), rows.get("hamiltonian-74", "revode")
    known = deep is not None and shallow is not None
    return [("", (deep.saved_bytes / deep.batch) / (shallow.saved_bytes / shallow.batch))] if known else []


def _time_per_block(rows: Rows) -> Values:
    times = list(rows.blocks.get("revode", {}).values())
    return [("", times[-1] / times[0])] if len(times) > 1 else []


def _operations(method: str) -> Callable[[Rows], Values]:
    def values(rows: Rows) -> Values:
        row = rows.get("tiny-convolution", method)
        return [("", row.operations[1])] if row and row.operations else []

    return values


def _lower_over_store(rows: Rows) -> Values:
    ours = rows.best("hamiltonian-74", "bfloat16", *_AT_BEST)
    store = rows.best("hamiltonian-74", "bfloat16", "store", "store-compiled")
    return [] if ours is None or store is None else [(f"{ours.method} / {store.method}", ours.seconds / store.seconds)]


def _roofline(workloads: Iterable[str], dtype: str, *methods: str) -> Callable[[Rows], Values]:
    return lambda rows: [(name, row.roofline) for name in workloads if (row := rows.best(name, dtype, *methods))]


BARS = (
    Bar("hamiltonian-74, reversible / store time", 1.25, 1.15, True, _ratios(["hamiltonian-74"], "revode", "store")),
    Bar("hamiltonian-1202, reversible / store time", 1.20, 1.10, True, _ratios(["hamiltonian-1202"], "revode", "store")),
    Bar("each stage, reversible / store time", 1.33, 1.20, True, _ratios(STAGES, "revode", "store")),
    Bar("each stage, fastest peer library / ours", 1.10, 1.25, False, _fastest_peer(*STAGES)),
    Bar("attention-12, fastest peer library / ours", 1.0, 1.1, False, _fastest_peer("attention-12")),
    Bar("torch checkpoint of each block / ours", 1.0, 1.1, False, _ratios(_NETWORKS, "checkpoint", "revode")),
    Bar("bytes kept, the same checkpoint / ours", 1.0, 1.0, False, _ratios(_NETWORKS, "checkpoint", "revode", "saved_bytes")),
    Bar("bytes kept, store / reversible at 1202 layers", 20, 40, False,
        _ratios(["hamiltonian-1202"], "store", "revode", "saved_bytes")),
    Bar("bytes kept for an image, 1202 / 74 layers, reversible", 1.1, 1.0, True, _memory_over_depth),
    Bar("exact=True / exact=False time", 1.10, 1.05, True, _ratios(_NETWORKS, "revode-exact", "revode")),
    Bar("bare convolutions / whole step", 0.75, 0.90, False, _roofline(_NETWORKS, "float32", "revode")),
    Bar("step time for a block, 1000 / 10 blocks", 1.05, 1.0, True, _time_per_block),
    Bar("compile=True / eager, reversible", 1.0, 0.9, True, _ratios(STAGES, "revode-compiled", "revode")),
    Bar("bookkeeping of tiny branches / torch checkpoint", 0.85, 0.7, True,
        _ratios(BOOKKEEPING, "revode", "checkpoint-branches")),
    Bar("aten operations of a branch, Conv+BN+ReLU, backward", 22, 16, True, _operations("revode")),
    Bar("the same with exact=True", 24, 16, True, _operations("revode-exact")),
    Bar("bfloat16, hamiltonian-74, exact: bare convolutions / step", 0.70, 0.78, False,
        _roofline(["hamiltonian-74"], "bfloat16", *_AT_BEST)),
    Bar("bfloat16, hamiltonian-74: exact / store, both at their best", 1.33, 1.2, True, _lower_over_store),
)  # fmt: skip


def verdicts(rows: Rows) -> list[Verdict]:
    """Return a verdict on every bar that the rows can answer."""
    return [Verdict(bar, values) for bar in BARS if (values := bar.values(rows))]


_INTRODUCTION = """# Benchmarks

Time, memory and gradient error of a training step (forward and backward, no optimizer) by method. All methods run the same
branches with the same parameters on the same input, in one process, in turn, after a warm-up. Times are medians with their
quartiles. glibc keeps freed memory for all methods, as in `revode train`.

| method | is |
|---|---|
| store | the scheme written out in plain PyTorch, everything kept by autograd |
| checkpoint | the same with `torch.utils.checkpoint` around each block, without re-entry and without RNG state |
| checkpoint-sqrt | the same around √N segments |
| revode | `ReversibleSequence` with its defaults |
| revode-exact | with `exact=True` |
| revode-budget-N | with a `memory_budget` N % of the way from the bytes of `revode` to the bytes of `store` |
| revode-compiled, revode-exact-compiled | the same with `compile=True` |
| store-compiled | `ReversibleSequence` with `backprop="store"` and `compile=True` |
| checkpoint-branches | `torch.utils.checkpoint` around each branch, with its defaults |
| memcnn, revtorch, revlib | the libraries of these names, in their default memory-saving mode |

- **saved**: every tensor kept for backward, without parameters and input, with tensors that a library hides from autograd's
  hooks. A sequence of ours keeps its final pair beside its output, so that the output may be changed in place. memcnn and
  RevTorch walk back from the output: half the bytes, and silently a wrong gradient if the output was changed.
- **peak**: peak resident memory of a step in a fresh process, above that of the process before the step, with buffers of the
  convolutions, gradients, and memory that the allocator has not returned.
- **error**: |g - g64| / |g64| over all gradients of four samples, g64 being the stored gradient in fp64. For `revode-exact`
  it is the rounding of states to the grid 2^-14, which changes the network a little, not a fault of its backward pass.
- **floor**: time of the step's convolutions and matrix products, called alone on tensors of the same shapes and strides, over
  the time of the step. **ops**: aten operations of a step for each branch, forward/backward, stem and head included. Compiled
  steps have none, since theirs are fused.

Rows in bfloat16 run branches under autocast, with states and parameters in float32 and batch norm, as in training
(`.venv/bin/python benchmarks/bench.py --dtype bfloat16`). On a CPU the other libraries do not restore autocast in backward,
so they are left out. Stages and depths are additive couplings of the paper's branches with h folded into the weights, which
every library can run; in whole networks branches are multiplied by ±h.
"""


def render(rows: Sequence[Row], conditions: dict[str, str], blocks: Blocks) -> str:
    """Return the page in Markdown."""
    found = Rows(rows, blocks)
    parts = [_INTRODUCTION, _conditions(conditions), _bars(found), _bookkeeping(found), "## Measurements\n"]
    return "\n".join(part for part in [*parts, *(_table(*table) for table in tables(rows)), _scaling(blocks)] if part)


def _conditions(conditions: dict[str, str]) -> str:
    lines = ", ".join(f"{name} {value}" for name, value in conditions.items() if name != "processor")
    return (
        "Regenerate this page with `make bench-docs` (35 minutes of 2 idle cores), one table with the command above it.\n\n"
        f"Measured on: {conditions['processor']}, {lines}.\n"
    )


def _bars(rows: Rows) -> str:
    table = markdown(
        ("what", "bar", "reach for", "measured", "verdict"), [verdict.cells() for verdict in verdicts(rows)]
    )
    return table and f"## What was promised\n\nThe worst of several values decides.\n\n{table}\n"


def _bookkeeping(found: Rows) -> str:
    """Return microseconds of a branch whose arithmetic is next to nothing."""
    methods = ("store", "checkpoint-branches", "revode", "revode-exact")
    lines = []
    for name in BOOKKEEPING:
        rows = [found.get(name, method) for method in methods]
        if any(rows):
            times = ("" if row is None else f"{row.seconds / NUM_TINY * 1e6:.0f}" for row in rows)
            lines.append([WORKLOADS[name].title.partition(": ")[2], *times])
    table = markdown(("µs for a branch, forward and backward", *methods), lines)
    return (
        table and f"## What is recorded around a branch\n\nBranches so small that a step is bookkeeping.\n\n{table}\n"
    )


def _table(heading: str, count: str, rows: Sequence[Row]) -> str:
    name, _, title = heading.partition(": ")
    lower = "" if rows[0].dtype == "float32" else f" --dtype {rows[0].dtype}"
    table = markdown(HEADER, [cells(row) for row in rows])
    command = f"`.venv/bin/python benchmarks/bench.py --workload {name}{lower}`"
    return f"### {name}{lower and ', bfloat16'}\n\n{title}; {count}. {command}\n\n{table}\n"


def _scaling(blocks: Blocks) -> str:
    """Return the time of one block over depth."""
    lines = [[method, *(f"{times[name] * 1e3:.3f}" for name in DEPTHS)] for method, times in blocks.items()]
    table = markdown(["method", *(f"{depth} blocks" for depth in DEPTHS.values())], lines)
    command = "All depths timed in the same rounds. `.venv/bin/python benchmarks/bench.py --blocks docs`"
    return table and f"### Time of a step for each block (ms)\n\n{command}\n\n{table}\n"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, numbers to the right; nothing without lines."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines]) if lines else ""


def main(folder: Path) -> None:
    """Read benchmarks.json and blocks.json in `folder`, write benchmarks.md beside them."""
    rows, conditions = read(folder / "benchmarks.json")
    timed = folder / "blocks.json"
    blocks = json.loads(timed.read_text(encoding="utf-8")) if timed.exists() else {}
    (folder / "benchmarks.md").write_text(render(rows, conditions, blocks), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
