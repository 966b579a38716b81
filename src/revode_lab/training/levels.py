"""A multilevel schedule, LAYERS@SIZE:EPOCHS,…: shallow networks on small images first."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

_LEVEL = re.compile(r"(\d+)@(\d+):(\d+)")


class Level(NamedTuple):
    """A network of so many layers on images of this size, for so many epochs."""

    layers: int
    edge: int
    epochs: int

    @property
    def cost(self) -> int:
        """The cost of an epoch, in proportion to layers and areas of images."""
        return self.layers * self.edge**2


def parse_levels(text: str) -> tuple[Level, ...]:
    """Return the levels of ``38@16:8,74@32:14``; none of an empty text."""
    levels = []
    for part in text.split(",") if text else []:
        match = _LEVEL.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"levels has {part!r}; expected layers@edge:epochs, as 38@16:8,74@32:14")
        levels.append(Level(*map(int, match.groups())))
    for first, second in itertools.pairwise(levels):
        if second.layers < first.layers or second.edge < first.edge:
            raise ValueError(f"levels is {text}; neither layers nor the edge of images may fall from level to level")
    if any(not (level.edge and level.epochs) for level in levels):
        raise ValueError(f"levels is {text}; every level needs an edge and epochs of at least 1")
    return tuple(levels)


def num_epochs(levels: tuple[Level, ...]) -> int:
    """Return the epochs of all levels."""
    return sum(level.epochs for level in levels)


def cost_until(levels: tuple[Level, ...], epoch: int) -> float:
    """Return the cost of the first epochs, in epochs of the last level."""
    if not levels:
        return float(epoch)
    each = [level.cost for level in levels for _ in range(level.epochs)]
    return sum(each[:epoch]) / levels[-1].cost


def mean_cost(levels: tuple[Level, ...]) -> float:
    """Return the mean cost of an epoch, in epochs of the last level."""
    return cost_until(levels, num_epochs(levels)) / num_epochs(levels) if levels else 1.0
