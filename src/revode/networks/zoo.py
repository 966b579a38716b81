"""The named networks: the paper's tables, its subsampling study, and a small one for the embedded digits."""

from __future__ import annotations

from typing import Any

from revode.networks.config import NetworkConfig, OdeConfig, ResNetConfig, RevNetConfig
from revode.networks.registry import STL_SIZE, register_family, register_model

H = 0.1
"""The step size of the authors' bias-only code; h = 1 would grow the signal 4e4 times over 18 blocks."""
LONGEST_UNIT = 36
"""Blocks up to which independent kernels at h = 0.1 keep signal and gradient within a factor 3 in every family as it is
built here (measured: MidPoint 2.9 at 36 blocks, 3.7 at 50)."""
HORIZON = 1.0
"""T of longer units: with kernels smooth in time it moves the signal by 0.4 to 1.3 of its norm and keeps it within a
factor 1.8, for any number of blocks."""


def _time(blocks: tuple[int, ...]) -> dict[str, Any]:
    """The paper's h and independent kernels; for units longer than it tried them on, a fixed horizon and smooth kernels."""
    if max(blocks) <= LONGEST_UNIT:
        return {"h": H}
    return {"horizon": HORIZON, "init": "smooth"}


def hamiltonian(name: str, blocks: tuple[int, ...], channels: tuple[int, ...]) -> OdeConfig:
    """Rule H of the paper's counts: biases, pool and pad."""
    return OdeConfig(name=name, family="hamiltonian", blocks=blocks, channels=channels, norm="none", **_time(blocks))


def hamiltonian_1layer(name: str, blocks: tuple[int, ...], channels: tuple[int, ...]) -> OdeConfig:
    """Haber & Ruthotto's block, one kernel shared by its two layers."""
    time = _time(blocks)
    return OdeConfig(name=name, family="hamiltonian-1layer", blocks=blocks, channels=channels, norm="none", **time)


def midpoint(name: str, blocks: tuple[int, ...], channels: tuple[int, ...]) -> OdeConfig:
    """Rule M: a norm in every step, connectors."""
    time = _time(blocks)
    return OdeConfig(name=name, family="midpoint", blocks=blocks, channels=channels, transition="connector", **time)


def leapfrog(name: str, blocks: tuple[int, ...], channels: tuple[int, ...]) -> OdeConfig:
    """Rule M: a norm in every step, connectors."""
    time = _time(blocks)
    return OdeConfig(name=name, family="leapfrog", blocks=blocks, channels=channels, transition="connector", **time)


def revnet(name: str, blocks: tuple[int, ...], channels: tuple[int, ...]) -> RevNetConfig:
    """Gomez et al.'s, as the paper's baseline."""
    return RevNetConfig(name=name, family="revnet", blocks=blocks, channels=channels)


def resnet(name: str, blocks: tuple[int, ...], channels: tuple[int, ...]) -> ResNetConfig:
    """He et al.'s, as the paper's baseline."""
    return ResNetConfig(name=name, family="resnet", blocks=blocks, channels=channels)


def _blocks(family: str, layers: int, per_block: int, fewest: int) -> tuple[int, int, int]:
    """Three equal units: layers = 3 per_block n + 2."""
    step = 3 * per_block
    n, rest = divmod(layers - 2, step)
    if rest or n < fewest:
        valid = ", ".join(str(step * k + 2) for k in range(fewest, fewest + 4))
        below = max(n, fewest)
        raise ValueError(
            f"{family} networks have {step}n + 2 layers with n >= {fewest} ({valid}, ...), got {layers}: "
            f"the nearest are {family}-{step * below + 2} and {family}-{step * (below + 1) + 2}"
        )
    return n, n, n


def _wide(layers: int) -> tuple[int, int, int]:
    return (32, 64, 112) if layers < 100 else (32, 64, 128)


@register_family("hamiltonian")
def hamiltonian_of_depth(layers: int) -> NetworkConfig:
    return hamiltonian(f"hamiltonian-{layers}", _blocks("hamiltonian", layers, 4, 1), _wide(layers))


@register_family("hamiltonian-1layer")
def hamiltonian_1layer_of_depth(layers: int) -> NetworkConfig:
    blocks = _blocks("hamiltonian-1layer", layers, 2, 1)
    return hamiltonian_1layer(f"hamiltonian-1layer-{layers}", blocks, _wide(layers))


@register_family("midpoint")
def midpoint_of_depth(layers: int) -> NetworkConfig:
    return midpoint(f"midpoint-{layers}", _blocks("midpoint", layers, 2, 2), _wide(layers))


@register_family("leapfrog")
def leapfrog_of_depth(layers: int) -> NetworkConfig:
    return leapfrog(f"leapfrog-{layers}", _blocks("leapfrog", layers, 2, 2), _wide(layers))


@register_family("revnet")
def revnet_of_depth(layers: int) -> NetworkConfig:
    return revnet(f"revnet-{layers}", _blocks("revnet", layers, 4, 1), _wide(layers))


@register_family("resnet")
def resnet_of_depth(layers: int) -> NetworkConfig:
    return resnet(f"resnet-{layers}", _blocks("resnet", layers, 2, 1), (16, 32, 64))


@register_model("hamiltonian-74")
def hamiltonian_74() -> NetworkConfig:
    return hamiltonian_of_depth(74)


@register_model("hamiltonian-218")
def hamiltonian_218() -> NetworkConfig:
    return hamiltonian_of_depth(218)


@register_model("hamiltonian-1202")
def hamiltonian_1202() -> NetworkConfig:
    return hamiltonian_of_depth(1202).with_options(norm="batch", h=H, init="independent")  # as the paper ran it


@register_model("hamiltonian-1layer-74")
def hamiltonian_1layer_74() -> NetworkConfig:
    return hamiltonian_1layer_of_depth(74)


@register_model("midpoint-26")
def midpoint_26() -> NetworkConfig:
    return midpoint_of_depth(26)


@register_model("midpoint-62")
def midpoint_62() -> NetworkConfig:
    return midpoint("midpoint-62", (10, 10, 10), (32, 64, 128))


@register_model("leapfrog-26")
def leapfrog_26() -> NetworkConfig:
    return leapfrog_of_depth(26)


@register_model("leapfrog-62")
def leapfrog_62() -> NetworkConfig:
    return leapfrog("leapfrog-62", (10, 10, 10), (32, 64, 128))


@register_model("revnet-38")
def revnet_38() -> NetworkConfig:
    return revnet_of_depth(38)


@register_model("revnet-110")
def revnet_110() -> NetworkConfig:
    return revnet_of_depth(110)


@register_model("resnet-32")
def resnet_32() -> NetworkConfig:
    return resnet_of_depth(32)


@register_model("resnet-110")
def resnet_110() -> NetworkConfig:
    return resnet_of_depth(110)


@register_model("resnet-1202")
def resnet_1202() -> NetworkConfig:
    return resnet_of_depth(1202)


SUBSET_BLOCKS, SUBSET_CHANNELS = (4, 4, 4, 4), (16, 64, 128, 256)
"""The layout of the subsampling study."""


@register_model("hamiltonian-subset")
def hamiltonian_subset() -> NetworkConfig:
    return hamiltonian("hamiltonian-subset", SUBSET_BLOCKS, SUBSET_CHANNELS)


@register_model("midpoint-subset")
def midpoint_subset() -> NetworkConfig:
    return midpoint("midpoint-subset", SUBSET_BLOCKS, SUBSET_CHANNELS)


@register_model("leapfrog-subset")
def leapfrog_subset() -> NetworkConfig:
    return leapfrog("leapfrog-subset", SUBSET_BLOCKS, SUBSET_CHANNELS)


@register_model("resnet-subset")
def resnet_subset() -> NetworkConfig:
    return resnet("resnet-subset", SUBSET_BLOCKS, SUBSET_CHANNELS)


@register_model("hamiltonian-stl")
def hamiltonian_stl() -> NetworkConfig:
    return hamiltonian("hamiltonian-stl", (6, 6, 6), (32, 64, 112)).with_options(image_size=STL_SIZE)


@register_model("midpoint-stl")
def midpoint_stl() -> NetworkConfig:
    return midpoint("midpoint-stl", (4, 4, 4), (32, 64, 112)).with_options(image_size=STL_SIZE)


@register_model("leapfrog-stl")
def leapfrog_stl() -> NetworkConfig:
    return leapfrog("leapfrog-stl", (4, 4, 4), (32, 64, 112)).with_options(image_size=STL_SIZE)


@register_model("hamiltonian-subset-stl")
def hamiltonian_subset_stl() -> NetworkConfig:
    return hamiltonian("hamiltonian-subset-stl", SUBSET_BLOCKS, SUBSET_CHANNELS).with_options(image_size=STL_SIZE)


@register_model("resnet-subset-stl")
def resnet_subset_stl() -> NetworkConfig:
    return resnet("resnet-subset-stl", SUBSET_BLOCKS, SUBSET_CHANNELS).with_options(image_size=STL_SIZE)


@register_model("hamiltonian-digits")
def hamiltonian_digits() -> NetworkConfig:
    return hamiltonian("hamiltonian-digits", (4, 4), (32, 64)).with_options(in_channels=1, image_size=8)
