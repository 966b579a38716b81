"""What a reading of the engine by strangers brought to light: each was wrong, or silent, once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from allocations import Allocations, storages
from branches import Checkpointed, Recurrent
from gradients import compare_with_store, weighted_sum
from test_saved_memory import saved_bytes
from torch import Tensor, nn

import revode
from revode import AdditiveCoupling, Leapfrog, MidPoint, Momentum, ReversibleSequence


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


class Codebook(nn.Module):
    """A moving average that is written where autograd does not look, and read in the same call."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, q: Tensor) -> Tensor:
        h = torch.tanh(self.mix(q))
        self.average.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h * (1 + self.average)


class SharedBuffers(nn.Module):
    """One tensor under two names: running averages of two norms, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.second.running_mean = self.first.running_mean
        constant = torch.linspace(0.5, 1.0, 4)
        self.first.register_buffer("constant", constant)
        self.mix = nn.Linear(4, 4)
        self.mix.register_buffer("constant", constant)

    def forward(self, q: Tensor) -> Tensor:
        return self.second(torch.tanh(self.mix(self.first(q * self.first.constant)))) * self.mix.constant


class TestAgainstStore:
    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
    @pytest.mark.parametrize("branch", [Codebook, SharedBuffers])
    def test_gradients_buffers_and_random_stream(self, branch: type[nn.Module], backprop: str, exact: bool) -> None:
        def loss(y: Tensor) -> Tensor:
            return weighted_sum(y + torch.randn(()))  # as a head with dropout would, it moves the stream

        def make(**options: Any) -> ReversibleSequence:
            return sequence_of(branch, **({"backprop": backprop, "exact": exact} | options)).double()

        compare_with_store(make, torch.randn(5, 4, dtype=torch.float64), loss=loss)

    @pytest.mark.parametrize("inside", [True, False])
    @pytest.mark.parametrize("exact", [False, True])
    def test_torchs_cache_of_parametrized_weights(self, exact: bool, inside: bool) -> None:
        grads = []
        for backprop in ("reversible", "store"):
            torch.manual_seed(0)
            sequence = sequence_of(
                lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh()),
                backprop=backprop,
                exact=exact,
            ).double()
            with nn.utils.parametrize.cached():
                loss = sequence(torch.ones(3, 4, dtype=torch.float64)).square().sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            grads.append([parameter.grad for parameter in sequence.parameters()])
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-14)

    def test_tensors_made_in_inference_mode(self) -> None:
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(4, 4)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, q: Tensor, bias: Tensor) -> Tensor:
                self.calls = self.calls + 1
                return torch.tanh(self.mix(q) + bias)

        sequence = sequence_of(Counting)
        with torch.inference_mode():
            bias = torch.randn(4)
            sequence(torch.randn(2, 4), bias=bias)
        sequence(torch.randn(2, 4), bias=bias).sum().backward()
        assert all(field.calls == 2 and field.mix.weight.grad is not None for field in sequence.fields)


def test_an_inverse_shares_what_a_branch_shares() -> None:
    sequence = sequence_of(SharedBuffers).double().eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    _, state = sequence(x, return_state=True)
    torch.testing.assert_close(sequence.inverse(state), x)


class TestKeptLosses:
    """Someone who keeps a loss keeps its graph, but not what the graph had saved: backward lets go of that."""

    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
    def test_arguments_and_records_go_with_backward(self, backprop: str) -> None:
        class Conditioned(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(4, 4)

            def forward(self, q: Tensor, context: Tensor) -> Tensor:
                return nn.functional.dropout(torch.tanh(self.mix(q) + context), 0.5)

        sequence = sequence_of(Conditioned, backprop=backprop)
        x, leaf = torch.randn(2, 4), torch.randn(2, 4, requires_grad=True)
        with Allocations([x, leaf, *sequence.parameters()]) as allocations:
            loss = sequence(x, context=leaf.exp()).square().sum()
            loss.backward()
        kept = storages([loss, leaf.grad, *(p.grad for p in sequence.parameters())])
        assert allocations.alive() <= kept

    def test_a_graph_that_is_retained_can_be_walked_again(self) -> None:
        sequence = sequence_of(lambda: nn.Sequential(layer(), nn.Dropout(0.5)))
        x = torch.randn(2, 4, requires_grad=True)
        loss = sequence(x).square().sum()
        grads = [torch.autograd.grad(loss, x, retain_graph=retain)[0] for retain in (True, False)]
        assert torch.equal(*grads)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


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
    def test_transforms_of_torch_func(self) -> None:
        sequence = sequence_of(layer)
        with pytest.raises(RuntimeError, match=r"torch\.func.*backprop='store'"):
            torch.func.grad(lambda x: sequence(x).sum())(torch.randn(2, 4))
        assert torch.func.grad(lambda x: sequence_of(layer, backprop="store")(x).sum())(torch.randn(2, 4)).shape == (
            2,
            4,
        )

    @pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
    def test_torchscript_branches(self) -> None:
        """Code without buffers is recomputed as any other; buffers inside cannot be set back."""
        branch = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        with pytest.raises(ValueError, match=r"branch 1 .*TorchScript.*the module it was made from"):
            ReversibleSequence([layer(), branch], MidPoint(h=0.1))(torch.randn(2, 4))

        def make(**options: Any) -> ReversibleSequence:
            branches = [layer(), nn.Sequential(torch.jit.script(layer()), nn.Tanh()), torch.jit.script(layer())]
            return ReversibleSequence(branches, MidPoint(h=0.1), **options).double()

        compare_with_store(make, torch.randn(2, 4, dtype=torch.float64))

    def test_numbers_that_nobody_can_draw_again(self) -> None:
        with pytest.raises(ValueError, match=r"branch 0 .*random\.SystemRandom"):
            sequence_of(lambda: Noisy(random.SystemRandom()))(torch.randn(2, 4))

    def test_a_keyword_argument_that_a_branch_does_not_take(self) -> None:
        with pytest.raises(TypeError, match=r"no branch takes the keyword argument 'mask'"):
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


def test_modules_are_attributes_of_the_package() -> None:
    assert revode.memory.SavedTensors
    assert revode.networks.describe
    assert {"memory", "networks"} <= set(dir(revode))


class Given(nn.Module):
    """A branch whose gradients by its state, by what it is given and by its weights are one tensor, or the incoming one."""

    def __init__(self, kind: str, shared: nn.Parameter) -> None:
        super().__init__()
        self.kind, self.shared = kind, shared
        self.own = nn.Parameter(0.05 * torch.randn_like(shared))

    def forward(self, q: Tensor, c: Tensor) -> Tensor:
        if self.kind == "added to the state":
            return torch.tanh((q + c) @ self.own)
        if self.kind == "added to the value":
            return torch.tanh(q @ self.own) + c
        return torch.tanh(q @ (self.own + self.shared)) * (1 + c)


@pytest.mark.parametrize("width", [8, 128])  # gradients of 128 KiB and more are kept as they come
@pytest.mark.parametrize("options", [{}, {"exact": True}, {"anchor_every": 2}, {"backprop": "checkpoint"}], ids=str)
@pytest.mark.parametrize("kind", ["added to the state", "added to the value", "added to a weight"])
def test_sums_of_gradients_are_not_written_over_what_others_hold(
    kind: str, options: dict[str, Any], width: int
) -> None:
    found = []
    for chosen in (options | {"backprop": "store"}, options):
        torch.manual_seed(0)
        shared = nn.Parameter(0.05 * torch.randn(width, width))
        sequence = ReversibleSequence([Given(kind, shared) for _ in range(6)], MidPoint(0.5), **chosen).double()
        x, c = (torch.randn(width, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
        (x + sequence(x, c=c)).square().sum().backward()
        found.append([t.grad for t in (x, c, *sequence.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def test_the_gradient_that_backward_is_given_stays_as_it_is() -> None:
    shared = nn.Parameter(torch.zeros(128, 128))
    sequence = ReversibleSequence([Given("added to the value", shared) for _ in range(4)], MidPoint(0.5)).double()
    x, c = (torch.randn(128, 128, dtype=torch.float64, requires_grad=True) for _ in range(2))
    _, (_, q) = sequence(x, c=c, return_state=True)
    given = torch.ones_like(q)
    torch.autograd.backward([q], [given])
    assert torch.equal(given, torch.ones_like(q))


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.source = torch.Generator().manual_seed(0)
        self.register_buffer("average", None)

    def forward(self, q: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(q)))) * (1 + 0.1 * torch.rand(4, generator=self.source, dtype=q.dtype))
        mean = h.detach().mean(0)
        self.average = mean if self.average is None else 0.9 * self.average + 0.1 * mean
        return h * (1 + self.average)


def tie(branch: TwoWeights) -> None:
    branch.b.weight = branch.a.weight


def take_bias_away(branch: TwoWeights) -> None:
    branch.a.bias = None


def replace_the_generator(branch: TwoWeights) -> None:
    branch.source = torch.Generator().manual_seed(5)


@pytest.mark.parametrize("change", [tie, take_bias_away, replace_the_generator, lambda branch: None])
def test_what_changes_between_two_steps_is_noticed(change: Callable[[TwoWeights], None]) -> None:
    found = []
    for backprop in ("store", "reversible"):
        torch.manual_seed(0)
        sequence = sequence_of(TwoWeights, 3, backprop=backprop).double()
        x = torch.randn(3, 4, dtype=torch.float64)
        for _ in range(2):
            sequence.zero_grad()
            sequence(x).square().sum().backward()
            for branch in sequence.fields:
                change(branch)
        sequence.zero_grad()
        sequence(x).square().sum().backward()
        state = [
            tensor for branch in sequence.fields for tensor in (branch.average, torch.rand(1, generator=branch.source))
        ]
        found.append([*(p.grad for p in sequence.parameters()), *state])
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-13)


def test_statistics_that_are_taken_away_between_two_steps() -> None:
    sequence = sequence_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 3)
    x = torch.randn(5, 4)
    sequence(x).sum().backward()
    for branch in sequence.fields:
        branch[1].running_mean = branch[1].running_var = branch[1].num_batches_tracked = None
    sequence(x).sum().backward()
    sequence.eval()(x).sum().backward()


def test_batch_norm_over_processes_collects_its_statistics_once() -> None:
    found = []
    for backprop in ("store", "reversible"):
        torch.manual_seed(0)
        sequence = sequence_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 3, backprop=backprop).double()
        sequence = nn.SyncBatchNorm.convert_sync_batchnorm(sequence)
        sequence(torch.randn(5, 4, dtype=torch.float64)).square().sum().backward()
        found.append([*(p.grad for p in sequence.parameters()), *sequence.buffers()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [0.0, 1e-12])
@pytest.mark.parametrize("scheme", [MidPoint(0.2), Leapfrog(0.2), AdditiveCoupling()], ids=repr)
def test_a_first_state_of_zeros_is_no_miss(scheme: Any, size: float, dtype: torch.dtype) -> None:
    def make(**options: Any) -> ReversibleSequence:
        return ReversibleSequence([layer() for _ in range(20)], scheme, split_dim=-1, **options).to(dtype)

    halves = 2 if isinstance(scheme, AdditiveCoupling) else 1
    x = torch.cat([size * torch.randn(3, 4, dtype=dtype), *[torch.randn(3, 4, dtype=dtype)] * (halves - 1)], -1)
    make()(x).square().sum().backward()  # raises nothing, and warnings are errors
    make()(x.flip(-1)).square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_wrong_walk_to_a_state_of_zeros_is_still_a_miss(dtype: torch.dtype) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.calls = nn.Linear(4, 4), [0]

        def forward(self, q: Tensor) -> Tensor:
            self.calls[0] += 1
            return torch.tanh(self.mix(q)) * self.calls[0]

    sequence = sequence_of(Counting).to(dtype)
    with pytest.raises(revode.ReversalError):
        sequence(torch.zeros(3, 4, dtype=dtype)).sum().backward()


@pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
def test_a_sequence_that_draws_inside_a_branch_repeats_its_numbers(backprop: str) -> None:
    def make(**options: Any) -> ReversibleSequence:
        inner = lambda: ReversibleSequence([layer() for _ in range(3)], revode.BDIA(0.5))  # noqa: E731
        return sequence_of(inner, 3, **({"backprop": backprop} | options)).double()

    compare_with_store(make, torch.randn(3, 4, dtype=torch.float64))


def test_counting_what_a_checkpointed_branch_keeps_does_not_run_it_again() -> None:
    sequence = sequence_of(lambda: Checkpointed(nn.BatchNorm1d(4)), 6, memory_budget=600).double()
    sequence(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
    counts = {int(branch.inside[1].num_batches_tracked) for branch in sequence.fields}
    assert counts <= {1, 2}  # torch's checkpoint itself counts each batch twice where it is stored
