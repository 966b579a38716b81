"""Ordinary differential equations with exact solutions, in double precision.

Some are nonlinear, so that an order measured on them is no accident of linearity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """Fields in the scheme's order, an initial value and the value at `time`."""

    fields: tuple[Callable[[Tensor], Tensor], ...]
    initial: Tensor
    solution: Callable[[float], Tensor]
    time: float = 1.0


def _column(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def rotation() -> Problem:
    """y' = F(z), z' = -G(y) with F(z) = z and G(y) = y: a rotation, for Verlet."""
    y, z = 0.8, -0.3

    def solution(t: float) -> Tensor:
        return _column(y * math.cos(t) + z * math.sin(t), z * math.cos(t) - y * math.sin(t))

    return Problem((lambda z: z, lambda y: y), _column(y, z), solution)


def logistic() -> Problem:
    """y' = y (1 - y), for MidPoint."""
    y = 0.2

    def solution(t: float) -> Tensor:
        return _column(y * math.exp(t) / (1.0 - y + y * math.exp(t)))

    return Problem((lambda y: y * (1.0 - y),), _column(y), solution)


def oscillator() -> Problem:
    """y'' = -4 y at rest, for Leapfrog."""
    return Problem((lambda y: 4.0 * y,), _column(0.7), lambda t: _column(0.7 * math.cos(2.0 * t)))


def soliton() -> Problem:
    """y'' = y - 2 y³ from rest at y = 1, solved by the soliton 1 / cosh t; nonlinear, for Leapfrog."""
    return Problem((lambda y: 2.0 * y**3 - y,), _column(1.0), lambda t: _column(1.0 / math.cosh(t)))
