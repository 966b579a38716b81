"""Networks by name: the paper's tables, its subsampling study, a small one for the embedded digits, and any depth."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import nn

from revode.errors import unknown
from revode.networks.classifier import StagedClassifier, build
from revode.networks.config import NetworkConfig
from revode.networks.cost import Description
from revode.networks.families import FAMILIES
from revode.networks.files import load_pretrained
from revode.networks.transformer import GPT, GPTConfig, on_tokens
from revode.networks.unet import UNetConfig

Recipe = Callable[[], NetworkConfig | GPTConfig]

H = 0.1
"""The step size of the authors' bias-only code; h = 1 would grow the signal 4e4 times over 18 blocks."""
LONGEST_UNIT = 36
"""Blocks up to which signal and gradient stay within a factor 3 in every family, with independent kernels at h = 0.1."""
HORIZON = 1.0
"""T of longer units: kernels smooth in time keep the signal within a factor 1.8, for any number of blocks."""
LARGE_SUFFIX, LARGE_SIZE = "-stl", 96
"""Behind a name: the same network for the images of STL-10."""

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
"""Every named classifier: its options beside those of its family and depth, or its family and layout."""

UNETS = {1: (16, 24, 32), 2: (16, 32, 64), 3: (16, 32, 64)}
"""Channels of the U-Nets in each number of dimensions: a half to a quarter of them goes down, the rest is set aside."""


def register_model(name: str) -> Callable[[Recipe], Recipe]:
    """Decorate a function without arguments that returns the config of the network `name`.

    >>> @register_model("hundred")
    ... def hundred():
    ...     return model_config("hamiltonian-14", num_classes=100)
    >>> model = create_model("hundred")
    """

    def register(recipe: Recipe) -> Recipe:
        if name in _RECIPES:
            raise ValueError(f"a network named {name!r} is registered already: choose another name")
        _RECIPES[name] = recipe
        return recipe

    return register


def list_models() -> list[str]:
    """Return the names of all registered networks; ``<family>-<layers>`` of other valid depths work too.

    >>> list_models()[:2]
    ['gpt-mini', 'hamiltonian-1layer-74']
    """
    return sorted(_RECIPES, key=_natural)


def model_config(name: str, **options: Any) -> NetworkConfig:
    """Return the config of the network `name` with these options, without building it.

    >>> model_config("hamiltonian-74", num_classes=100).blocks
    (6, 6, 6)
    """
    config = _find(name)
    if isinstance(config, GPTConfig):
        raise on_tokens(name)
    return config.with_options(**options)


@overload
def create_model(  # pyright: ignore[reportOverlappingOverload]
    name: Literal["gpt-mini"], *, pretrained: None = None, **options: Any
) -> GPT: ...
@overload
def create_model(name: str, *, pretrained: str | None = None, **options: Any) -> StagedClassifier: ...
def create_model(name: str, *, pretrained: str | None = None, **options: Any) -> StagedClassifier | GPT:
    """Build a network by name, with fresh weights or with trained ones.

    >>> model = create_model("hamiltonian-14", num_classes=100)
    >>> model(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 100])

    Args:
        name: one of `list_models()`, or ``<family>-<layers>`` for any depth that fits the family, with ``-stl`` behind it for
            96x96 images.
        pretrained: a data set, to take the weights that come with the package; they bring their own norm and h.
        options: ``num_classes``, ``in_channels``, ``image_size``, ``blocks``, ``channels``, ``activation``, ``norm``,
            ``compile``; of reversible networks also ``backprop``, ``exact``, ``verify``, ``anchor_every``, ``memory_budget``,
            ``damping``; of ODE networks also ``h`` or ``horizon``, ``init``, ``start``, ``transition``; of U-Nets also
            ``scheme``. See `NetworkConfig` and `UNetConfig`. A GPT takes those of `GPTConfig` and of `ReversibleSequence`.
    """
    if pretrained is not None:
        return load_pretrained(name, pretrained, **options)
    return build(_find(name).with_options(**options))


def _find(name: str) -> NetworkConfig | GPTConfig:
    if not isinstance(name, str):
        raise ValueError(f"a network's name is a string, got {name!r}")
    if name in _RECIPES:
        config = _RECIPES[name]()
        if not isinstance(config, NetworkConfig | GPTConfig):
            raise ValueError(f"the function registered as {name!r} must return a config, got {type(config).__name__}")
        return config
    if name.endswith(LARGE_SUFFIX):
        return dataclasses.replace(model_config(name.removesuffix(LARGE_SUFFIX)), name=name, image_size=LARGE_SIZE)
    family, _, layers = name.rpartition("-")
    if family in FAMILIES and layers.isascii() and layers.isdigit():
        return _configure(name)
    if name in FAMILIES:
        example = next((other for other in list_models() if re.fullmatch(rf"{name}-\d+", other)), f"{name}-<layers>")
        raise ValueError(f"{name} is a family: say how many layers, as in {example}")
    raise unknown("network", name, list_models(), "`revode models` lists all")


def _configure(
    name: str, family: str = "", blocks: tuple[int, ...] = (), channels: tuple[int, ...] = (), **options: Any
) -> NetworkConfig:
    """Return the config of ``<family>-<layers>``, or of a family and a layout.

    It has the paper's h and independent kernels; units longer than the paper's get a fixed horizon and smooth kernels.
    """
    layers = 0
    if not family:
        family, _, depth = name.rpartition("-")
        layers = int(depth)
        blocks = _equal_units(family, layers)
    row = FAMILIES[family]
    time: dict[str, Any] = {}
    if row.integrates:
        time = {"h": H} if max(blocks) <= LONGEST_UNIT else {"horizon": HORIZON, "init": "smooth"}
        time |= {"transition": row.transition}
    channels = channels or row.channels(layers)
    config = NetworkConfig(name=name, family=family, blocks=blocks, channels=channels, **row.defaults | time)
    return config.with_options(**options)


def _equal_units(family: str, layers: int) -> tuple[int, int, int]:
    """Return the blocks of three equal units: layers = 3 layers_per_block n + 2."""
    step, fewest = 3 * FAMILIES[family].layers_per_block, FAMILIES[family].fewest_blocks
    n, rest = divmod(layers - 2, step)
    if rest or n < fewest:
        valid = ", ".join(str(step * k + 2) for k in range(fewest, fewest + 4))
        below = max(n, fewest)
        raise ValueError(
            f"{family} networks have {step}n + 2 layers with n >= {fewest} ({valid}, ...), got {layers}: "
            f"the nearest are {family}-{step * below + 2} and {family}-{step * (below + 1) + 2}"
        )
    return n, n, n


def _natural(name: str) -> list[Any]:
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name)]


_RECIPES: dict[str, Recipe] = {name: partial(_configure, name, **row) for name, row in _NAMED.items()}
_RECIPES["gpt-mini"] = GPTConfig
for _ndim, _channels in UNETS.items():
    _RECIPES[f"unet-{_ndim}d"] = partial(
        UNetConfig, name=f"unet-{_ndim}d", ndim=_ndim, blocks=(4,) * len(_channels), channels=_channels
    )


def count_parameters(config: NetworkConfig | GPTConfig) -> int:
    """Return the number of parameters of a network, without drawing any."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


def summarize_all() -> list[dict[str, Any]]:
    """Return a row for every registered network, with the layout and the number of parameters.

    Parameters are for its own images in 10 and in 100 classes, beside the paper's; those of a GPT are for bytes.

    >>> summarize_all()[0].keys() >= {"name", "layers", "params_cifar10"}
    True
    """
    return [_summarize(name) for name in list_models()]


def _summarize(name: str) -> dict[str, Any]:
    config, further_classes = _find(name), 0
    if isinstance(config, NetworkConfig):
        config = config.with_options(num_classes=10)
        further_classes = 90 * (config.head_channels + 1)
    num_parameters = count_parameters(config)
    paper = PAPER_PARAMETERS.get(name, (None, None))
    return {
        "name": name,
        "family": config.family,
        "layers": config.num_layers,
        "units": list(config.blocks),
        "channels": list(config.channels),
        "params_cifar10": num_parameters,
        "params_cifar100": num_parameters + further_classes,
        "paper_params_cifar10_m": paper[0],
        "paper_params_cifar100_m": paper[1],
    }


def describe(
    model: nn.Module | str, *, image_size: int | Sequence[int] | None = None, batch_size: int | None = None
) -> Description:
    """Return the cost of a network, part by part.

    >>> cost = describe("hamiltonian-14", batch_size=1)
    >>> cost.bytes_kept("reversible") < cost.bytes_kept("store")
    True

    Args:
        model: a network of `create_model`, or its name.
        image_size: the image size, or one for each dimension; the config's unless given.
        batch_size: images in a training step; 100 unless given, or 1 of a U-Net.
    """
    if isinstance(model, str):
        with torch.random.fork_rng(devices=[]):
            model = build(model_config(model))
    if not isinstance(model, StagedClassifier):
        raise ValueError(f"describe takes a network of revode.create_model or its name, got {type(model).__name__}")
    batch_size = model.config.usual_batch if batch_size is None else batch_size
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}")
    shape = model.config.image_shape(image_size)
    model.check_image(torch.empty(1, *shape, device="meta"))
    parts = tuple(model.measure(shape, batch_size))
    return Description(config=model.config, image_shape=shape, batch_size=batch_size, parts=parts)
