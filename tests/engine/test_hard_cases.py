"""What a reading of the engine by strangers brought to light: each was wrong, or silent, once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from branches import Recurrent
from gradients import compare_with_store
from test_saved_memory import saved_bytes
from torch import Tensor, nn

import revode
from revode import Leapfrog, MidPoint, Momentum, ReversibleSequence


def layer(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def sequence_of(make: Callable[[], nn.Module], number: int = 6, **options: Any) -> ReversibleSequence:
    return ReversibleSequence([make() for _ in range(number)], MidPoint(h=0.2), **options)


HELD: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.random.default_rng(0),
    "numpy, another generator": lambda: np.random.Generator(np.random.MT19937(0)),
    "numpy, old style": lambda: np.random.RandomState(0),
    "random": lambda: random.Random(0),
    "torch, in a list": lambda: [torch.Generator().manual_seed(0)],
    "torch, in a dict": lambda: {"noise": torch.Generator().manual_seed(0)},
}


def draw(source: Any) -> float:
    if isinstance(source, list | dict):
        return draw(source[0] if isinstance(source, list) else source["noise"])
    if isinstance(source, torch.Generator):
        return torch.rand((), generator=source).item()
    if isinstance(source, np.random.RandomState):
        return source.normal()  # of which it keeps one in store
    return source.random()


class Noisy(nn.Module):
    """A branch with noise from what it holds, or from a generator it is given."""

    def __init__(self, source: Any = None) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.source = source

    def forward(self, q: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.tanh(self.mix(q)) * draw(self.source if generator is None else generator)


@pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
@pytest.mark.parametrize("kind", HELD)
def test_noise_from_a_generator_that_a_branch_holds_repeats_itself(kind: str, backprop: str) -> None:
    def make(**options: Any) -> ReversibleSequence:
        return sequence_of(lambda: Noisy(HELD[kind]()), **({"backprop": backprop} | options)).double()

    compare_with_store(make, torch.randn(3, 4, dtype=torch.float64))


def test_noise_from_a_generator_among_the_arguments_repeats_itself() -> None:
    grads = []
    for backprop in ("reversible", "store"):
        torch.manual_seed(0)
        sequence = sequence_of(Noisy, backprop=backprop).double()
        x = torch.ones(3, 4, dtype=torch.float64)
        sequence(x, generator=torch.Generator().manual_seed(7)).square().sum().backward()
        grads.append([parameter.grad for parameter in sequence.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-14)


class TestInverse:
    def test_a_branch_that_draws_is_refused_and_the_stream_left(self) -> None:
        sequence = sequence_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
        _, state = sequence(torch.randn(2, 4), return_state=True)
        before = torch.get_rng_state()
        with pytest.raises(ValueError, match=r"branch 5 .*random numbers.*eval\(\)"):
            sequence.inverse(state)
        assert torch.equal(torch.get_rng_state(), before)
        x = torch.randn(2, 4)
        _, state = sequence.eval()(x, return_state=True)
        torch.testing.assert_close(sequence.inverse(state), x)

    def test_buffers_of_any_kind_stay(self) -> None:
        class Counting(nn.BatchNorm1d):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(input)

        sequence = sequence_of(lambda: nn.Sequential(nn.Linear(4, 4), Counting(4)))
        _, state = sequence(torch.randn(5, 4), return_state=True)
        before = {name: buffer.clone() for name, buffer in sequence.named_buffers()}
        sequence.inverse(state)
        assert all(torch.equal(buffer, before[name]) for name, buffer in sequence.named_buffers())

    def test_without_gradients_it_keeps_nothing(self) -> None:
        sequence = sequence_of(layer)
        _, state = sequence(torch.randn(2, 4), return_state=True)
        with torch.no_grad():
            assert not sequence.inverse(state).requires_grad


def recurrent() -> nn.Module:
    return Recurrent(nn.LSTM(8, 8, batch_first=True))


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


@pytest.mark.parametrize("make", [recurrent, transformer])
@pytest.mark.parametrize("exact", [False, True])
def test_kernels_that_depend_on_whether_gradients_are_wanted_are_those_of_store(
    make: Callable[[], nn.Module], exact: bool
) -> None:
    found = []
    for backprop in ("reversible", "checkpoint", "store"):
        torch.manual_seed(0)
        sequence = sequence_of(make, 12, backprop=backprop, exact=exact)
        y = sequence(torch.randn(3, 5, 8))
        y.square().sum().backward()
        found.append((y.detach(), [parameter.grad for parameter in sequence.parameters()]))
    for y, grads in found[:2]:
        assert torch.equal(y, found[2][0])
        if exact:
            assert all(torch.equal(a, b) for a, b in zip(grads, found[2][1], strict=True))


@pytest.mark.parametrize("backprop", ["reversible", "checkpoint", "store"])
def test_parameters_may_be_frozen_before_the_backward(backprop: str) -> None:
    torch.manual_seed(0)
    sequence = sequence_of(layer, backprop=backprop)
    x = torch.ones(2, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(sequence(x).sum(), x)
    loss = sequence(x).sum()
    sequence.requires_grad_(False)
    loss.backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        (Momentum(gamma=0.9), {}),
        (Leapfrog(h=0.1, damping=0.3), {}),
        (MidPoint(h=0.1), {"anchor_every": 5}),
        (MidPoint(h=0.1), {}),
    ],
)
def test_a_budget_is_kept_with_anchors_too_or_refused(scheme: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    outcomes = set()
    for budget in (40_000, 400_000, 1_000_000, 3_000_000):
        fields = [layer(64) for _ in range(50)]
        sequence = ReversibleSequence(fields, scheme, memory_budget=budget, **options)
        try:
            kept = saved_bytes(sequence, x)
        except ValueError as error:
            outcomes.add("refused" if "too small" in str(error) else str(error))
        else:
            assert kept <= budget
            outcomes.add("kept")
    assert outcomes == {"refused", "kept"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_states_are_warned_of(dtype: torch.dtype) -> None:
    x = torch.randn(2, 4, dtype=dtype)
    with pytest.warns(UserWarning, match="keep the states in float32"):
        sequence_of(layer).to(dtype)(x)
    for options in ({"backprop": "checkpoint"}, {"backprop": "store"}, {"anchor_every": 1}):
        sequence_of(layer, **options).to(dtype)(x)
    with torch.no_grad():
        sequence_of(layer).to(dtype)(x)


class TestMessages:
    def test_a_keyword_argument_that_a_branch_does_not_take(self) -> None:
        with pytest.raises(TypeError, match=r"branch 0 \(Sequential\).*'mask'.*every branch is given.* mask"):
            sequence_of(layer)(torch.randn(2, 4), mask=1)

    def test_a_width_that_attention_does_not_have(self) -> None:
        class Attending(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

            def forward(self, q: Tensor) -> Tensor:
                return self.attention(q, q, q)[0]

        with pytest.raises(ValueError, match=r"branch 0 \(Attending\) failed on a state of shape \(2, 3, 6\)"):
            sequence_of(Attending)(torch.randn(2, 3, 6))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_sequence_can_be_traced_with_gradients_enabled() -> None:
    sequence = sequence_of(layer).eval()
    x = torch.randn(2, 4)
    torch.testing.assert_close(torch.jit.trace(sequence, x)(x), sequence(x))


def test_rooms_are_attributes_of_the_package() -> None:
    assert revode.stability.suggest_h
    assert revode.training.configure
    assert revode.data.load
    assert {"stability", "training"} <= set(dir(revode))
