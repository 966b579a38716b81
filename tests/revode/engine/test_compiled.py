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

from revode import BDIA, AdditiveCoupling, Leapfrog, MidPoint, ReversibleSequence, SymmetricField, Verlet

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
    "additive-anchors": (AdditiveCoupling(), small_conv, {"anchor_every": 1}),
    "leapfrog-damped": (Leapfrog(h=0.2, damping=0.1), small_conv, {}),
    "bdia": (BDIA(), small_conv, {}),
    "checkpoint": (Leapfrog(h=0.2), small_conv, {"backprop": "checkpoint"}),
    "budget": (Leapfrog(h=0.2), small_conv, {"memory_budget": 10_000}),
}


def around(body: nn.Module) -> nn.Module:
    """A model of which something is left to compile where the body breaks the graph."""
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh(), body, nn.Conv2d(4, 4, 1))


@pytest.mark.parametrize("name", CASES)
def test_a_walk_breaks_the_graph_and_has_the_gradients_of_eager(name: str) -> None:
    scheme, make, options = CASES[name]
    model = around(make_sequence(scheme, make, number=4, **options))
    assert_agree(*eager_and_compiled(model, torch.randn(2, 4, 5, 5), backend="eager"), 1e-5)


@pytest.mark.parametrize("number", [2, 12, 40])
def test_any_number_of_branches_is_right(number: int) -> None:
    """Dynamo gives up after eight variants of one piece of code; a walk is none of its business."""
    model = around(make_sequence(MidPoint(h=0.1), small_conv, number=number)).double()
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    assert_agree(*eager_and_compiled(model, x, backend="eager"), 1e-10)
    assert not counters["unimplemented"]


def test_generated_code_around_a_walk_trains() -> None:
    model = around(make_sequence(MidPoint(h=0.2), small_conv, number=2, exact=True))
    x = torch.randn(2, 4, 5, 5)
    assert_agree(*eager_and_compiled(model, x), 1e-3)
    compiled, optimizer, losses = torch.compile(model), torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(8):
        loss = compiled(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_one_graph_of_training_is_refused_by_torch_and_stored_is_not() -> None:
    sequence, x = make_sequence(MidPoint(h=0.2), tanh_layer), torch.randn(2, 4)
    with pytest.raises(Exception, match="disable"):
        torch.compile(sequence, fullgraph=True, backend="eager")(x)
    stored = sequence.with_strategy(backprop="store")
    torch._dynamo.reset()
    assert_agree(*eager_and_compiled(stored, x, fullgraph=True, backend="aot_eager"), 1e-6)


@pytest.mark.parametrize("name", ["verlet", "leapfrog-exact", "bdia"])
def test_without_gradients_it_is_one_graph(name: str) -> None:
    scheme, make, options = CASES[name]
    model = around(make_sequence(scheme, make, number=4, **options)).eval()
    x = torch.randn(2, 4, 5, 5)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


def test_inverse_breaks_the_graph_and_is_right() -> None:
    sequence, x = make_sequence(Leapfrog(h=0.2), tanh_layer, number=3), torch.randn(2, 4)
    with torch.no_grad():
        _, state = sequence(x, return_state=True)
        torch.testing.assert_close(torch.compile(sequence.inverse, backend="eager")(state), x)


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
def test_random_branches_are_right() -> None:
    def make(channels: int) -> nn.Module:
        return nn.Sequential(nn.Linear(channels, channels), nn.Dropout(0.5), nn.Tanh())

    sequence = make_sequence(MidPoint(h=0.2), make, number=3).double()
    compiled = torch.compile(sequence)
    x = torch.randn(3, 4, dtype=torch.float64)

    def loss() -> Tensor:
        torch.manual_seed(3)
        return weighted_sum(compiled(x))

    loss().backward()
    weight = sequence.fields[1][0].weight
    direction = torch.randn_like(weight)
    measured = finite_difference(loss, weight, direction)
    assert float((weight.grad * direction).sum()) == pytest.approx(measured, rel=1e-5, abs=1e-7)


def test_keyword_arguments_and_the_state_go_through() -> None:
    sequence = make_sequence(Leapfrog(h=0.3), Conditioned)
    compiled = torch.compile(sequence, backend="eager")
    grads = []
    for call in (sequence, compiled):
        sequence.zero_grad()
        condition = torch.linspace(-1, 1, 4).requires_grad_()
        y, state = call(torch.ones(2, 4), condition=condition, return_state=True)
        weighted_sum((y, *state)).backward()
        grads.append({"condition": condition.grad} | {n: p.grad.clone() for n, p in sequence.named_parameters()})
    assert_agree(*grads, 1e-6)


@pytest.mark.slow
def test_a_state_out_of_range_without_gradients_is_an_error_at_run_time() -> None:
    sequence = make_sequence(MidPoint(h=0.2), tanh_layer, exact=True)
    compiled = torch.compile(sequence, fullgraph=True)
    with torch.no_grad():
        compiled(torch.randn(2, 4))
        with pytest.raises(RuntimeError, match="out of range"):
            compiled(torch.full((2, 4), 3000.0))


@pytest.mark.parametrize("scheme", [Verlet(h=0.2), Leapfrog(h=0.2)], ids=repr)
@pytest.mark.parametrize("exact", [False, True])
def test_the_eval_model_is_exported(scheme: Any, exact: bool) -> None:
    body = make_sequence(scheme, conv_norm_relu, exact=exact)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), body, nn.Flatten(), nn.Linear(36, 2)).eval()
    x = torch.randn(2, 3, 5, 5)
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-5, atol=1e-5)


def test_keywords_that_some_branches_take_are_traced() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = ReversibleSequence([Conditioned(4), nn.Linear(4, 4)], MidPoint(h=0.2))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x, condition=x.flip(0))

    model, x = Model().eval(), torch.randn(2, 4)
    expected = model(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), expected)


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
    compiled = torch.compile(sequence, backend="aot_eager")
    x = torch.randn(2, 4)
    first, second = compiled(x).sum(), compiled(x).sum()
    first.backward()
    with torch.no_grad():
        next(sequence.parameters()).mul_(2.0)
    with pytest.raises(RuntimeError, match="modified in place"):
        second.backward()
