"""Levels of a training: a shallow network on small images first, the named network on whole images last.

In depth (Chang et al. 2018) a level starts with the weights of the one before, refined in time; in resolution (Haber et al.
2017) with the same weights on images whose pixels are averaged over fewer. Nothing here needs torch before a network is made.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from revode.networks import NetworkConfig

_LEVEL = re.compile(r"(\d+)@(\d+):(\d+)")


@dataclass(frozen=True)
class Level:
    """A network of so many layers on images of this edge, for so many epochs."""

    layers: int
    edge: int
    epochs: int


def parse_levels(text: str) -> tuple[Level, ...]:
    """The levels of ``38@16:8,74@32:14``; none of an empty text."""
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
    """Epochs of all levels."""
    return sum(level.epochs for level in levels)


def level_of(levels: tuple[Level, ...], epoch: int) -> int:
    """Which level an epoch belongs to; those behind the end to the last."""
    for index, level in enumerate(levels):
        epoch -= level.epochs
        if epoch < 0:
            return index
    return len(levels) - 1


def networks(levels: tuple[Level, ...], config: NetworkConfig, edge: int) -> list[NetworkConfig]:
    """The network of each level; the last is `config` itself, and has images of this edge."""
    from revode.networks import config_at_depth

    last = levels[-1]
    if (last.layers, last.edge) != (config.num_layers, edge):
        raise ValueError(
            f"the last of the levels has {last.layers} layers on images of edge {last.edge}; expected {config.name}'s "
            f"{config.num_layers} layers and the data set's edge {edge}"
        )
    names = [f"{config.family}-{level.layers}" for level in levels]
    return [
        config if level.layers == config.num_layers else config_at_depth(config, name)
        for level, name in zip(levels, names, strict=True)
    ]
