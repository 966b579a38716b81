"""The config of a network: one frozen dataclass that builds it, is saved with it, and explains it.

The family says which options there are: those of `REVERSIBLE` if its units are reversible sequences, those of `IN_TIME` if they
integrate an ODE. Everything is checked here, once; a builder trusts its config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from revode.engine import STRATEGIES
from revode.errors import unknown
from revode.fields import ACTIVATIONS
from revode.networks.families import FAMILIES, TRANSITIONS, Family, Transition

REVERSIBLE = ("exact", "verify", "anchor_every", "memory_budget", "damping")
IN_TIME = ("h", "horizon", "init", "start", "transition")
KINDS: dict[str, type[NetworkConfig]] = {}
"""The configs of networks whose ``family`` is not one of `FAMILIES`, by that name."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """A classifier of images: stem, units of blocks, head.

    >>> model_config("hamiltonian-14").with_options(num_classes=100, exact=True).num_layers
    14

    Args:
        name: the name of the network.
        family: a name of `FAMILIES`, which decides the blocks.
        blocks: blocks in each unit, as the paper counts them.
        channels: channels of each unit.
        num_classes: outputs.
        in_channels: channels of the image.
        image_size: the image size for the checks and for `describe`; the network takes larger and smaller ones too.
        activation: σ by name.
        norm: inside the blocks: ``"none"`` (a bias), ``"batch"``, ``"instance"``, ``"group"`` or ``"tv"`` (batch-independent).
        backprop: ``"reversible"``, ``"checkpoint"`` or ``"store"``; by default the first that the family offers.
        compile: whether blocks run compiled, once for each kind and shape. Files of a network do not store it.
        exact: True, or the bits of the grid, for bit-exact reversing.
        verify: whether to check that the walk back ends where forward began.
        anchor_every: keep the state of every k-th block.
        memory_budget: bytes of activations that the whole network may keep; as much as fits is not recomputed.
        damping: d in [0, 1) multiplies the carried state by 1 - d at every step.
        h: step size, or one for each unit; leave it out for `horizon`.
        horizon: T, so that a unit of N blocks takes steps of h = T / N: deeper is finer, not longer.
        init: ``"independent"`` kernels in every block, or kernels ``"smooth"`` in time.
        start: how MidPoint and Leapfrog make their second state; the scheme's own default unless given.
        transition: ``"pool_pad"``, ``"connector"`` or ``"squeeze"``.
    """

    name: str
    family: str
    blocks: tuple[int, ...]
    channels: tuple[int, ...]
    num_classes: int = 10
    in_channels: int = 3
    image_size: int = 32
    activation: str = "relu"
    norm: str = "batch"
    backprop: str = ""
    compile: bool = False
    exact: bool | int = False
    verify: bool = True
    anchor_every: int | None = None
    memory_budget: int | None = None
    damping: float = 0.0
    h: float | tuple[float, ...] | None = None
    horizon: float | None = None
    init: str = "independent"
    start: str | None = None
    transition: str = "pool_pad"

    ndim = 2  # spatial dimensions of an image
    usual_batch = 100  # batch size of `describe` by default
    scores_points = False  # False: one row of scores for an image
    transitions = ("pool_pad", "connector", "squeeze")

    def __post_init__(self) -> None:
        for fault in self._family_faults():
            raise ValueError(fault)
        object.__setattr__(self, "backprop", self.backprop or self.strategies[0])
        for name in ("blocks", "channels"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list | tuple) else (value,))
        if isinstance(self.h, list | tuple):
            same = len(self.h) == len(self.blocks) and all(h == self.h[0] for h in self.h)
            object.__setattr__(self, "h", self.h[0] if same else tuple(self.h))
        for fault in self._faults():
            raise ValueError(fault)

    def _family_faults(self) -> Iterator[str]:
        yield from not_among("family", self.family, FAMILIES)

    def _faults(self) -> Iterator[str]:
        """Yield a sentence for every fault; each relies on the claims of the sentences before it."""
        for name in ("blocks", "channels"):
            if not getattr(self, name) or not all(map(is_count, getattr(self, name))):
                yield f"{name} must be positive integers, got {getattr(self, name)!r}"
        for name in ("num_classes", "in_channels", "image_size"):
            if not is_count(getattr(self, name)):
                yield f"{name} must be a positive integer, got {getattr(self, name)!r}"
        for field in dataclasses.fields(self):
            if field.name not in self.entries and getattr(self, field.name) != field.default:
                yield f"{self.family} networks have no {field.name}: leave it out, got {getattr(self, field.name)!r}"
        yield from not_among("activation", self.activation, ACTIVATIONS)
        yield from not_among("norm", self.norm, self.row.norms, f" for {self.name}")
        yield from not_among("backprop", self.backprop, self.strategies, f" for {self.name}")
        yield from not_among("init", self.init, ("independent", "smooth"))
        yield from not_among("transition", self.transition, self.transitions)
        if len(self.blocks) != len(self.channels):
            yield (
                f"blocks and channels must name the same number of units, got blocks={self.blocks} and "
                f"channels={self.channels}"
            )
        if self.memory_budget is not None and not is_count(self.memory_budget):
            yield f"memory_budget must be a positive integer, got {self.memory_budget!r}"
        if self.memory_budget is not None and (self.backprop, self.anchor_every) != ("reversible", None):
            yield (
                "memory_budget says itself what is kept: leave out backprop and anchor_every, "
                f"got backprop={self.backprop!r}, anchor_every={self.anchor_every}"
            )
        yield from self._time_faults()
        yield from self._layout_faults()
        steps = {self.step_size(unit) for unit in range(self.num_units)}
        if self.passage.carries_pair and not self.splits and len(steps) > 1:
            yield (
                f"transition={self.transition!r} carries two successive states on, so h, or horizon / blocks, must be the same "
                f"everywhere: give one h, or all units as many blocks, got h={self.h}, blocks={self.blocks}"
            )

    def _time_faults(self) -> Iterator[str]:
        if not self.row.integrates:
            if (self.h, self.horizon, self.init) != (None, None, "independent"):
                yield (
                    f"blocks of the family {self.row.name} take no steps in time: leave out h, horizon and init, "
                    f"got h={self.h}, horizon={self.horizon}, init={self.init!r}"
                )
            return
        if (self.h is None) == (self.horizon is None):
            yield f"give either h (the step size) or horizon (h = horizon / blocks), got h={self.h}, horizon={self.horizon}"
        steps = self.h if isinstance(self.h, tuple) else (self.h,)
        for name, value in (("horizon", self.horizon), *(("h", h) for h in steps)):
            if value is not None and not (isinstance(value, int | float) and 0.0 < value < float("inf")):
                yield f"{name} must be a positive number, got {value!r}"
        if isinstance(self.h, tuple) and len(self.h) != len(self.blocks):
            yield f"h must be one number or one for each of the {len(self.blocks)} units, got {self.h}"

    def _layout_faults(self) -> Iterator[str]:
        if list(self.channels) != sorted(self.channels):
            yield f"channels must not decrease from unit to unit, got {self.channels}"
        if self.splits and any(c % 2 for c in self.channels):
            yield f"{self.name} splits its channels in two halves: all must be even, got {self.channels}"
        if self.image_size < self.reduction:
            yield (
                f"image_size={self.image_size} is too small: {self.num_units} units halve it {self.num_units - 1} "
                f"times, so it must be at least {self.reduction}"
            )
        if self.transition == "connector" and min(self.blocks) < 2:
            yield (
                "transition='connector' makes the last block of a unit its connector: "
                f"every unit must have at least 2 blocks, got {self.blocks}"
            )
        if self.transition == "squeeze":
            valid = squeezed_channels(self.channels[0], self.num_units)
            if self.channels != valid:
                yield f"transition='squeeze' makes channels four times as many: {valid}, got {self.channels}"
            if self.channels[0] < self.in_channels:
                yield (
                    f"transition='squeeze' repeats the image's {self.in_channels} channels to fill those of the first unit, "
                    f"which must be at least as many, got {self.channels[0]}"
                )
            if self.image_size % self.reduction:
                yield (
                    f"transition='squeeze' halves the image exactly: image_size must be a multiple of {self.reduction}, "
                    f"got {self.image_size}"
                )

    @property
    def row(self) -> Family:
        """Return the family."""
        return FAMILIES[self.family]

    @property
    def passage(self) -> Transition:
        """Return the transition between the units."""
        return TRANSITIONS[self.transition if self.row.integrates else self.row.transition]

    @property
    def entries(self) -> list[str]:
        """Return the names of the options that this family has; all others keep their defaults."""
        absent = (() if self.row.scheme else REVERSIBLE) + (() if self.row.integrates else IN_TIME)
        return [field.name for field in dataclasses.fields(self) if field.name not in absent]

    @property
    def strategies(self) -> tuple[str, ...]:
        """Return the gradient strategies that the network offers."""
        return STRATEGIES if self.row.scheme else ("store",)

    @property
    def splits(self) -> bool:
        """Return True if the pair is the two halves of the channels."""
        return self.row.scheme is not None and self.row.scheme.splits

    @property
    def num_units(self) -> int:
        """Return the number of units, each at its own width and resolution."""
        return len(self.blocks)

    @property
    def num_layers(self) -> int:
        """Return the number of layers as the paper counts them: convolutions in the blocks, the stem and the linear map."""
        return self.row.layers_per_block * sum(self.blocks) + 2

    @property
    def reduction(self) -> int:
        """Return how many times smaller than the image the smallest features are, in each dimension."""
        return 2 ** (len(self.channels) - 1)

    @property
    def stage_blocks(self) -> tuple[int, ...]:
        """Return the number of blocks that run at the width of each unit."""
        last = self.num_units - 1
        return tuple(n + self.passage.extra_blocks(unit, last) for unit, n in enumerate(self.blocks))

    @property
    def stage_channels(self) -> tuple[int, ...]:
        """Return the channels of the blocks that run at the width of each unit."""
        return self.channels

    @property
    def head_channels(self) -> int:
        """Return the channels of the head's input."""
        return self.channels[-1]

    @property
    def pair_channels(self) -> int:
        """Return the channels of both members of the last pair."""
        return self.stage_channels[-1] * (1 if self.splits else 2)

    def branch_options(self, unit: int) -> dict[str, Any]:
        """Return the options of this unit's branches beside activation, norm and dimensions."""
        return {}

    def step_size(self, unit: int) -> float:
        """Return h of the unit at this index, or 1 if the scheme has none."""
        if self.horizon is not None:
            return self.horizon / self.blocks[unit]
        return self.h[unit] if isinstance(self.h, tuple) else self.h or 1.0

    def image_shape(self, size: int | Sequence[int] | None = None) -> tuple[int, ...]:
        """Return channels and image size for this size, one number or one for each dimension; the config's own unless given."""
        size = self.image_size if size is None else size
        edges = (size,) * self.ndim if isinstance(size, int) else tuple(size)
        if len(edges) != self.ndim:
            raise ValueError(f"image_size of {self.name} is one edge or {self.ndim} of them, got {size!r}")
        if not all(map(is_count, edges)):
            raise ValueError(f"image_size must be a positive integer, got {size!r}")
        return (self.in_channels, *edges)

    def with_options(self, **options: Any) -> Self:
        """Return a config with these options replaced. Raise for an unknown option, and list the valid ones."""
        names = [name for name in self.entries if name not in ("name", "family", "ndim")]
        for option in options:
            if option not in names:
                raise unknown(f"option of {self.name}", option, names)
        return dataclasses.replace(self, **self._resolve(options))

    def _resolve(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options, and those that follow from them."""
        for given, other in (("h", "horizon"), ("horizon", "h")):
            if options.get(given) is not None:
                options = {other: None} | options
        if options.get("transition") == "squeeze" != self.transition and "channels" not in options:
            num_units = len(options.get("blocks", self.blocks))
            first = max(self.channels[-1] // 4 ** (num_units - 1), options.get("in_channels", self.in_channels))
            options = options | {"channels": squeezed_channels(first + first % 2, num_units)}
        return options

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain values, for JSON and YAML, without ``compile``."""
        values = {name: getattr(self, name) for name in self.entries if name != "compile"}
        return {name: _as_lists(value) for name, value in values.items()}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> NetworkConfig:
        """Return the config that `to_dict` gave, of the class of its family."""
        if not isinstance(values, Mapping):
            raise ValueError(f"not a network's config: {values!r}")
        known = dict.fromkeys(FAMILIES, NetworkConfig) | KINDS
        if values.get("family") not in known:
            raise ValueError(f"family must be one of {', '.join(known)}, got {values.get('family')!r}")
        kind = known[values["family"]]
        names = {field.name for field in dataclasses.fields(kind)}
        odd = sorted(({"name", "blocks", "channels"} - set(values)) | (set(values) - names))
        if odd:
            raise ValueError(f"not a {kind.__name__}: entries {', '.join(map(repr, odd))} are missing or unknown")
        return kind(**values)


def squeezed_channels(first: int, num_units: int) -> tuple[int, ...]:
    """Return first, 4 first, 16 first, ..., the channels behind each space to depth."""
    return tuple(first * 4**unit for unit in range(num_units))


def _as_lists(value: Any) -> Any:
    return list(map(_as_lists, value)) if isinstance(value, tuple) else value


def not_among(name: str, value: Any, choices: Iterable[str], where: str = "") -> Iterator[str]:
    """Yield the sentence that refuses a value that is not among `choices`."""
    choices = tuple(choices)
    if value not in choices:
        yield f"{name} must be {' or '.join(map(repr, choices))}{where}, got {value!r}"


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
