"""Kernels that vary smoothly in time.

Independent kernels in every block are a noise that the ODE view has no limit for. Here the kernels of a sequence of N
blocks are samples of one curve,

    K_j = cos(θ_j) A + sin(θ_j) B,    θ_j = (π/2) (j + 1/2) / N,

with A and B drawn as the paper draws a kernel: every K_j has the paper's distribution, neighbours differ by O(1/N), and
with h = T/N the network converges as N grows.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from revode.engine import ReversibleSequence
from revode.operators import LinearOperator


def smooth_in_time_(sequence: ReversibleSequence, generator: torch.Generator) -> None:
    """Overwrite the kernels of a sequence, one curve for each position within a block.

    Args:
        sequence: its fields have an ``operator``.
        generator: where A and B are drawn from; what is drawn does not depend on N.
    """
    per_step = sequence.scheme.fields_per_step
    done: set[int] = set()
    for position in range(per_step):
        operators = [cast(LinearOperator, field.operator) for field in sequence.fields[position::per_step]]
        if id(operators[0].weight) in done:  # the second layer of a block that shares its kernel
            continue
        done.update(id(operator.weight) for operator in operators)
        start, end = _draw(operators[0], generator), _draw(operators[0], generator)
        for j, operator in enumerate(operators):
            angle = 0.5 * math.pi * (j + 0.5) / len(operators)
            with torch.no_grad():
                operator.weight.copy_(math.cos(angle) * start + math.sin(angle) * end)


def _draw(operator: LinearOperator, generator: torch.Generator) -> Tensor:
    """A kernel as `LinearOperator.reset_parameters` draws it, from `generator`."""
    volume = math.prod(operator.weight.shape[2:])
    std = math.sqrt(2.0 / (volume * operator.out_channels))
    return torch.randn(operator.weight.shape, generator=generator, dtype=operator.weight.dtype).mul_(std)
