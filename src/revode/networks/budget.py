"""One memory budget for a whole network, shared among its units.

Stem, transitions and head keep what they must, each unit at least its final pair and the graph of one branch. The rest goes
where it spares most recomputation: to the units whose branches cost most FLOPs for a byte kept, which are the later ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from revode.networks.cost import PartCost


@dataclass(frozen=True)
class Need:
    """What a unit can use: at least `minimum` bytes, at most `full`; `worth` is the FLOPs spared by a byte."""

    minimum: int
    full: int
    worth: float


def unit_need(part: PartCost, batch: int) -> Need:
    """The need of a reversible unit for a batch of this size."""
    graphs = [branch.of(batch) for branch in part.branches]
    pair = part.pair.of(batch)
    pairs = max(pair, part.saved["reversible"].of(batch))  # with anchors, one for each segment
    minimum = pairs + max(graphs)
    return Need(minimum, max(minimum, pair + sum(graphs)), part.flops * batch / max(1, sum(graphs)))


def share(budget: int, parts: list[PartCost], batch: int) -> list[int]:
    """The bytes for each reversible unit among `parts`, in order; with everything else they stay within `budget`."""
    needs = [unit_need(part, batch) for part in parts if part.branches]
    elsewhere = sum(part.saved["reversible"].of(batch) for part in parts if not part.branches)
    minimum = elsewhere + sum(need.minimum for need in needs)
    if budget < minimum:
        raise ValueError(
            f"memory_budget={budget} is too small for a batch of {batch}: stem, transitions, head and the smallest "
            f"possible units (a pair and one branch each) need {minimum} bytes"
        )
    shares = [need.minimum for need in needs]
    left = budget - minimum
    for index in sorted(range(len(needs)), key=lambda index: -needs[index].worth):
        extra = min(left, needs[index].full - needs[index].minimum)
        shares[index] += extra
        left -= extra
    return shares
