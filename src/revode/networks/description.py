"""Networks in numbers: the list of all, and the bill of one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from revode.networks.classifier import StagedClassifier, build
from revode.networks.config import NetworkConfig, OdeConfig
from revode.networks.cost import PartCost
from revode.networks.transformer import FAMILY, GPT, GPTS
from revode.networks.zoo import PAPER_PARAMETERS, list_models, model_config


@functools.cache
def count_parameters(config: NetworkConfig) -> int:
    """Parameters of the network, without drawing any."""
    if isinstance(config, OdeConfig):
        config = dataclasses.replace(config, init="independent")
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


def summarize(name: str) -> dict[str, Any]:
    """One line of the list: layout and parameters for its own images in 10 and in 100 classes, the paper's beside them.

    A GPT has attention and MLP as two layers a block, and parameters for bytes.
    """
    if name in GPTS:
        gpt = GPTS[name]
        with torch.device("meta"):
            num_parameters = more_classes = sum(parameter.numel() for parameter in GPT(gpt).parameters())
        family, layers, blocks, channels = FAMILY, 2 * gpt.depth, (gpt.depth,), (gpt.width,)
    else:
        config = model_config(name, num_classes=10)
        num_parameters = count_parameters(config)
        more_classes = num_parameters + 90 * (config.head_channels + 1)
        family, layers, blocks, channels = config.family, config.num_layers, config.blocks, config.channels
    paper = PAPER_PARAMETERS.get(name, (None, None))
    return {
        "name": name,
        "family": family,
        "layers": layers,
        "units": list(blocks),
        "channels": list(channels),
        "params_cifar10": num_parameters,
        "params_cifar100": more_classes,
        "paper_params_cifar10_m": paper[0],
        "paper_params_cifar100_m": paper[1],
    }


def summarize_all() -> list[dict[str, Any]]:
    """`summarize` for every registered network."""
    return [summarize(name) for name in list_models()]


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a network is made of and what a training step of it costs.

    ``parts`` are its stem, units, transitions and head in order; `bytes_kept` is what backward keeps of a batch.
    """

    config: NetworkConfig
    image_shape: tuple[int, ...]
    batch_size: int
    parts: tuple[PartCost, ...]

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def num_parameters(self) -> int:
        return sum(part.num_parameters for part in self.parts)

    @property
    def flops(self) -> int:
        """Floating-point operations of one forward pass of one image; a multiply-add counts as two."""
        return sum(part.flops for part in self.parts)

    def bytes_kept(self, strategy: str) -> int:
        """Bytes of activations kept for backward."""
        return sum(part.saved[strategy].of(self.batch_size) for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.config.name,
            "family": self.config.family,
            "layers": self.num_layers,
            "config": self.config.to_dict(),
            "image_shape": list(self.image_shape),
            "batch_size": self.batch_size,
            "params": self.num_parameters,
            "flops_per_image": self.flops,
            "activation_bytes": {strategy: self.bytes_kept(strategy) for strategy in self.config.strategies},
            "stages": [
                {
                    "name": part.name,
                    "blocks": part.num_blocks,
                    "shape": list(part.shape),
                    "params": part.num_parameters,
                    "flops_per_image": part.flops,
                    "activation_bytes": {name: kept.of(self.batch_size) for name, kept in part.saved.items()},
                }
                for part in self.parts
            ],
        }


def describe(
    model: nn.Module | str, *, image_size: int | Sequence[int] | None = None, batch_size: int | None = None
) -> Description:
    """The bill of a network.

    Args:
        model: a network of this room, or the name of one.
        image_size: edge of the images, or one for each dimension; the config's unless given.
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
    parts = tuple(model.measure(shape))
    return Description(config=model.config, image_shape=shape, batch_size=batch_size, parts=parts)
