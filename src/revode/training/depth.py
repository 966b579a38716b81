"""What happens over the depth of a network: how well states are reconstructed, and how large their gradients are."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode.training.planning import use_strategy


@dataclass
class UnitProfile:
    """One reversible sequence, branch by branch from its input to its output.

    Attributes:
        name: ``unit 1``, ...
        reconstruction_error: ‖state computed back - state‖ / ‖state‖, after walking back from the end.
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
        sequence = self.sequence
        round_to_grid = None if sequence.grid is None else sequence.grid.round
        _, (q, q_next) = sequence(_detached(self.input), return_state=True)
        errors: list[float] = []
        for index in reversed(range(1, len(sequence.fields))):
            u = sequence.fields[index](q)
            p = sequence.scheme.coupling(index).reverse(q, q_next, u, round_to_grid)
            expected = self.states[index - 1]
            errors.append(float((p - expected).norm() / expected.norm().clamp(min=1e-30)))
            q, q_next = p, q
        return errors[::-1]


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else tuple(part.detach() for part in x)
