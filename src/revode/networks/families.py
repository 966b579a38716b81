"""The families of networks and the transitions between their units, one row each.

A row has all that distinguishes a family: nothing else in the package asks for a family's name. Use `register_family` for a new
family, and add a new transition to `TRANSITIONS`. Which blocks run at which width depends on the transition. Units of n blocks
become, with three units,

| transition | blocks at each width | why |
|---|---|---|
| ``pool_pad`` | n + 1, n, n - 1 | rule H: the first block of a later unit runs before pooling, at the width it comes from |
| ``connector`` | n - 1, n - 1, n - 1 | rule M: a unit's last block is its connector |
| ``squeeze`` | n, n, n | nothing is lost in between |
| ``strided`` | n, n - 1, n - 1 | RevNet: the first block of a later unit is the transition |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from revode.errors import unknown
from revode.fields import AntisymmetricField, OneLayerField, SymmetricField
from revode.networks import blocks
from revode.operators import NORMS
from revode.schemes import SCHEMES, AdditiveCoupling, Leapfrog, MidPoint, Scheme, Verlet

Part = Callable[[Any, int], nn.Module]
"""A function (config, unit) -> a part of the network that the config describes."""


@dataclass(frozen=True, kw_only=True)
class Transition:
    """The modules between two units.

    Attributes:
        between: makes the module behind a unit, other than the last.
        behind: makes the module behind the last unit.
        extra_blocks: (unit, last unit) -> how many more blocks than its own run at the unit's width; may be negative.
        keeps_units: whether every block that the paper counts is reversible, so that units are as the paper counts them.
        carries_pair: whether every scheme passes its pair on, so that the whole network can be undone.
        head: (channels, classes) -> the head.
        stem: config -> the stem.
    """

    between: Part = lambda config, unit: nn.Identity()
    behind: Part = lambda config, unit: nn.Identity()
    extra_blocks: Callable[[int, int], int] = lambda unit, last: 0
    keeps_units: bool = False
    carries_pair: bool = False
    head: Callable[[int, int], nn.Module] = blocks.NormHead
    stem: Callable[[Any], nn.Module] = lambda config: blocks.ConvStem(config.in_channels, config.channels[0])


def _sizes(config: Any, unit: int) -> tuple[int, int, str, str]:
    """Return the sizes and names for a transition with convolutions; the last one keeps the channels."""
    following = config.channels[min(unit + 1, config.num_units - 1)]
    return config.channels[unit], following, config.norm, config.activation


TRANSITIONS: dict[str, Transition] = {
    "pool_pad": Transition(
        between=lambda config, unit: blocks.PoolPad(config.channels[unit + 1]),
        extra_blocks=lambda unit, last: (unit < last) - (unit > 0),
        keeps_units=True,
    ),
    "connector": Transition(
        between=lambda config, unit: blocks.Connector(*_sizes(config, unit)),
        behind=lambda config, unit: blocks.Connector(*_sizes(config, unit), pools=False),
        extra_blocks=lambda unit, last: -1,
        head=blocks.LinearHead,
    ),
    "squeeze": Transition(
        between=lambda config, unit: blocks.Squeeze(),
        carries_pair=True,
        stem=lambda config: blocks.PadStem(config.in_channels, config.channels[0]),
    ),
    "strided": Transition(
        between=lambda config, unit: blocks.StridedBlock(*_sizes(config, unit)),
        extra_blocks=lambda unit, last: -(unit > 0),
    ),
    "none": Transition(),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of network.

    >>> FAMILIES["hamiltonian"].scheme.__name__, FAMILIES["hamiltonian"].layers_per_block
    ('Verlet', 4)

    Attributes:
        name: as in ``<name>-<layers>``.
        block: (channels, first, options) -> the branches of one block. `first` is True for the network's first block; options
            are ``activation``, ``norm`` and ``ndim``, of a U-Net with other kernels than 3 ``kernel_size``, and of one that is
            not reversible ``in_channels`` and ``stride``.
        scheme: the integrator; None if it is not reversible.
        integrates: whether the scheme takes a step size, so that the network has ``h``, ``init``, ``start`` and ``transition``.
        layers_per_block: convolutions of a block as the paper counts them (K and K' are two).
        norms: the norms that its blocks can have.
        transition: a name of `TRANSITIONS`; one that integrates may be given another.
        defaults: options of its named networks that differ from those of their config.
        fewest_blocks: blocks that a unit has at least.
        channels: layers -> channels of three units.
        theory: the paper's statement on its stability.
    """

    name: str
    block: Callable[..., list[nn.Module]]
    layers_per_block: int
    scheme: type[Scheme] | None = None
    integrates: bool = False
    norms: tuple[str, ...] = tuple(NORMS)
    transition: str = "pool_pad"
    defaults: dict[str, Any] = field(default_factory=dict)
    fewest_blocks: int = 1
    channels: Callable[[int], tuple[int, ...]] = lambda layers: (32, 64, 112 if layers < 100 else 128)
    theory: str = "stability not guaranteed"


FAMILIES: dict[str, Family] = {}
"""The families by name."""


def register_family(family: Family) -> Family:
    """Make ``<family>-<layers>`` known; raise if the name is taken.

    >>> family = register_family(Family(name="calm", block=_one_layer, layers_per_block=2, scheme=Verlet, integrates=True))
    >>> create_model("calm-14").num_layers
    14
    """
    if family.name in FAMILIES:
        raise ValueError(f"a family named {family.name!r} is registered already: choose another name")
    FAMILIES[family.name] = family
    return family


def _hamiltonian(channels: int, first: bool, **options: Any) -> list[nn.Module]:
    half = channels // 2
    return [SymmetricField(half, leading=not first, **options), SymmetricField(half, leading=True, **options)]


def _one_layer(channels: int, first: bool, *, norm: str, **options: Any) -> list[nn.Module]:
    return list(OneLayerField.pair(channels // 2, **options))  # a bias, shared by both


def _midpoint(channels: int, first: bool, **options: Any) -> list[nn.Module]:
    return [AntisymmetricField(channels, **options)]


def _leapfrog(channels: int, first: bool, **options: Any) -> list[nn.Module]:
    return [SymmetricField(channels, **options)]


def _revnet(channels: int, first: bool, **options: Any) -> list[nn.Module]:
    half = channels // 2
    return [blocks.PreActivation(half, leading=not first, **options), blocks.PreActivation(half, **options)]


def _resnet(channels: int, first: bool, *, in_channels: int | None = None, **options: Any) -> list[nn.Module]:
    return [blocks.ResidualBlock(in_channels or channels, channels, leading=not first, **options)]


_STABLE: dict[str, Any] = {"integrates": True, "theory": "Re λ = 0: stable"}
_RULE_H: dict[str, Any] = {**_STABLE, "scheme": Verlet, "defaults": {"norm": "none"}}
"""Rule H of the paper's counts: biases, pool and pad."""
_RULE_M: dict[str, Any] = {**_STABLE, "layers_per_block": 2, "transition": "connector", "fewest_blocks": 2}
"""Rule M: a norm in every step, connectors."""

_TRUE_NORMS = tuple(norm for norm in NORMS if norm != "none")

for _family in (
    Family(name="hamiltonian", block=_hamiltonian, layers_per_block=4, **_RULE_H),
    # Haber & Ruthotto's block, one kernel shared by its two layers
    Family(name="hamiltonian-1layer", block=_one_layer, layers_per_block=2, norms=("none",), **_RULE_H),
    Family(name="midpoint", block=_midpoint, scheme=MidPoint, **_RULE_M),
    Family(name="leapfrog", block=_leapfrog, scheme=Leapfrog, **_RULE_M),
    Family(
        name="revnet",
        block=_revnet,
        layers_per_block=4,
        scheme=AdditiveCoupling,
        norms=_TRUE_NORMS,
        transition="strided",
    ),
    Family(name="resnet", block=_resnet, layers_per_block=2, transition="none", channels=lambda layers: (16, 32, 64)),
):
    register_family(_family)


def family_of(scheme: str) -> Family:
    """Return the family whose blocks a U-Net of this scheme has: the first one of the scheme, or residual branches.

    >>> family_of("verlet").name, family_of("additive").name, family_of("momentum").name
    ('hamiltonian', 'revnet', 'momentum')

    Args:
        scheme: a name in `revode.schemes.SCHEMES`.
    """
    if scheme not in SCHEMES:
        raise unknown("scheme", scheme, SCHEMES)
    kind = SCHEMES[scheme]
    for family in FAMILIES.values():
        if family.scheme is kind:
            return family
    branches = kind.fields_per_step

    def block(channels: int, first: bool, **options: Any) -> list[nn.Module]:
        width = channels // 2 if kind.splits else channels
        return [blocks.PreActivation(width, leading=bool(i) or not first, **options) for i in range(branches)]

    integrates = "h" in inspect.signature(kind).parameters
    return Family(
        name=scheme, block=block, layers_per_block=2 * branches, scheme=kind, integrates=integrates, norms=_TRUE_NORMS
    )
