"""Reversible U-Nets in one, two and three dimensions: scores at every point, and the input back from the last features.

On the way down a unit's pair is split along the channels. One part becomes coarser, by an invertible transform that turns
neighbours into channels; the other is set aside, and joined again on the way up. So a skip connection copies nothing and loses
nothing, and the whole network can be undone (Lensink, Peters, Haber 2019; Etmann, Ke, Schönlieb 2020).

With channels (16, 32, 64) in three dimensions:

    unit 1: 16 ─ 12 set aside ──────────────────────────── 12 ┬ 16: unit 5 ─ head
            └─ 4 ─ Haar ─ unit 2: 32 ─ 24 set aside ─── 24 ┬ 32: unit 4 ─ Haar back ─ 4 ┘
                          └─ 8 ─ Haar ─ unit 3: 64 ─ Haar back ─ 8 ┘

Backward keeps the last pair of each unit, however many blocks it has; transforms and head keep nothing more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revode.engine.arrival import WIDTH as fingerprint_width
from revode.engine.grid import Grid
from revode.networks import blocks
from revode.networks.blocks import Features
from revode.networks.classifier import InvertibleClassifier, assemble, build
from revode.networks.config import KINDS, NetworkConfig, not_among
from revode.networks.cost import PartCost, measure_parts
from revode.networks.families import FAMILIES, Family, Transition

Resampling = Callable[[Tensor, Grid | None], Tensor]

RESAMPLINGS: dict[str, tuple[Resampling, Resampling]] = {
    "haar": (blocks.haar, blocks.unhaar),
    "squeeze": (lambda x, grid: blocks.squeeze(x), lambda x, grid: blocks.unsqueeze(x)),
}
"""How neighbours become channels, and back; on the grid of ``exact``, or in floating point."""


@dataclass(frozen=True, kw_only=True)
class UNetConfig(NetworkConfig):
    """A reversible U-Net.

    Args:
        scheme: the family whose blocks its units have: ``"hamiltonian"``, ``"leapfrog"``, ``"midpoint"``, ``"revnet"``, ...
        ndim: 1, 2 or 3 spatial dimensions.
        blocks: blocks in a unit, for each resolution; the units on the way up have as many as those on the way down.
        channels: channels at each resolution.
        transition: ``"haar"`` or ``"squeeze"`` (space to depth).
    """

    family: str = "unet"
    scheme: str = "hamiltonian"
    ndim: int = 3
    in_channels: int = 1
    norm: str = "none"
    h: float | tuple[float, ...] | None = 0.1
    transition: str = "haar"

    transitions = tuple(RESAMPLINGS)
    usual_batch = 1
    scores_points = True

    def _family_faults(self) -> Iterator[str]:
        yield from not_among("family", self.family, ("unet",))
        yield from not_among("scheme", self.scheme, [name for name, row in FAMILIES.items() if row.scheme is not None])
        if self.ndim not in (1, 2, 3):
            yield f"ndim must be 1, 2 or 3, got {self.ndim!r}"

    def _layout_faults(self) -> Iterator[str]:
        most, first, parts = 2**self.ndim, self.channels[0], 2 if self.splits else 1
        if first % parts or any(c % self.multiple or c > most * b for b, c in itertools.pairwise(self.channels)):
            yield (
                f"channels of {self.name} must be multiples of {parts}, behind the first of {self.multiple}, and "
                f"at most {most} times those before them, got {self.channels}"
            )
        if first < self.in_channels:
            yield (
                f"the first unit repeats the {self.in_channels} channels of its input and must have at least as many, "
                f"got channels={self.channels}"
            )

    @property
    def row(self) -> Family:
        return FAMILIES[self.scheme]

    @property
    def passage(self) -> Transition:
        return Transition(between=_transition, carries_pair=True, head=partial(blocks.PointHead, ndim=self.ndim))

    @property
    def entries(self) -> list[str]:
        return [field.name for field in fields(self)]

    @property
    def multiple(self) -> int:
        """The channels that one finer channel of each member becomes."""
        return 2**self.ndim * (2 if self.splits else 1)

    @property
    def num_units(self) -> int:
        return 2 * len(self.channels) - 1

    @property
    def num_layers(self) -> int:
        """Convolutions in the blocks and the head."""
        return self.row.layers_per_block * sum(self.stage_blocks) + 1

    @property
    def stage_blocks(self) -> tuple[int, ...]:
        return self.blocks + self.blocks[-2::-1]

    @property
    def stage_channels(self) -> tuple[int, ...]:
        return self.channels + self.channels[-2::-1]

    @property
    def head_channels(self) -> int:
        return self.pair_channels

    def step_size(self, unit: int) -> float:
        return super().step_size(min(unit, self.num_units - 1 - unit))

    def _resolve(self, options: dict[str, Any]) -> dict[str, Any]:
        """One number of blocks is for every unit; another scheme has the norm and the step size of its family."""
        options = super()._resolve({"channels": self.channels} | options)
        given = options.get("blocks", self.blocks)
        num_levels = len(options["channels"]) if isinstance(options["channels"], list | tuple) else 1
        if isinstance(given, int) or ("blocks" not in options and num_levels != len(given)):
            options["blocks"] = (given if isinstance(given, int) else given[0],) * num_levels
        row = FAMILIES.get(options.get("scheme", self.scheme))
        if row is not None and row is not self.row:
            if row.integrates != self.row.integrates:
                options = {"h": 0.1 if row.integrates else None, "horizon": None} | options
            options = {"norm": row.defaults.get("norm", "batch")} | options
        return options


KINDS["unet"] = UNetConfig


class Descent(nn.Module):
    """The first channels of each member become coarser, the others are set aside behind what was set aside before.

    Args:
        channels: how many of each member become coarser.
        transition: how, by name.
        grid: the grid that the states live on, if any.
    """

    def __init__(self, channels: int, transition: str, grid: Grid | None) -> None:
        super().__init__()
        self.channels = channels
        self.transition = transition
        self.grid = grid

    def forward(self, x: Features) -> Features:
        down, _ = RESAMPLINGS[self.transition]
        p, q, *aside = x
        (p, p_rest), (q, q_rest) = (y.split([self.channels, y.shape[1] - self.channels], dim=1) for y in (p, q))
        return down(p, self.grid), down(q, self.grid), p_rest, q_rest, *aside

    def inverse(self, x: Features) -> Features:
        """Finer again, and joined with what was set aside last."""
        _, up = RESAMPLINGS[self.transition]
        p, q, p_rest, q_rest, *aside = x
        return torch.cat((up(p, self.grid), p_rest), 1), torch.cat((up(q, self.grid), q_rest), 1), *aside

    def extra_repr(self) -> str:
        return f"{self.channels}, {self.transition!r}"


class Ascent(Descent):
    """A `Descent` undone."""

    def forward(self, x: Features) -> Features:
        return super().inverse(x)

    def inverse(self, x: Features) -> Features:
        return super().forward(x)


class UNet(InvertibleClassifier):
    """Signals, images or volumes to scores at each of their points, wholly reversible.

    Edges of any size are padded by repeating the last points until they can be halved, and scores are cropped again.
    """

    config: UNetConfig

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return scores[(..., *(slice(edge) for edge in x.shape[2:]))]

    def run_stages(self, x: Tensor) -> Features:
        self.check_image(x)
        missing = [-edge % self.config.reduction for edge in x.shape[2:]]
        if any(missing):
            x = F.pad(x, [end for edge in reversed(missing) for end in (0, edge)], mode="replicate")
        return super().run_stages(x)

    def readout(self, x: Features) -> Any:
        """The last pair: the head joins nothing."""
        return x

    def check_image(self, x: Tensor) -> None:
        """Refuse what has other dimensions or channels."""
        if x.dim() != 2 + self.config.ndim or x.shape[1] != self.config.in_channels or 0 in x.shape[2:]:
            edges = ", ".join(("depth", "height", "width")[-self.config.ndim :])
            raise ValueError(
                f"{self.config.name} takes inputs of shape (batch, {self.config.in_channels}, {edges}), got {tuple(x.shape)}"
            )

    def inverse(self, features: Tensor, size: tuple[int, ...] | None = None) -> Tensor:
        """The input whose `features` these are.

        Args:
            features: both members of the last pair, joined along the channels, as `features` returns them.
            size: the edges of the input, if they were padded.
        """
        image = super().inverse(features)
        return image if size is None else image[(..., *(slice(edge) for edge in size))]

    def measure(self, image_shape: tuple[int, ...], batch: int) -> list[PartCost]:
        """Measured on small inputs, as many as have the points of the real ones: nothing of the real size is made.

        All bytes grow with the number of points but those of fingerprints, which are fixed once a state is large enough.
        """
        factor, ndim, fewest = self.config.reduction, self.config.ndim, min(self.config.channels) // 2
        coarsest = next(edge for edge in itertools.count(1) if fewest * edge**ndim >= fingerprint_width)
        small = coarsest * factor
        large = [edge + -edge % factor for edge in image_shape[1:]]
        ratio = Fraction(math.prod(large), small**ndim)
        parts = []
        for part in measure_parts(self, (image_shape[0], *[small] * ndim), batch * ratio):
            edges = (edge * new // small for edge, new in zip(part.shape[1:], large, strict=True))
            parts.append(replace(part, shape=(part.shape[0], *edges), flops=round(part.flops * ratio)))
        return parts


build.register(UNetConfig, partial(assemble, kind=UNet))


def _transition(config: UNetConfig, unit: int) -> nn.Module:
    """Down behind the units of the first half, up behind the others."""
    goes_down = unit < len(config.channels) - 1
    coarse = config.stage_channels[unit + 1 if goes_down else unit]
    grid = None if config.exact is False else Grid(config.exact)
    return (Descent if goes_down else Ascent)(coarse // config.multiple, config.transition, grid)
