"""A network watched over its depth: why a training broke, how well states are reconstructed, how large their gradients are.

States enter branches, so hooks on the branches see the course of the signal over depth. When a training has broken, the network
is run once more on the batch that broke it: the first place and quantity that is not a number tells the likely cause.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode.training.checkpoint import StepResult
from revode.training.job import Job
from revode.training.planning import use_strategy


class Diverged(RuntimeError):
    """Loss or gradient is not a number any more, or states left the range of the exact grid.

    Attributes:
        step: Updates done before it broke.
        diagnosis: What broke first and why, in sentences.
    """

    def __init__(self, step: int, what: str, diagnosis: str, folder: Path) -> None:
        self.step = step
        self.diagnosis = diagnosis
        self.folder = folder
        super().__init__(f"training diverged at step {step}: {what}")


def diagnose(job: Job, indices: Tensor, epoch: int, step: int, result: StepResult) -> str:
    """What broke first when the network met these images, and the likely cause; a sentence a line."""
    images, labels = job.images(indices, epoch)
    if _first_broken(job.model.named_parameters()):
        return diagnose_weights(job, step)
    model = copy.deepcopy(job.model)
    course, broken = _signal(model, images)
    if broken:
        first = f"first: {broken}"
    elif not math.isfinite(result.loss_sum):
        first = "first: the loss; all states and class scores are finite but too far apart"
    else:
        first = f"first: the gradient of {_first_broken_gradient(model, images, labels) or 'some parameter'}"
    lines = [first, *_growth(course), *_bound_cause(job.model, images)]
    return "\n".join([*lines, _learning_rate_cause(job, step)])


def diagnose_weights(job: Job, step: int) -> str:
    """What the weights alone tell, and the likely cause; a sentence a line."""
    broken = _first_broken(job.model.named_parameters())
    first = [f"first: the parameter {broken} is not finite"] if broken else []
    return "\n".join([*first, _learning_rate_cause(job, step)])


def _first_broken(tensors: Any) -> str | None:
    return next((name for name, tensor in tensors if tensor is not None and not torch.isfinite(tensor).all()), None)


Course = list[tuple[str, float]]
"""Places in the order they are visited, with the largest magnitude of what enters."""


def places(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every branch by its place, and the modules between sequences by their names."""
    inside: set[int] = set()
    unit = 0
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        if isinstance(module, ReversibleSequence):
            unit += 1
            inside.update(id(part) for part in module.modules())
            width = module.scheme.fields_per_step
            for index, field in enumerate(module.fields):
                half = f", half {index % width + 1}" if width > 1 else ""
                yield f"unit {unit}, block {index // width + 1}{half}", field
        elif not any(True for _ in module.children()) and name:
            yield name, module


@torch.no_grad()
def _signal(model: nn.Module, images: Tensor) -> tuple[Course, str | None]:
    """The course of the signal, and the first quantity that is not finite."""
    course: Course = []
    broken: list[str] = []

    def look(name: str, quantity: str, value: Any) -> float:
        if not isinstance(value, Tensor) or not value.numel():
            return 0.0
        magnitude = float(value.abs().max())
        if not math.isfinite(magnitude):
            broken.append(f"the {quantity} of {name}")
        return magnitude

    def before(name: str) -> Any:
        return lambda module, inputs: course.append((name, look(name, "input", inputs[0] if inputs else None)))

    def after(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:  # a hook's value would replace the output
            look(name, "output", output)

        return hook

    for name, module in places(model):
        module.register_forward_pre_hook(before(name))
        module.register_forward_hook(after(name))
    try:
        look("the network", "class scores", model.train()(images))
    except ValueError as error:  # the exact grid refuses what is out of its range
        broken.append(f"{error}")
    return course, broken[0] if broken else None


def _first_broken_gradient(model: nn.Module, images: Tensor, labels: Tensor) -> str | None:
    use_strategy(model, "store")
    F.cross_entropy(model(images), labels).backward()
    return _first_broken(reversed([(name, p.grad) for name, p in model.named_parameters()]))


def _growth(course: Course) -> list[str]:
    """How the signal grew within the unit where it grew most."""
    units: dict[str, list[float]] = {}
    for name, magnitude in course:
        if name.startswith("unit "):
            units.setdefault(name.split(",")[0], []).append(magnitude)
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


def _bound_cause(model: nn.Module, images: Tensor) -> list[str]:
    """The step size against its bound, where that can be computed."""
    try:
        from revode.stability.bounds import step_bounds

        model = copy.deepcopy(model)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.reset_running_stats()  # the broken batch has spoilt them
        bounds = step_bounds(model, images[:2])
    except (ImportError, ValueError, RuntimeError, NotImplementedError):
        return []
    if not bounds:
        return []
    worst = max(bounds, key=lambda bound: bound.usage)
    place = f"unit {worst.unit + 1}, block {worst.step + 1}"
    if worst.usage > 1:
        return [
            f"likely cause: h = {worst.h:g} is above its bound {worst.sharp:.3g} at {place}; "
            f"use a smaller h (option h={0.9 * worst.sharp:.2g}) or more weight decay"
        ]
    return [f"h = {worst.h:g} is within its bound {worst.sharp:.3g} (tightest at {place}), so h is not the cause"]


def _learning_rate_cause(job: Job, step: int) -> str:
    rate = job.learning_rate(step)
    clip = "" if job.config.optimization.clip else " or clip=1"
    lower = job.config.optimization.lr / 3
    return f"the learning rate was {rate:.3g} at this step; if it rose too fast, try lr={lower:.1g}{clip}"


@dataclass
class UnitProfile:
    """One reversible sequence, branch by branch from its input to its output.

    Attributes:
        name: ``unit 1``, ...
        reconstruction_error: ‖state computed back - state‖ / ‖state‖, after walking back from the end; empty where the
            final pair alone does not tell the way back.
        gradient_norm: ‖∂loss/∂state‖.
    """

    name: str
    reconstruction_error: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)


def depth_profile(model: nn.Module, images: Tensor, labels: Tensor) -> list[UnitProfile]:
    """The profile of every reversible sequence of `model` on these images; empty if it has none."""
    model = copy.deepcopy(model).eval()
    use_strategy(model, "store")
    for parameter in model.parameters():
        parameter.grad = None
    sequences = [module for module in model.modules() if isinstance(module, ReversibleSequence)]
    watches = [_Watch(f"unit {number}", sequence) for number, sequence in enumerate(sequences, 1)]
    F.cross_entropy(model(images), labels).backward()
    return [watch.profile() for watch in watches]


class _Watch:
    """Hooks on one sequence that keep the state entering each branch, and the norm of its gradient."""

    def __init__(self, name: str, sequence: ReversibleSequence) -> None:
        self.name = name
        self.sequence = sequence
        self.states: list[Tensor] = []
        self.gradient_norm = [0.0] * len(sequence.fields)
        self.handles = [sequence.register_forward_pre_hook(self._enter)]
        for index, branch in enumerate(sequence.fields):
            self.handles.append(branch.register_forward_pre_hook(self._hook(index)))

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self.input = inputs[0]

    def _hook(self, index: int) -> Any:
        def look(module: nn.Module, inputs: Any) -> None:
            q = inputs[0]
            self.states.append(q.detach())
            if q.requires_grad:
                q.register_hook(lambda grad: self.gradient_norm.__setitem__(index, float(grad.norm())))

        return look

    def profile(self) -> UnitProfile:
        """The profile, once forward and backward have run."""
        for handle in self.handles:
            handle.remove()
        return UnitProfile(self.name, self._reconstruction_error(), self.gradient_norm)

    @torch.no_grad()
    def _reconstruction_error(self) -> list[float]:
        """Walk back from the final pair and compare with what went forward; the state before branch 1 is the first."""
        _, state = self.sequence(_detached(self.input), return_state=True)
        try:
            back = [p for p, _ in self.sequence.states_back(state)][1 : len(self.states)]
        except ValueError:  # the final pair alone does not tell the way back
            return []
        errors = [
            float((p - expected).norm() / expected.norm().clamp(min=1e-30))
            for p, expected in zip(back, reversed(self.states[:-1]), strict=True)
            if p is not None
        ]
        return errors[::-1]


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else tuple(part.detach() for part in x)
