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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode.engine.arrival import WIDTH as fingerprint_width
from revode.engine.grid import Grid
from revode.networks import blocks
from revode.networks.blocks import Features
from revode.networks.classifier import (
    Stage,
    StagedClassifier,
    build,
    draw_seed,
    make_sequence,
    with_smooth_kernels,
)
from revode.networks.config import KINDS, OdeConfig, require_choice
from revode.networks.cost import PartCost, measure_parts
from revode.networks.families import FAMILIES, TRANSITIONS, Family, Transition
from revode.schemes import State

Resampling = Callable[[Tensor, Grid | None], Tensor]

RESAMPLINGS: dict[str, tuple[Resampling, Resampling]] = {
    "haar": (blocks.haar, blocks.unhaar),
    "squeeze": (lambda x, grid: blocks.squeeze(x), lambda x, grid: blocks.unsqueeze(x)),
}
"""How neighbours become channels, and back; on the grid of ``exact``, or in floating point."""


@dataclass(frozen=True, kw_only=True)
class UNetConfig(OdeConfig):
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

    def __post_init__(self) -> None:
        require_choice("scheme", self.scheme, [name for name, row in FAMILIES.items() if row.scheme is not None])
        if self.ndim not in (1, 2, 3):
            raise ValueError(f"ndim must be 1, 2 or 3, got {self.ndim!r}")
        super().__post_init__()

    def _check_family(self) -> None:
        require_choice("family", self.family, ("unet",))

    def _check_time(self) -> None:
        if self.row.integrates:
            super()._check_time()
        elif (self.h, self.horizon, self.init) != (None, None, "independent"):
            raise ValueError(
                f"blocks of scheme={self.scheme!r} take no steps in time: leave out h, horizon and init, "
                f"got h={self.h}, horizon={self.horizon}, init={self.init!r}"
            )

    def _check_channels(self) -> None:
        most = 2**self.ndim
        first = self.channels[0]
        if first % self._num_parts or any(
            c % self.multiple or c > most * b for b, c in itertools.pairwise(self.channels)
        ):
            raise ValueError(
                f"channels of {self.name} must be multiples of {self._num_parts}, behind the first of {self.multiple}, and "
                f"at most {most} times those before them, got {self.channels}"
            )
        if first < self.in_channels:
            raise ValueError(
                f"the first unit repeats the {self.in_channels} channels of its input and must have at least as many, "
                f"got channels={self.channels}"
            )
        self._check_equal_steps()

    def _check_image(self) -> None:
        """Any size will do."""

    @property
    def row(self) -> Family:
        return FAMILIES[self.scheme]

    @property
    def passage(self) -> Transition:
        return TRANSITIONS["squeeze"]

    @property
    def _num_parts(self) -> int:
        """Into how many parts a scheme splits the channels."""
        return 2 if self.splits else 1

    @property
    def multiple(self) -> int:
        """The channels that one finer channel of each member becomes."""
        return 2**self.ndim * self._num_parts

    @property
    def num_units(self) -> int:
        return 2 * len(self.channels) - 1

    @property
    def num_layers(self) -> int:
        """Convolutions in the blocks and the head."""
        return self.row.layers_per_block * sum(self.stage_blocks) + 1

    @property
    def reduction(self) -> int:
        return 2 ** (len(self.channels) - 1)

    @property
    def stage_blocks(self) -> tuple[int, ...]:
        return self.blocks + self.blocks[-2::-1]

    @property
    def stage_channels(self) -> tuple[int, ...]:
        return self.channels + self.channels[-2::-1]

    @property
    def head_channels(self) -> int:
        """Channels of both members of the last pair."""
        return 2 * self.channels[0] // self._num_parts

    def step_size(self, unit: int) -> float:
        return super().step_size(min(unit, self.num_units - 1 - unit)) if self.row.integrates else 1.0

    def _resolve(self, options: dict[str, Any]) -> dict[str, Any]:
        """One number of blocks is for every unit; another scheme has the norm and the step size of its family."""
        options = {"channels": self.channels} | options
        given = options.get("blocks", self.blocks)
        num_levels = len(options["channels"]) if isinstance(options["channels"], list | tuple) else 1
        if isinstance(given, int) or ("blocks" not in options and num_levels != len(given)):
            options["blocks"] = (given if isinstance(given, int) else given[0],) * num_levels
        if options.get("scheme", self.scheme) != self.scheme and options["scheme"] in FAMILIES:
            row = FAMILIES[options["scheme"]]
            time = (
                {}
                if row.integrates and self.row.integrates
                else {"h": 0.1 if row.integrates else None, "horizon": None}
            )
            options = {"norm": row.defaults.get("norm", "batch"), **time} | options
        return super()._resolve(options)


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


class CarryingStage(Stage):
    """A stage that carries what has been set aside past its blocks."""

    def run_body(self, x: Features) -> Features:
        return super().run_body(x) if isinstance(x, Tensor) else (*super().run_body(x[:2]), *x[2:])

    def inverse(self, x: Features) -> Features:
        """What came in, as a pair."""
        if isinstance(self.transition, Descent):
            x = self.transition.inverse(x)
        return *cast(ReversibleSequence, self.body).inverse(cast(State, x[:2]), return_state=True), *x[2:]


class UNet(StagedClassifier):
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
        channels = self.config.head_channels
        if features.dim() != 2 + self.config.ndim or features.shape[1] != channels:
            raise ValueError(f"inverse takes features of shape (batch, {channels}, …), got {tuple(features.shape)}")
        x: Features = features.chunk(2, dim=1)
        first, *later = cast(list[CarryingStage], list(self.stages))
        for stage in reversed(later):
            x = stage.inverse(x)
        x = first.transition.inverse(x) if later else x  # pyright: ignore[reportCallIssue]
        image = cast(blocks.PadStem, self.stem).inverse(cast(ReversibleSequence, first.body).inverse(cast(State, x)))
        return image if size is None else image[(..., *(slice(edge) for edge in size))]

    def measure(self, image_shape: tuple[int, ...]) -> list[PartCost]:
        """Measured on a small input, and enlarged: nothing of the real size is made.

        All bytes grow with the number of points but those of fingerprints, which are fixed once a state is large enough.
        """
        factor, ndim, fewest = self.config.reduction, self.config.ndim, min(self.config.channels) // 2
        coarsest = next(edge for edge in itertools.count(1) if fewest * edge**ndim >= fingerprint_width)
        small = [coarsest * factor] * ndim
        large = [edge + -edge % factor for edge in image_shape[1:]]
        return [part.enlarged(small, large) for part in measure_parts(self, (image_shape[0], *small))]


@build.register
def build_unet(config: UNetConfig) -> StagedClassifier:
    """The U-Net that `config` describes, with fresh weights."""
    seed = draw_seed(config)
    stem = blocks.PadStem(config.in_channels, config.channels[0])
    stages: list[Stage] = [
        CarryingStage(make_sequence(config, unit), _transition(config, unit), passes_pair=True)
        for unit in range(config.num_units)
    ]
    head = blocks.PointHead(config.head_channels, config.num_classes, config.ndim)
    return with_smooth_kernels(UNet(config, stem, stages, head), seed)


def _transition(config: UNetConfig, unit: int) -> nn.Module:
    """What follows a unit: down, up, or nothing behind the last."""
    if unit == config.num_units - 1:
        return nn.Identity()
    goes_down = unit < len(config.channels) - 1
    coarse = config.stage_channels[unit + 1 if goes_down else unit]
    grid = None if config.exact is False else Grid(config.exact)
    return (Descent if goes_down else Ascent)(coarse // config.multiple, config.transition, grid)
