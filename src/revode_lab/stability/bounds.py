"""Bounds on the step size h for each layer, the share in use, and a suggestion.

At a frozen state, with 0 ≤ σ' ≤ κ (κ = 1 for ReLU and tanh), every step of the linearised network is stable while

    Verlet     h ≤ 2 / (κ |K1 K2'|)
    Leapfrog   h ≤ 2 / (√κ |K|)
    MidPoint   h ≤ 1 / (κ |K - K'|)

sharp when σ is linear. (Damping changes the constants, see `revode_lab.stability.dynamics`.) A batch norm in eval mode is a
scale of each channel and becomes part of K. Where a field is not of this form (a norm that depends on the state, a branch of
the user's own) the bound is taken from the norm of its Jacobian at the given state; ``basis`` says which was used.

Norms come from products with K and K', with a stated tolerance. `largest_singular_value` runs Lanczos on K'K, which is power
iteration that uses all of its iterates. Its value never exceeds the norm. What certifies it from the other side is the
theorem of Kuczyński and Woźniakowski (1992): from a start drawn uniformly on the sphere of R^n, the estimate ρ of λ = |K|²
after m steps satisfies

    P[ρ < (1 - ε) λ]  ≤  1.648 √n exp(-√ε (2m - 1)),

whatever the spectrum. The number of steps follows from the tolerance asked for, at a failure probability of 1e-6. A gap in the
spectrum is never assumed, as a test for small residuals would do: a residual says that ρ is near *an* eigenvalue only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revode.fields import AntisymmetricField, OneLayerField, SymmetricField
from revode.operators import Bias, LinearOperator
from revode.schemes import Scheme
from revode_lab.stability.dynamics import is_first_order, step_limit
from revode_lab.stability.spectra import Jacobian, slope
from revode_lab.stability.walk import Parts, prepared, steps_of, unit_states

Apply = Callable[[Tensor], Tensor]

FAILURE = 1e-6
"""Probability, over the random start, that a norm lies outside its tolerance."""


@dataclass(frozen=True)
class Norm:
    """An operator norm between two bounds.

    Attributes:
        lower: attained by a vector, so never above the norm (to round-off).
        upper: never below the norm, with probability 1 - `FAILURE` over the random start.
    """

    lower: float
    upper: float


def lanczos_steps(size: int, tolerance: float) -> int:
    """Return the steps after which the relative error of the norm is below `tolerance` with probability 1 - `FAILURE`."""
    epsilon = 1.0 - (1.0 - tolerance) ** 2  # of the squared norm
    needed = (math.log(1.648 * math.sqrt(size) / FAILURE) / math.sqrt(epsilon) + 1.0) / 2.0
    return min(size, math.ceil(needed))


def largest_singular_value(
    product: Apply, adjoint: Apply, like: Tensor, *, tolerance: float = 0.01, seed: int = 0
) -> Norm:
    """Return the norm of a linear map K from its products x -> K x and y -> K' y, between bounds `tolerance` apart.

    `like` is an x, for its shape, dtype and device; all but the products is done on the CPU in float64.
    """
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must lie in (0, 1), got {tolerance!r}")
    start = torch.randn(like.numel(), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def gram(v: Tensor) -> Tensor:
        with torch.no_grad():
            return adjoint(product(v.to(like).reshape(like.shape))).flatten().cpu().to(torch.float64)

    largest, exhausted = _lanczos(gram, start, lanczos_steps(like.numel(), tolerance))
    lower = math.sqrt(max(largest, 0.0))
    slack = 1e-9 if like.dtype == torch.float64 else 1e-5
    upper = lower * (1.0 + slack) if exhausted else lower / (1.0 - tolerance)
    return Norm(lower, upper)


def _lanczos(gram: Callable[[Tensor], Tensor], v: Tensor, steps: int) -> tuple[float, bool]:
    """Return the largest Ritz value of a symmetric map, and whether the Krylov space was exhausted."""
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
    return float(torch.linalg.eigvalsh(tridiagonal)[-1]), exhausted


def operator_norm(operator: LinearOperator, shape: Sequence[int], *, tolerance: float = 0.01) -> Norm:
    """Return |K| of an operator on one sample of this shape (without the batch), between bounds `tolerance` apart."""
    like = operator.weight.new_zeros(1, *shape)
    return largest_singular_value(operator, operator.adjoint, like, tolerance=tolerance)


@dataclass(frozen=True)
class LayerBound:
    """The bound on h of one step.

    Attributes:
        unit, step: number of its unit, and its number there.
        h: the step size in use.
        sharp: the bound on h at a frozen state; infinite if the field is zero.
        basis: ``"weights"`` if it holds at any state, ``"state"`` if it was computed at the given one.
        flipped: a batch norm in the field has negative weights, or an activation a negative slope. The field is then no
            longer the force of a convex potential (nor antisymmetric up to a scale), and a step within its bound may grow, as
            where a norm leads the field, and for branches of the user's (``basis="state"``).
    """

    unit: int
    step: int
    h: float
    sharp: float
    basis: str
    flipped: bool = False

    @property
    def usage(self) -> float:
        """h as a fraction of its bound; above 1 a step at a frozen state may grow."""
        return self.h / self.sharp

    @property
    def margin(self) -> float:
        """By what factor h could grow."""
        return self.sharp / self.h


@torch.no_grad()
def step_bounds(
    model: nn.Module, images: Tensor, *, tolerance: float = 0.01, dtype: torch.dtype = torch.float64
) -> list[LayerBound]:
    """Return the bound on h of every step of every unit; none for units whose scheme has no bound (RevNet).

    The first image gives the sizes of the states, and the state of the bounds with ``basis="state"``. A bound errs on the safe
    side, by at most the relative `tolerance`. float32 is faster and good for five digits.
    """
    bounds: list[LayerBound] = []
    model, images = prepared(model, images, dtype)
    for number, (unit, states) in enumerate(unit_states(model, images[:1])):
        limit = step_limit(unit.scheme)
        if limit is None:
            continue
        for step, fields in enumerate(steps_of(unit)):
            radius, basis = _radius(unit.scheme, fields, states[step], tolerance)
            sharp = limit / radius if radius > 0.0 else math.inf
            flipped = any(_flips(module) for field in fields for module in field.modules())
            bounds.append(LayerBound(number, step, unit.scheme.h, sharp, basis, flipped))
    return bounds


def suggest_h(model: nn.Module, images: Tensor, *, safety: float = 0.9) -> float:
    """Return the largest step size that keeps every layer within the fraction `safety`, in (0, 1], of its bound."""
    if not 0.0 < safety <= 1.0:
        raise ValueError(f"safety must lie in (0, 1], got {safety!r}")
    bounds = step_bounds(model, images)
    if not bounds:
        raise ValueError("no h can be suggested: the scheme of this network has no step size with a bound")
    smallest = min(bound.sharp for bound in bounds)
    if math.isinf(smallest):
        raise ValueError("no h can be suggested: all branches are zero, so any step is stable")
    return safety * smallest


def _radius(scheme: Scheme, fields: list[nn.Module], state: Parts, tolerance: float) -> tuple[float, str]:
    """Return a bound on the spectral radius of the ODE's Jacobian, and what it holds for."""
    inputs = [state[-1]]
    if scheme.splits:
        inputs.append(scheme.step((state[0], state[1]), fields[0])[1])

    def norm(product: Apply, adjoint: Apply, like: Tensor) -> float:
        return largest_singular_value(product, adjoint, like, tolerance=tolerance).upper

    def radius(norms: list[float]) -> float:
        return norms[0] if is_first_order(scheme) else math.sqrt(math.prod(norms))

    known = [factors for field in fields if (factors := linear_factors(field)) is not None]
    if len(known) < len(fields):
        jacobians = [Jacobian(field, q) for field, q in zip(fields, inputs, strict=True)]
        return radius([norm(jacobian.matvec, jacobian.rmatvec, jacobian.x) for jacobian in jacobians]), "state"
    if scheme.splits and all(len(factors) == 2 and len(set(factors)) == 1 for factors in known):
        (first, _), (second, _) = known
        hidden = second.product(inputs[1])
        joint = norm(lambda x: first.product(second.adjoint(x)), lambda x: second.product(first.adjoint(x)), hidden)
        return joint, "weights"  # |L1 L2'|
    norms = []
    for factors, q in zip(known, inputs, strict=True):
        own = {factor: norm(factor.product, factor.adjoint, q) for factor in factors}
        norms.append(math.prod(own[factor] for factor in factors))
    return radius(norms), "weights"


@dataclass(frozen=True)
class _Factor:
    """A linear map L, by its products."""

    product: Apply
    adjoint: Apply


def linear_factors(field: nn.Module) -> tuple[_Factor, ...] | None:
    """Return the maps whose norms multiply to a bound on |F'|, with slopes κ and channel scales; None for other branches.

    L and L Λ where F' = L' D L Λ, with D ≤ 1 and a leading channel scale Λ; L alone where F' is similar to D^½ L D^½.
    """
    if not isinstance(field, SymmetricField | AntisymmetricField | OneLayerField):
        return None
    operator = field.operator
    lead_norm = field.lead if isinstance(field, SymmetricField) else None
    scale, lead = _channel_scale(field.norm, operator), _channel_scale(lead_norm, operator)
    if scale is None or lead is None:
        return None
    root = (scale * largest_slope(field.activation)).sqrt()
    if isinstance(field, AntisymmetricField):
        return (_Factor(lambda x: root * operator(root * x), lambda y: root * operator.adjoint(root * y)),)
    if isinstance(field, OneLayerField):
        top = float(root.max()) ** 2
        return (_Factor(lambda x: top * operator(x), lambda y: top * operator.adjoint(y)),)
    factor = _Factor(lambda x: root * operator(x), lambda y: operator.adjoint(root * y))
    if not isinstance(lead_norm, _BatchNorm):
        return factor, factor
    return factor, _Factor(lambda x: factor.product(lead * x), lambda y: lead * factor.adjoint(y))


def _channel_scale(norm: nn.Module | None, operator: LinearOperator) -> Tensor | None:
    """Return the factor by which a norm multiplies each channel, shaped to broadcast; None if it depends on the state."""
    if norm is None or isinstance(norm, Bias):
        return torch.ones((), dtype=operator.weight.dtype)
    if isinstance(norm, _BatchNorm) and not norm.training and norm.running_var is not None:
        weight = torch.ones_like(norm.running_var) if norm.weight is None else norm.weight.detach()
        scale = (weight / torch.sqrt(norm.running_var + norm.eps)).abs()
        return scale.reshape(-1, *[1] * (operator.weight.dim() - 2))
    return None


def _flips(module: nn.Module) -> bool:
    """Return True for a batch norm that changes the sign of a channel, or a module whose activation falls somewhere."""
    if isinstance(module, _BatchNorm):
        return module.weight is not None and bool((module.weight < 0).any())
    activation = getattr(module, "activation", None)
    return callable(activation) and bool((_slopes(cast(Apply, activation)) < 0).any())


def largest_slope(activation: Callable[[Tensor], Tensor]) -> float:
    """Return κ = sup |σ'|, on a fine grid from -20 to 20."""
    return float(_slopes(activation).abs().max())


def _slopes(activation: Callable[[Tensor], Tensor]) -> Tensor:
    return slope(activation, torch.linspace(-20.0, 20.0, 40001, dtype=torch.float64))


def largest_usage(bounds: list[LayerBound]) -> LayerBound | None:
    """Return the layer that uses most of its bound."""
    return max(bounds, key=lambda bound: bound.usage, default=None)
