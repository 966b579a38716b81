"""`compile=True`: branches compiled once for each kind, in the eager engine, with the bits and promises of the engine."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import revode
from revode.engine import ReversibleSequence, regional
from revode.fields import AntisymmetricField, SymmetricField
from revode.schemes import Leapfrog, MidPoint, Verlet

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles


def gradients(sequence: nn.Module, x: torch.Tensor, bfloat16: bool = False) -> list[torch.Tensor]:
    """Output, gradients and batch statistics of one step."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        y = sequence(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    found = [y.detach(), x.grad, *(p.grad for p in sequence.parameters()), *(b.float() for b in sequence.buffers())]
    return [tensor for tensor in found if tensor is not None]


def symmetric(number: int, norm: str) -> list[nn.Module]:
    return [SymmetricField(4, norm=norm, leading=index > 0) for index in range(number)]


KINDS = {
    "verlet": (lambda: symmetric(4, "batch"), Verlet(0.3)),
    "leapfrog": (lambda: [SymmetricField(8, activation="leaky_relu") for _ in range(3)], Leapfrog(0.5)),
    "midpoint": (lambda: [AntisymmetricField(8, norm="batch", activation="tanh") for _ in range(3)], MidPoint(0.2)),
}


@pytest.mark.parametrize(
    ("kind", "bfloat16"),
    [
        ("verlet", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(KINDS, (False, True))
            if case != ("verlet", True)
        ),
    ],
)
def test_strategies_agree_to_the_bit_on_the_grid_and_with_eager_ones_to_rounding(kind: str, bfloat16: bool) -> None:
    torch.manual_seed(0)
    make, scheme = KINDS[kind]
    fields, x = make(), torch.randn(3, 8, 6, 6)
    found = {}
    ways = [("reversible", True), ("checkpoint", True), ("store", True), ("reversible", False)]
    for backprop, compile in ways:
        sequence = ReversibleSequence(copy.deepcopy(fields), scheme, backprop=backprop, exact=True, compile=compile)
        found[backprop, compile] = gradients(sequence, x, bfloat16)
    for other in ("checkpoint", "store"):
        for ours, theirs in zip(found["reversible", True], found[other, True], strict=True):
            assert torch.equal(ours, theirs), other
    for ours, theirs in zip(found["reversible", True], found["reversible", False], strict=True):
        assert (ours - theirs).norm() <= (2e-2 if bfloat16 else 1e-4) * theirs.norm() + 1e-6


@pytest.mark.slow
def test_without_the_grid_gradients_are_right_in_double() -> None:
    torch.manual_seed(0)
    fields, x = [field.double() for field in symmetric(4, "batch")], torch.randn(3, 8, 6, 6, dtype=torch.float64)
    compiled = gradients(ReversibleSequence(copy.deepcopy(fields), Verlet(0.3), compile=True), x)
    stored = gradients(ReversibleSequence(fields, Verlet(0.3), backprop="store"), x)
    for ours, theirs in zip(compiled, stored, strict=True):
        assert (ours - theirs).norm() <= 1e-9 * (1 + theirs.norm())


def test_depth_compiles_nothing_more_and_gradients_are_those_of_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_function = regional._compile
    monkeypatch.setattr(regional, "_compile", lambda *a: (compiled.append(1), compile_function(*a))[1])
    monkeypatch.setattr(regional, "_kinds", {})
    numbers = []
    for depth in (4, 40):
        fields, x = [SymmetricField(3, norm="batch") for _ in range(depth)], torch.randn(2, 6, 5, 5)
        eager = gradients(ReversibleSequence(copy.deepcopy(fields), Verlet(0.1)), x)
        found = gradients(ReversibleSequence(fields, Verlet(0.1), compile=True), x)
        numbers.append(len(compiled))
        for ours, theirs in zip(found, eager, strict=True):
            assert (ours - theirs).norm() <= 1e-3 * theirs.norm() + 1e-5
    assert numbers[0] == numbers[1] <= 7  # values, product, coupling


class Layer(nn.Module):
    """A branch with a number of its own, as layers of language models have."""

    def __init__(self, width: int, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.layer_idx = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * (1.0 + 0.0 * self.layer_idx)


@pytest.mark.slow
def test_branches_that_differ_in_a_number_share_their_graphs_and_many_kinds_are_all_compiled() -> None:
    torch._dynamo.reset()
    counters.clear()
    gradients(ReversibleSequence([Layer(6, i) for i in range(24)], MidPoint(0.1), compile=True), torch.randn(2, 6))
    assert counters["stats"]["unique_graphs"] <= 4
    counters.clear()
    for width in range(2, 14):
        sequence = ReversibleSequence([Layer(width, 0), Layer(width, 1)], MidPoint(0.1), compile=True)
        gradients(sequence, torch.randn(2, width))
    assert counters["stats"]["unique_graphs"] >= 2
    assert counters["frames"]["ok"] == counters["frames"]["total"]  # none was left to the interpreter
    assert not counters["graph_break"]


@pytest.mark.slow
def test_branches_of_users_are_right_with_dropout_too() -> None:
    def branch() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh())

    torch.manual_seed(0)
    fields, x = [branch() for _ in range(6)], torch.randn(4, 6)
    compiled = {}
    for backprop in ("reversible", "store"):
        sequence = ReversibleSequence(copy.deepcopy(fields), MidPoint(0.1), backprop=backprop, compile=True)
        torch.manual_seed(1)
        compiled[backprop] = gradients(sequence, x)
    for ours, theirs in zip(compiled["reversible"], compiled["store"], strict=True):
        assert (ours - theirs).norm() <= 1e-4 * (1 + theirs.norm())


def test_a_network_takes_compile_and_its_file_does_not_remember_it(tmp_path) -> None:
    net = revode.create_model("hamiltonian-digits", compile=True)
    revode.save(net, tmp_path / "net.safetensors")
    assert all(module.strategy.compile for module in net.modules() if isinstance(module, ReversibleSequence))
    again = revode.load(tmp_path / "net.safetensors")
    assert not any(module.strategy.compile for module in again.modules() if isinstance(module, ReversibleSequence))


def test_a_gradient_of_the_gradient_is_refused_in_a_sentence() -> None:
    sequence = ReversibleSequence([SymmetricField(3, norm="none")] * 2, Verlet(0.1), backprop="store", compile=True)
    x = torch.randn(2, 6, 5, 5, requires_grad=True)
    with pytest.raises(RuntimeError, match="compile=False"):
        torch.autograd.grad(sequence(x).sum(), x, create_graph=True)


def test_on_the_grid_its_inverse_is_exact_and_its_forward_the_same_without_gradients() -> None:
    torch.manual_seed(0)
    sequence = ReversibleSequence(symmetric(20, "batch"), Verlet(0.5), exact=True, compile=True)
    x = torch.randn(4, 8, 6, 6)
    y, state = sequence(x, return_state=True)
    statistics = [buffer.clone() for buffer in sequence.buffers()]
    with torch.no_grad():
        assert torch.equal(sequence.inverse(tuple(part.detach() for part in state)), sequence.grid.round(x))
        assert all(map(torch.equal, sequence.buffers(), statistics))
        assert torch.equal(sequence(x), y)


def test_batch_norm_counts_and_refuses_as_torch_has_it() -> None:
    torch.manual_seed(0)
    sequence = ReversibleSequence(symmetric(2, "batch"), Verlet(0.3), compile=True)
    for norm in (module for module in sequence.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.track_running_stats = False
    before = [buffer.clone() for buffer in sequence.buffers()]
    sequence(torch.randn(3, 8, 6, 6)).sum().backward()
    assert all(map(torch.equal, sequence.buffers(), before))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        sequence(torch.randn(1, 8, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("change", ["momentum is none", "momentum", "double statistics"])
def test_running_statistics_are_those_of_eager(change: str) -> None:
    """Over several steps, by every strategy; fields that differ in how they count are of different kinds."""
    torch.manual_seed(0)
    fields = symmetric(4, "batch")
    for norm in (module for module in fields[1].modules() if isinstance(module, nn.BatchNorm2d)):
        if change == "double statistics":
            norm.running_mean, norm.running_var = norm.running_mean.double(), norm.running_var.double()
        else:
            norm.momentum = None if change == "momentum is none" else 0.3
    compiled = [
        ReversibleSequence(copy.deepcopy(fields), Verlet(0.3), backprop=way, compile=True)
        for way in ("reversible", "store")
    ]
    if change == "double statistics":  # which torch's own kernel refuses
        assert all(b.dtype == torch.float64 for s in compiled for b in s.fields[1].norm.buffers() if b.dim())
        eager = ReversibleSequence(symmetric(4, "batch"), Verlet(0.3))
        eager.load_state_dict(compiled[0].state_dict())
    else:
        eager = ReversibleSequence(copy.deepcopy(fields), Verlet(0.3))
    for _ in range(3):
        x = torch.randn(4, 8, 6, 6)
        for sequence in (eager, *compiled):
            sequence(x).sum().backward()
    for sequence in compiled:
        for ours, theirs in zip(sequence.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, check_dtype=False, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_in_bfloat16_throughout_it_is_as_precise_as_eager() -> None:
    """One value far from the others: statistics are sums of differences from one of them."""
    torch.manual_seed(0)
    fields, x = symmetric(2, "batch"), torch.randn(8, 8, 6, 6)
    x[0, :, 0, 0] += 20.0
    x = x.bfloat16()
    exact = ReversibleSequence([copy.deepcopy(field).double() for field in fields], Verlet(1.0))
    expected = gradients(exact, x.double())[2:]
    errors = []
    for compile in (False, True):
        own = [copy.deepcopy(field).bfloat16() for field in fields]
        found = gradients(ReversibleSequence(own, Verlet(1.0), backprop="checkpoint", compile=compile), x)[2:]
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True) if b.any()))
    assert errors[1] < 2 * errors[0]


def test_a_field_without_an_activation_is_compiled() -> None:
    fields = [SymmetricField(4, activation="identity") for _ in range(2)]
    found = [
        gradients(ReversibleSequence(copy.deepcopy(fields), Verlet(0.3), compile=compile), torch.ones(2, 8, 5, 5))
        for compile in (True, False)
    ]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*found, strict=True))


def test_fields_that_differ_in_a_number_of_their_own_are_of_two_kinds_and_modes_are_not() -> None:
    class Scaled(SymmetricField):
        strength = 1.0

    fields, q = [Scaled(4) for _ in range(3)], torch.randn(2, 4, 5, 5)
    fields[0].strength = 2.0
    fields[1].eval()
    kinds = [regional._kind_of(field, q, torch.float32) for field in fields]
    assert kinds[0] is not kinds[1] is kinds[2]
