"""Walking through a network block by block, on a copy, with a visitor at every depth.

Everything that looks inside a network here does so through `prepared` and `walk`: the user's model keeps its mode,
gradients, buffers and strategy, and the global RNG state stay as they are.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revode.engine import ReversibleSequence
from revode.networks import Stage
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

    @property
    def inside(self) -> bool:
        """True if a unit led here from the place before, and not stem, transition or head."""
        return self.kind in ("step", "leave")


Visitor = Callable[[Place, ReversibleSequence | None, Parts], Parts | None]
"""Called with the place, its unit and the state; may return a state of the same shape to go on with."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network inside torch.compile's or DistributedDataParallel's wrapper."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def reversible_units(model: nn.Module) -> list[ReversibleSequence]:
    """Return the reversible sequences of a model; an error if there is none."""
    units = [module for module in model.modules() if isinstance(module, ReversibleSequence)]
    if not units:
        name = getattr(getattr(model, "config", None), "name", type(model).__name__)
        raise ValueError(f"{name} has no reversible units: the stability analysis has nothing to walk through")
    return units


def walked_units(model: nn.Module) -> list[nn.Module]:
    """Return the units of a walk: reversible sequences, or the bodies of a ResNet of revode."""
    stages = [module for module in model.modules() if isinstance(module, Stage)]
    bodies: list[nn.Module] = [stage.body for stage in stages if isinstance(stage.body, nn.Sequential)]
    return bodies or [*reversible_units(model)]


def steps_of(unit: ReversibleSequence) -> list[list[nn.Module]]:
    """Return the branches of each step of a unit."""
    width = unit.scheme.fields_per_step
    return [list(unit.fields[start : start + width]) for start in range(0, len(unit.fields), width)]


def first_not_finite(model: nn.Module) -> str | None:
    """Return the name of the first weight or statistic that holds NaN or infinity."""
    found = (name for name, t in model.state_dict().items() if t.is_floating_point() and not bool(t.isfinite().all()))
    return next(found, None)


def analysis_copy(model: nn.Module, dtype: torch.dtype | None = torch.float64) -> nn.Module:
    """Return a copy in eval mode, under ``store`` without a grid, without gradients; None keeps the model's dtype."""
    model = unwrapped(model)
    walked_units(model)
    name = first_not_finite(model)
    if name is not None:
        raise ValueError(f"the weights of {type(model).__name__} hold NaN or infinity, first in {name!r}")
    clone = copy.deepcopy(model).requires_grad_(False)
    for name, unit in list(clone.named_modules(remove_duplicate=False)):
        if isinstance(unit, ReversibleSequence):
            stored = unit.with_strategy(backprop="store", exact=False, anchor_every=None)
            if name:
                clone.set_submodule(name, stored)
            else:
                clone = stored
    return clone.eval() if dtype is None else clone.eval().to(dtype)


@torch.no_grad()
def calibrate_batch_norm(model: nn.Module, images: Tensor) -> int:
    """Give batch norms of an `analysis_copy` that have seen no data the statistics of `images`; returns their number.

    Untrained running statistics (mean 0, variance 1) normalise nothing, and the network would not be the one that trains.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    fresh = [norm for norm in norms if norm.num_batches_tracked is not None and not int(norm.num_batches_tracked)]
    for norm in fresh:
        norm.train()
        norm.momentum = 1.0
    if fresh:
        model(images)
        model.eval()
    return len(fresh)


def prepared(model: nn.Module, images: Tensor, dtype: torch.dtype | None = torch.float64) -> tuple[nn.Module, Tensor]:
    """Return an `analysis_copy` with its batch norms calibrated on `images`, and the images in its dtype."""
    copied = analysis_copy(model, dtype)
    images = images.to(next(copied.parameters()).dtype)
    calibrate_batch_norm(copied, images)
    return copied, images


def walk(model: nn.Module, x: Any, visit: Visitor) -> Any:
    """Return model(x), calling `visit` at every depth. `model` should be an `analysis_copy`; x may be a dual tensor."""
    units = walked_units(model)
    place = Place(-1, 0, 0, 0.0, "enter")

    def visited(kind: str, unit: ReversibleSequence | None, state: OpenState) -> Any:
        nonlocal place
        place = replace(place, kind=kind)
        parts = members(state)
        changed = visit(place, unit, parts) or parts
        return changed if len(changed) == 2 else (None, *changed)

    def run(unit: ReversibleSequence, x: Tensor | State, *, return_state: bool = False, **kwargs: Any) -> Any:
        """Compute ``unit(x)`` step by step."""
        nonlocal place
        scheme = unit.scheme
        place = replace(place, unit=place.unit + 1, step=0)
        states: Any = unit.states(x, **kwargs)
        state = visited("enter", unit, next(states))
        for index in range(1, len(unit.fields) + 1):
            state = states.send(state)
            if index % scheme.fields_per_step == 0:
                place = replace(place, step=place.step + 1, depth=place.depth + 1, time=place.time + scheme.h)
                state = visited("step", unit, state)
        if return_state:  # the pair goes on, so the pair is what leaves
            state = visited("leave", unit, state)
            return scheme.readout(state, unit.split_dim), state
        return visited("leave", unit, (None, scheme.readout(state, unit.split_dim)))[1]

    def run_blocks(body: nn.Sequential, x: Tensor) -> Tensor:
        """Compute a ResNet's ``body(x)`` block by block; a first block that changes the shape is a transition."""
        nonlocal place
        place = replace(place, unit=place.unit + 1, step=0)
        blocks, y = list(body), body[0](x)
        if y.shape != x.shape:
            blocks, x = blocks[1:], y
        x = visited("enter", None, (None, x))[1]
        for block in blocks:
            place = replace(place, step=place.step + 1, depth=place.depth + 1, time=place.time + 1.0)
            x = visited("step", None, (None, block(x)))[1]
        return visited("leave", None, (None, x))[1]

    for unit in units:
        unit.__dict__["forward"] = functools.partial(run if isinstance(unit, ReversibleSequence) else run_blocks, unit)
    try:
        y = model(x)
    finally:
        for unit in units:
            del unit.__dict__["forward"]
    if isinstance(y, Tensor):
        visit(replace(place, kind="output"), None, (y,))
    return y


def unit_states(model: nn.Module, images: Tensor) -> list[tuple[ReversibleSequence, list[Parts]]]:
    """Return every unit with its states: at the entrance and after each step, the entrance as the unit's input."""
    found: list[tuple[ReversibleSequence, list[Parts]]] = []

    def visit(place: Place, unit: ReversibleSequence | None, parts: Parts) -> None:
        if unit is not None and place.kind == "enter":
            found.append((unit, [parts]))
        elif unit is not None and place.kind == "step":
            found[-1][1].append(parts)

    with torch.no_grad():
        walk(model, images, visit)
    return found


def unit_inputs(model: nn.Module, images: Tensor) -> list[tuple[ReversibleSequence, Tensor]]:
    """Return every unit with its input, as the one tensor that ``unit(x)`` takes."""
    return [
        (unit, unit.scheme.undo_init(cast(State, parts), unit.split_dim) if unit.scheme.splits else parts[-1])
        for unit, (parts, *_) in unit_states(model, images)
    ]


def members(state: OpenState) -> Parts:
    """Return the tensors of a state: two, or one before a scheme on one tensor has started."""
    return (state[1],) if state[0] is None else (state[0], state[1])


def pair_scale(unit: ReversibleSequence | None, parts: Parts) -> float:
    """Return √½ for two successive states of a one-tensor scheme, else 1.

    With it a state at rest has the norm of its tensor, and entering and leaving the pair neither adds nor takes.
    """
    return 0.5**0.5 if len(parts) == 2 and unit is not None and not unit.scheme.splits else 1.0


def flatten_state(unit: ReversibleSequence | None, parts: Parts) -> Tensor:
    """Return the state as one vector a sample, shape (batch, n), times `pair_scale`."""
    return torch.cat([part.flatten(1) for part in parts], dim=1) * pair_scale(unit, parts)


def unflatten_state(unit: ReversibleSequence | None, vector: Tensor, like: Parts) -> Parts:
    """Return the inverse of `flatten_state`."""
    pieces = (vector / pair_scale(unit, like)).split([part[0].numel() for part in like], dim=1)
    return tuple(piece.reshape(part.shape) for piece, part in zip(pieces, like, strict=True))
