"""Forty kinds of hidden state in a branch: right, or refused, or noticed; silent only where docs/recomputation.md says so."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gradients import relative_error
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import revode
from revode import BDIA, MidPoint, ReversibleSequence
from revode.memory import graph_bytes

Act = Callable[["Hidden", Tensor], Tensor]
"""What a branch does with its hidden state: (the branch, W q) -> u."""


class Hidden(nn.Module):
    """tanh of what `act` makes of W q, with a place for every kind of state."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.mix, self.weight, self.act = nn.Linear(4, 4), nn.Parameter(torch.randn(4) / 4), act
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("large", torch.ones(5000))
        self.count, self.tensor, self.table, self.items = 0, torch.ones(()), {}, []
        self.generator = torch.Generator().manual_seed(1)
        self.own_random, self.own_numpy = random.Random(1), np.random.default_rng(1)
        self.drop, self.norm, self.slot = nn.Dropout(0.5), nn.BatchNorm1d(4), None
        self.local = threading.local()

    def __deepcopy__(self, memo: Any) -> Hidden:
        raise TypeError("not needed here")

    def forward(self, q: Tensor) -> Tensor:
        return torch.tanh(self.act(self, self.mix(q)))


class Cell:
    value = 1.0


GLOBALS = {"count": 0}
CYCLE = itertools.count()
WORLD = Cell()


def counted(branch: Hidden, u: Tensor) -> Tensor:
    branch.count += 1
    return u * branch.count


def grown_list(branch: Hidden, u: Tensor) -> Tensor:
    branch.items.append(1)
    return u * len(branch.items)


def grown_dict(branch: Hidden, u: Tensor) -> Tensor:
    branch.table[len(branch.table)] = 1
    return u * len(branch.table)


def global_count(branch: Hidden, u: Tensor) -> Tensor:
    GLOBALS["count"] += 1
    return u * GLOBALS["count"]


def class_attribute(branch: Hidden, u: Tensor) -> Tensor:
    Cell.value *= 1.1
    return u * Cell.value


def object_attribute(branch: Hidden, u: Tensor) -> Tensor:
    WORLD.value = WORLD.value * 1.1
    return u * WORLD.value


def iterator(branch: Hidden, u: Tensor) -> Tensor:
    return u * (1 + next(CYCLE) % 7)


def thread_local(branch: Hidden, u: Tensor) -> Tensor:
    branch.local.count = getattr(branch.local, "count", 0) + 1
    return u * branch.local.count


def plain_tensor(branch: Hidden, u: Tensor) -> Tensor:
    branch.tensor = branch.tensor * 1.5
    return u * branch.tensor


def plain_tensor_in_place(branch: Hidden, u: Tensor) -> Tensor:
    branch.tensor.mul_(1.5)
    return u * branch.tensor


def activation_memory(branch: Hidden, u: Tensor) -> Tensor:
    branch.table["mean"] = branch.table.get("mean", 0.0) + u.detach().mean()
    return u + branch.table["mean"]


def buffer_in_place(branch: Hidden, u: Tensor) -> Tensor:
    branch.scale.mul_(0.5)
    return u * branch.scale


def buffer_assigned(branch: Hidden, u: Tensor) -> Tensor:
    branch.scale = branch.scale * 0.5
    return u * branch.scale


def buffer_data(branch: Hidden, u: Tensor) -> Tensor:
    branch.scale.data.mul_(0.5)
    return u * branch.scale


def large_buffer(branch: Hidden, u: Tensor) -> Tensor:
    branch.large.mul_(0.5)
    return u * branch.large[:4]


def large_buffer_data(branch: Hidden, u: Tensor) -> Tensor:
    branch.large.data.mul_(0.5)
    return u * branch.large[:4]


def weight_in_place(branch: Hidden, u: Tensor) -> Tensor:
    with torch.no_grad():
        branch.weight.mul_(1.1)
    return u * branch.weight


def cached_weight(branch: Hidden, u: Tensor) -> Tensor:
    if branch.slot is None:
        branch.slot = 2 * branch.weight
    return u * branch.slot


def cached_weight_in_table(branch: Hidden, u: Tensor) -> Tensor:
    if "w" not in branch.table:
        branch.table["w"] = 2 * branch.weight
    return u * branch.table["w"]


def logged_activation(branch: Hidden, u: Tensor) -> Tensor:
    branch.slot = u
    return u * branch.weight


def numpy_noise(branch: Hidden, u: Tensor) -> Tensor:
    return u * float(np.random.rand())  # noqa: NPY002


def numpy_own_noise(branch: Hidden, u: Tensor) -> Tensor:
    return u * float(branch.own_numpy.random())


def python_noise(branch: Hidden, u: Tensor) -> Tensor:
    return u * random.random()


def python_own_noise(branch: Hidden, u: Tensor) -> Tensor:
    return u * branch.own_random.random()


def torch_noise(branch: Hidden, u: Tensor) -> Tensor:
    return u * torch.rand(4, dtype=u.dtype)


def generator_noise(branch: Hidden, u: Tensor) -> Tensor:
    return u * torch.rand(4, generator=branch.generator, dtype=u.dtype)


def forked_noise(branch: Hidden, u: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return u * torch.rand(4, dtype=u.dtype)


def new_generator(branch: Hidden, u: Tensor) -> Tensor:
    generator = torch.Generator()
    generator.seed()
    return u * torch.rand(4, generator=generator, dtype=u.dtype)


def system_noise(branch: Hidden, u: Tensor) -> Tensor:
    return u * random.SystemRandom().random()


def seeded_inside(branch: Hidden, u: Tensor) -> Tensor:
    torch.manual_seed(3)
    return u * torch.rand(4, dtype=u.dtype)


def address(branch: Hidden, u: Tensor) -> Tensor:
    return u * (1 + (u.data_ptr() // 64) % 5)


def grad_mode(branch: Hidden, u: Tensor) -> Tensor:
    return u * (2.0 if torch.is_grad_enabled() else 1.0)


def requires_grad(branch: Hidden, u: Tensor) -> Tensor:
    return u * (2.0 if u.requires_grad else 1.0)


def dropout(branch: Hidden, u: Tensor) -> Tensor:
    return branch.drop(u)


def batch_norm(branch: Hidden, u: Tensor) -> Tensor:
    return branch.norm(u)


def memoized(branch: Hidden, u: Tensor) -> Tensor:
    return u * branch.table.setdefault("first", float(u.detach().mean()))


def training_flag(branch: Hidden, u: Tensor) -> Tensor:
    branch.drop.train(not branch.drop.training)
    return u * (2.0 if branch.drop.training else 1.0)


def closed_over() -> Act:
    cell = [1.0]

    def act(branch: Hidden, u: Tensor) -> Tensor:
        cell[0] *= 1.1
        return u * cell[0]

    return act


def partial_state(cell: dict[str, float], branch: Hidden, u: Tensor) -> Tensor:
    cell["n"] = cell.get("n", 0.0) + 1.0
    return u * cell["n"]


def context_manager(branch: Hidden, u: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16), contextlib.suppress(ValueError):
        return branch.mix(u).to(u.dtype)


def input_changed(branch: Hidden, u: Tensor) -> Tensor:
    return u.mul_(0.5)


def lazily_registered(branch: Hidden, u: Tensor) -> Tensor:
    if not hasattr(branch, "late"):
        branch.register_buffer("late", torch.full((4,), 0.5, dtype=u.dtype))
    return u * branch.late


KINDS: dict[str, Act] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and name.islower()
    and name != "closed_over"
    and name != "partial_state"
} | {"closed_over": closed_over(), "partial_state": functools.partial(partial_state, {})}
SILENT = {
    "large_buffer_data": "written behind torch's back, and too large to be compared in every call",
}
"""Kinds whose gradient may be wrong without a word -> why. docs/recomputation.md warns of each."""


def gradients(act: Act, backprop: str) -> dict[str, Tensor | None]:
    Cell.value, WORLD.value, GLOBALS["count"] = 1.0, 1.0, 0
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    sequence = ReversibleSequence([Hidden(act) for _ in range(3)], MidPoint(h=0.3), backprop=backprop).double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    sequence(x).square().sum().backward()
    return {"x": x.grad, **{name: parameter.grad for name, parameter in sequence.named_parameters()}}


@pytest.mark.parametrize("kind", KINDS)
def test_right_or_refused_or_noticed(kind: str) -> None:
    assert len(KINDS) >= 40
    try:
        ours = gradients(KINDS[kind], "reversible")
    except (revode.BranchError, revode.ReversalError, RuntimeError):
        return
    stored = gradients(KINDS[kind], "store")
    floor = 1e-3 * max(float(grad.norm()) for grad in stored.values() if grad is not None)
    worst = max(relative_error(ours[name], stored[name], floor) for name in stored)
    assert worst < 1e-9 or kind in SILENT, f"{kind}: off by {worst:.2g} without a word"


def test_what_is_silent_is_documented() -> None:
    from pathlib import Path

    text = " ".join((Path(__file__).parents[3] / "docs" / "recomputation.md").read_text(encoding="utf-8").split())
    for reason in SILENT.values():
        assert reason in text


@pytest.mark.parametrize("act", [cached_weight, cached_weight_in_table])
def test_a_weight_that_is_cached_without_its_gradient_is_refused(act: Act) -> None:
    with pytest.raises(revode.BranchError, match=r"no gradient for its parameter 'weight'.*must not be cached"):
        gradients(act, "reversible")


class Inner(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.sequence = ReversibleSequence([make() for _ in range(3)], MidPoint(h=0.3))

    def forward(self, q: Tensor) -> Tensor:
        return self.sequence(q)


class OwnNorm(nn.BatchNorm1d):
    """A batch norm of a class that nothing is known of."""

    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, OwnNorm])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_averages_move_once_however_deep_sequences_are_nested(depth: int, norm: type[nn.Module]) -> None:
    def make(level: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), norm(4)) if level == 0 else Inner(lambda: make(level - 1))

    sequence = make(depth)
    for _ in range(2):
        sequence(torch.randn(8, 4)).square().sum().backward()
    assert {int(n) for name, n in sequence.named_buffers() if "tracked" in name} == {2}


class Tied(nn.Module):
    """A router whose choices among equals depend on the call: the kernel may take either."""

    calls = 0

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.experts, self.keeps = nn.Parameter(torch.randn(2, 4, 4) / 4), keeps

    def forward(self, q: Tensor) -> Tensor:
        Tied.calls += 1
        chosen = torch.arange(len(q)) % 2 if Tied.calls % 4 else 1 - torch.arange(len(q)) % 2
        chosen = revode.keep(chosen) if self.keeps else chosen
        return torch.tanh(torch.einsum("bi,bij->bj", q, self.experts[chosen]))


class Noisy(nn.Module):
    """A kernel whose sums come out differently in every run."""

    calls = 0

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.mix, self.keeps = nn.Linear(4, 4), keeps

    def forward(self, q: Tensor) -> Tensor:
        Noisy.calls += 1
        u = self.mix(q) + 1e-3 * Noisy.calls
        return torch.tanh(revode.keep(u) if self.keeps else u)


class Wavering(nn.Module):
    """Keeps more, or less, in each call."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.mix, self.count, self.sign = nn.Linear(4, 4), 3, sign

    def forward(self, q: Tensor) -> Tensor:
        u = self.mix(q)
        for _ in range(self.count):
            u = revode.keep(u)
        self.count += self.sign
        return u


class TestKeep:
    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("kind", [Tied, Noisy])
    def test_decisions_are_those_of_forward(self, kind: Any, exact: bool, backprop: str) -> None:
        def step(backprop: str) -> dict[str, Tensor | None]:
            kind.calls = 0
            torch.manual_seed(0)
            sequence = ReversibleSequence(
                [kind(True) for _ in range(4)], MidPoint(h=0.3), backprop=backprop, exact=exact
            )
            x = torch.randn(6, 4, requires_grad=True)
            sequence(x).square().sum().backward()
            return {"x": x.grad, **{name: parameter.grad for name, parameter in sequence.named_parameters()}}

        ours, stored = step(backprop), step("store")
        for name in stored:
            assert relative_error(ours[name], stored[name]) < (1e-30 if exact else 1e-5)

    @pytest.mark.parametrize("kind", [Tied, Noisy])
    def test_without_it_the_walk_back_notices(self, kind: Any) -> None:
        kind.calls = 0
        sequence = ReversibleSequence([kind(False) for _ in range(4)], MidPoint(h=0.3), exact=True)
        with pytest.raises(revode.ReversalError, match="check_branch"):
            sequence(torch.randn(6, 4)).square().sum().backward()

    def test_what_is_kept_is_counted(self) -> None:
        x = torch.randn(6, 4, requires_grad=True)
        kept = {}
        for keeps in (False, True):
            sequence = ReversibleSequence([Tied(keeps) for _ in range(5)], MidPoint(h=0.3), verify=False)
            kept[keeps] = graph_bytes(sequence(x), [x])
        assert kept[True] - kept[False] == 5 * 6 * 8  # six indices of eight bytes for each branch

    def test_saved_tensor_hooks_see_it(self) -> None:
        seen: list[torch.dtype] = []
        x = torch.randn(6, 4, requires_grad=True)
        Tied.calls = 0
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.dtype) or t.clone(), lambda t: t):
            y = ReversibleSequence([Tied(True) for _ in range(5)], MidPoint(h=0.3))(x)
        y.sum().backward()
        assert seen.count(torch.int64) == 5

    def test_inside_a_sequence_inside_a_branch(self) -> None:
        def step(backprop: str) -> Tensor | None:
            Tied.calls = 0
            torch.manual_seed(0)
            sequence = ReversibleSequence(
                [Inner(lambda: Tied(True)) for _ in range(2)], MidPoint(h=0.3), backprop=backprop
            )
            x = torch.randn(6, 4, requires_grad=True)
            sequence(x).square().sum().backward()
            return x.grad

        torch.testing.assert_close(step("reversible"), step("store"))

    def test_in_a_converted_model(self) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.branch = Tied(True)

            def forward(self, x: Tensor) -> Tensor:
                return x + self.branch(x)

        model = nn.Sequential(*(Block() for _ in range(4)))
        Tied.calls = 0
        revode.convert(model, scheme=BDIA(blend=0.5), exact=True)
        model(torch.randn(6, 4)).square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    @pytest.mark.parametrize(("sign", "word"), [(1, "more often"), (-1, "less often")])
    def test_another_number_of_calls_raises(self, sign: int, word: str) -> None:
        sequence = ReversibleSequence([Wavering(sign) for _ in range(2)], MidPoint(h=0.3))
        loss = sequence(torch.randn(2, 4)).sum()
        with pytest.raises(RuntimeError, match=word):
            loss.backward()

    def test_elsewhere_it_changes_nothing(self) -> None:
        x = torch.randn(3, requires_grad=True)
        assert revode.keep(x) is x
        assert revode.keep({"a": [x, 1]})["a"][0] is x


class Doctored(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.unused, self.act, self.count = nn.Linear(4, 4), nn.Parameter(torch.ones(2)), act, 0
        self.register_buffer("scale", torch.ones(4))

    def forward(self, q: Tensor) -> Tensor:
        self.count += 1
        return self.act(self, q)


class TestCheckBranch:
    @pytest.mark.parametrize(
        ("act", "finding"),
        [
            (lambda b, q: b.mix(q) * b.count, "recomputed at once it differs by"),
            (lambda b, q: b.mix(q) * (1 + threading.current_thread().name.startswith("Main")), "on another thread"),
            (lambda b, q: b.mix(q) * (2 if torch.is_grad_enabled() else 1), "recomputed with gradients it differs"),
            (lambda b, q: b.mix(q), "no gradient reaches 'unused'"),
            (lambda b, q: q + b.mix(q), "leave out the skip connection"),
            (lambda b, q: b.mix(q)[:, :2], "changes the shape of its state"),
            (lambda b, q: q.mul_(2), "modifies its input"),
        ],
    )
    def test_names_what_differs(self, act: Any, finding: str) -> None:
        branch = Doctored(act)
        report = revode.check_branch(branch, torch.randn(2, 4))
        assert finding in str(report)
        assert not report.ok
        assert branch.count == 0  # a copy was run

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize(
        "make",
        [
            lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)),
            lambda: spectral_norm(nn.Linear(4, 4)),
            lambda: weight_norm(nn.Linear(4, 4)),
            lambda: ReversibleSequence([nn.Linear(4, 4)], MidPoint(h=0.1)),
        ],
    )
    def test_finds_nothing_in_a_good_branch(self, make: Callable[[], nn.Module], training: bool) -> None:
        state = torch.get_rng_state()
        with parametrize.cached():
            report = revode.check_branch(make().train(training), torch.randn(8, 4))
        torch.set_rng_state(state)
        assert report.ok, str(report)

    def test_leaves_branch_and_rng_states_alone(self) -> None:
        branch, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), torch.randn(8, 4)
        before = {name: value.clone() for name, value in branch.state_dict().items()}
        numpy_rng: Any = np.random.mtrand._rand
        states = torch.get_rng_state(), random.getstate(), repr(numpy_rng.get_state())
        revode.check_branch(branch, x)
        assert (random.getstate(), repr(numpy_rng.get_state())) == states[1:]
        assert torch.equal(torch.get_rng_state(), states[0])
        assert all(torch.equal(value, before[name]) for name, value in branch.state_dict().items())
        assert branch[0].weight.grad is None
