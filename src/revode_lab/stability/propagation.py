"""Signals, gradients, rounding errors and energy over the depth of a network, and the sensitivity of its class scores.

The two-layer network is Hamilton's system y' = ∂H/∂z, z' = -∂H/∂y of

    H(y, z) = Σ S(K1 (z + a1) + b1) + Σ S(K2 (y + a2) + b2),        S' = σ,

and Leapfrog that of H(y, v) = ½ |v|² + Σ S(K y + b). With weights that stay the same, H is a constant of the flow and Verlet
keeps it up to an oscillation of order h. Between blocks the weights change, and H with them: that jump is not the
integrator's doing, and no bound on h removes it. Smooth weights and small steps do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode.fields import SymmetricField
from revode.operators import ACTIVATIONS, Bias
from revode.schemes import State
from revode_lab.stability.dynamics import is_first_order
from revode_lab.stability.walk import (
    Parts,
    Place,
    flatten_state,
    members,
    pair_scale,
    prepared,
    steps_of,
    unit_states,
    walk,
)


@dataclass(frozen=True)
class Propagation:
    """Norms over depth, geometric means over the images.

    Attributes:
        places: where they were measured, in order.
        signal: norm of the state.
        gradient: norm of the loss's gradient by the state.
    """

    places: list[Place]
    signal: Tensor
    gradient: Tensor

    @property
    def signal_growth(self) -> float:
        """The factor by which the state's norm grows inside the reversible units, all of them together."""
        return float(self._inside(self.signal.log()).exp())

    @property
    def gradient_growth(self) -> float:
        """The factor by which the gradient grows on its way back through the units: vanishing below 1, exploding above."""
        return float((-self._inside(self.gradient.log())).exp())

    def _inside(self, logs: Tensor) -> Tensor:
        return logs.diff()[[place.inside for place in self.places[1:]]].sum()


def signal_propagation(
    model: nn.Module, images: Tensor, labels: Tensor | None = None, *, chunk: int = 8
) -> Propagation:
    """Return the norms of signal and gradient at every depth, in the model's own dtype.

    The loss is the cross entropy with `labels`; for a module whose output is not a batch of class scores, the product with
    fixed random numbers. Every activation of a `chunk` is kept.
    """
    model, images = prepared(model, images, None)
    found = [_norms(model, part, own) for part, own in _chunks(images, labels, chunk)]
    places, norms = found[0][0], torch.cat([norms for _, norms in found], 2)
    signal, gradient = norms.double().log().mean(2).exp().unbind(1)
    return Propagation(places, signal, gradient)


def _chunks(images: Tensor, labels: Tensor | None, chunk: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    for start in range(0, len(images), chunk):
        own = slice(start, start + chunk)
        yield images[own], None if labels is None else labels[own]


def _norms(model: nn.Module, images: Tensor, labels: Tensor | None) -> tuple[list[Place], Tensor]:
    """Return norms of states and co-states, shape (places, 2, images)."""
    seen: list[tuple[Place, ReversibleSequence | None, Parts]] = []

    def visit(place: Place, unit: ReversibleSequence | None, parts: Parts) -> Parts:
        aliases = tuple(part.view_as(part) for part in parts)  # so that the members of a pair are independent
        seen.append((place, unit, parts if unit is None else aliases))
        return aliases

    with torch.enable_grad():
        loss = _loss(walk(model, images.detach().clone().requires_grad_(), visit), labels)
        leaves = [part for _, _, parts in seen for part in parts]
        gradients = iter(torch.autograd.grad(loss, leaves, allow_unused=True))
    norms = []
    for place, unit, parts in seen:
        found = [next(gradients) for _ in parts]
        if place.kind == "leave" and len(parts) == 2 and found[0] is None:
            # A pair was asked for, and its newest state goes on.
            parts, found = parts[1:], found[1:]
        costates = tuple(torch.zeros_like(p) if g is None else g for p, g in zip(parts, found, strict=True))
        # The co-state lives in the dual coordinates: where states are scaled by √½, gradients are by √2.
        costate = flatten_state(unit, costates) / pair_scale(unit, parts) ** 2
        both = torch.stack((flatten_state(unit, parts).detach(), costate))
        norms.append(torch.linalg.vector_norm(both, dim=2))
    return [place for place, _, _ in seen], torch.stack(norms)


def _loss(output: Tensor, labels: Tensor | None) -> Tensor:
    if output.dim() == 2:
        target = output.argmax(1) if labels is None else labels
        return nn.functional.cross_entropy(output, target, reduction="sum")
    weight = torch.randn(output[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (output * weight.to(output)).sum()


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return |found - expected| / |expected|, over all tensors together, in double precision."""
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    size = sum(float(b.double().square().sum()) for b in expected)
    return (difference / size) ** 0.5 if size > 0 else difference**0.5


def reconstruction_profile(sequence: ReversibleSequence, x: Tensor | State) -> list[float]:
    """Return the relative error of the state on the way back: at the entrance, then after each step; the last is 0."""
    sequence = copy.deepcopy(sequence)
    with torch.no_grad():
        states = list(sequence.states(x))
        started = None if isinstance(x, Tensor) else True
        back = reversed(list(sequence.states_back(cast(State, states[-1]), started=started)))
        errors = [relative_error(members(found), members(state)) for found, state in zip(back, states, strict=True)]
    return errors[:: sequence.scheme.fields_per_step]


_ANTIDERIVATIVES: dict[Any, Callable[[Tensor], Tensor]] = {
    ACTIVATIONS["relu"]: lambda x: 0.5 * torch.relu(x).square(),
    ACTIVATIONS["tanh"]: lambda x: x.abs() + nn.functional.softplus(-2.0 * x.abs()) - float(np.log(2.0)),
    ACTIVATIONS["sigmoid"]: lambda x: nn.functional.softplus(x) - float(np.log(2.0)),
    ACTIVATIONS["identity"]: lambda x: 0.5 * x.square(),
}


def antiderivative(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return S(x) = ∫ σ from 0 to x, in closed form where known, else by Gauss-Legendre quadrature with 24 nodes."""
    if activation in _ANTIDERIVATIVES:
        return _ANTIDERIVATIVES[activation](x)
    nodes, weights = np.polynomial.legendre.leggauss(24)
    total = torch.zeros_like(x)
    for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
        total = total + 0.5 * weight * activation(0.5 * (node + 1.0) * x)
    return total * x


def potential(field: nn.Module, q: Tensor) -> Tensor:
    """Return Σ S(K(q + a) + b) of each sample: the potential whose gradient the field is."""
    assert isinstance(field, SymmetricField)
    before = field.norm(field.operator(q if field.lead is None else field.lead(q)))
    return antiderivative(field.activation, before).flatten(1).sum(1)


def has_energy(unit: ReversibleSequence) -> bool:
    """Return True if the unit integrates Hamilton's equations: symmetric fields with biases, in a scheme with a Hamiltonian."""
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
        """The change of H by one step, as a fraction of H."""
        return (self.after - self.before) / self.before

    @property
    def jump(self) -> Tensor:
        """The change of H by the next block's weights, as a fraction of H; between blocks of one unit only."""
        inside = torch.tensor([a == b for a, b in zip(self.units[:-1], self.units[1:], strict=True)], dtype=torch.bool)
        return ((self.before[1:] - self.after[:-1]) / self.after[:-1])[inside]


def energy(unit: ReversibleSequence, fields: list[nn.Module], parts: Parts) -> Tensor:
    """Return H of one state under the weights of one block, for each sample."""
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
    """Return H along depth, or None if no unit of the model has a Hamiltonian."""
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


@dataclass(frozen=True)
class Sensitivity:
    """The change of the class scores under a disturbance of the input.

    Attributes:
        kind: ``"noise"`` or ``"fgsm"``.
        size: of the disturbance: for each pixel, in units of the input (its standard deviation where images are
            standardised). Noise has this standard deviation; FGSM moves every pixel by exactly this much.
        logit_change: |Δ logits| / |logits|, the mean over images.
        flipped: fraction of images whose predicted class changed.
    """

    kind: str
    size: float
    logit_change: float
    flipped: float


def noise_sensitivity(
    model: nn.Module, images: Tensor, *, sizes: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3), seed: int = 0
) -> list[Sensitivity]:
    """Return the answer to Gaussian noise of the given sizes."""
    model, images = prepared(model, images, None)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(images.shape, generator=generator, dtype=torch.float64).to(images)
    return _answers(model, images, noise, "noise", sizes)


def adversarial_sensitivity(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    sizes: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3),
    chunk: int = 8,
) -> list[Sensitivity]:
    """Return the answer to one step along the sign of the loss's gradient (FGSM; Goodfellow et al. 2015)."""
    model, images = prepared(model, images, None)
    direction = []
    for part, own in _chunks(images, labels, chunk):
        x = part.detach().clone().requires_grad_()
        with torch.enable_grad():
            loss = _loss(model(x), own)
            direction.append(torch.autograd.grad(loss, x)[0].sign())
    return _answers(model, images, torch.cat(direction), "fgsm", sizes)


@torch.no_grad()
def _answers(
    model: nn.Module, images: Tensor, direction: Tensor, kind: str, sizes: tuple[float, ...]
) -> list[Sensitivity]:
    plain = model(images).flatten(1)
    rows = []
    for size in sizes:
        moved = model(images + size * direction).flatten(1)
        change = torch.linalg.vector_norm(moved - plain, dim=1) / torch.linalg.vector_norm(plain, dim=1)
        flipped = (moved.argmax(1) != plain.argmax(1)).double().mean()
        rows.append(Sensitivity(kind, size, float(change.mean()), float(flipped)))
    return rows
