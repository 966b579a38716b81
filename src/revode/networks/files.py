"""A network as one safetensors file: weights, and the config that builds it. Loading runs no code from the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn

from revode.files import write_atomically
from revode.networks.classifier import StagedClassifier, build
from revode.networks.config import NetworkConfig
from revode.networks.transformer import FAMILY, GPT, GPTConfig

FORMAT = "revode-network-1"
"""The format named in the file; the number rises when older versions cannot read it."""
PRETRAINED = Path(__file__).parent / "pretrained"
"""Weights that come with the package, as ``<network>-<data set>.safetensors``."""
FREE_OPTIONS = ("backprop", "exact", "anchor_every", "memory_budget", "verify", "compile", "image_size")
"""Options that trained weights leave open: the gradient strategy, and the image size."""


def save(model: StagedClassifier | GPT, path: str | os.PathLike[str]) -> None:
    """Write `model`, a network of `create_model`, to `path`: wholly, or not at all.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(create_model("hamiltonian-14"), f"{folder}/net.safetensors")
    ...     model = load(f"{folder}/net.safetensors", backprop="store")
    """
    if not isinstance(model, StagedClassifier | GPT):
        raise ValueError(f"save takes a network of revode.create_model, got {type(model).__name__}")
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"cannot save to {target}: it is a directory, give a file name")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _distinct_tensors(model).items()}
    metadata = {"format": FORMAT, "config": json.dumps(model.config.to_dict())}
    write_atomically(target, _with_sorted_metadata(serialize(tensors, metadata)))


def _with_sorted_metadata(data: bytes) -> bytes:
    """Return a safetensors file with its metadata in alphabetical order, so that equal networks give equal files."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensors to 8 bytes
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def load(path: str | os.PathLike[str], **options: Any) -> Any:
    """Return the network that `save` wrote to `path`, on the CPU and in training mode.

    >>> model = load(PRETRAINED / "hamiltonian-74-cifar10.safetensors", backprop="checkpoint")

    `options` are those that do not change its weights, such as ``backprop`` or ``memory_budget``.
    """
    target = Path(path)
    if not target.exists():
        raise FileNotFoundError(f"there is no file {target}")
    config, tensors = _read(target)
    with torch.random.fork_rng(devices=[]):
        model = build(config.with_options(**options))
    _fill(model, tensors, target)
    return model


def load_pretrained(name: str, dataset: str, **options: Any) -> StagedClassifier:
    """Return the network `name` with the weights that were trained on `dataset` and come with the package.

    >>> model = load_pretrained("hamiltonian-74", "cifar10").eval()

    `options` are `FREE_OPTIONS`, or those that the weights were trained with; others are refused.
    """
    path = PRETRAINED / f"{name}-{dataset}.safetensors"
    if not path.exists():
        there = ", ".join(sorted(found.stem for found in PRETRAINED.glob("*.safetensors"))) or "none"
        raise ValueError(
            f"no weights of {name} for {dataset} come with the package; there are: {there}. Train it with `revode train {name}`"
        )
    config = _read(path)[0]
    wanted = config.with_options(**options)
    for option in options:
        own, asked = getattr(config, option), getattr(wanted, option)
        if option not in FREE_OPTIONS and asked != own:
            raise ValueError(
                f"the weights of {name} for {dataset} were trained with {option}={own}, got {option}={asked}; leave it out"
            )
    return load(path, **options)


def _distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, each shared one once, under its first name."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def _read(path: Path) -> tuple[Any, dict[str, Tensor]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(
                    f"{path} is not a network saved by revode.save (its format is {metadata.get('format')!r})"
                )
            values = json.loads(metadata["config"])
            is_gpt = isinstance(values, dict) and values.get("family") == FAMILY
            config = (GPTConfig if is_gpt else NetworkConfig).from_dict(values)
            return config, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a readable network file, truncated or foreign: {error}") from error


def _fill(model: Any, tensors: dict[str, Tensor], path: Path) -> None:
    """Put `tensors` into the model, if their names and shapes are exactly those of the model."""
    own = _distinct_tensors(model)
    odd = sorted(set(own) ^ set(tensors)) or [name for name in own if own[name].shape != tensors[name].shape]
    if odd:
        raise ValueError(
            f"{path} does not hold the weights that its config describes: "
            f"{len(odd)} tensors are missing, unknown or of another shape, the first is {odd[0]!r}"
        )
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        model.to(kinds.pop())
    with torch.no_grad():
        for name, tensor in _distinct_tensors(model).items():
            tensor.copy_(tensors[name])
