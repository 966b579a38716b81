"""Networks by name: the paper's tables, its subsampling study, a small one for the embedded digits, and any depth."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, overload

from revode.files import unknown
from revode.networks.classifier import StagedClassifier, build
from revode.networks.config import NetworkConfig
from revode.networks.families import FAMILIES, Family
from revode.networks.files import load_pretrained
from revode.networks.transformer import GPT, GPTS, on_tokens
from revode.networks.unet import UNetConfig

Recipe = Callable[[], NetworkConfig]

H = 0.1
"""The step size of the authors' bias-only code; h = 1 would grow the signal 4e4 times over 18 blocks."""
LONGEST_UNIT = 36
"""Blocks up to which independent kernels at h = 0.1 keep signal and gradient within a factor 3 in every family as it is
built here (measured: MidPoint 2.9 at 36 blocks, 3.7 at 50)."""
HORIZON = 1.0
"""T of longer units: with kernels smooth in time it moves the signal by 0.4 to 1.3 of its norm and keeps it within a
factor 1.8, for any number of blocks."""
LARGE_SUFFIX, LARGE_SIZE = "-stl", 96
"""Behind a name: the same network for the images of STL-10."""

_RECIPES: dict[str, Recipe] = {}

PAPER_PARAMETERS: dict[str, tuple[float, float | None]] = {
    "resnet-32": (0.46, 0.47),
    "revnet-38": (0.46, 0.48),
    "hamiltonian-74": (0.43, 0.44),
    "midpoint-26": (0.50, 0.51),
    "leapfrog-26": (0.50, 0.51),
    "resnet-110": (1.73, 1.73),
    "revnet-110": (1.73, 1.74),
    "hamiltonian-218": (1.68, 1.69),
    "midpoint-62": (1.78, 1.79),
    "leapfrog-62": (1.78, 1.79),
    "resnet-1202": (19.4, None),
    "hamiltonian-1202": (9.70, None),
}
"""The rows of the paper's table: millions of parameters as it prints them, for CIFAR-10 and CIFAR-100."""

_SUBSET: dict[str, Any] = {"blocks": (4, 4, 4, 4), "channels": (16, 64, 128, 256)}
"""The layout of the subsampling study."""

_NAMED: dict[str, dict[str, Any]] = {
    **{name: {} for name in PAPER_PARAMETERS},
    "hamiltonian-1202": {"norm": "batch", "h": H, "init": "independent"},  # as the paper ran it
    "midpoint-62": {"channels": (32, 64, 128)},
    "leapfrog-62": {"channels": (32, 64, 128)},
    "hamiltonian-1layer-74": {},
    "hamiltonian-subset": {"family": "hamiltonian", **_SUBSET},
    "midpoint-subset": {"family": "midpoint", **_SUBSET},
    "leapfrog-subset": {"family": "leapfrog", **_SUBSET},
    "resnet-subset": {"family": "resnet", **_SUBSET},
    "hamiltonian-stl": {"family": "hamiltonian", "blocks": (6, 6, 6), "image_size": LARGE_SIZE},
    "midpoint-stl": {"family": "midpoint", "blocks": (4, 4, 4), "image_size": LARGE_SIZE},
    "leapfrog-stl": {"family": "leapfrog", "blocks": (4, 4, 4), "image_size": LARGE_SIZE},
    "hamiltonian-subset-stl": {"family": "hamiltonian", **_SUBSET, "image_size": LARGE_SIZE},
    "resnet-subset-stl": {"family": "resnet", **_SUBSET, "image_size": LARGE_SIZE},
    "hamiltonian-digits": {
        "family": "hamiltonian", "blocks": (4, 4), "channels": (32, 64), "in_channels": 1, "image_size": 8,
    },
}  # fmt: skip
"""Every named network: what differs from the network of its family and depth, or its family and layout."""


UNETS = {1: (16, 24, 32), 2: (16, 32, 64), 3: (16, 32, 64)}
"""Channels of the U-Nets in each number of dimensions: a half to a quarter of them goes down, the rest is set aside."""


def register_model(name: str) -> Callable[[Recipe], Recipe]:
    """Decorate a function without arguments that returns the config of the network `name`."""

    def register(recipe: Recipe) -> Recipe:
        if name in _RECIPES:
            raise ValueError(f"a network named {name!r} is registered already: choose another name")
        _RECIPES[name] = recipe
        return recipe

    return register


def list_models() -> list[str]:
    """The names of all registered networks; ``<family>-<layers>`` of other valid depths work too."""
    return sorted([*_RECIPES, *GPTS], key=_natural)


def model_config(name: str, **options: Any) -> NetworkConfig:
    """The config of the network `name` with these options, without building it."""
    return _find(name).with_options(**options)


@overload
def create_model(  # pyright: ignore[reportOverlappingOverload]
    name: Literal["gpt-mini"], *, pretrained: None = None, **options: Any
) -> GPT: ...
@overload
def create_model(name: str, *, pretrained: str | None = None, **options: Any) -> StagedClassifier: ...
def create_model(name: str, *, pretrained: str | None = None, **options: Any) -> StagedClassifier | GPT:
    """Build a network by name, with fresh weights or with trained ones.

    Args:
        name: one of `list_models()`, or ``<family>-<layers>`` for any depth that fits the family, with ``-stl`` behind it
            for 96x96 images.
        pretrained: a data set, to take the weights that come with the package; they bring their own norm and h.
        options: ``num_classes``, ``in_channels``, ``image_size``, ``blocks``, ``channels``, ``activation``, ``norm``; of
            reversible networks also ``backprop``, ``exact``, ``anchor_every``, ``memory_budget``, ``damping``; of ODE
            networks also ``h`` or ``horizon``, ``init``, ``start``, ``transition``; of U-Nets also ``scheme``. See `OdeConfig`
            and `UNetConfig`. A GPT takes those of `GPTConfig` and of `ReversibleSequence`.
    """
    if name in GPTS and pretrained is None:
        return GPT(GPTS[name].with_options(**options))
    if pretrained is not None:
        return load_pretrained(name, pretrained, **options)
    return build(model_config(name, **options))


def _find(name: str) -> NetworkConfig:
    if not isinstance(name, str):
        raise ValueError(f"a network's name is a string, got {name!r}")
    if name in _RECIPES:
        config = _RECIPES[name]()
        if not isinstance(config, NetworkConfig):
            raise ValueError(f"the function registered as {name!r} must return a config, got {type(config).__name__}")
        return config
    if name in GPTS:
        raise on_tokens(name)
    if name.endswith(LARGE_SUFFIX):
        return dataclasses.replace(_find(name.removesuffix(LARGE_SUFFIX)), name=name, image_size=LARGE_SIZE)
    family, _, layers = name.rpartition("-")
    if family in FAMILIES and layers.isascii() and layers.isdigit():
        return _of_depth(FAMILIES[family], int(layers))
    if name in FAMILIES:
        example = next((other for other in list_models() if re.fullmatch(rf"{name}-\d+", other)), f"{name}-<layers>")
        raise ValueError(f"{name} is a family: say how many layers, as in {example}")
    raise unknown("network", name, list_models(), "`revode models` lists all")


def _of_depth(family: Family, layers: int) -> NetworkConfig:
    """Three equal units: layers = 3 layers_per_block n + 2."""
    step, fewest = 3 * family.layers_per_block, family.fewest_blocks
    n, rest = divmod(layers - 2, step)
    if rest or n < fewest:
        valid = ", ".join(str(step * k + 2) for k in range(fewest, fewest + 4))
        below = max(n, fewest)
        raise ValueError(
            f"{family.name} networks have {step}n + 2 layers with n >= {fewest} ({valid}, ...), got {layers}: "
            f"the nearest are {family.name}-{step * below + 2} and {family.name}-{step * (below + 1) + 2}"
        )
    return _of_layout(f"{family.name}-{layers}", family, (n, n, n), family.channels(layers))


def _of_layout(name: str, family: Family, blocks: tuple[int, ...], channels: tuple[int, ...]) -> NetworkConfig:
    """The paper's h and independent kernels; for units longer than it tried them on, a fixed horizon and smooth kernels."""
    values: dict[str, Any] = {}
    if family.integrates:
        time = {"h": H} if max(blocks) <= LONGEST_UNIT else {"horizon": HORIZON, "init": "smooth"}
        values = {"transition": family.transition, **time}
    return NetworkConfig.of_family(family, name=name, blocks=blocks, channels=channels, **values)


def _natural(name: str) -> list[Any]:
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name)]


def _named(name: str, family: str | None = None, blocks: tuple[int, ...] = (), **options: Any) -> Recipe:
    def recipe() -> NetworkConfig:
        if family is None:
            kind, _, layers = name.rpartition("-")
            return _of_depth(FAMILIES[kind], int(layers)).with_options(**options)
        row = FAMILIES[family]
        channels = options.get("channels", row.channels(0))
        return _of_layout(name, row, blocks, channels).with_options(**options)

    return recipe


def _unet(ndim: int, channels: tuple[int, ...]) -> Recipe:
    return lambda: UNetConfig(name=f"unet-{ndim}d", ndim=ndim, blocks=(4,) * len(channels), channels=channels)


for _name, _options in _NAMED.items():
    register_model(_name)(_named(_name, **_options))
for _ndim, _channels in UNETS.items():
    register_model(f"unet-{_ndim}d")(_unet(_ndim, _channels))
