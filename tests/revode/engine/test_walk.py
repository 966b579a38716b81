"""The walk: one autograd node per branch, right in every order of backward; gradients are finished on the way."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import Allocations, storages
from branches import SCHEMES, width
from torch import Tensor, nn

from revode import BDIA, AdditiveCoupling, Leapfrog, MidPoint, Momentum, ReversibleSequence, Verlet, Walk


def layer(features: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(features, features), nn.Tanh())


def layers(number: int, features: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer(features).double() for _ in range(number)]


def walked(walk: Walk, branches: list[nn.Module], x: Tensor, **kwargs: Any) -> list[Any]:
    """The pairs behind each branch."""
    states = [walk.enter(x)]
    for branch in branches:
        states.append(walk.step(branch, states[-1], **kwargs))
    return states[1:]


def gradients(loss: Tensor, x: Tensor, branches: list[nn.Module]) -> list[Tensor | None]:
    parameters = [p for branch in branches for p in branch.parameters()]
    return list(torch.autograd.grad(loss, [x, *parameters], allow_unused=True))


def assert_equal(ours: list[Tensor | None], theirs: list[Tensor | None], tolerance: float = 1e-12) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert float((a - b).norm()) <= tolerance * (1.0 + float(b.norm()))


LOSSES = {
    "the end": lambda states: states[-1][1].square().sum(),
    "the older member": lambda states: states[-1][0].sin().sum(),
    "a state in the middle": lambda states: states[2][1].square().sum(),
    "all states": lambda states: sum((k + 1) * state[1].cos().sum() for k, state in enumerate(states)),
}


class TestLoopsOfTheUsersOwn:
    @pytest.mark.parametrize("options", [{}, {"exact": True}, {"anchor_every": 2}, {"backprop": "checkpoint"}], ids=str)
    @pytest.mark.parametrize("name", SCHEMES)
    def test_losses_on_any_states_have_the_gradients_of_store(self, name: str, options: dict[str, Any]) -> None:
        scheme = SCHEMES[name]()
        if options.get("exact") and not scheme.invertible_exactly:
            pytest.skip("the scheme has no exact mode")
        branches = layers(6, width(scheme, 4))
        stored = {key: value for key, value in options.items() if key == "exact"} | {"backprop": "store"}
        for name_of_loss, loss in LOSSES.items():
            found = []
            for chosen in (options, stored):
                x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
                torch.manual_seed(3)  # for schemes that draw
                found.append(gradients(loss(walked(Walk(scheme, **chosen), branches, x)), x, branches))
            to_the_bit = options.get("exact") and name_of_loss == "the end"  # outside uses are added in another order
            assert_equal(*found, tolerance=0.0 if to_the_bit else 1e-11)

    def test_it_is_the_sequence_of_the_same_branches(self) -> None:
        branches, x = layers(5), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        walk = Walk(Leapfrog(h=0.3))
        ours = walk.leave(walked(walk, branches, x)[-1])
        theirs = ReversibleSequence(branches, Leapfrog(h=0.3))(x)
        assert torch.equal(ours, theirs)
        assert_equal(gradients(ours.sum(), x, branches), gradients(theirs.sum(), x, branches))

    def test_arguments_of_each_step_have_gradients(self) -> None:
        class Shifted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = layer()

            def forward(self, q: Tensor, shift: Tensor) -> Tensor:
                return self.mix(q) + shift

        torch.manual_seed(0)
        branches, x = [Shifted().double() for _ in range(4)], torch.randn(3, 4, dtype=torch.float64)
        found = []
        for backprop in ("reversible", "store"):
            shifts = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
            walk = Walk(MidPoint(h=0.2), backprop=backprop)
            state: Any = walk.enter(x)
            for branch, shift in zip(branches, shifts, strict=True):
                state = walk.step(branch, state, shift=shift.exp())
            found.append(torch.autograd.grad(walk.leave(state).square().sum(), shifts)[0])
        assert_equal([found[0]], [found[1]])

    def test_steps_without_gradients_in_between_begin_a_new_stretch(self) -> None:
        branches, x = layers(6), torch.randn(3, 4, dtype=torch.float64)
        found = []
        for backprop in ("reversible", "store"):
            walk = Walk(MidPoint(h=0.2), backprop=backprop)
            state: Any = walk.enter(x)
            for number, branch in enumerate(branches):
                with torch.set_grad_enabled(number >= 3):
                    state = walk.step(branch, state)
            found.append(gradients(walk.leave(state).sum(), x.requires_grad_(), branches))
        assert_equal(*found)

    def test_going_on_from_an_older_pair_is_right(self) -> None:
        branches, x = layers(4), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        found = []
        for backprop in ("reversible", "store"):
            walk = Walk(MidPoint(h=0.2), backprop=backprop)
            states = walked(walk, branches, x)
            again = walk.step(branches[0], states[1])
            found.append(gradients((again[1] * states[-1][1]).sum(), x, branches))
        assert_equal(*found)

    @pytest.mark.parametrize("scheme", [MidPoint(h=0.2), Verlet(h=0.2)], ids=repr)
    def test_a_branch_that_failed_can_be_tried_again(self, scheme: Any) -> None:
        class Fails(nn.Module):
            def forward(self, q: Tensor) -> Tensor:
                raise RuntimeError("out of luck")

        branches, x = layers(4, width(scheme, 4)), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        found = []
        for fails in (False, True):
            walk = Walk(scheme)
            state: Any = walk.enter(x)
            for branch in branches:
                if fails:
                    with pytest.raises(RuntimeError, match="out of luck"):
                        walk.step(Fails(), state)
                state = walk.step(branch, state)
            found.append(gradients(walk.leave(state).square().sum(), x, branches))
        assert_equal(*found, tolerance=0.0)

    def test_bad_options_are_one_sentence(self) -> None:
        with pytest.raises(ValueError, match="takes no memory_budget"):
            Walk(MidPoint(), memory_budget=100)
        with pytest.raises(TypeError, match="no option 'exakt'"):
            Walk(MidPoint(), exakt=True)
        with pytest.raises(ValueError, match="exact=True needs a scheme"):
            Walk(Momentum(0.9), exact=True)
        with pytest.raises(ValueError, match="floating-point"):
            Walk(MidPoint()).enter(torch.ones(2, 4, dtype=torch.int64))


class TestOrdersOfBackward:
    def test_a_second_backward_raises_and_a_retained_graph_does_not(self) -> None:
        branches, x = layers(5), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        loss = walked(Walk(MidPoint(h=0.2)), branches, x)[-1][1].square().sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        again = torch.autograd.grad(loss, x)
        assert torch.equal(*first, *again)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, x)

    def test_a_part_of_the_gradients_then_the_rest(self) -> None:
        branches, x = layers(6), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        states = walked(Walk(Leapfrog(h=0.3)), branches, x)
        loss = states[-1][1].square().sum()
        part = torch.autograd.grad(loss, branches[4][0].weight, retain_graph=True)
        by_state = torch.autograd.grad(loss, states[2][1], retain_graph=True)
        whole = gradients(loss, x, branches)
        assert torch.equal(part[0], whole[1 + 2 * 4])
        assert by_state[0].shape == x.shape

    def test_the_loss_in_the_middle_first_then_the_end(self) -> None:
        branches, x = layers(6), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        found = []
        for backprop in ("reversible", "store"):
            states = walked(Walk(MidPoint(h=0.2), backprop=backprop), branches, x)
            x.grad = None
            states[2][1].square().sum().backward(retain_graph=True)
            states[-1][1].square().sum().backward()
            found.append([x.grad])
        assert_equal(*found)

    def test_an_exception_in_a_hook_and_a_second_try(self) -> None:
        branches, x = layers(5), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        walk = Walk(MidPoint(h=0.2))
        states = walked(walk, branches, x)
        loss = states[-1][1].square().sum()
        expected = gradients(walked(Walk(MidPoint(h=0.2)), branches, x)[-1][1].square().sum(), x, branches)

        def fail(grad: Tensor) -> None:
            raise KeyError("once")

        handle = states[2][1].register_hook(fail)
        with pytest.raises(KeyError):
            torch.autograd.grad(loss, x, retain_graph=True)
        handle.remove()
        assert_equal(gradients(loss, x, branches), expected)

    def test_a_state_changed_in_place_raises(self) -> None:
        branches, x = layers(4), torch.randn(3, 4, dtype=torch.float64)
        states = walked(Walk(MidPoint(h=0.2)), branches, x)
        with torch.no_grad():
            states[-1][1].add_(1.0)
        with pytest.raises(RuntimeError, match="modified in place"):
            states[-1][1].sum().backward()

    def test_an_output_of_a_sequence_changed_in_place_raises(self) -> None:
        sequence = ReversibleSequence(layers(4), MidPoint(h=0.2))
        y, state = sequence(torch.randn(3, 4, dtype=torch.float64), return_state=True)
        with torch.no_grad():
            state[1].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


class TestGrain:
    def test_a_gradient_is_gone_before_the_next_branch_is_evaluated(self) -> None:
        branches = layers(6)
        sequence = ReversibleSequence(branches, MidPoint(h=0.2))
        alive: list[weakref.ref[Tensor]] = []
        seen: list[int] = []

        def consume(parameter: Tensor) -> None:
            assert parameter.grad is not None
            alive.append(weakref.ref(parameter.grad))
            with torch.no_grad():
                parameter.sub_(parameter.grad)
            parameter.grad = None

        for branch in branches:
            branch.register_forward_pre_hook(lambda *_: seen.append(sum(ref() is not None for ref in alive)))
            for parameter in branch.parameters():
                parameter.register_post_accumulate_grad_hook(consume)
        loss = sequence(torch.randn(3, 4, dtype=torch.float64)).sum()
        seen.clear()
        loss.backward()
        assert seen == [0] * 6
        assert len(alive) == 12

    @pytest.mark.parametrize("number", [20, 200])
    @pytest.mark.parametrize("scheme", [MidPoint(h=0.01), Leapfrog(h=0.01), AdditiveCoupling()], ids=repr)
    def test_few_states_live_after_forward_and_none_after_backward(self, scheme: Any, number: int) -> None:
        features = 64
        branches = [layer(width(scheme, features)) for _ in range(number)]
        sequence = ReversibleSequence(branches, scheme)
        x = torch.randn(100, features)
        sequence(x).sum().backward()
        with Allocations([x, *sequence.parameters()]) as allocations:
            loss = sequence(x).sum()
        state = x.numel() // (2 if scheme.halves else 1) * x.element_size()
        assert allocations.alive_bytes() <= 3.5 * state
        with Allocations([x, *sequence.parameters()]) as allocations:
            loss = sequence(x).sum()
            loss.backward()
        kept = storages([loss, *(p.grad for p in sequence.parameters() if p.grad is not None)])
        assert allocations.alive() <= kept

    @pytest.mark.parametrize("kind", ["sequence", "walk"])
    def test_a_step_leaves_no_reference_cycles(self, kind: str) -> None:
        branches, x = layers(4), torch.randn(3, 4, dtype=torch.float64)

        def step() -> None:
            if kind == "sequence":
                ReversibleSequence(branches, BDIA())(x).sum().backward()
            else:
                walk = Walk(BDIA())
                walk.leave(walked(walk, branches, x)[-1]).sum().backward()

        step()
        gc.collect()
        gc.disable()
        try:
            step()
            found = gc.collect()
        finally:
            gc.enable()
        assert found <= (40 if kind == "sequence" else 0)  # an nn.Module that is thrown away is one


MEMORY = """
import re, sys
from pathlib import Path
import torch
from torch import nn
from revode import MidPoint, ReversibleSequence

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def consume(parameter):
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-1e-3)
    parameter.grad = None

torch.set_num_threads(1)
sequence = ReversibleSequence([nn.Linear(1024, 1024) for _ in range(30)], MidPoint(0.1))
if sys.argv[1] == "optimizer in backward":
    for parameter in sequence.parameters():
        parameter.register_post_accumulate_grad_hook(consume)
x = torch.randn(64, 1024)
sequence(x).square().mean().backward()
loss = sequence(x).square().mean()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
loss.backward()
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is reset by Linux's /proc"
)
@pytest.mark.parametrize("mode", ["accumulation", "optimizer in backward"])
def test_no_second_copy_of_the_gradients_exists(mode: str) -> None:
    """Of 126 MB of parameters, a backward pass needs the gradients of a few branches at a time."""
    done = subprocess.run([sys.executable, "-c", MEMORY, mode], capture_output=True, text=True, timeout=200, check=True)
    assert float(done.stdout) < 45.0


class Scored(nn.Module):
    """A layer with a score of its own, as a router has."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, q: Tensor) -> tuple[Tensor, Tensor]:
        u = torch.tanh(self.mix(q))
        return u, u.square().mean()


@pytest.mark.parametrize("backprop", ["reversible", "store"])
def test_aux_of_each_step_has_its_gradient(backprop: str) -> None:
    torch.manual_seed(0)
    branches, x = [Scored() for _ in range(4)], torch.randn(3, 4, dtype=torch.float64)
    for branch in branches:
        branch.double()

    def step(backprop: str) -> list[Tensor]:
        walk, total = Walk(MidPoint(0.2), backprop=backprop), torch.zeros((), dtype=x.dtype)
        state = walk.enter(x)
        for branch in branches:
            state, score = walk.step(branch, state, return_aux=True)
            total = total + score
        parameters = [parameter for branch in branches for parameter in branch.parameters()]
        return list(torch.autograd.grad(walk.leave(state).sum() + total, parameters))

    for ours, stored in zip(step(backprop), step("store"), strict=True):
        torch.testing.assert_close(ours, stored, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [2, 3])
def test_a_tensor_in_the_place_of_a_pair_is_refused(size: int) -> None:
    walk, x = Walk(MidPoint(0.1)), torch.randn(size, 4)
    for call in (lambda: walk.step(nn.Linear(4, 4), x), lambda: walk.leave(x), lambda: walk.undo(x)):  # type: ignore[arg-type]
        with pytest.raises(
            ValueError, match=r"state must be the pair .* got a tensor of shape .*: call enter\(x\) first"
        ):
            call()
