"""The units of a reversible network as stages: a sequence at one width and resolution, then the transition to the next.

Which blocks run at which width depends on the transition. Units of n blocks become, with three units,

| transition | blocks of the stages | why |
|---|---|---|
| ``pool_pad`` | n + 1, n, n - 1 | rule H: the first block of a later unit runs before pooling, at the width it comes from |
| ``connector`` | n - 1, n - 1, n - 1 | rule M: a unit's last block is its connector |
| ``squeeze`` | n, n, n | nothing is lost in between |
| ``strided`` | n, n - 1, n - 1 | RevNet: the first block of a later unit is the transition |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from revode.engine import ReversibleSequence
from revode.fields import AntisymmetricField, OneLayerField, SymmetricField
from revode.networks.baselines import PreActivation, StridedBlock
from revode.networks.config import SCHEMES_OF_FAMILIES, OdeConfig, ReversibleConfig
from revode.networks.transitions import Connector, Features, PoolPad, Squeeze
from revode.schemes import Scheme


class NamedSequence(NamedTuple):
    """A reversible sequence of a network."""

    name: str
    sequence: ReversibleSequence
    num_blocks: int


class Unit(NamedTuple):
    """The branches of one of the paper's units in order, ``fields_per_block`` to a block, and their step size."""

    name: str
    fields: tuple[nn.Module, ...]
    fields_per_block: int
    h: float


class Stage(nn.Module):
    """A sequence of blocks at one width and resolution, and the transition behind it.

    Args:
        body: the sequence; anything from tensor to tensor if it is not reversible, and may be absent.
        transition: what follows it.
        hands_on_pair: whether the transition gets the pair of the scheme, or its newest state.
    """

    def __init__(self, body: nn.Module | None, transition: nn.Module, *, hands_on_pair: bool = False) -> None:
        super().__init__()
        self.body = body
        self.transition = transition
        self.hands_on_pair = hands_on_pair

    def run_body(self, x: Features) -> Features:
        """What the transition gets."""
        if self.body is None:
            return x
        if not isinstance(self.body, ReversibleSequence):
            return self.body(x)
        # The newest state itself, not the readout: that is a copy, and the unit has saved the state anyway.
        state = self.body(x, return_state=True)[1]
        return state if self.hands_on_pair else state[1]

    def forward(self, x: Features) -> Features:
        return self.transition(self.run_body(x))


def _hamiltonian(config: Any, channels: int, first: bool) -> list[nn.Module]:
    half, options = channels // 2, {"activation": config.activation, "norm": config.norm}
    return [SymmetricField(half, leading=not first, **options), SymmetricField(half, leading=True, **options)]


def _one_layer(config: Any, channels: int, first: bool) -> list[nn.Module]:
    return list(OneLayerField.pair(channels // 2, activation=config.activation))


def _midpoint(config: Any, channels: int, first: bool) -> list[nn.Module]:
    return [AntisymmetricField(channels, activation=config.activation, norm=config.norm)]


def _leapfrog(config: Any, channels: int, first: bool) -> list[nn.Module]:
    return [SymmetricField(channels, activation=config.activation, norm=config.norm)]


def _revnet(config: Any, channels: int, first: bool) -> list[nn.Module]:
    half, options = channels // 2, {"activation": config.activation, "norm": config.norm}
    return [PreActivation(half, leading=not first, **options), PreActivation(half, **options)]


_BLOCKS: dict[str, Callable[[Any, int, bool], list[nn.Module]]] = {
    "hamiltonian": _hamiltonian,
    "hamiltonian-1layer": _one_layer,
    "midpoint": _midpoint,
    "leapfrog": _leapfrog,
    "revnet": _revnet,
}
"""The branches of one block, given the config, the channels and whether it is the network's first."""


def transition_kind(config: ReversibleConfig) -> str:
    """The name of the transition; a RevNet has its own."""
    return config.transition if isinstance(config, OdeConfig) else "strided"


def stage_blocks(config: ReversibleConfig) -> tuple[int, ...]:
    """Blocks that run at the width of each unit."""
    kind, blocks = transition_kind(config), config.blocks
    last = len(blocks) - 1
    if kind == "pool_pad":
        return tuple(n - (unit > 0) + (unit < last) for unit, n in enumerate(blocks))
    if kind == "connector":
        return tuple(n - 1 for n in blocks)
    if kind == "strided":
        return tuple(n - (unit > 0) for unit, n in enumerate(blocks))
    return blocks


def unit_blocks(config: ReversibleConfig) -> tuple[int, ...]:
    """Reversible blocks that belong to each unit, in the order in which they run."""
    return config.blocks if transition_kind(config) == "pool_pad" else stage_blocks(config)


def make_scheme(config: ReversibleConfig, unit: int) -> Scheme:
    """The integrator of the unit at this index."""
    kind: Any = SCHEMES_OF_FAMILIES[config.family]
    if isinstance(config, OdeConfig):
        return kind(config.step_size(unit), start=config.start, damping=config.damping)
    return kind(damping=config.damping)


def make_sequence(config: ReversibleConfig, unit: int) -> ReversibleSequence | None:
    """The blocks at the width of this unit, or None if there are none."""
    num_blocks, channels = stage_blocks(config)[unit], config.channels[unit]
    if not num_blocks:
        return None
    make_block = _BLOCKS[config.family]
    fields = [field for i in range(num_blocks) for field in make_block(config, channels, unit == 0 and i == 0)]
    return ReversibleSequence(
        fields,
        make_scheme(config, unit),
        backprop=config.backprop,
        exact=config.exact,
        anchor_every=config.anchor_every,
    )


def make_transition(config: ReversibleConfig, unit: int) -> nn.Module:
    """What follows the blocks of this unit."""
    last = unit == config.num_units - 1
    kind, channels = transition_kind(config), config.channels[unit]
    following = channels if last else config.channels[unit + 1]
    if kind == "connector":
        return Connector(channels, following, config.norm, config.activation, pools=not last)
    if last:
        return nn.Identity()
    if kind == "pool_pad":
        return PoolPad(following)
    if kind == "squeeze":
        return Squeeze()
    return StridedBlock(channels, following, config.norm, config.activation)


def make_stage(config: ReversibleConfig, unit: int) -> Stage:
    """Blocks and transition of one unit."""
    pair = config.splits or transition_kind(config) == "squeeze"
    return Stage(make_sequence(config, unit), make_transition(config, unit), hands_on_pair=pair)
