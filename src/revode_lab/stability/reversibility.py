"""Reconstruction and gradient errors of reversing.

Every scheme here inverts exactly in real numbers. In floating point an error of rounding is carried back through the
inverse, and a mode that shrinks forward grows backward. `drift` measures it on any sequence over depth, dtype and step size.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode_lab.stability.propagation import relative_error
from revode_lab.stability.walk import prepared, unit_inputs


@dataclass(frozen=True)
class Drift:
    """Errors of one configuration, as fractions of the norm of what should have come out.

    Attributes:
        depth: steps.
        exact: states lie on the grid.
        reconstruction: error of the input found back from the final pair.
        gradient: error of the gradients by ``reversible`` to those of ``store``, over input and parameters together.
    """

    depth: int
    dtype: str
    h: float
    exact: bool
    reconstruction: float
    gradient: float


def resized(
    sequence: ReversibleSequence, *, depth: int | None = None, h: float | None = None, dtype: torch.dtype | None = None
) -> ReversibleSequence:
    """Return a copy of the first `depth` steps of a sequence, with another step size or dtype; reversible, without a grid."""
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
    fields = [copy.deepcopy(field).requires_grad_(True) for field in sequence.fields[: depth * width]]
    # Without verify: what is measured here may be as bad as it is.
    clone = ReversibleSequence(fields, scheme, split_dim=sequence.split_dim, verify=False)
    clone.train(sequence.training)
    return clone if dtype is None else clone.to(dtype)


def reconstruction_error(sequence: ReversibleSequence, x: Tensor) -> float:
    """Return the relative error of ``inverse`` after ``forward``; on a grid, of the rounded input it promises to return."""
    sequence = copy.deepcopy(sequence)  # a call in training mode moves running statistics
    with torch.no_grad():
        _, state = sequence(x, return_state=True)
        again = sequence.inverse(state)
        target = x if sequence.grid is None else sequence.grid.round(x)
    return relative_error([again], [target])


def unit_reconstruction_errors(model: nn.Module, images: Tensor) -> list[float]:
    """Return the relative reconstruction error of every unit on its own input, in the model's dtype."""
    return [reconstruction_error(resized(unit), x) for unit, x in unit_inputs(*prepared(model, images, None))]


def _gradients(sequence: ReversibleSequence, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Return gradients of <weight, y> by the input and all parameters."""
    x = x.detach().clone().requires_grad_()
    leaves = [x, *sequence.parameters()]
    with torch.enable_grad():
        loss = (sequence(x) * weight).sum()
        return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def gradient_error(sequence: ReversibleSequence, x: Tensor) -> float:
    """Return the relative difference of a sequence's gradients to those of the same forward under ``store``."""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
    own = resized(sequence).with_strategy(exact=sequence.strategy.exact, anchor_every=sequence.strategy.anchor_every)
    stored = own.with_strategy(backprop="store", anchor_every=None)
    return relative_error(_gradients(own, x, weight), _gradients(stored, x, weight))


def drift(
    sequence: ReversibleSequence,
    x: Tensor,
    *,
    depths: Sequence[int] | None = None,
    steps: Sequence[float] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64),
    exact: Sequence[bool] = (False, True),
) -> list[Drift]:
    """Return reconstruction and gradient error over depth, dtype, step size and grid, on copies.

    Configurations that the grid refuses (a scheme that scales its state, a state out of range, half precision) have no row.

    Args:
        sequence: the branches, with the scheme's start.
        x: its input.
        depths: numbers of steps; the whole sequence unless given.
        steps: step sizes h; the scheme's own unless given.
        dtypes: dtypes of states and weights.
        exact: put states on the grid or not.
    """
    depths = depths or [len(sequence.fields) // sequence.scheme.fields_per_step]
    rows = []
    for depth, h, dtype, on_grid in itertools.product(depths, steps or [sequence.scheme.h], dtypes, exact):
        clone, own = resized(sequence, depth=depth, h=h, dtype=dtype), x.to(dtype)
        try:
            clone = clone.with_strategy(exact=on_grid)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="states in .*float16 are rebuilt")  # which is what we measure
                errors = reconstruction_error(clone, own), gradient_error(clone, own)
        except ValueError:
            if not on_grid:
                raise
            continue
        rows.append(Drift(depth, str(dtype).removeprefix("torch."), h, on_grid, *errors))
    return rows
