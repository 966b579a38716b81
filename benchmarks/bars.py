"""What was promised, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from measure import Row
from methods import PEERS
from workloads import BOOKKEEPING, STAGES

Values = list[tuple[str, float]]
"""(where, value) pairs; the worst decides."""
Blocks = dict[str, dict[str, float]]
"""Method -> workload -> seconds of a block, as benchmarks/blocks.py writes them."""


@dataclass(frozen=True)
class Bar:
    """A promise about a ratio.

    Args:
        what: in words.
        bar: the value that must be kept.
        reach: the value to reach for.
        at_most: whether smaller is better.
        values: takes it from the rows, wherever they hold enough for it.
    """

    what: str
    bar: float
    reach: float
    at_most: bool
    values: Callable[[Rows], Values]

    def judge(self, rows: Rows) -> Verdict | None:
        """The worst value and whether it holds, or None where the rows do not say."""
        values = self.values(rows)
        if not values:
            return None
        worst = (max if self.at_most else min)(value for _, value in values)
        return Verdict(self, values, worst, self._holds(worst, self.bar), self._holds(worst, self.reach))

    def _holds(self, value: float, limit: float) -> bool:
        return value <= limit if self.at_most else value >= limit


@dataclass(frozen=True)
class Verdict:
    """A bar with what was measured."""

    bar: Bar
    values: Values
    worst: float
    kept: bool
    reached: bool

    def cells(self) -> tuple[str, ...]:
        """For a table: what, bar, reach, measured, verdict."""
        sign = "≤" if self.bar.at_most else "≥"
        measured = ", ".join(f"{where} {value:.2f}" if where else f"{value:.2f}" for where, value in self.values)
        verdict = "reached" if self.reached else "kept" if self.kept else "**missed**"
        return self.bar.what, f"{sign} {self.bar.bar:g}", f"{sign} {self.bar.reach:g}", measured, verdict


class Rows:
    """Rows by workload, method and dtype; and the seconds of a block by method and workload."""

    def __init__(self, rows: Iterable[Row], blocks: Blocks | None = None) -> None:
        self._rows = {(row.workload, row.method, row.dtype): row for row in rows}
        self.blocks = blocks or {}

    def get(self, workload: str, method: str, dtype: str = "float32") -> Row | None:
        """The row, if it was measured."""
        return self._rows.get((workload, method, dtype))

    def best(self, workload: str, dtype: str, *methods: str) -> Row | None:
        """The fastest row of several methods."""
        found = [row for row in (self.get(workload, method, dtype) for method in methods) if row is not None]
        return min(found, key=lambda row: row.seconds, default=None)

    def ratios(self, workloads: Iterable[str], above: str, below: str, column: str = "seconds") -> Values:
        """column(above) / column(below) on each workload that has both."""
        found: Values = []
        for workload in workloads:
            a, b = self.get(workload, above), self.get(workload, below)
            if a is not None and b is not None:
                found.append((workload, getattr(a, column) / getattr(b, column)))
        return found

    def fastest_peer(self, workload: str) -> Row | None:
        """The row of the fastest other library, if any was measured."""
        return self.best(workload, "float32", *PEERS)


_SPEED = (*STAGES, "hamiltonian-74", "hamiltonian-1202")


def _ratios(workloads: Iterable[str], above: str, below: str, column: str = "seconds") -> Callable[[Rows], Values]:
    return lambda rows: rows.ratios(workloads, above, below, column)


def _fastest_peer(*workloads: str) -> Callable[[Rows], Values]:
    def values(rows: Rows) -> Values:
        found: Values = []
        for workload in workloads:
            ours, peer = rows.get(workload, "revode"), rows.fastest_peer(workload)
            if ours is not None and peer is not None:
                found.append((f"{workload} ({peer.method})", peer.seconds / ours.seconds))
        return found

    return values


def _memory_over_depth(rows: Rows) -> Values:
    """Bytes for an image, since the two networks run different batches."""
    deep, shallow = rows.get("hamiltonian-1202", "revode"), rows.get("hamiltonian-74", "revode")
    known = deep is not None and shallow is not None
    return [("", (deep.saved_bytes / deep.batch) / (shallow.saved_bytes / shallow.batch))] if known else []


def _time_per_block(rows: Rows) -> Values:
    times = list(rows.blocks.get("revode", {}).values())
    return [("", times[-1] / times[0])] if len(times) > 1 else []


def _operations(method: str) -> Callable[[Rows], Values]:
    def values(rows: Rows) -> Values:
        row = rows.get("tiny-convolution", method)
        return [] if row is None or row.operations is None else [("", row.operations[1])]

    return values


_AT_BEST = ("revode-exact", "revode-exact-compiled")


def _lower_roofline(rows: Rows) -> Values:
    row = rows.best("hamiltonian-74", "bfloat16", *_AT_BEST)
    return [] if row is None else [(row.method, row.roofline)]


def _lower_over_store(rows: Rows) -> Values:
    ours = rows.best("hamiltonian-74", "bfloat16", *_AT_BEST)
    store = rows.best("hamiltonian-74", "bfloat16", "store", "store-compiled")
    return [] if ours is None or store is None else [(f"{ours.method} / {store.method}", ours.seconds / store.seconds)]


def _roofline(rows: Rows) -> Values:
    return [(name, row.roofline) for name in _SPEED if (row := rows.get(name, "revode")) is not None]


BARS = (
    Bar("hamiltonian-74, reversible / store time", 1.25, 1.15, True, _ratios(["hamiltonian-74"], "revode", "store")),
    Bar("hamiltonian-1202, reversible / store time", 1.20, 1.10, True, _ratios(["hamiltonian-1202"], "revode", "store")),
    Bar("each stage, reversible / store time", 1.33, 1.20, True, _ratios(STAGES, "revode", "store")),
    Bar("each stage, fastest peer library / ours", 1.10, 1.25, False, _fastest_peer(*STAGES)),
    Bar("attention-12, fastest peer library / ours", 1.0, 1.1, False, _fastest_peer("attention-12")),
    Bar("torch checkpoint of each block / ours", 1.0, 1.1, False, _ratios(_SPEED, "checkpoint", "revode")),
    Bar("bytes kept, the same checkpoint / ours", 1.0, 1.0, False, _ratios(_SPEED, "checkpoint", "revode", "saved_bytes")),
    Bar("bytes kept, store / reversible at 1202 layers", 20, 40, False,
        _ratios(["hamiltonian-1202"], "store", "revode", "saved_bytes")),
    Bar("bytes kept for an image, 1202 / 74 layers, reversible", 1.1, 1.0, True, _memory_over_depth),
    Bar("exact=True / exact=False time", 1.10, 1.05, True, _ratios(_SPEED, "revode-exact", "revode")),
    Bar("bare convolutions / whole step", 0.75, 0.90, False, _roofline),
    Bar("step time for a block, 1000 / 10 blocks", 1.05, 1.0, True, _time_per_block),
    Bar("compile=True / eager, reversible", 1.0, 0.9, True, _ratios(STAGES, "revode-compiled", "revode")),
    Bar("bookkeeping of tiny branches / torch checkpoint", 1.0, 0.7, True,
        _ratios(BOOKKEEPING, "revode", "checkpoint-branches")),
    Bar("aten operations of a branch, Conv+BN+ReLU, backward", 22, 16, True, _operations("revode")),
    Bar("the same with exact=True", 24, 16, True, _operations("revode-exact")),
    Bar("bfloat16, hamiltonian-74, exact: bare convolutions / step", 0.70, 0.78, False, _lower_roofline),
    Bar("bfloat16, hamiltonian-74: exact / store, both at their best", 1.33, 1.2, True, _lower_over_store),
)  # fmt: skip


def verdicts(rows: Rows) -> list[Verdict]:
    """Every bar that the rows can answer."""
    return [verdict for bar in BARS if (verdict := bar.judge(rows)) is not None]
