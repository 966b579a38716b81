"""The Hamiltonian along depth: what the integrator keeps, and what jumping kernels pump in.

The two-layer network is Hamilton's system y' = ∂H/∂z, z' = -∂H/∂y of

    H(y, z) = Σ S(K1 (z + a1) + b1) + Σ S(K2 (y + a2) + b2),        S' = σ,

and Leapfrog that of H(y, v) = ½ |v|² + Σ S(K y + b). With weights that stay the same, H is a constant of the flow and Verlet
keeps it up to an oscillation of order h. Between blocks the weights change, and H with them: that jump is not the
integrator's doing, and no bound on h removes it. Smooth weights and small steps do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode.fields import ACTIVATIONS, Bias, SymmetricField
from revode.stability.dynamics import is_first_order
from revode.stability.walk import Parts, prepared, steps_of, unit_states

_ANTIDERIVATIVES: dict[Any, Callable[[Tensor], Tensor]] = {
    ACTIVATIONS["relu"]: lambda x: 0.5 * torch.relu(x).square(),
    ACTIVATIONS["tanh"]: lambda x: x.abs() + nn.functional.softplus(-2.0 * x.abs()) - float(np.log(2.0)),
    ACTIVATIONS["sigmoid"]: lambda x: nn.functional.softplus(x) - float(np.log(2.0)),
    ACTIVATIONS["identity"]: lambda x: 0.5 * x.square(),
}


def antiderivative(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """S(x) = ∫ σ from 0 to x, in closed form where known, else by Gauss-Legendre quadrature with 24 nodes."""
    if activation in _ANTIDERIVATIVES:
        return _ANTIDERIVATIVES[activation](x)
    nodes, weights = np.polynomial.legendre.leggauss(24)
    total = torch.zeros_like(x)
    for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
        total = total + 0.5 * weight * activation(0.5 * (node + 1.0) * x)
    return total * x


def potential(field: nn.Module, q: Tensor) -> Tensor:
    """Σ S(K(q + a) + b) of each sample: the potential whose gradient the field is."""
    assert isinstance(field, SymmetricField)
    before = field.norm(field.operator(q if field.lead is None else field.lead(q)))
    return antiderivative(field.activation, before).flatten(1).sum(1)


def has_energy(unit: ReversibleSequence) -> bool:
    """Whether the unit integrates Hamilton's equations: symmetric fields with biases, in a scheme that has a Hamiltonian."""
    scheme = unit.scheme
    conservative = all(
        isinstance(field, SymmetricField)
        and isinstance(field.norm, Bias)
        and (field.lead is None or isinstance(field.lead, Bias))
        for field in unit.fields
    )
    opposed = not scheme.splits or scheme.coupling(0).gain * scheme.coupling(1).gain < 0
    return conservative and opposed and not is_first_order(scheme) and abs(scheme.carry) == 1.0


@dataclass(frozen=True)
class Energy:
    """H of each block's own weights, before and after its step; means over the images.

    Attributes:
        units: number of the unit of each step.
        before: H before the step.
        after: H after the step, with the same weights.
    """

    units: list[int]
    before: Tensor
    after: Tensor

    @property
    def step_change(self) -> Tensor:
        """What integrating one step added, as a fraction of H."""
        return (self.after - self.before) / self.before

    @property
    def jump(self) -> Tensor:
        """What changing to the next block's weights added, as a fraction of H; between blocks of one unit only."""
        inside = torch.tensor([a == b for a, b in zip(self.units[:-1], self.units[1:], strict=True)], dtype=torch.bool)
        return ((self.before[1:] - self.after[:-1]) / self.after[:-1])[inside]


def energy(unit: ReversibleSequence, fields: list[nn.Module], parts: Parts) -> Tensor:
    """H of one state under the weights of one block, for each sample."""
    if unit.scheme.splits:
        y, z = parts
        return potential(fields[0], z) + potential(fields[1], y)
    if len(parts) == 1:
        return potential(fields[0], parts[0])
    p, q = parts
    kinetic = 0.5 * ((q - p) / unit.scheme.h).square().flatten(1).sum(1)
    return kinetic + 0.5 * (potential(fields[0], p) + potential(fields[0], q))


@torch.no_grad()
def hamiltonian_energy(model: nn.Module, images: Tensor, *, dtype: torch.dtype = torch.float64) -> Energy | None:
    """H along depth; None if no unit of the model has a Hamiltonian.

    Args:
        model: a network with reversible units.
        images: its inputs.
        dtype: of the computation.
    """
    units: list[int] = []
    before: list[Tensor] = []
    after: list[Tensor] = []
    for number, (unit, states) in enumerate(unit_states(*prepared(model, images, dtype))):
        if has_energy(unit):
            for fields, old, new in zip(steps_of(unit), states, states[1:], strict=False):
                units.append(number)
                before.append(energy(unit, fields, old).mean().double())
                after.append(energy(unit, fields, new).mean().double())
    return Energy(units, torch.stack(before), torch.stack(after)) if units else None
