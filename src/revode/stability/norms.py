"""Operator norms from products with K and K', with a stated tolerance.

`largest_singular_value` runs Lanczos on K'K, which is power iteration that uses all of its iterates. Its value never
exceeds the norm. What certifies it from the other side is the theorem of Kuczyński and Woźniakowski (1992): from a start
drawn uniformly on the sphere of R^n, the estimate ρ of λ = |K|² after m steps satisfies

    P[ρ < (1 - ε) λ]  ≤  1.648 √n exp(-√ε (2m - 1)),

whatever the spectrum. The number of steps follows from the tolerance asked for, at a failure probability of 1e-6. A gap in the
spectrum is never assumed, as a test for small residuals would do: a residual says that ρ is near *an* eigenvalue only.
`schur_norm` needs no iteration: |K|² ≤ |K|_1 |K|_∞, from sums of absolute kernel entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from revode.operators import AntisymmetricConv, AntisymmetricDense, LinearOperator, adjoint_kernel

FAILURE = 1e-6
"""Probability, over the random start, that a norm lies outside its tolerance."""


@dataclass(frozen=True)
class Norm:
    """An operator norm between two bounds.

    Attributes:
        lower: attained by a vector, so never above the norm (to round-off).
        upper: never below the norm, with probability 1 - `FAILURE` over the random start.
        steps: products with K'K that it took.
    """

    lower: float
    upper: float
    steps: int


def lanczos_steps(size: int, tolerance: float) -> int:
    """Steps after which the relative error of the norm is below `tolerance` with probability 1 - `FAILURE`."""
    epsilon = 1.0 - (1.0 - tolerance) ** 2  # of the squared norm
    needed = (math.log(1.648 * math.sqrt(size) / FAILURE) / math.sqrt(epsilon) + 1.0) / 2.0
    return min(size, math.ceil(needed))


def largest_singular_value(
    product: Callable[[Tensor], Tensor],
    adjoint: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    *,
    tolerance: float = 0.01,
    dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
    seed: int = 0,
) -> Norm:
    """The norm of a linear map given by its products.

    Args:
        product: x -> K x on tensors of shape `shape`.
        adjoint: y -> K' y.
        shape: of x.
        tolerance: relative width of the interval returned.
        dtype: of the products.
        device: where the products are taken; the rest is done on the CPU.
        seed: of the random start.
    """
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must lie in (0, 1), got {tolerance!r}")
    size = math.prod(shape)
    steps = lanczos_steps(size, tolerance)
    start = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def gram(v: Tensor) -> Tensor:
        with torch.no_grad():
            there = v.to(dtype).reshape(*shape).to(device)
            return adjoint(product(there)).flatten().cpu().to(torch.float64)

    largest, taken, exhausted = _lanczos(gram, start, steps)
    lower = math.sqrt(max(largest, 0.0))
    slack = 1e-9 if dtype == torch.float64 else 1e-5
    upper = lower * (1.0 + slack) if exhausted else lower / (1.0 - tolerance)
    return Norm(lower, upper, taken)


def _lanczos(gram: Callable[[Tensor], Tensor], v: Tensor, steps: int) -> tuple[float, int, bool]:
    """The largest Ritz value of a symmetric map, the steps taken, and whether the Krylov space was exhausted."""
    v = v / torch.linalg.vector_norm(v)
    basis = torch.empty(steps, v.numel(), dtype=v.dtype)
    alphas: list[float] = []
    betas: list[float] = []
    exhausted = steps == v.numel()
    for m in range(steps):
        basis[m] = v
        w = gram(v)
        alphas.append(float(w @ v))
        for _ in range(2):  # twice is enough: orthogonal to round-off
            w -= (basis[: m + 1] @ w) @ basis[: m + 1]
        beta = float(torch.linalg.vector_norm(w))
        if beta <= 1e-12 * max(abs(alphas[0]), max(betas, default=0.0)):
            exhausted = True
            break
        betas.append(beta)
        v = w / beta
    offdiagonal = torch.tensor(betas[: len(alphas) - 1], dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(alphas, dtype=torch.float64))
    tridiagonal += torch.diag(offdiagonal, 1) + torch.diag(offdiagonal, -1)
    return float(torch.linalg.eigvalsh(tridiagonal)[-1]), len(alphas), exhausted


def operator_norm(operator: LinearOperator, shape: Sequence[int], *, tolerance: float = 0.01, seed: int = 0) -> Norm:
    """|K| of an operator on one sample.

    Args:
        operator: K.
        shape: of one sample of its input, without the batch.
        tolerance: relative width of the interval.
        seed: of the random start.
    """
    weight = operator.weight
    options = {"tolerance": tolerance, "dtype": weight.dtype, "device": weight.device, "seed": seed}
    return largest_singular_value(operator, operator.adjoint, (1, *shape), **options)


def schur_norm(operator: LinearOperator) -> float:
    """√(|K|_1 |K|_∞) ≥ |K|, on inputs of any size."""
    weight = operator.weight.detach().double()
    if isinstance(operator, AntisymmetricConv):
        weight = weight - adjoint_kernel(weight)
    elif isinstance(operator, AntisymmetricDense):
        weight = weight - weight.t()
    sums = weight.abs().flatten(2).sum(2) if weight.dim() > 2 else weight.abs()
    return math.sqrt(float(sums.sum(0).max()) * float(sums.sum(1).max()))
