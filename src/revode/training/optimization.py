"""SGD with the groups that decay, the course of the learning rate, averaged weights and the random states.

The learning rate is a pure function of the step, so that a resumed run needs to remember nothing of it.
"""

from __future__ import annotations

import bisect
import math
from typing import Any

import torch
from torch import Tensor, nn

from revode.regularizers import decay_groups
from revode.training.config import OptimizationConfig


def make_optimizer(model: nn.Module, config: OptimizationConfig) -> torch.optim.SGD:
    """SGD with momentum; convolution and linear weights decay, biases and norms do not."""
    return torch.optim.SGD(
        decay_groups(model, config.weight_decay), lr=config.lr, momentum=config.momentum, nesterov=config.nesterov
    )


def learning_rate(config: OptimizationConfig, step: int, num_steps: int, steps_per_epoch: int) -> float:
    """The learning rate of the update from `step` to `step + 1`.

    Args:
        config: Peak, kind of schedule and its constants.
        step: Updates done so far.
        num_steps: Updates of the whole run.
        steps_per_epoch: What an epoch's milestone is worth.
    """
    if config.schedule == "one-cycle":
        return config.lr * one_cycle(step / max(1, num_steps), config.warmup_fraction)
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "cosine":
        progress = max(0, step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
        return config.lr * warmup * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    if config.schedule == "step":
        unit = steps_per_epoch if config.milestone_unit == "epochs" else 1
        passed = bisect.bisect_right([milestone * unit for milestone in sorted(config.milestones)], step)
        return config.lr * warmup * config.decay_factor**passed
    return config.lr * warmup


def one_cycle(progress: float, rise: float, start: float = 0.04, end: float = 0.001) -> float:
    """A cosine up from `start` to 1 over the share `rise` of the run, then a cosine down to `end` (Smith 2018)."""
    if progress < rise:
        return start + (1 - start) * 0.5 * (1 - math.cos(math.pi * progress / rise))
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * (progress - rise) / (1 - rise)))


class AveragedWeights:
    """The exponential moving average of parameters and floating-point buffers.

    Its decay rises to `decay` as (1 + n) / (10 + n), so that the first, random weights do not linger.

    Args:
        model: The model to follow.
        decay: What is kept of the average in each update.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        self.tensors = {name: tensor.detach().clone() for name, tensor in _state(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the model."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for name, tensor in _state(model).items():
            if tensor.is_floating_point():
                self.tensors[name].lerp_(tensor.detach(), 1 - decay)
            else:
                self.tensors[name].copy_(tensor)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange the average with the model's own weights; twice is as before."""
        for name, tensor in _state(model).items():
            held = tensor.detach().clone()
            tensor.detach().copy_(self.tensors[name])
            self.tensors[name].copy_(held)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def random_states() -> dict[str, Any]:
    """The states of torch's generators, in types that load with ``weights_only=True``."""
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Set torch's generators to what `random_states` returned."""
    torch.set_rng_state(states["cpu"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
