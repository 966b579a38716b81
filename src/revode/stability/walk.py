"""Walking through a network block by block, on a copy, with a visitor at every depth.

Everything that looks inside a network here does so through `analysis_copy` and `walk`: the user's model keeps its mode,
gradients, buffers and strategy, and the global random stream does not move.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revode.engine import ReversibleSequence
from revode.schemes import OpenState, State

Parts = tuple[Tensor, ...]
"""A state as the tensors it consists of: two inside a unit, one at the entrance of one-tensor schemes and between units."""


@dataclass(frozen=True)
class Place:
    """Where a visitor is called.

    Attributes:
        unit: number of the reversible unit, in the order of evaluation.
        step: steps of this unit done so far.
        depth: steps of all units done so far.
        time: sum of h over these steps.
        kind: ``"enter"`` a unit, after a ``"step"``, ``"leave"`` a unit, or the network's ``"output"``.
    """

    unit: int
    step: int
    depth: int
    time: float
    kind: str


Visitor = Callable[[Place, ReversibleSequence | None, Parts], Parts | None]
"""Called with the place, its unit and the state; may return a state of the same shape to go on with."""


def reversible_units(model: nn.Module) -> list[ReversibleSequence]:
    """The reversible sequences of a model; an error if there is none."""
    units = [module for module in model.modules() if isinstance(module, ReversibleSequence)]
    if not units:
        name = getattr(getattr(model, "config", None), "name", type(model).__name__)
        raise ValueError(f"{name} has no reversible units: the stability analysis has nothing to walk through")
    return units


def check_finite(model: nn.Module) -> None:
    """Refuse weights that are NaN or infinite."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"the weights of {type(model).__name__} hold NaN or infinity, first in {name!r}")


def analysis_copy(model: nn.Module, dtype: torch.dtype | None = torch.float64) -> nn.Module:
    """A copy to analyse: in eval mode, under ``store`` without a grid, its parameters without gradients.

    Args:
        model: any module with reversible units (or one such unit); stays as it is.
        dtype: floating-point type of the copy; None keeps the model's.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    reversible_units(model)
    check_finite(model)
    clone = detached_copy(model)
    if isinstance(clone, ReversibleSequence):
        clone = _stored(clone)
    for module in list(clone.modules()):
        for name, child in module.named_children():
            if isinstance(child, ReversibleSequence):
                setattr(module, name, _stored(child))
    return clone.eval() if dtype is None else clone.eval().to(dtype)


def _stored(unit: ReversibleSequence) -> ReversibleSequence:
    return unit.with_strategy(backprop="store", exact=False, anchor_every=None)


def detached_copy(module: nn.Module) -> nn.Module:
    """A deep copy whose parameters need no gradient."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def calibrate_batch_norm(model: nn.Module, images: Tensor) -> int:
    """Give batch norms that have seen no data the statistics of `images`; returns how many there were.

    Untrained running statistics (mean 0, variance 1) normalise nothing, and the network would not be the one that trains.
    """
    fresh = [m for m in model.modules() if isinstance(m, _BatchNorm) and _has_seen_nothing(m)]
    if not fresh:
        return 0
    momenta = [module.momentum for module in fresh]
    for module in fresh:
        module.train()
        module.momentum = 1.0
    model(images)
    for module, momentum in zip(fresh, momenta, strict=True):
        module.eval()
        module.momentum = momentum
    return len(fresh)


def prepared(model: nn.Module, images: Tensor, dtype: torch.dtype | None = torch.float64) -> tuple[nn.Module, Tensor]:
    """An `analysis_copy` with its batch norms calibrated on `images`, and the images in its dtype."""
    copied = analysis_copy(model, dtype)
    images = images.to(next(copied.parameters()).dtype)
    calibrate_batch_norm(copied, images)
    return copied, images


def _has_seen_nothing(module: _BatchNorm) -> bool:
    seen = module.num_batches_tracked
    return module.running_mean is not None and seen is not None and int(seen) == 0


def walk(model: nn.Module, x: Any, visit: Visitor) -> Any:
    """model(x), calling `visit` at every depth. `model` should be an `analysis_copy`; x may be a dual tensor."""
    with _visited(reversible_units(model), visit) as tracker:
        y = model(x)
    if isinstance(y, Tensor):
        visit(tracker.place("output"), None, (y,))
    return y


class _Tracker:
    """Counts units, steps and time during one walk."""

    def __init__(self, visit: Visitor) -> None:
        self.visit = visit
        self.unit = -1
        self.step = self.depth = 0
        self.time = 0.0

    def place(self, kind: str) -> Place:
        return Place(self.unit, self.step, self.depth, self.time, kind)

    def call(self, kind: str, unit: ReversibleSequence, state: OpenState) -> Any:
        parts = members(state)
        changed = self.visit(self.place(kind), unit, parts) or parts
        return changed if len(changed) == 2 else (None, *changed)

    def run(self, sequence: ReversibleSequence, x: Tensor | State, *, return_state: bool = False, **kwargs: Any) -> Any:
        """What ``sequence(x)`` computes, step by step."""
        scheme = sequence.scheme
        self.unit, self.step = self.unit + 1, 0
        states: Any = sequence.states(x, **kwargs)
        state = self.call("enter", sequence, next(states))
        for index in range(len(sequence.fields)):
            state = states.send(state)
            if (index + 1) % scheme.fields_per_step == 0:
                self.step, self.depth, self.time = self.step + 1, self.depth + 1, self.time + scheme.h
                state = self.call("step", sequence, state)
        if return_state:  # the pair goes on, so the pair is what leaves
            state = self.call("leave", sequence, state)
            return scheme.readout(state, sequence.split_dim), state
        return self.call("leave", sequence, (None, scheme.readout(state, sequence.split_dim)))[1]


@contextmanager
def _visited(units: list[ReversibleSequence], visit: Visitor) -> Iterator[_Tracker]:
    """Inside, calls of `units` are walked; outside, they are what they were."""
    tracker = _Tracker(visit)
    for unit in units:
        unit.__dict__["forward"] = functools.partial(tracker.run, unit)
    try:
        yield tracker
    finally:
        for unit in units:
            del unit.__dict__["forward"]


def unit_states(model: nn.Module, images: Tensor) -> list[tuple[ReversibleSequence, list[Parts]]]:
    """Every unit with its states: at the entrance and after each step, the entrance as the unit's input."""
    found: list[tuple[ReversibleSequence, list[Parts]]] = []

    def visit(place: Place, unit: ReversibleSequence | None, parts: Parts) -> None:
        if unit is not None and place.kind == "enter":
            found.append((unit, [parts]))
        elif place.kind == "step":
            found[-1][1].append(parts)

    with torch.no_grad():
        walk(model, images, visit)
    return found


def members(state: OpenState) -> Parts:
    """The tensors of a state: two, or one before a scheme on one tensor has started."""
    return (state[1],) if state[0] is None else (state[0], state[1])


def flatten_state(unit: ReversibleSequence | None, parts: Parts) -> Tensor:
    """The state as one vector a sample, shape (batch, n).

    Two successive states of a one-tensor scheme are scaled by √½ each, so that a state at rest has the norm of its tensor
    and entering and leaving the pair neither adds nor takes.
    """
    vector = torch.cat([part.flatten(1) for part in parts], dim=1)
    return vector * _pair_scale(unit, parts)


def unflatten_state(unit: ReversibleSequence | None, vector: Tensor, like: Parts) -> Parts:
    """The inverse of `flatten_state`."""
    pieces = (vector / _pair_scale(unit, like)).split([part[0].numel() for part in like], dim=1)
    return tuple(piece.reshape(part.shape) for piece, part in zip(pieces, like, strict=True))


def _pair_scale(unit: ReversibleSequence | None, parts: Parts) -> float:
    return 0.5**0.5 if len(parts) == 2 and unit is not None and not unit.scheme.splits else 1.0


def unit_input(unit: ReversibleSequence, parts: Parts) -> Tensor:
    """A unit's entrance as the one tensor that ``unit(x)`` takes."""
    return unit.scheme.readout(cast(State, parts), unit.split_dim) if unit.scheme.splits else parts[-1]
