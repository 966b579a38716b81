"""Gradients of whole networks, for comparison."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import revode


def images(model: nn.Module, batch: int = 2, size: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, *model.config.image_shape(size), generator=generator, dtype=dtype)


def twin(model: nn.Module, **options: object) -> nn.Module:
    """The same network with other options and the same weights."""
    config = model.config.with_options(**options)
    other = revode.networks.build(config).to(next(model.parameters()).dtype)
    other.load_state_dict(model.state_dict())
    return other


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Loss and gradients of one training step, by name."""
    x = x.clone().requires_grad_()
    scores = model(x)
    labels = (torch.arange(scores[:, 0].numel()) % model.config.num_classes).view(scores[:, 0].shape)
    loss = nn.functional.cross_entropy(scores, labels)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), "image": x.grad} | found


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Over all tensors, relative to the largest entry of each (or 1e-3, if all are smaller)."""
    assert first.keys() == second.keys()
    worst = 0.0
    for name in first:
        scale = max(first[name].abs().max().item(), 1e-3)
        worst = max(worst, (first[name] - second[name]).abs().max().item() / scale)
    return worst
