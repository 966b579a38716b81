"""Replay broken on purpose, in ten ways: the walk back notices each by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import revode.engine.replay
import revode.engine.step
from revode import MidPoint, ReversalError, ReversibleSequence, SymmetricField
from revode.engine.branch import BranchError, Replayed
from revode.engine.call import Arguments, Autocast
from revode.schemes import Coupling

Patch = pytest.MonkeyPatch


def layers(*more: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 8), *(make() for make in more), nn.Tanh())


class Halving(nn.Module):
    """Multiplies by a buffer that each call halves."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, q: Tensor) -> Tensor:
        self.scale.mul_(0.5)
        return torch.tanh(self.mix(q)) * self.scale


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, q: Tensor, shift: Tensor | None = None) -> Tensor:
        u = self.mix(q)
        return torch.tanh(u if shift is None else u + shift)


def hooked() -> nn.Module:
    branch = layers()()
    branch.register_forward_hook(lambda module, inputs, output: 2.0 * output)
    return branch


def no_restoring_of_noise(patch: Patch) -> None:
    patch.setattr(revode.engine.replay, "drawn_again", lambda draws: contextlib.nullcontext())


def no_restoring_of_buffers(patch: Patch) -> None:
    patch.setattr(revode.engine.replay, "_lent", lambda tensors: contextlib.nullcontext())


def no_restoring_of_modes(patch: Patch) -> None:
    patch.setattr(revode.engine.replay, "_training_modes", lambda *_: contextlib.nullcontext())


def no_restoring_of_autocast(patch: Patch) -> None:
    patch.setattr(Autocast, "restore", lambda self: contextlib.nullcontext())


def other_parameters(patch: Patch) -> None:
    def leaves(self: Replayed, wanted: bool) -> Any:
        lent = {name: (1.5 * p.detach()).requires_grad_() for name, p in self.parameters.items()}
        return list(lent.values()), lent

    patch.setattr(Replayed, "_leaves", leaves)


def another_order(patch: Patch) -> None:
    original = Replayed.call
    branches: dict[int, nn.Module] = {}

    def call(self: Replayed, q: Tensor, kwargs: dict[str, Any]) -> Any:
        branches[self.index] = self.branch
        if torch._C._current_graph_task_id() == -1:
            return original(self, q, kwargs)
        return branches[max(0, self.index - 1)](q, **kwargs)

    patch.setattr(Replayed, "call", call)


def no_grid_on_the_way_back(patch: Patch) -> None:
    original = Coupling.reverse
    patch.setattr(Coupling, "reverse", lambda self, q, q_next, u, *_: original(self, q, q_next, u))


def other_arguments(patch: Patch) -> None:
    original = Arguments.tracked

    def tracked(self: Arguments, wanted: bool) -> Any:
        given, leaves = original(self, wanted)
        return {name: 2.0 * value for name, value in given.items()}, leaves

    patch.setattr(Arguments, "tracked", tracked)


def hooks_left_out(patch: Patch) -> None:
    patch.setattr(revode.engine.replay, "_recall", lambda branch, call, q, kwargs, lent: branch.forward(q, **kwargs))


def other_strides(patch: Patch) -> None:
    original = revode.engine.step.retreat
    patch.setattr(revode.engine.step, "retreat", lambda *args, **kwargs: original(*args, **kwargs).contiguous())


MUTATIONS: dict[Callable[[Patch], None], tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    no_restoring_of_noise: (layers(lambda: nn.Dropout(0.2)), {}),
    no_restoring_of_buffers: (Halving, {}),
    no_restoring_of_modes: (layers(lambda: nn.BatchNorm1d(8)), {}),
    no_restoring_of_autocast: (layers(), {"exact": True}),
    other_parameters: (layers(), {}),
    another_order: (layers(), {}),
    no_grid_on_the_way_back: (layers(), {"exact": True}),
    other_arguments: (Shifted, {}),
    hooks_left_out: (hooked, {}),
    other_strides: (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.BatchNorm2d(8)),
        {"exact": True},
    ),
}


def step(make: Callable[[], nn.Module], options: dict[str, Any], mutation: Any) -> None:
    torch.manual_seed(0)
    sequence = ReversibleSequence([make() for _ in range(6)], MidPoint(h=0.3), **options)
    x = torch.randn(16, 8)
    if mutation is other_strides:
        x = torch.randn(4, 8, 7, 5).contiguous(memory_format=torch.channels_last)
    kwargs = {"shift": torch.randn(8)} if make is Shifted else {}
    with torch.autocast("cpu", torch.bfloat16, enabled=mutation is no_restoring_of_autocast):
        loss = sequence(x, **kwargs).square().sum()
    if mutation is no_restoring_of_modes:
        sequence.eval()
    loss.backward()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_walk_back_notices(mutation: Callable[[Patch], None], monkeypatch: Patch) -> None:
    make, options = MUTATIONS[mutation]
    step(make, options, mutation)  # as it is, it says nothing
    mutation(monkeypatch)
    noticed_before = mutation is another_order  # as parameters that are not the branch's own
    with pytest.raises(BranchError if noticed_before else ReversalError):
        step(make, options, mutation)


def test_a_field_that_knows_its_product_is_noticed_too(monkeypatch: Patch) -> None:
    original = SymmetricField.vjp

    def vjp(self: SymmetricField, q: Tensor, *args: Any) -> Any:
        return original(self, 1.01 * q, *args)

    sequence = ReversibleSequence([SymmetricField(8) for _ in range(6)], MidPoint(h=0.3), exact=True)
    monkeypatch.setattr(SymmetricField, "vjp", vjp)
    with pytest.raises(ReversalError, match="missed the state"):
        sequence(torch.randn(2, 8, 5, 5)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_zero", [0, 8])
def test_a_state_of_equal_parts_is_no_false_alarm(num_zero: int, dtype: torch.dtype) -> None:
    """Their signs can cancel, so that the fingerprint is nothing but rounding: a stem that repeats one channel makes such."""
    image = torch.randn(1, 1, 64, 64, dtype=dtype)
    x = torch.cat([image.expand(-1, 8, -1, -1), torch.zeros(1, num_zero, 64, 64, dtype=dtype)], 1)
    sequence = ReversibleSequence([SymmetricField(8 + num_zero) for _ in range(4)], MidPoint(h=0.1)).to(dtype)
    sequence(x).square().mean().backward()
