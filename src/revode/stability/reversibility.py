"""What reversing costs in accuracy: reconstruction and gradient errors, and the paper's linear analysis of RevNet.

Every scheme here inverts exactly in real numbers. In floating point an error of rounding is carried back through the
inverse, and a mode that shrinks forward grows backward. `drift` measures it on any sequence over depth, dtype and step size;
`linear_revnet` computes where in the plane of (α, β) RevNet's linear model can be reversed at all.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode.schemes import AdditiveCoupling, State
from revode.stability.dynamics import amplification
from revode.stability.walk import detached_copy, members, prepared, unit_input, unit_states


@dataclass(frozen=True)
class Drift:
    """Errors of one configuration, as fractions of the norm of what should have come out.

    Attributes:
        depth: steps.
        dtype: of states and weights.
        h: step size.
        exact: whether states lie on the grid.
        reconstruction: of the input, from the final pair.
        gradient: of the gradients of ``reversible`` to those of ``store``, over input and parameters together.
    """

    depth: int
    dtype: str
    h: float
    exact: bool
    reconstruction: float
    gradient: float


def resized(
    sequence: ReversibleSequence,
    *,
    depth: int | None = None,
    h: float | None = None,
    dtype: torch.dtype | None = None,
    exact: bool | int = False,
) -> ReversibleSequence:
    """A copy of the first `depth` steps of a sequence, with another step size, dtype or grid; reversible."""
    scheme = copy.copy(sequence.scheme)
    if h is not None:
        if not h > 0.0:
            raise ValueError(f"h must be a positive number, got {h!r}")
        scheme.h = float(h)
    width = scheme.fields_per_step
    available = len(sequence.fields) // width
    depth = available if depth is None else depth
    if not 1 <= depth <= available:
        raise ValueError(f"depth must lie between 1 and the {available} steps of the sequence, got {depth!r}")
    fields = [detached_copy(field).requires_grad_(True) for field in sequence.fields[: depth * width]]
    options: dict[str, Any] = {"exact": exact, "split_dim": sequence.split_dim}
    clone = ReversibleSequence(fields, scheme, **options, verify=False)  # what is measured here may be as bad as it is
    clone.train(sequence.training)
    return clone if dtype is None else clone.to(dtype)


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """|found - expected| / |expected|, over all tensors together, in double precision."""
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    size = sum(float(b.double().square().sum()) for b in expected)
    return (difference / size) ** 0.5 if size > 0 else difference**0.5


def reconstruction_error(sequence: ReversibleSequence, x: Tensor) -> float:
    """The relative error of ``inverse`` after ``forward``; on a grid, of the rounded input it promises to return."""
    with torch.no_grad():
        _, state = sequence(x, return_state=True)
        again = sequence.inverse(state)
        target = x if sequence.grid is None else sequence.grid.round(x)
    return relative_error([again], [target])


def unit_reconstruction_errors(model: nn.Module, images: Tensor) -> list[float]:
    """The relative reconstruction error of every unit on its own input, in the model's dtype."""
    states = unit_states(*prepared(model, images, None))
    return [reconstruction_error(resized(unit), unit_input(unit, entrance[0])) for unit, entrance in states]


def reconstruction_profile(sequence: ReversibleSequence, x: Tensor) -> list[float]:
    """The relative error of the state on the way back: at the entrance, then after each step; the last is 0."""
    with torch.no_grad():
        states = list(sequence.states(x))
        back = reversed(list(sequence.states_back(cast(State, states[-1]))))
        errors = [relative_error(members(found), members(state)) for found, state in zip(back, states, strict=True)]
    return errors[:: sequence.scheme.fields_per_step]


def gradients(sequence: ReversibleSequence, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Gradients of <weight, y> by the input and all parameters."""
    x = x.detach().clone().requires_grad_()
    leaves = [x, *sequence.parameters()]
    with torch.enable_grad():
        y = sequence(x)
        found = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def gradient_error(sequence: ReversibleSequence, x: Tensor, *, seed: int = 0) -> float:
    """The relative difference of a sequence's gradients to those of the same forward under ``store``."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    own = resized(sequence, exact=sequence.exact).with_strategy(anchor_every=sequence.anchor_every)
    stored = own.with_strategy(backprop="store", anchor_every=None)
    return relative_error(gradients(own, x, weight), gradients(stored, x, weight))


def drift(
    sequence: ReversibleSequence,
    x: Tensor,
    *,
    depths: Sequence[int] | None = None,
    steps: Sequence[float] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64),
    exact: Sequence[bool] = (False, True),
) -> list[Drift]:
    """Reconstruction and gradient error over depth, dtype, step size and grid, on copies.

    Configurations that the grid refuses (a scheme that scales its state, a state out of range, half precision) have no row.

    Args:
        sequence: whose branches to use.
        x: its input.
        depths: numbers of steps; the whole sequence unless given.
        steps: step sizes h; the scheme's own unless given.
        dtypes: of states and weights.
        exact: whether to put states on the grid.
    """
    depths = depths or [len(sequence.fields) // sequence.scheme.fields_per_step]
    rows = []
    for depth in depths:
        for h in steps or [sequence.scheme.h]:
            for dtype in dtypes:
                for on_grid in exact:
                    try:
                        row = _measure(sequence, x, depth, h, dtype, on_grid)
                    except ValueError:
                        if not on_grid:
                            raise
                        continue
                    rows.append(row)
    return rows


def _measure(sequence: ReversibleSequence, x: Tensor, depth: int, h: float, dtype: torch.dtype, on_grid: bool) -> Drift:
    clone = resized(sequence, depth=depth, h=h, dtype=dtype, exact=on_grid)
    x = x.to(dtype)
    name = str(dtype).removeprefix("torch.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="states in .*float16 are rebuilt")  # which is what we measure
        return Drift(depth, name, h, on_grid, reconstruction_error(clone, x), gradient_error(clone, x))


class _Scale(nn.Module):
    """q times a fixed number for each sample."""

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, q: Tensor) -> Tensor:
        return self.factor * q


@dataclass(frozen=True)
class LinearRevNet:
    """The paper's linear RevNet, Y+ = Y + βZ, Z+ = Z + αY+, over a grid of α and β.

    Attributes:
        alpha: factors of G.
        beta: factors of F.
        predicted: max |ξ| of the roots of ξ² - (2 + αβ) ξ + 1 = 0, shape (len(alpha), len(beta)).
        simulated: the growth factor per step of the simulated network.
    """

    alpha: Tensor
    beta: Tensor
    predicted: Tensor
    simulated: Tensor

    @property
    def stable(self) -> Tensor:
        """Where -4 ≤ αβ ≤ 0, so that |ξ| = 1."""
        product = self.alpha[:, None] * self.beta
        return (product <= 0.0) & (product >= -4.0)


def linear_revnet(alpha: Tensor, beta: Tensor, *, num_steps: int = 20000) -> LinearRevNet:
    """Growth factors of the linear RevNet, from the roots ξ and from a simulation with the network's own scheme.

    Args:
        alpha: values of α.
        beta: values of β.
        num_steps: steps to simulate; the error of the simulated rate falls like log(n) / n.
    """
    alpha, beta = alpha.double(), beta.double()
    grid_alpha, grid_beta = torch.meshgrid(alpha, beta, indexing="ij")
    predicted = amplification(AdditiveCoupling(), grid_beta, grid_alpha).abs().amax(-1)
    return LinearRevNet(alpha, beta, predicted, _simulate(grid_beta, grid_alpha, num_steps))


def _simulate(beta: Tensor, alpha: Tensor, num_steps: int) -> Tensor:
    """exp of the mean logarithmic growth over the second half of the steps, the state rescaled as it goes."""
    scheme, fields = AdditiveCoupling(), (_Scale(beta), _Scale(alpha))
    state = (torch.full_like(beta, 0.6), torch.full_like(beta, 0.8))
    logs = torch.zeros_like(beta)
    half = num_steps // 2
    with torch.no_grad():
        for step in range(num_steps):
            for index, field in enumerate(fields):
                state = scheme.step(state, field, index)
            if step % 8 == 7 or step in (half - 1, num_steps - 1):
                norm = torch.hypot(*state)
                state = (state[0] / norm, state[1] / norm)
                logs = logs + norm.log()
            if step == half - 1:
                logs = torch.zeros_like(logs)
    return (logs / (num_steps - half)).exp()
