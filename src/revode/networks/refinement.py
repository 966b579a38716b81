"""Deeper networks out of trained shallow ones: multilevel training (Haber et al. 2017; Chang et al. 2018).

The N blocks at one width integrate over the time T = N h. Refining keeps T and takes more and shorter steps. Kernels, norms and
biases are functions of time that the blocks sample: a new block gets the value at its own time, linear between two samples and
constant before the first and behind the last. Stem, transitions and head are copied.

A block of a scheme on two halves acts over [t, t + h], so its sample lies in the middle, at t + h/2. A scheme on two
successive states evaluates its field at t itself. Placed like this, linear interpolation comes closer to the shallow network
than copying blocks does, as Chang et al. do (docs/multilevel.md has the distances).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor
from torch.optim.swa_utils import update_bn

from revode.engine import ReversibleSequence
from revode.networks.classifier import StagedClassifier, build
from revode.networks.config import NetworkConfig
from revode.networks.zoo import model_config


def refine(model: StagedClassifier, name: str, batches: Iterable[Tensor] | None = None) -> StagedClassifier:
    """Return a deeper network that computes nearly what `model` does, if kernels change slowly from block to block.

    Widths, norm and all other options stay those of `model`. At each width the step size h is divided by the growth of the
    number of blocks, so h may differ between units. `model` stays as it is.

    >>> refine(create_model("hamiltonian-26"), "hamiltonian-50").config.step_size(1)
    0.05

    Args:
        model: a network of `create_model` that integrates an ODE.
        name: a network of the same family, which gives the blocks and nothing else.
        batches: images, to measure the statistics of batch norms anew; without them, statistics are interpolated and fit less
            well.
    """
    config = _config_of(model, name)
    if sum(config.blocks) < sum(model.config.blocks):
        raise ValueError(f"{name} is shallower than {model.config.name}; refine needs a deeper one, use coarsen")
    return _resampled(model, config, batches)


def coarsen(model: StagedClassifier, name: str, batches: Iterable[Tensor] | None = None) -> StagedClassifier:
    """Return a shallower network with the kernels of `model` at fewer times, and longer steps; see `refine`.

    >>> coarsen(create_model("hamiltonian-50"), "hamiltonian-26").num_layers
    26
    """
    config = _config_of(model, name)
    if sum(config.blocks) > sum(model.config.blocks):
        raise ValueError(f"{name} is deeper than {model.config.name}; coarsen needs a shallower one, use refine")
    return _resampled(model, config, batches)


def _config_of(model: StagedClassifier, name: str) -> NetworkConfig:
    if not isinstance(model, StagedClassifier):
        raise ValueError(
            f"refine and coarsen take a network of revode.create_model for images, got {type(model).__name__}"
        )
    return config_at_depth(model.config, name)


Share = tuple[str, str, float]
"""Two tensors by name, and the weight of the second: their mean is ``torch.lerp(first, second, weight)``."""


class Resampling:
    """A map from the tensors of one network to those of another of other depth: weights, their averages, gradients and momenta.

    >>> model = create_model("hamiltonian-26")
    >>> deeper = refine(model, "hamiltonian-50")
    >>> deeper.load_state_dict(Resampling(model, deeper).weights(model.state_dict()))
    <All keys matched successfully>

    Args:
        source: the network that the tensors come from.
        target: the network that gets them; its config is one that `config_at_depth` makes.
    """

    def __init__(self, source: StagedClassifier, target: StagedClassifier) -> None:
        self._shares: dict[str, Share] = {key: (key, key, 0.0) for key in target.state_dict()}
        self._gains = dict.fromkeys(self._shares, 1.0)
        available = set(source.state_dict())
        for path, new in target.named_modules():
            if isinstance(new, ReversibleSequence):
                old = cast(ReversibleSequence, source.get_submodule(path))
                shares = _shares_of_fields(f"{path}.", old, new, available)
                self._shares |= shares
                self._gains |= dict.fromkeys(shares, new.scheme.h / old.scheme.h)

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the target's tensors from the source's; missing ones are left out."""
        found = {}
        for key, (first, second, weight) in self._shares.items():
            if first in tensors:
                # Counters cannot be mixed: they are the first's.
                mixes = weight and tensors[first].is_floating_point()
                found[key] = torch.lerp(tensors[first], tensors[second], weight) if mixes else tensors[first].clone()
        return found

    def gradients(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients or momenta of the target: shorter steps have gradients that are smaller in proportion."""
        return {key: tensor * self._gains[key] for key, tensor in self.weights(tensors).items()}


def config_at_depth(config: NetworkConfig, name: str) -> NetworkConfig:
    """Return the config with the blocks of the network `name`, and step sizes that keep the time at each width.

    Damping over the same time stays as it is, too, as nearly as one number for all units allows.

    >>> config_at_depth(model_config("hamiltonian-26"), "hamiltonian-50").num_layers
    50
    """
    wanted = model_config(name)
    if not config.row.integrates:
        raise ValueError(
            f"{config.name} takes no steps in time, so its depth cannot be changed; take a Hamiltonian, MidPoint or "
            "Leapfrog network"
        )
    if wanted.family != config.family or wanted.num_units != config.num_units:
        raise ValueError(
            f"{config.name} cannot become {name}: a network keeps its family ({config.family}) and its "
            f"{config.num_units} units; take a name of that family"
        )
    target = dataclasses.replace(config, name=name, blocks=wanted.blocks)
    if 0 in config.stage_blocks or 0 in target.stage_blocks:
        raise ValueError(
            f"{config.name} or {name} has no block at one of its widths, so no kernel can be taken from or to there; "
            "give every unit at least 2 blocks"
        )
    ratios = [own / new for own, new in zip(config.stage_blocks, target.stage_blocks, strict=True)]
    h = tuple(config.step_size(unit) * ratios[unit] for unit in range(len(config.blocks)))
    damping = 1.0 - (1.0 - config.damping) ** (sum(config.stage_blocks) / sum(target.stage_blocks))
    refined = dataclasses.replace(target, h=h, horizon=None, damping=damping)
    for unit, (own, new) in enumerate(zip(config.stage_blocks, refined.stage_blocks, strict=True)):
        if not math.isclose(config.step_size(unit) * own, refined.step_size(unit) * new):
            raise ValueError(f"{config.name} cannot be refined: its up_blocks are fixed, so that times would change")
    return refined


def _resampled(model: StagedClassifier, config: NetworkConfig, batches: Iterable[Tensor] | None) -> StagedClassifier:
    weight = next(model.parameters())
    with torch.random.fork_rng(devices=[]):
        target = build(config).to(weight.device, weight.dtype).train(model.training)
    target.load_state_dict(Resampling(model, target).weights(model.state_dict()))
    if batches is not None:
        update_bn(batches, target, weight.device)
    return target


def _shares_of_fields(
    prefix: str, old: ReversibleSequence, new: ReversibleSequence, available: set[str]
) -> dict[str, Share]:
    """Return for every tensor of the new fields the two old ones around its time."""
    per_block = new.scheme.fields_per_step
    num_old, num_new = len(old.fields) // per_block, len(new.fields) // per_block
    shares: dict[str, Share] = {}
    for index, field in enumerate(new.fields):
        block, position = divmod(index, per_block)
        offset = 0.5 if new.scheme.splits else 0.0
        time = (block + offset) * num_old / num_new - offset  # in steps of the old sequence, from its first sample on
        for key in field.state_dict():
            names = {at: f"{prefix}fields.{at * per_block + position}.{key}" for at in range(num_old)}
            samples = {at: name for at, name in names.items() if name in available}
            if not samples:  # the network's first branch has no leading norm: the other branch of the block has one
                samples = {at: f"{prefix}fields.{at * per_block + per_block - 1}.{key}" for at in range(num_old)}
            first = max((at for at in samples if at <= time), default=min(samples))
            second = min((at for at in samples if at >= time), default=max(samples))
            weight = (time - first) / (second - first) if second > first else 0.0
            shares[f"{prefix}fields.{index}.{key}"] = samples[first], samples[second], weight
    return shares
