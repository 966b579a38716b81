"""Compiled and exported sequences compute what eager ones do, or refuse."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from branches import Conditioned, conv_norm_relu, small_conv, tanh_layer, width
from gradients import Record, assert_agree, training_step, weighted_sum
from torch import Tensor, nn
from torch._dynamo.utils import counters

from revode import AdditiveCoupling, Leapfrog, MidPoint, ReversibleSequence, SymmetricField, Verlet

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of every kind, while it compiles and exports


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_sequence(scheme: Any, make: Any, number: int = 2, channels: int = 4, **options: Any) -> ReversibleSequence:
    torch.manual_seed(0)
    fields = [make(width(scheme, channels)) for _ in range(number)]
    return ReversibleSequence(fields, scheme, **options)


def eager_and_compiled(sequence: nn.Module, x: Tensor, **options: Any) -> tuple[Record, Record]:
    """The records of both; the second was compiled, or the comparison would say nothing."""
    counters.clear()
    state = {name: value.clone() for name, value in sequence.state_dict().items()}
    eager = training_step(sequence, x)
    sequence.load_state_dict(state)
    record = training_step(sequence, x, call=torch.compile(sequence, **options))
    assert counters["stats"]["unique_graphs"] > 0
    return record, eager


CASES = {
    "verlet": (Verlet(h=0.2), SymmetricField, {}),
    "leapfrog-exact": (Leapfrog(h=0.2), conv_norm_relu, {"exact": True}),
    "leapfrog": (Leapfrog(h=0.2), conv_norm_relu, {}),
    "verlet-exact": (Verlet(h=0.2), SymmetricField, {"exact": True}),
    "verlet-batch-norm": (Verlet(h=0.2), conv_norm_relu, {}),
    "midpoint": (MidPoint(h=0.1), small_conv, {}),
    "additive-anchors": (AdditiveCoupling(), small_conv, {"anchor_every": 1}),
    "leapfrog-damped": (Leapfrog(h=0.2, damping=0.1), small_conv, {}),
    "checkpoint": (Leapfrog(h=0.2), small_conv, {"backprop": "checkpoint"}),
}
EVERYDAY = ("verlet", "leapfrog-exact")


@pytest.mark.parametrize("name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_one_graph_has_the_gradients_of_eager(name: str) -> None:
    """Traced and differentiated whole, run without generated code: what dynamo and AOTAutograd make of the engine."""
    scheme, make, options = CASES[name]
    sequence = make_sequence(scheme, make, **options)
    ours, eager = eager_and_compiled(sequence, torch.randn(2, 4, 5, 5), fullgraph=True, backend="aot_eager")
    ours.pop("random stream"), eager.pop("random stream")
    assert_agree(ours, eager, 1e-5)


def test_generated_code_trains() -> None:
    check_training(make_sequence(MidPoint(h=0.2), tanh_layer, number=2, exact=True), torch.randn(2, 4), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_generated_code_of_every_kind_trains(name: str) -> None:
    scheme, make, options = CASES[name]
    sequence = make_sequence(scheme, make, **options)
    check_training(sequence, torch.randn(2, 4, 5, 5), 1e-3 if options.get("exact") else 1e-4)


def check_training(sequence: ReversibleSequence, x: Tensor, tolerance: float) -> None:
    """One graph of generated code has the gradients of eager, and its loss falls."""
    ours, eager = eager_and_compiled(sequence, x, fullgraph=True)
    ours.pop("random stream"), eager.pop("random stream")
    assert_agree(ours, eager, tolerance)
    compiled = torch.compile(sequence, fullgraph=True)
    optimizer = torch.optim.SGD(sequence.parameters(), lr=0.05)
    losses = []
    x = x.clone().requires_grad_()  # as above, or there would be another graph to compile
    for _ in range(8):
        loss = compiled(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("make", [lambda c: nn.Sequential(nn.Linear(c, c), nn.Dropout(0.5))], ids=["dropout"])
def test_a_random_branch_in_one_graph_is_refused(make: Any) -> None:
    sequence = make_sequence(MidPoint(h=0.2), make)
    with pytest.raises(Exception, match="draws random numbers"):
        torch.compile(sequence, fullgraph=True)(torch.randn(2, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [
        lambda q: q * torch.rand_like(q),
        lambda q: q * torch.randn_like(q),
        lambda q: q * torch.normal(0.0, 1.0, q.shape),
        lambda q: q * torch.distributions.Normal(torch.zeros(4), 1.0).sample(),
        lambda q: q * torch.rand(q.shape),
        lambda q: q + torch.empty_like(q).normal_(),
        lambda q: q * torch.bernoulli(torch.full_like(q, 0.5)),
        lambda q: nn.functional.dropout1d(q[:, None])[:, 0],
        lambda q: nn.functional.rrelu(q, training=True),
        lambda q: q[:, torch.randperm(4)],
        lambda q: nn.functional.scaled_dot_product_attention(q[None], q[None], q[None], dropout_p=0.5)[0],
    ],
    ids=[
        "rand_like",
        "randn_like",
        "normal",
        "distribution",
        "rand",
        "normal_",
        "bernoulli",
        "dropout1d",
        "rrelu",
        "randperm",
        "attention",
    ],
)
def test_every_way_to_draw_in_one_graph_is_refused(draw: Any) -> None:
    class Drawing(nn.Module):
        def __init__(self, features: int) -> None:
            super().__init__()
            self.mix = nn.Linear(features, features)

        def forward(self, q: Tensor) -> Tensor:
            return draw(self.mix(q))

    sequence = make_sequence(MidPoint(h=0.2), Drawing)
    with pytest.raises(Exception, match="draws random numbers"):
        torch.compile(sequence, fullgraph=True, backend="aot_eager")(torch.randn(2, 4))


@pytest.mark.slow
def test_dropout_that_is_switched_off_compiles() -> None:
    def make(channels: int) -> nn.Module:
        return nn.Sequential(nn.Linear(channels, channels), nn.Dropout(0.5))

    sequence = make_sequence(MidPoint(h=0.2), make).eval()
    ours, eager = eager_and_compiled(sequence, torch.randn(2, 4), fullgraph=True)
    ours.pop("random stream"), eager.pop("random stream")
    assert_agree(ours, eager, 1e-4)


def finite_difference(loss: Any, parameter: Tensor, direction: Tensor, step: float = 1e-5) -> float:
    """The slope of `loss` along `direction`, by central differences; with gradients on, as compiled noise depends on it."""
    values = []
    for sign in (1.0, -2.0):
        with torch.no_grad():
            parameter.add_(direction, alpha=sign * step)
        values.append(float(loss().detach()))
    with torch.no_grad():
        parameter.add_(direction, alpha=step)
    return (values[0] - values[1]) / (2 * step)


@pytest.mark.slow
def test_branches_compiled_on_their_own_draw_the_same_noise_again() -> None:
    """Compiled noise is not eager noise, so the reference is a finite difference in double precision."""

    class Dropping(nn.Module):
        """Of our own: dynamo compiles no frame of a ``Sequential``, whose code is torch's."""

        def __init__(self, features: int) -> None:
            super().__init__()
            self.mix, self.drop = nn.Linear(features, features), nn.Dropout(0.5)

        def forward(self, q: Tensor) -> Tensor:
            return torch.tanh(self.drop(self.mix(q)))

    sequence = make_sequence(MidPoint(h=0.2), Dropping, number=3).double()
    counters.clear()
    for field in sequence.fields:
        field.compile()
    x = torch.randn(3, 4, dtype=torch.float64)

    def loss() -> Tensor:
        torch.manual_seed(3)
        return weighted_sum(sequence(x))

    loss().backward()
    assert counters["stats"]["unique_graphs"] > 0
    for field in sequence.fields:
        weight = field.mix.weight
        direction = torch.randn_like(weight)
        measured = finite_difference(loss, weight, direction)
        assert float((weight.grad * direction).sum()) == pytest.approx(measured, rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_a_branch_with_a_graph_break_is_right() -> None:
    class Breaking(nn.Module):
        def __init__(self, features: int) -> None:
            super().__init__()
            self.mix = nn.Linear(features, features)

        def forward(self, q: Tensor) -> Tensor:
            u = self.mix(q)
            torch._dynamo.graph_break()
            return torch.tanh(u)

    sequence = make_sequence(MidPoint(h=0.2), Breaking).double()
    assert_agree(*eager_and_compiled(sequence, torch.randn(2, 4, dtype=torch.float64)), 1e-10)


@pytest.mark.slow
def test_random_branches_without_one_graph_are_right_or_refused() -> None:
    def make(channels: int) -> nn.Module:
        return nn.Sequential(nn.Linear(channels, channels), nn.Dropout(0.5), nn.Tanh())

    sequence = make_sequence(MidPoint(h=0.2), make, number=3).double()
    compiled = torch.compile(sequence)
    x = torch.randn(3, 4, dtype=torch.float64)

    def loss() -> Tensor:
        torch.manual_seed(3)
        return weighted_sum(compiled(x))

    try:
        loss().backward()
    except Exception as error:
        if "draws random numbers" in str(error):
            return
        raise
    weight = sequence.fields[1][0].weight
    direction = torch.randn_like(weight)
    measured = finite_difference(loss, weight, direction)
    assert float((weight.grad * direction).sum()) == pytest.approx(measured, rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_keyword_arguments_and_the_state_go_through_one_graph() -> None:
    sequence = make_sequence(Leapfrog(h=0.3), Conditioned)
    compiled = torch.compile(sequence, fullgraph=True)
    grads = []
    for call in (sequence, compiled):
        sequence.zero_grad()
        condition = torch.linspace(-1, 1, 4).requires_grad_()
        y, state = call(torch.ones(2, 4), condition=condition, return_state=True)
        weighted_sum((y, *state)).backward()
        grads.append({"condition": condition.grad} | {n: p.grad.clone() for n, p in sequence.named_parameters()})
    assert_agree(*grads, 1e-4)


@pytest.mark.slow
def test_a_state_out_of_range_is_an_error_at_run_time() -> None:
    sequence = make_sequence(MidPoint(h=0.2), tanh_layer, exact=True)
    compiled = torch.compile(sequence, fullgraph=True)
    compiled(torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="out of range"):
        compiled(torch.full((2, 4), 3000.0))


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_compiled_saved_bytes_do_not_grow_with_depth(exact: bool) -> None:
    from test_saved_memory import assert_constant, saved_bytes

    at = {}
    for num_blocks in (16, 64):
        torch._dynamo.reset()
        sequence = make_sequence(Leapfrog(h=0.05), tanh_layer, number=num_blocks, exact=exact)
        x = torch.randn(64, 4)
        at[num_blocks] = saved_bytes(torch.compile(sequence, fullgraph=True), x)
    assert_constant(at[16], at[64])


@pytest.mark.parametrize("scheme", [Verlet(h=0.2), Leapfrog(h=0.2)], ids=repr)
@pytest.mark.parametrize("exact", [False, True])
def test_the_eval_model_is_exported(scheme: Any, exact: bool) -> None:
    body = make_sequence(scheme, conv_norm_relu, exact=exact)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), body, nn.Flatten(), nn.Linear(36, 2)).eval()
    x = torch.randn(2, 3, 5, 5)
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=[pytest.mark.slow])])
def test_onnxruntime_agrees_with_the_eval_model(exact: bool, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    body = make_sequence(Verlet(h=0.2), SymmetricField, exact=exact)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), body, nn.Flatten(), nn.Linear(36, 2)).eval()
    x = torch.randn(2, 3, 5, 5)
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(path), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (ours,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = model(x).detach()
    # On the grid, a sum that another kernel rounds otherwise may move a value by one grid step.
    tolerance = 1e-3 if exact else 1e-5
    torch.testing.assert_close(torch.from_numpy(ours), expected, rtol=tolerance, atol=tolerance)


def test_the_finite_difference_catches_other_noise() -> None:
    layer = nn.Linear(4, 4).double()
    x, direction = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)

    def loss(seed: int = 3) -> Tensor:
        torch.manual_seed(seed)
        return weighted_sum(nn.functional.dropout(layer(x), 0.5))

    loss(seed=4).backward()
    measured = finite_difference(loss, layer.weight, direction)
    assert float((layer.weight.grad * direction).sum()) != pytest.approx(measured, rel=1e-3)


def test_a_parameter_changed_before_the_backward_raises() -> None:
    sequence = ReversibleSequence([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)], MidPoint(h=0.2))
    compiled = torch.compile(sequence, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4)
    first, second = compiled(x).sum(), compiled(x).sum()
    first.backward()
    with torch.no_grad():
        next(sequence.parameters()).mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
