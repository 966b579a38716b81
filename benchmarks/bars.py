"""What was promised, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from revode.bench.measure import Row
from revode.bench.methods import PEERS
from revode.bench.workloads import DEPTHS, STAGES

Values = list[tuple[str, float]]
"""(where, value) pairs; the worst decides."""


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

    def judge(self, rows: Sequence[Row]) -> Verdict | None:
        """The worst value and whether it holds, or None where the rows do not say."""
        values = self.values(Rows(rows))
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
    """Rows by workload and method."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {(row.workload, row.method): row for row in rows}

    def get(self, workload: str, method: str) -> Row | None:
        """The row, if it was measured."""
        return self._rows.get((workload, method))

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
        peers = [row for row in (self.get(workload, name) for name in PEERS) if row is not None]
        return min(peers, key=lambda row: row.seconds, default=None)


_SPEED = (*STAGES, "hamiltonian-74", "hamiltonian-1202")


def _time_over_store(*workloads: str) -> Callable[[Rows], Values]:
    return lambda rows: rows.ratios(workloads, "revode", "store")


def _fastest_peer(rows: Rows) -> Values:
    found: Values = []
    for stage in STAGES:
        ours, peer = rows.get(stage, "revode"), rows.fastest_peer(stage)
        if ours is not None and peer is not None:
            found.append((f"{stage} ({peer.method})", peer.seconds / ours.seconds))
    return found


def _memory_over_depth(rows: Rows) -> Values:
    """Bytes for an image, since the two networks run different batches."""
    deep, shallow = rows.get("hamiltonian-1202", "revode"), rows.get("hamiltonian-74", "revode")
    if deep is None or shallow is None:
        return []
    return [("", (deep.saved_bytes / deep.batch) / (shallow.saved_bytes / shallow.batch))]


def _time_per_block(rows: Rows) -> Values:
    shallow, *_, deep = (rows.get(name, "revode") for name in DEPTHS)
    if shallow is None or deep is None or shallow.block_seconds is None or deep.block_seconds is None:
        return []
    return [("", deep.block_seconds / shallow.block_seconds)]


def _roofline(rows: Rows) -> Values:
    found = ((workload, rows.get(workload, "revode")) for workload in _SPEED)
    return [(workload, row.roofline) for workload, row in found if row is not None]


BARS = (
    Bar("hamiltonian-74, reversible / store time", 1.25, 1.15, True, _time_over_store("hamiltonian-74")),
    Bar("hamiltonian-1202, reversible / store time", 1.20, 1.10, True, _time_over_store("hamiltonian-1202")),
    Bar("each stage, reversible / store time", 1.33, 1.20, True, _time_over_store(*STAGES)),
    Bar("each stage, fastest peer library / ours", 1.10, 1.25, False, _fastest_peer),
    Bar("torch checkpoint of each block / ours", 1.0, 1.1, False, lambda r: r.ratios(_SPEED, "checkpoint", "revode")),
    Bar(
        "bytes kept, the same checkpoint / ours",
        1.0,
        1.0,
        False,
        lambda rows: rows.ratios(_SPEED, "checkpoint", "revode", "saved_bytes"),
    ),
    Bar(
        "bytes kept, store / reversible at 1202 layers",
        20,
        40,
        False,
        lambda rows: rows.ratios(["hamiltonian-1202"], "store", "revode", "saved_bytes"),
    ),
    Bar("bytes kept for an image, 1202 / 74 layers, reversible", 1.1, 1.0, True, _memory_over_depth),
    Bar("exact=True / exact=False time", 1.10, 1.05, True, lambda r: r.ratios(_SPEED, "revode-exact", "revode")),
    Bar("bare convolutions / whole step", 0.75, 0.90, False, _roofline),
    Bar("step time for a block, 1000 / 10 blocks", 1.05, 1.0, True, _time_per_block),
    Bar("torch.compile / eager, reversible", 1.0, 0.9, True, lambda r: r.ratios(STAGES, "revode-compiled", "revode")),
)


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Every bar that the rows can answer."""
    return [verdict for bar in BARS if (verdict := bar.judge(rows)) is not None]
