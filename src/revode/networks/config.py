"""What a network is, as data: one frozen dataclass that builds it, is saved with it, and explains it.

`NetworkConfig` holds what every classifier has; `ReversibleConfig` adds how gradients are computed (RevNet); `OdeConfig` adds
the integrator (Hamiltonian, MidPoint, Leapfrog). Everything is checked here, once; a builder trusts its config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from revode.engine import STRATEGIES
from revode.fields import ACTIVATIONS
from revode.files import unknown
from revode.networks.families import FAMILIES, TRANSITIONS, Family, Transition

INITS = ("independent", "smooth")
KINDS: dict[str, type[NetworkConfig]] = {}
"""The configs of networks whose ``family`` is not one of `FAMILIES`, by that name."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """A classifier of images: stem, units of blocks, head.

    Args:
        name: what the network is called.
        family: which kind of blocks it has.
        blocks: blocks in each unit, as the paper counts them.
        channels: channels of each unit.
        num_classes: outputs.
        in_channels: channels of the image.
        image_size: edge of the image, for the checks and for `describe`; the network takes larger and smaller ones too.
        activation: σ by name.
        norm: ``"none"`` (a bias), ``"batch"`` or ``"tv"`` (batch-independent) inside the blocks.
        backprop: ``"reversible"``, ``"checkpoint"`` or ``"store"``.
        compile: whether blocks run compiled, once for each kind and shape. Files of a network do not remember it.
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
    backprop: str = "reversible"
    compile: bool = False

    ndim = 2  # of the images
    usual_batch = 100  # images in a step, where nobody says how many
    scores_points = False  # or the image as a whole

    def __post_init__(self) -> None:
        for name in ("blocks", "channels"):
            object.__setattr__(self, name, _integers(name, getattr(self, name)))
        self._check_family()
        require_choice("activation", self.activation, ACTIVATIONS)
        require_choice("norm", self.norm, self.row.norms, f" for {self.name}")
        require_choice("backprop", self.backprop, self.strategies, f" for {self.name}")
        for name in ("num_classes", "in_channels", "image_size"):
            require_positive_integer(name, getattr(self, name))
        if len(self.blocks) != len(self.channels):
            raise ValueError(
                f"blocks and channels must name the same number of units, got blocks={self.blocks} and "
                f"channels={self.channels}"
            )
        self._check_channels()
        self._check_image()

    def _check_family(self) -> None:
        require_choice("family", self.family, [name for name, row in FAMILIES.items() if isinstance(self, _kind(row))])

    def _check_channels(self) -> None:
        if list(self.channels) != sorted(self.channels):
            raise ValueError(f"channels must not decrease from unit to unit, got {self.channels}")

    def _check_image(self) -> None:
        if self.image_size < self.reduction:
            raise ValueError(
                f"image_size={self.image_size} is too small: {self.num_units} units halve it {self.num_units - 1} "
                f"times, so it must be at least {self.reduction}"
            )

    @property
    def row(self) -> Family:
        """All that its family decides."""
        return FAMILIES[self.family]

    @property
    def passage(self) -> Transition:
        """All that the transition between its units decides."""
        return TRANSITIONS[self.row.transition]

    @property
    def strategies(self) -> tuple[str, ...]:
        """The ways of computing gradients that the network offers."""
        return ("store",) if self.row.scheme is None else STRATEGIES

    @property
    def num_units(self) -> int:
        """Units, each at its own width and resolution."""
        return len(self.blocks)

    @property
    def num_layers(self) -> int:
        """Layers as the paper counts them: convolutions in the blocks, the stem and the linear map."""
        return self.row.layers_per_block * sum(self.blocks) + 2

    @property
    def reduction(self) -> int:
        """How many times smaller than the image the last features are, in each dimension."""
        return 2 ** (self.num_units - 1)

    @property
    def stage_blocks(self) -> tuple[int, ...]:
        """Blocks that run at the width of each unit."""
        last = self.num_units - 1
        return tuple(n + self.passage.extra_blocks(unit, last) for unit, n in enumerate(self.blocks))

    @property
    def stage_channels(self) -> tuple[int, ...]:
        """Channels of the blocks that run at the width of each unit."""
        return self.channels

    @property
    def head_channels(self) -> int:
        """Channels that the head sees."""
        return self.channels[-1]

    def image_shape(self, size: int | Sequence[int] | None = None) -> tuple[int, ...]:
        """Channels and edges of an image with these edges, or this one edge; the config's own unless given."""
        size = self.image_size if size is None else size
        edges = (size,) * self.ndim if isinstance(size, int) else tuple(size)
        if len(edges) != self.ndim:
            raise ValueError(f"image_size of {self.name} is one edge or {self.ndim} of them, got {size!r}")
        for edge in edges:
            require_positive_integer("image_size", edge)
        return (self.in_channels, *edges)

    def with_options(self, **options: Any) -> Self:
        """This config with some options replaced; an unknown one is refused with the valid ones."""
        fixed = ("name", "family", "ndim")
        names = [field.name for field in dataclasses.fields(self) if field.name not in fixed]
        for option in options:
            if option not in names:
                raise unknown(f"option of {self.name}", option, names)
        return dataclasses.replace(self, **self._resolve(options))

    def _resolve(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options that follow from others."""
        return options

    def to_dict(self) -> dict[str, Any]:
        """What the network is in plain values, for JSON and YAML; not whether it runs compiled here."""
        values = dataclasses.asdict(self).items()
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values if k != "compile"}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> NetworkConfig:
        """The config that `to_dict` gave, of the class that its family asks for."""
        if not isinstance(values, Mapping):
            raise ValueError(f"not a network's config: {values!r}")
        known = KINDS | {name: _kind(row) for name, row in FAMILIES.items()}
        if values.get("family") not in known:
            raise ValueError(f"family must be one of {', '.join(known)}, got {values.get('family')!r}")
        kind = known[values["family"]]
        names = {field.name for field in dataclasses.fields(kind)}
        odd = sorted(({"name", "blocks", "channels"} - set(values)) | (set(values) - names))
        if odd:
            raise ValueError(f"not a {kind.__name__}: entries {', '.join(map(repr, odd))} are missing or unknown")
        return kind(**values)

    @staticmethod
    def of_family(row: Family, **values: Any) -> NetworkConfig:
        """A config with the defaults of a family."""
        return _kind(row)(family=row.name, **row.defaults | values)


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(NetworkConfig):
    """A pre-activation ResNet (He et al. 2016): not reversible, so its activations are stored."""

    backprop: str = "store"


@dataclass(frozen=True, kw_only=True)
class ReversibleConfig(NetworkConfig):
    """A network whose units are reversible sequences.

    Args:
        exact: True, or the bits of the grid, for bit-exact reversing.
        anchor_every: keep the state of every k-th block.
        memory_budget: bytes of activations that the whole network may keep; as much as fits is not recomputed.
        damping: d in [0, 1): multiplies the carried state by 1 - d at every step.
        verify: whether the walk back checks that it ends where forward began.
    """

    exact: bool | int = False
    verify: bool = True
    anchor_every: int | None = None
    memory_budget: int | None = None
    damping: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_budget is not None:
            require_positive_integer("memory_budget", self.memory_budget)
            if self.backprop != "reversible" or self.anchor_every is not None:
                raise ValueError(
                    "memory_budget says itself what is kept: leave out backprop and anchor_every, "
                    f"got backprop={self.backprop!r}, anchor_every={self.anchor_every}"
                )

    @property
    def splits(self) -> bool:
        """Whether the pair is the two halves of the channels."""
        assert self.row.scheme is not None
        return self.row.scheme.splits

    def step_size(self, unit: int) -> float:
        """h of the unit at this index; 1 where the scheme has none."""
        return 1.0

    def _check_channels(self) -> None:
        super()._check_channels()
        if self.splits and any(c % 2 for c in self.channels):
            raise ValueError(f"{self.name} splits its channels in two halves: all must be even, got {self.channels}")


@dataclass(frozen=True, kw_only=True)
class RevNetConfig(ReversibleConfig):
    """A RevNet (Gomez et al. 2017): additive coupling of pre-activation branches."""


@dataclass(frozen=True, kw_only=True)
class OdeConfig(ReversibleConfig):
    """A network whose units integrate an ODE.

    Args:
        h: step size, or one for each unit; leave it out for `horizon`.
        horizon: T, so that a unit of N blocks takes steps of h = T / N: deeper is finer, not longer.
        init: ``"independent"`` kernels in every block, or kernels ``"smooth"`` in time.
        start: how MidPoint and Leapfrog make their second state; the scheme's own default unless given.
        transition: ``"pool_pad"``, ``"connector"`` or ``"squeeze"``.
    """

    h: float | tuple[float, ...] | None = None
    horizon: float | None = None
    init: str = "independent"
    start: str | None = None
    transition: str = "pool_pad"

    transitions = ("pool_pad", "connector", "squeeze")

    def __post_init__(self) -> None:
        require_choice("init", self.init, INITS)
        require_choice("transition", self.transition, self.transitions)
        self._check_time()
        super().__post_init__()
        if self.transition == "connector" and min(self.blocks) < 2:
            raise ValueError(
                "transition='connector' makes the last block of a unit its connector: "
                f"every unit must have at least 2 blocks, got {self.blocks}"
            )

    def _check_time(self) -> None:
        if (self.h is None) == (self.horizon is None):
            raise ValueError(
                f"give either h (the step size) or horizon (h = horizon / blocks), got h={self.h}, horizon={self.horizon}"
            )
        _require_positive("horizon", self.horizon)
        self._check_step_size()

    @property
    def passage(self) -> Transition:
        return TRANSITIONS[self.transition]

    def _check_step_size(self) -> None:
        """One number, or one for each unit; equal ones become one number."""
        if not isinstance(self.h, list | tuple):
            return _require_positive("h", self.h)
        for h in self.h:
            _require_positive("h", h)
        if len(self.h) != len(self.blocks):
            raise ValueError(f"h must be one number or one for each of the {len(self.blocks)} units, got {self.h}")
        object.__setattr__(self, "h", tuple(self.h) if len(set(self.h)) > 1 else self.h[0])

    def _check_channels(self) -> None:
        super()._check_channels()
        if not self.passage.carries_pair:
            return
        valid = squeezed_channels(self.channels[0], self.num_units)
        if self.channels != valid:
            raise ValueError(f"transition='squeeze' makes channels four times as many: {valid}, got {self.channels}")
        if self.channels[0] < self.in_channels:
            raise ValueError(
                f"transition='squeeze' repeats the image's {self.in_channels} channels to fill those of the first unit, "
                f"which must be at least as many, got {self.channels[0]}"
            )
        self._check_equal_steps()

    def _check_equal_steps(self) -> None:
        """Two successive states that pass from unit to unit are as far apart in time in each."""
        if not self.splits and len({self.step_size(unit) for unit in range(self.num_units)}) > 1:
            raise ValueError(
                f"transition={self.transition!r} carries two successive states on, so h, or horizon / blocks, must be the same "
                f"everywhere: give one h, or all units as many blocks, got h={self.h}, blocks={self.blocks}"
            )

    def _check_image(self) -> None:
        super()._check_image()
        if self.passage.carries_pair and self.image_size % self.reduction:
            raise ValueError(
                f"transition='squeeze' halves the image exactly: image_size must be a multiple of {self.reduction}, "
                f"got {self.image_size}"
            )

    def step_size(self, unit: int) -> float:
        """h of the unit at this index."""
        if isinstance(self.h, tuple):
            return self.h[unit]
        if self.h is not None:
            return self.h
        assert self.horizon is not None
        return self.horizon / self.blocks[unit]

    def _resolve(self, options: dict[str, Any]) -> dict[str, Any]:
        if options.get("h") is not None and "horizon" not in options:
            options = options | {"horizon": None}
        if options.get("horizon") is not None and "h" not in options:
            options = options | {"h": None}
        if options.get("transition") == "squeeze" != self.transition and "channels" not in options:
            in_channels = options.get("in_channels", self.in_channels)
            num_units = len(options.get("blocks", self.blocks))
            first = max(self.channels[-1] // 4 ** (num_units - 1), in_channels)
            options = options | {"channels": squeezed_channels(first + first % 2, num_units)}
        return options


def _kind(row: Family) -> type[NetworkConfig]:
    """The config that networks of a family have."""
    if row.scheme is None:
        return ResNetConfig
    return OdeConfig if row.integrates else RevNetConfig


def squeezed_channels(first: int, num_units: int) -> tuple[int, ...]:
    """first, 4 first, 16 first, ...: what space-to-depth makes of the channels."""
    return tuple(first * 4**unit for unit in range(num_units))


def require_choice(name: str, value: Any, choices: Iterable[str], where: str = "") -> None:
    """Refuse a value that is not among `choices`."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}{where}, got {value!r}")


def require_positive_integer(name: str, value: Any) -> None:
    """Refuse what is not a whole number above zero."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _require_positive(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, int | float) and 0.0 < value < float("inf")):
        raise ValueError(f"{name} must be a positive number, got {value!r}")


def _integers(name: str, values: Any) -> tuple[int, ...]:
    found = tuple(values) if isinstance(values, list | tuple) else (values,)
    if not found or any(not isinstance(v, int) or isinstance(v, bool) or v < 1 for v in found):
        raise ValueError(f"{name} must be positive integers, got {values!r}")
    return found
