"""Diagnosis of a broken training: run the network once more on the batch that broke it, and find the first non-finite number.

States enter branches, so hooks on the branches see the course of the signal over depth.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode_lab.training.job import Job

if TYPE_CHECKING:
    from revode_lab.stability import LayerBound

_CUSTOMARY = 0.1
"""The learning rate of most recipes: where one is far above it, a third of it would help nobody."""


class Diverged(RuntimeError):
    """Loss or gradient is not a number any more, or states left the range of the exact grid; `diagnosis` says why."""

    def __init__(self, step: int, what: str, diagnosis: str, folder: Path) -> None:
        self.step = step
        self.diagnosis = diagnosis
        self.folder = folder
        super().__init__(f"training diverged at step {step}: {what}")


def diagnose(job: Job, indices: Tensor, epoch: int, step: int, loss: float) -> str:
    """Say what broke first when the network met these images with this loss, and the likely cause; a sentence a line."""
    if _first_broken(job.model.named_parameters()):
        return diagnose_weights(job, step)
    images, _ = job.images(indices, epoch)
    course, broken = _signal(copy.deepcopy(job.model), images)
    if broken:
        first = f"first: {broken}"
    elif not math.isfinite(loss):
        first = "first: the loss; all states and class scores are finite but too far apart"
    else:
        gradients = reversed([(name, p.grad) for name, p in job.model.named_parameters()])
        first = f"first: the gradient of {_first_broken(gradients) or 'some parameter'}"
    return "\n".join([first, *_growth(course), *_causes(job, images, step)])


def diagnose_weights(job: Job, step: int) -> str:
    """Say what the weights alone tell, and the likely cause; a sentence a line."""
    broken = _first_broken(job.model.named_parameters())
    first = [f"first: the parameter {broken} is not finite"] if broken else []
    return "\n".join([*first, _learning_rate_cause(job, step)])


def _first_broken(tensors: Iterable[tuple[str, Tensor | None]]) -> str | None:
    return next((name for name, tensor in tensors if tensor is not None and not torch.isfinite(tensor).all()), None)


Course = list[tuple[str, str, float]]
"""Places in the order they are visited, what was looked at there, and its largest magnitude."""


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return every branch by its place, and the modules between sequences by their names."""
    inside: set[nn.Module] = set()
    unit = 0
    for name, module in model.named_modules():
        if module in inside:
            continue
        if isinstance(module, ReversibleSequence):
            unit += 1
            inside.update(module.modules())
            width = module.scheme.fields_per_step
            for index, field in enumerate(module.fields):
                half = f", half {index % width + 1}" if width > 1 else ""
                yield f"unit {unit}, block {index // width + 1}{half}", field
        elif name and not list(module.children()):
            yield name, module


@torch.no_grad()
def _signal(model: nn.Module, images: Tensor) -> tuple[Course, str | None]:
    """Return the course of the signal, and the first quantity that is not finite."""
    course: Course = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for quantity, value in (("input", inputs[0]), ("output", output)):
            if isinstance(value, Tensor) and value.numel():
                course.append((name, quantity, float(value.abs().max())))

    for name, module in _places(model):
        module.register_forward_hook(functools.partial(look, name))
    refusal = None
    try:
        scores = model.train()(images)
        course.append(("the network", "class scores", float(scores.abs().max())))
    except ValueError as error:  # the exact grid refuses what is out of its range
        refusal = str(error)
    broken = (f"the {quantity} of {name}" for name, quantity, size in course if not math.isfinite(size))
    return course, next(broken, refusal)


def _growth(course: Course) -> list[str]:
    """Say how the signal grew within the unit where it grew most."""
    units: dict[str, list[float]] = {}
    for name, quantity, size in course:
        if name.startswith("unit ") and quantity == "input":
            units.setdefault(name.split(",")[0], []).append(size)
    factors = {
        name: sizes[-1] / sizes[0] if math.isfinite(sizes[-1]) else math.inf
        for name, sizes in units.items()
        if sizes[0] > 0
    }
    if not factors:
        return []
    name = max(factors, key=lambda key: factors[key])
    sizes = units[name]
    return [f"signal: from {sizes[0]:.3g} to {sizes[-1]:.3g} over the {len(sizes)} branches of {name}"]


def _causes(job: Job, images: Tensor, step: int) -> list[str]:
    """Return the likely cause first: h if it was above its bound from the start, else the rate that made the weights grow."""
    worst, rate = _tightest(job.model, images), _learning_rate_cause(job, step)
    if worst is None:
        return [rate]
    place = f"unit {worst.unit + 1}, block {worst.step + 1}"
    if worst.usage <= 1:
        return [
            rate,
            f"h = {worst.h:g} is within its bound {worst.sharp:.3g} (tightest at {place}), so h is not the cause",
        ]
    with job.group.forked_randomness():
        first = _tightest(job.fresh_model(), images)
    if first is not None and first.usage <= 1:
        grown = f"h = {first.h:g} was within its bound {first.sharp:.3g} at first; the weights grew until"
        return [f"likely cause: {rate}", f"{grown} it was {worst.sharp:.3g} at {place}"]
    return [
        f"likely cause: h = {worst.h:g} is above its bound {worst.sharp:.3g} at {place}; "
        f"use a smaller h (option h={0.9 * worst.sharp:.2g}) or more weight decay",
        rate,
    ]


def _tightest(model: nn.Module, images: Tensor) -> LayerBound | None:
    """Return the step that uses most of its bound, where bounds can be computed."""
    try:
        from revode_lab.stability.bounds import largest_usage, step_bounds

        model = copy.deepcopy(model)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.reset_running_stats()  # the broken batch has spoilt them
        return largest_usage(step_bounds(model, images[:2]))
    except (ImportError, ValueError, RuntimeError, NotImplementedError):
        return None


def _learning_rate_cause(job: Job, step: int) -> str:
    rate = job.learning_rate(step)
    clip = "" if job.config.optimization.clip else " or clip=1"
    lower = min(job.config.optimization.lr / 3, _CUSTOMARY)
    return f"the learning rate was {rate:.3g} at this step; if it rose too fast, try lr={lower:.1g}{clip}"
