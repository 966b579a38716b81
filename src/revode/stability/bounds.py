"""How large a step may be: bounds on h for each layer, the share of it in use, and a suggestion.

At a frozen state, with 0 ≤ σ' ≤ κ (κ = 1 for ReLU and tanh), every step of the linearised network is stable while

    Verlet     h ≤ 2 / (κ |K1 K2'|)         cheap estimate 2 / (κ |K1| |K2|)
    Leapfrog   h ≤ 2 / (√κ |K|)             cheap estimate with √(|K|_1 |K|_∞) in place of |K|
    MidPoint   h ≤ 1 / (κ |K - K'|)         likewise

sharp when σ is linear. (Damping changes the constants, see `revode.stability.dynamics`.) A batch norm in eval mode is a
scale of each channel and becomes part of K. Where a field is not of this form (a norm that depends on the state, a branch of
the user's own) the bound is taken from the norm of its Jacobian at the given state; ``basis`` says which was used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revode.fields import AntisymmetricField, Bias, OneLayerField, SymmetricField
from revode.operators import LinearOperator
from revode.schemes import Scheme
from revode.stability.dynamics import step_limit
from revode.stability.norms import largest_singular_value, schur_norm
from revode.stability.spectra import Jacobian
from revode.stability.tangents import slope
from revode.stability.walk import prepared, unit_states

Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerBound:
    """The bound on h of one step.

    Attributes:
        unit: number of its unit.
        step: its number in the unit.
        h: the step size in use.
        sharp: largest stable h at a frozen state; infinite if the field is zero.
        cheap: an estimate from below, from the norms of single operators.
        basis: ``"weights"`` if it holds at any state, ``"state"`` if it was computed at the given one.
        flipped: whether a batch norm in the field has negative weights. The field is then no longer the force of a convex
            potential (nor antisymmetric up to a scale), and a step within its bound may grow all the same.
    """

    unit: int
    step: int
    h: float
    sharp: float
    cheap: float
    basis: str
    flipped: bool = False

    @property
    def usage(self) -> float:
        """h as a fraction of its bound; above 1 the step is unstable."""
        return self.h / self.sharp

    @property
    def margin(self) -> float:
        """By what factor h could grow."""
        return self.sharp / self.h


@dataclass(frozen=True)
class _Factor:
    """F' = L' D L Λ if symmetric, else similar to D^½ L D^½; D ≤ 1, L given by its products, Λ a leading channel scale."""

    product: Apply
    adjoint: Apply
    schur: float
    symmetric: bool
    lead: Tensor | None = None


def step_bounds(
    model: nn.Module,
    images: Tensor,
    *,
    tolerance: float = 0.01,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[LayerBound]:
    """The bound on h of every step of every unit, on a copy of the model.

    Args:
        model: a network with reversible units.
        images: its inputs; they give the sizes of the states, and the state of the bounds with ``basis="state"`` (the
            first image's).
        tolerance: relative tolerance of the norms; a bound errs on the safe side by at most that.
        dtype: of the products; float32 is faster and good for five digits.
        seed: of the norms' random starts.

    Returns:
        One entry a step; none for units whose scheme has no bound (RevNet).
    """
    model, images = prepared(model, images, dtype)
    bounds: list[LayerBound] = []
    for number, (unit, states) in enumerate(unit_states(model, images[:1])):
        limit = step_limit(unit.scheme)
        if limit is None:
            continue
        width = unit.scheme.fields_per_step
        for step in range(len(unit.fields) // width):
            fields = list(unit.fields[step * width : (step + 1) * width])
            inputs = _branch_inputs(unit.scheme, fields, states[step])
            sharp, cheap, basis = _bound(limit, unit.scheme, fields, inputs, tolerance, seed)
            flipped = any(_flips(module) for field in fields for module in field.modules())
            bounds.append(LayerBound(number, step, unit.scheme.h, sharp, min(cheap, sharp), basis, flipped))
    return bounds


def suggest_h(model: nn.Module, images: Tensor, *, safety: float = 0.9, tolerance: float = 0.01) -> float:
    """The largest step size that keeps every layer within `safety` of its bound.

    Args:
        model: a network with reversible units.
        images: its inputs.
        safety: fraction of the bound to use, in (0, 1].
        tolerance: relative tolerance of the norms.
    """
    if not 0.0 < safety <= 1.0:
        raise ValueError(f"safety must lie in (0, 1], got {safety!r}")
    bounds = step_bounds(model, images, tolerance=tolerance)
    if not bounds:
        raise ValueError("no h can be suggested: the scheme of this network has no step size with a bound")
    smallest = min(bound.sharp for bound in bounds)
    if math.isinf(smallest):
        raise ValueError("no h can be suggested: all branches are zero, so any step is stable")
    return safety * smallest


def _branch_inputs(scheme: Scheme, fields: list[nn.Module], parts: tuple[Tensor, ...]) -> list[Tensor]:
    """What each branch of one step sees, from the state before the step."""
    if len(parts) == 1:
        return [parts[0]]
    state, inputs = (parts[0], parts[1]), []
    with torch.no_grad():
        for index, field in enumerate(fields):
            inputs.append(state[1])
            state = scheme.step(state, field, index)
    return inputs


def _bound(
    limit: float, scheme: Scheme, fields: list[nn.Module], inputs: list[Tensor], tolerance: float, seed: int
) -> tuple[float, float, str]:
    """(sharp, cheap, basis) of one step."""
    factors = [factor_of(field) for field in fields]
    if any(factor is None for factor in factors):
        norms = [_jacobian_norm(field, q, tolerance, seed) for field, q in zip(fields, inputs, strict=True)]
        sharp = _over(limit, _radius(scheme, norms))
        return sharp, sharp, "state"
    known = [factor for factor in factors if factor is not None]
    if len(known) == 2 and all(factor.symmetric and factor.lead is None for factor in known):
        return *_pair_bound(limit, known[0], known[1], inputs, tolerance, seed), "weights"
    norms = [_norm_of(f, q, tolerance, seed) for f, q in zip(known, inputs, strict=True)]
    sharp = _over(limit, _radius(scheme, norms))
    cheap = _over(limit, _radius(scheme, [_cheap_norm_of(f) for f in known]))
    return sharp, cheap, "weights"


def _pair_bound(
    limit: float, first: _Factor, second: _Factor, inputs: list[Tensor], tolerance: float, seed: int
) -> tuple[float, float]:
    """c / |L1 L2'| and c / (|L1| |L2|)."""
    options = {"tolerance": tolerance, "dtype": inputs[0].dtype, "device": inputs[0].device, "seed": seed}
    singles = [
        largest_singular_value(f.product, f.adjoint, q.shape, **options)
        for f, q in zip((first, second), inputs, strict=True)
    ]
    with torch.no_grad():
        hidden = second.product(inputs[1]).shape
    joint = largest_singular_value(
        lambda x: first.product(second.adjoint(x)), lambda x: second.product(first.adjoint(x)), hidden, **options
    )
    return _over(limit, joint.upper), _over(limit, singles[0].upper * singles[1].upper)


def _norm_of(factor: _Factor, q: Tensor, tolerance: float, seed: int) -> float:
    """A bound on |F'| at any state; for a leading scale, |L| |L Λ|."""
    options = {"tolerance": tolerance, "dtype": q.dtype, "device": q.device, "seed": seed}
    norm = largest_singular_value(factor.product, factor.adjoint, q.shape, **options).upper
    if not factor.symmetric:
        return norm
    lead = factor.lead
    if lead is None:
        return norm**2
    led = largest_singular_value(
        lambda x: factor.product(lead * x), lambda y: lead * factor.adjoint(y), q.shape, **options
    )
    return norm * led.upper


def _cheap_norm_of(factor: _Factor) -> float:
    """The same from sums of kernel entries."""
    if not factor.symmetric:
        return factor.schur
    return factor.schur**2 * (1.0 if factor.lead is None else float(factor.lead.max()))


def _radius(scheme: Scheme, norms: list[float]) -> float:
    """A bound on the spectral radius of the ODE's Jacobian from the norms |F'| of the branches."""
    if scheme.splits:
        return math.sqrt(norms[0] * norms[1])
    return norms[0] if scheme.coupling(0).keep == 0.0 else math.sqrt(norms[0])


def _over(limit: float, radius: float) -> float:
    return limit / radius if radius > 0.0 else math.inf


def _jacobian_norm(field: nn.Module, q: Tensor, tolerance: float, seed: int) -> float:
    jacobian = Jacobian(field, q)
    found = largest_singular_value(
        jacobian.matvec, jacobian.rmatvec, (q.numel(),), tolerance=tolerance, dtype=q.dtype, device=q.device, seed=seed
    )
    return found.upper


def factor_of(field: nn.Module) -> _Factor | None:
    """The linear part of one of the paper's fields with its slopes κ and channel scales, or None for other branches."""
    if not isinstance(field, SymmetricField | AntisymmetricField | OneLayerField):
        return None
    operator = field.operator
    lead_norm = field.lead if isinstance(field, SymmetricField) else None
    scale, lead = _channel_scale(field.norm, operator), _channel_scale(lead_norm, operator)
    if scale is None or lead is None:
        return None
    root = (scale * largest_slope(field.activation)).sqrt()
    schur, peak = schur_norm(operator), float(root.max())
    if isinstance(field, SymmetricField):
        return _Factor(
            lambda x: root * operator(x),
            lambda y: operator.adjoint(root * y),
            peak * schur,
            True,
            lead if isinstance(lead_norm, _BatchNorm) else None,
        )
    if isinstance(field, AntisymmetricField):
        return _Factor(
            lambda x: root * operator(root * x), lambda y: root * operator.adjoint(root * y), peak**2 * schur, False
        )
    top = peak**2
    return _Factor(lambda x: top * operator(x), lambda y: top * operator.adjoint(y), top * schur, False)


def _channel_scale(norm: nn.Module | None, operator: LinearOperator) -> Tensor | None:
    """The factor by which a norm multiplies each channel, shaped to broadcast; None if it depends on the state."""
    if norm is None or isinstance(norm, Bias):
        return torch.ones((), dtype=operator.weight.dtype)
    if isinstance(norm, _BatchNorm) and not norm.training and norm.running_var is not None:
        weight = torch.ones_like(norm.running_var) if norm.weight is None else norm.weight.detach()
        scale = (weight / torch.sqrt(norm.running_var + norm.eps)).abs()
        return scale.reshape(-1, *[1] * (operator.weight.dim() - 2))
    return None


def _flips(module: nn.Module) -> bool:
    """Whether it is a batch norm that changes the sign of a channel."""
    return isinstance(module, _BatchNorm) and module.weight is not None and bool((module.weight < 0).any())


def largest_slope(activation: Callable[[Tensor], Tensor]) -> float:
    """κ = sup |σ'|, on a fine grid from -20 to 20."""
    x = torch.linspace(-20.0, 20.0, 40001, dtype=torch.float64)
    return float(slope(activation, x).abs().max())


def largest_usage(bounds: list[LayerBound]) -> LayerBound | None:
    """The layer that uses most of its bound."""
    return max(bounds, key=lambda bound: bound.usage, default=None)
