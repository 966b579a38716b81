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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import partial
from operator import le
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revode.engine.arrival import WIDTH as fingerprint_width
from revode.engine.grid import Grid
from revode.networks import blocks
from revode.networks.blocks import Features
from revode.networks.classifier import InvertibleClassifier, Stage, assemble, build
from revode.networks.config import KINDS, NetworkConfig, is_count, not_among
from revode.networks.cost import PartCost, measure_parts
from revode.networks.families import Family, Transition, family_of
from revode.operators import DroppedActivation
from revode.schemes import SCHEMES

Resampling = Callable[[Tensor, Grid | None, Sequence[int]], Tensor]

RESAMPLINGS: dict[str, tuple[Resampling, Resampling]] = {
    "haar": (blocks.haar, blocks.unhaar),
    "squeeze": (
        lambda x, grid, strides: blocks.squeeze(x, strides),
        lambda x, grid, strides: blocks.unsqueeze(x, strides),
    ),
}
"""By name: make neighbours into channels, and undo that; on the grid of ``exact``, or in floating point."""

Axes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UNetConfig(NetworkConfig):
    """A reversible U-Net.

    >>> config = UNetConfig(name="small", blocks=(2, 2), channels=(16, 32), num_classes=3)
    >>> build(config)(torch.randn(1, 1, 8, 8, 8)).shape
    torch.Size([1, 3, 8, 8, 8])

    Args:
        scheme: a name in `revode.schemes.SCHEMES`; units have the blocks of its network family, or residual branches.
        ndim: 1, 2 or 3 spatial dimensions.
        blocks: blocks in a unit, for each resolution; the units on the way up have as many as those on the way down.
        channels: channels at each resolution.
        transition: ``"haar"`` or ``"squeeze"`` (space to depth).
        kernels: odd edge length of the kernels; or one for each resolution, each a number or one for each axis.
        strides: 1 or 2 between resolutions; or one for each step down, each a number or one for each axis.
        stem_stride: of a space to depth before the first unit, a number or one for each axis; undone behind the head.
        up_blocks: blocks in a unit on the way up, from the coarsest on, where they differ.
        deep_supervision: whether the units on the way up, but for the last, have a head, too: scores come as a list.
        dropout: the share that is dropped behind every activation inside the branches.
    """

    family: str = "unet"
    scheme: str = "verlet"
    ndim: int = 3
    in_channels: int = 1
    norm: str = "none"
    h: float | tuple[float, ...] | None = 0.3
    transition: str = "haar"
    kernels: Any = 3
    strides: Any = 2
    stem_stride: Any = 1
    up_blocks: Any = None
    deep_supervision: bool = False
    dropout: float = 0.0

    transitions = tuple(RESAMPLINGS)
    usual_batch = 1
    scores_points = True

    def __post_init__(self) -> None:
        for name in ("kernels", "strides", "stem_stride", "up_blocks"):
            object.__setattr__(self, name, _as_tuples(getattr(self, name)))
        super().__post_init__()

    def _family_faults(self) -> Iterator[str]:
        yield from not_among("family", self.family, ("unet",))
        yield from not_among("scheme", self.scheme, SCHEMES)
        if self.ndim not in (1, 2, 3):
            yield f"ndim must be 1, 2 or 3, got {self.ndim!r}"

    def _layout_faults(self) -> Iterator[str]:
        levels, each = len(self.channels), f"or one for each axis ({self.ndim})"
        for name, rows, count, allowed, what in (
            ("kernels", self.kernels, levels, lambda edge: edge % 2 == 1, "odd numbers"),
            ("strides", self.strides, levels - 1, lambda stride: stride <= 2, "1 or 2"),
            ("stem_stride", (self.stem_stride,), 1, lambda stride: True, "positive integers"),
        ):
            found = _spread(rows, count, self.ndim)
            fits = all(len(row) == self.ndim and all(is_count(n) and allowed(n) for n in row) for row in found)
            if len(found) != count or not fits:
                many = f"one for all, or {count} for {levels} resolutions; each a number, " * (name != "stem_stride")
                yield f"{name} of {self.name} are {what}: {many}{each}, got {getattr(self, name)!r}"
        up = self.up_blocks if isinstance(self.up_blocks, tuple) else (self.up_blocks,) * (levels - 1)
        if self.up_blocks is not None and (len(up) != levels - 1 or not all(map(is_count, up))):
            yield f"up_blocks must be a positive integer or {levels - 1} of them, got {self.up_blocks!r}"
        if not (isinstance(self.dropout, int | float) and 0.0 <= self.dropout < 1.0):
            yield f"dropout must lie in [0, 1), got {self.dropout!r}"
        first, parts = self.channels[0], 2 if self.splits else 1
        multiples = [self.multiple(level) for level in range(levels - 1)]
        most = [multiple // parts for multiple in multiples]
        steps = zip(itertools.pairwise(self.channels), multiples, most, strict=True)
        if first % parts or any(c % multiple or c > times * b for (b, c), multiple, times in steps):
            yield (
                f"channels of {self.name} must be multiples of {parts}, behind the first of {_words(multiples)}, and "
                f"at most {_words(most)} times those before them, got {self.channels}"
            )
        if first < self.stem_channels:
            yield (
                f"the first unit repeats the {self.stem_channels} channels of its input and must have at least as many, "
                f"got channels={self.channels}"
            )

    @property
    def row(self) -> Family:
        return family_of(self.scheme)

    @property
    def passage(self) -> Transition:
        return Transition(between=_transition, carries_pair=True, head=self._head, stem=_stem)

    def _head(self, channels: int, num_classes: int) -> nn.Module:
        num_classes *= math.prod(self.stem_strides)
        if not self.deep_supervision:
            return blocks.PointHead(channels, num_classes, self.ndim)
        pairs = [c * (1 if self.splits else 2) for c in self.channels[: max(1, len(self.channels) - 1)]]
        return blocks.DeepHead(pairs, num_classes, self.ndim)

    @property
    def entries(self) -> list[str]:
        return [field.name for field in fields(self)]

    @property
    def level_strides(self) -> tuple[Axes, ...]:
        """Return the strides along each axis, of each step down."""
        return _spread(self.strides, len(self.channels) - 1, self.ndim)

    @property
    def stem_strides(self) -> Axes:
        return _spread((self.stem_stride,), 1, self.ndim)[0]

    @property
    def stem_channels(self) -> int:
        """Return the channels of the input, behind the strides of the stem."""
        return self.in_channels * math.prod(self.stem_strides)

    def multiple(self, level: int) -> int:
        """Return how many channels one channel of each member becomes on the step down from this resolution."""
        return math.prod(self.level_strides[level]) * (2 if self.splits else 1)

    @property
    def num_units(self) -> int:
        return 2 * len(self.channels) - 1

    @property
    def num_layers(self) -> int:
        return self.row.layers_per_block * sum(self.stage_blocks) + 1

    @property
    def reductions(self) -> Axes:
        """Return how many times smaller than the image the coarsest features are, along each axis."""
        return tuple(map(math.prod, zip(self.stem_strides, *self.level_strides, strict=True)))

    @property
    def stage_blocks(self) -> tuple[int, ...]:
        up = self.up_blocks or self.blocks[-2::-1]
        return self.blocks + (up if isinstance(up, tuple) else (up,) * (len(self.blocks) - 1))

    @property
    def stage_channels(self) -> tuple[int, ...]:
        return self.channels + self.channels[-2::-1]

    @property
    def head_channels(self) -> int:
        return self.pair_channels

    def level(self, unit: int) -> int:
        return min(unit, self.num_units - 1 - unit)

    def step_size(self, unit: int) -> float:
        if self.horizon is not None:
            return self.horizon / self.stage_blocks[unit]
        return super().step_size(self.level(unit))

    def branch_options(self, unit: int) -> dict[str, Any]:
        kernel = _spread(self.kernels, len(self.channels), self.ndim)[self.level(unit)]
        options: dict[str, Any] = {} if set(kernel) == {3} else {"kernel_size": kernel}
        if self.dropout:
            options["activation"] = DroppedActivation(self.activation, self.dropout)
        return options

    def with_options(self, **options: Any) -> Self:
        """Return this config with other options; ``out_channels`` is another word for ``num_classes``."""
        if "out_channels" in options:
            if "num_classes" in options:
                raise ValueError("out_channels and num_classes are the same: give one of them")
            options["num_classes"] = options.pop("out_channels")
        return super().with_options(**options)

    def _resolve(self, options: dict[str, Any]) -> dict[str, Any]:
        """Take one number of blocks for every unit; give another scheme group norm, unless its family has biases."""
        options = super()._resolve({"channels": self.channels} | options)
        given = options.get("blocks", self.blocks)
        num_levels = len(options["channels"]) if isinstance(options["channels"], list | tuple) else 1
        if isinstance(given, int) or ("blocks" not in options and num_levels != len(given)):
            options["blocks"] = (given if isinstance(given, int) else given[0],) * num_levels
        scheme = options.get("scheme", self.scheme)
        if scheme != self.scheme and scheme in SCHEMES:
            row = family_of(scheme)
            if row.integrates != self.row.integrates:
                options = {"h": 0.1 if row.integrates else None, "horizon": None} | options
            options = {"norm": row.defaults.get("norm", "group")} | options
        return options


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def _spread(rows: Any, count: int, ndim: int) -> tuple[Axes, ...]:
    """Return so many rows of one number for each axis, of which there may be one for all."""
    rows = rows if isinstance(rows, tuple) else (rows,) * count
    return tuple(row if isinstance(row, tuple) else (row,) * ndim for row in rows)


def _words(numbers: list[int]) -> str:
    return " and ".join(map(str, dict.fromkeys(numbers)))


KINDS["unet"] = UNetConfig


class Descent(nn.Module):
    """Make the first channels of each member coarser; set the others aside, behind what was set aside before.

    Args:
        channels: how many of each member become coarser.
        transition: how, by name.
        strides: along which axes, 2, and along which not, 1.
        grid: the grid that the states live on, if any.
    """

    def __init__(self, channels: int, transition: str, strides: Axes, grid: Grid | None) -> None:
        super().__init__()
        self.channels = channels
        self.transition = transition
        self.strides = strides
        self.grid = grid

    def forward(self, x: Features) -> Features:
        down, _ = RESAMPLINGS[self.transition]
        p, q, *aside = x
        (p, p_rest), (q, q_rest) = (y.split([self.channels, y.shape[1] - self.channels], dim=1) for y in (p, q))
        return down(p, self.grid, self.strides), down(q, self.grid, self.strides), p_rest, q_rest, *aside

    def inverse(self, x: Features) -> Features:
        """Make the coarse channels finer, and join them with what was set aside last."""
        _, up = RESAMPLINGS[self.transition]
        p, q, p_rest, q_rest, *aside = x
        fine = (up(member, self.grid, self.strides) for member in (p, q))
        return *(torch.cat(parts, 1) for parts in zip(fine, (p_rest, q_rest), strict=True)), *aside

    def extra_repr(self) -> str:
        return f"{self.channels}, {self.transition!r}, {self.strides}"


class Ascent(Descent):
    """Undo a `Descent`; one that is `supervised` carries the coarse pair on, behind all that is set aside, to a head."""

    supervised = False

    def forward(self, x: Features) -> Features:
        fine = super().inverse(x)
        return (*fine, *x[:2]) if self.supervised else fine

    def inverse(self, x: Features) -> Features:
        return super().forward(x)


class UNet(InvertibleClassifier):
    """Scores at each point of signals, images or volumes, wholly reversible.

    Inputs of any size are padded with their last points until they can be halved, and scores are cropped again.

    >>> import revode
    >>> net, x = revode.create_model("unet-2d", channels=(8, 16), num_classes=3), torch.randn(1, 1, 9, 10)
    >>> net(x).shape
    torch.Size([1, 3, 9, 10])
    >>> bool((net.inverse(net.features(x), size=(9, 10)) - x).abs().max() < 1e-4)
    True
    """

    config: UNetConfig

    def __init__(self, config: UNetConfig, stem: nn.Module, stages: list[Stage], head: nn.Module) -> None:
        super().__init__(config, stem, stages, head)
        self._deep_supervision = config.deep_supervision

    @property
    def deep_supervision(self) -> bool:
        """Return whether scores come as a list: those of the input's size first, then those of each coarser resolution."""
        return self._deep_supervision

    @deep_supervision.setter
    def deep_supervision(self, wanted: bool) -> None:
        if wanted and not self.config.deep_supervision:
            raise ValueError(f"{self.config.name} has no coarse heads: create it with deep_supervision=True")
        self._deep_supervision = bool(wanted)

    def forward(self, x: Tensor) -> Any:
        scores: Any = super().forward(x)
        if isinstance(scores, Tensor):
            return self._fitted(scores, x.shape[2:])
        found, edges = [], x.shape[2:]
        for each, strides in zip(scores, [(1,) * len(edges), *self.config.level_strides], strict=False):
            edges = [-(-edge // stride) for edge, stride in zip(edges, strides, strict=True)]
            found.append(self._fitted(each, edges))
        return found

    def _fitted(self, scores: Tensor, edges: Sequence[int]) -> Tensor:
        strides = self.config.stem_strides
        scores = blocks.unsqueeze(scores, strides) if math.prod(strides) > 1 else scores
        return scores[(..., *(slice(edge) for edge in edges))]

    def features(self, x: Tensor) -> Tensor:
        return blocks.join(self.run_stages(x)[:2])

    def run_stages(self, x: Tensor) -> Features:
        self.check_image(x)
        missing = [-edge % factor for edge, factor in zip(x.shape[2:], self.config.reductions, strict=True)]
        if any(missing):
            x = F.pad(x, [end for edge in reversed(missing) for end in (0, edge)], mode="replicate")
        return super().run_stages(x)

    def readout(self, x: Features) -> Any:
        """Return the last pair; under deep supervision a list, with the coarser pairs behind it."""
        pairs = [x[i : i + 2] for i in range(0, len(x), 2)]
        return [pairs[0], *reversed(pairs[1:])] if self.deep_supervision else pairs[0]

    def with_strategy(self, backprop: str, **changes: Any) -> UNet:
        twin = cast(UNet, super().with_strategy(backprop, **changes))
        twin.deep_supervision = self.deep_supervision
        return twin

    def check_image(self, x: Tensor) -> None:
        """Refuse what has other dimensions or channels, and a single point where a norm takes means over points."""
        if x.dim() != 2 + self.config.ndim or x.shape[1] != self.config.in_channels or 0 in x.shape[2:]:
            edges = ", ".join(("depth", "height", "width")[-self.config.ndim :])
            raise ValueError(
                f"{self.config.name} takes inputs of shape (batch, {self.config.in_channels}, {edges}), got {tuple(x.shape)}"
            )
        factors = self.config.reductions
        if self.config.norm == "instance" and all(map(le, x.shape[2:], factors)):
            raise ValueError(
                f"norm='instance' needs more than one point at the coarsest resolution: give {self.config.name} inputs larger "
                f"than {factors}, got {tuple(x.shape[2:])}, or norm='group'"
            )

    def inverse(self, features: Tensor, size: tuple[int, ...] | None = None) -> Tensor:
        """Return the input whose `features` these are.

        Args:
            features: both members of the last pair, joined along the channels, as `features` returns them.
            size: the edges of the input, if they were padded.
        """
        image = super().inverse(features)
        return image if size is None else image[(..., *(slice(edge) for edge in size))]

    def measure(self, image_shape: tuple[int, ...], batch: int) -> list[PartCost]:
        """Measure small inputs, as many as have the points of the real ones: nothing of the real size is made.

        All bytes grow with the number of points but those of fingerprints, which are fixed once a state is large enough.
        """
        factors, ndim, fewest = self.config.reductions, self.config.ndim, min(self.config.channels) // 2
        coarsest = next(edge for edge in itertools.count(2) if fewest * edge**ndim >= fingerprint_width)
        small = [coarsest * factor for factor in factors]
        large = [edge + -edge % factor for edge, factor in zip(image_shape[1:], factors, strict=True)]
        ratio = Fraction(math.prod(large), math.prod(small))
        parts = []
        for part in measure_parts(self, (image_shape[0], *small), batch * ratio):
            edges = (edge * new // old for edge, new, old in zip(part.shape[1:], large, small, strict=True))
            parts.append(replace(part, shape=(part.shape[0], *edges), flops=round(part.flops * ratio)))
        return parts


build.register(UNetConfig, partial(assemble, kind=UNet))


def _stem(config: UNetConfig) -> nn.Module:
    strides = config.stem_strides if math.prod(config.stem_strides) > 1 else ()
    return blocks.PadStem(config.stem_channels, config.channels[0], strides)


def _transition(config: UNetConfig, unit: int) -> nn.Module:
    bottom = len(config.channels) - 1
    level = min(unit, 2 * bottom - 1 - unit)
    grid = None if config.exact is False else Grid(config.exact)
    kind = Descent if unit < bottom else Ascent
    moving = config.channels[level + 1] // config.multiple(level)
    made = kind(moving, config.transition, config.level_strides[level], grid)
    if isinstance(made, Ascent):
        made.supervised = config.deep_supervision and unit > bottom
    return made
