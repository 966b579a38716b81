"""Gradients: those of stored activations, for every scheme, strategy, branch and depth; and the true ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from branches import ALL_SCHEMES, DISSIPATIVE, IMAGE_BRANCHES, SCHEMES, Conditioned, small_conv, tanh_layer, width
from gradients import assert_agree, assert_bitwise, compare_with_store, training_step, weighted_sum
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import revode.schemes
from revode import BDIA, AdditiveCoupling, Leapfrog, MidPoint, ReversibleSequence, Verlet
from revode.engine.path import _Node
from revode.schemes import Scheme


def dense_sequence(name: str, num_fields: int, features: int = 4, **options: Any) -> ReversibleSequence:
    scheme = ALL_SCHEMES[name]()
    fields = [tanh_layer(width(scheme, features)) for _ in range(num_fields)]
    return ReversibleSequence(fields, scheme, **options).double()


def image_sequence(name: str, branch: str, num_fields: int, channels: int = 4, **options: Any) -> ReversibleSequence:
    scheme = ALL_SCHEMES[name]()
    fields = [IMAGE_BRANCHES[branch](width(scheme, channels)) for _ in range(num_fields)]
    return ReversibleSequence(fields, scheme, **options)


def test_every_registered_scheme_is_among_those_tested() -> None:
    assert {type(make()) for make in ALL_SCHEMES.values()} == set(revode.schemes.SCHEMES.values())


def plain_integration(scheme: Scheme, fields: list[nn.Module], x: Tensor) -> Tensor:
    """The formulas of the design page as a user would write them, for ordinary autograd."""
    if isinstance(scheme, Verlet | AdditiveCoupling):
        h, sign = (scheme.h, -1.0) if isinstance(scheme, Verlet) else (1.0, 1.0)
        y, z = x.chunk(2, dim=1)
        for F, G in zip(fields[::2], fields[1::2], strict=True):
            y = y + h * F(z)
            z = z + sign * h * G(y)
        return torch.cat((y, z), 1)
    if isinstance(scheme, MidPoint):
        blends = [scheme.blend] * len(fields)
        if isinstance(scheme, BDIA):  # the signs that the sequence draws behind the same seed
            blends = [torch.randint(2, (x.shape[0], 1)).double() - 0.5 for _ in fields]
        old, Y = x, x + scheme.h * fields[0](x)
        for a, F in zip(blends[1:], fields[1:], strict=True):
            old, Y = Y, a * old + (1 - a) * Y + (1 + a) * scheme.h * F(Y)
        return Y
    assert isinstance(scheme, Leapfrog)
    old, Y = x, x - scheme.h**2 / 2 * fields[0](x)
    for F in fields[1:]:
        old, Y = Y, 2 * Y - old - scheme.h**2 * F(Y)
    return Y


@pytest.mark.parametrize("backprop", ["reversible", "checkpoint", "store"])
@pytest.mark.parametrize(
    "name", ["verlet", "additive", "midpoint", "leapfrog", "midpoint-half", "midpoint-minus-blend", "bdia"]
)
def test_gradients_are_those_of_the_formula_written_out(name: str, backprop: str) -> None:
    sequence = dense_sequence(name, 12, backprop=backprop)
    x = torch.randn(3, 4, dtype=torch.float64)
    ours = training_step(sequence, x)
    plain = training_step(sequence, x, call=lambda x: plain_integration(sequence.scheme, list(sequence.fields), x))
    assert_agree(ours, plain, 1e-12)


@pytest.mark.parametrize(("backprop", "num_blocks"), [("reversible", 100), ("checkpoint", 10)])
@pytest.mark.parametrize("name", ALL_SCHEMES)
def test_gradients_match_store(name: str, backprop: str, num_blocks: int) -> None:
    """At a depth over which errors of reversing would grow; checkpoints are not reversed."""
    num_fields = num_blocks * ALL_SCHEMES[name]().fields_per_step
    x = torch.randn(2, 4, dtype=torch.float64)
    compare_with_store(lambda **o: dense_sequence(name, num_fields, **({"backprop": backprop} | o)), x)


@pytest.mark.parametrize("branch", IMAGE_BRANCHES)
@pytest.mark.parametrize("name", ["verlet", "midpoint", "leapfrog", "momentum", "bdia"])
def test_gradients_match_store_with_every_kind_of_branch(name: str, branch: str) -> None:
    x = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    compare_with_store(lambda **o: image_sequence(name, branch, 8, **o).double(), x)


@pytest.mark.parametrize("ndim", [1, 3])
@pytest.mark.parametrize("kind", ["SymmetricField", "AntisymmetricField", "OneLayerField"])
def test_gradients_match_store_in_other_dimensions(kind: str, ndim: int) -> None:
    import revode

    x = torch.randn(2, 4, *[4] * ndim, dtype=torch.float64)

    def make(**options: Any) -> ReversibleSequence:
        fields = [getattr(revode, kind)(2, ndim=ndim, activation="tanh") for _ in range(6)]
        return ReversibleSequence(fields, Verlet(h=0.2), split_dim=1, **options).double()

    compare_with_store(make, x)


@pytest.mark.parametrize("anchor_every", [1, 3, 7, 50])
@pytest.mark.parametrize("name", ["verlet", "midpoint-paper", "leapfrog", "momentum", "leapfrog-damped", "bdia"])
def test_gradients_match_store_between_anchors(name: str, anchor_every: int) -> None:
    x = torch.randn(2, 4, dtype=torch.float64)
    compare_with_store(lambda **o: dense_sequence(name, 20, **({"anchor_every": anchor_every} | o)), x)


@pytest.mark.parametrize("name", ALL_SCHEMES)
def test_gradcheck_passes(name: str) -> None:
    sequence = dense_sequence(name, 4)
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)

    def seeded(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        y, state = sequence(x, return_state=True)
        return y, *state

    assert torch.autograd.gradcheck(lambda *inputs: seeded(*inputs)[0], (x, *sequence.parameters()), fast_mode=True)
    assert torch.autograd.gradcheck(lambda x: seeded(x)[1:], (x,), fast_mode=True)


@pytest.mark.parametrize("branch", ["symmetric_lead_tanh", "antisymmetric_sigmoid", "symmetric_tv", "conv_norm_relu"])
def test_gradcheck_passes_on_images(branch: str) -> None:
    sequence = image_sequence("verlet", branch, 4).double()
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: sequence(x), (x, *sequence.parameters()), fast_mode=True)


@pytest.mark.parametrize("name", ALL_SCHEMES)
def test_outputs_are_identical_under_all_strategies(name: str) -> None:
    x = torch.randn(2, 4, 5, 3)
    outputs = []
    for options in (
        {},
        {"backprop": "checkpoint"},
        {"backprop": "store"},
        {"anchor_every": 2},
        {"memory_budget": 10_000_000},
    ):
        torch.manual_seed(0)
        sequence = image_sequence(name, "symmetric", 6, **options)
        torch.manual_seed(1)
        y, state = sequence(x, return_state=True)
        outputs.append((y, *state))
        torch.manual_seed(1)
        with torch.no_grad():
            outputs.append((sequence(x), *state))
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, outputs[0], strict=True))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(sorted(ALL_SCHEMES)))
    scheme = ALL_SCHEMES[name]()
    exact = scheme.invertible_exactly and draw(st.booleans())
    backprop = draw(st.sampled_from(["reversible", "checkpoint"]))
    return {
        "name": name,
        "branch": draw(st.sampled_from(sorted(IMAGE_BRANCHES))),
        "num_fields": scheme.fields_per_step * draw(st.integers(1, 6)),
        "channels": 2 * draw(st.integers(1, 3)),
        "shape": (draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(6, 7))),
        "dtype": torch.float64 if draw(st.booleans()) else torch.float32,
        "backprop": backprop,
        "exact": draw(st.integers(8, 16)) if exact else False,
        "anchor_every": draw(st.sampled_from([None, 1, 2, 3])),
        "memory_budget": 4_000 * draw(st.integers(20, 40))
        if backprop == "reversible" and draw(st.booleans())
        else None,
        "layout": draw(st.sampled_from(["contiguous", "channels_last", "transposed", "sliced"])),
    }


def input_of(case: dict[str, Any]) -> Tensor:
    torch.manual_seed(0)
    batch, rows, columns = case["shape"]
    if case["layout"] == "transposed":
        return torch.randn(batch, case["channels"], columns, rows, dtype=case["dtype"]).transpose(2, 3)
    if case["layout"] == "sliced":
        return torch.randn(batch, case["channels"], rows, 2 * columns, dtype=case["dtype"])[..., ::2]
    x = torch.randn(batch, case["channels"], rows, columns, dtype=case["dtype"])
    return x.contiguous(memory_format=torch.channels_last) if case["layout"] == "channels_last" else x


@settings(max_examples=80)
@given(cases())
def test_any_sequence_agrees_with_store_and_inverts(case: dict[str, Any]) -> None:
    x = input_of(case)
    options = {key: case[key] for key in ("backprop", "exact", "anchor_every", "memory_budget")}

    def make(**other: Any) -> ReversibleSequence:
        size = case["name"], case["branch"], case["num_fields"], case["channels"]
        return image_sequence(*size, **(options | other)).to(case["dtype"])

    tolerance = 0.0 if case["exact"] else (1e-10 if case["dtype"] is torch.float64 else 1e-3)
    compare_with_store(make, x, tolerance=tolerance)
    sequence = make().eval()
    if not sequence.scheme.invertible or (case["exact"] and abs(sequence.scheme.carry) != 1.0):
        return
    with torch.no_grad():
        again = sequence.inverse(sequence(x, return_state=True)[1])
    if case["exact"]:
        scale = 2.0 ** case["exact"]
        assert torch.equal(again, torch.round(x * scale) / scale)
    else:
        tight = case["dtype"] is torch.float64
        torch.testing.assert_close(again, x, rtol=1e-8 if tight else 1e-3, atol=1e-8 if tight else 1e-3)


@pytest.mark.parametrize("name", SCHEMES)
def test_inverse_inverts_a_deep_sequence(name: str) -> None:
    sequence = dense_sequence(name, 100)
    x = torch.randn(2, 4, dtype=torch.float64)
    y, state = sequence(x, return_state=True)
    torch.testing.assert_close(sequence.inverse(state), x, rtol=1e-9, atol=1e-9)
    assert (y - x).norm() > 0.1


@pytest.mark.parametrize("name", ALL_SCHEMES)
@pytest.mark.parametrize("exact", [False, True])
def test_a_pair_is_continued_and_taken_back(name: str, exact: bool) -> None:
    if exact and name in DISSIPATIVE:
        pytest.skip("this scheme has no exact mode")
    torch.manual_seed(0)
    whole = dense_sequence(name, 8, exact=exact)
    scheme = whole.scheme
    first = ReversibleSequence(list(whole.fields[:4]), scheme, exact=exact)
    second = ReversibleSequence(list(whole.fields[4:]), scheme, exact=exact)
    x = torch.randn(2, 4, dtype=torch.float64)
    in_two = training_step(whole, x, call=lambda x: second(first(x, return_state=True)[1]))
    at_once = training_step(whole, x)
    assert_agree(in_two, at_once, 0.0 if exact else 1e-11)
    if not scheme.invertible or (exact and abs(scheme.carry) != 1.0):
        return
    with torch.no_grad():
        _, middle = first(x, return_state=True)
        _, end = second(middle, return_state=True)
        again = second.inverse(end, return_state=True)
        tolerance = 0.0 if exact else 1e-9
        for ours, original in zip(again, middle, strict=True):
            torch.testing.assert_close(ours, original, rtol=tolerance, atol=tolerance)
        start = whole.inverse(end)
        torch.testing.assert_close(start, x, rtol=1e-3 if exact else 1e-9, atol=1e-3 if exact else 1e-9)


@pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
def test_gradients_reach_keyword_arguments(backprop: str) -> None:
    def make(**options: Any) -> ReversibleSequence:
        fields = [Conditioned(4) for _ in range(6)]
        return ReversibleSequence(fields, MidPoint(h=0.2), **({"backprop": backprop} | options)).double()

    condition = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    compare_with_store(make, torch.randn(3, 4, dtype=torch.float64), kwargs={"condition": condition})


def test_inverse_takes_the_keyword_arguments_of_forward() -> None:
    sequence = ReversibleSequence([Conditioned(4) for _ in range(6)], Leapfrog(h=0.2)).double()
    x, condition = torch.randn(2, 3, 4, dtype=torch.float64)
    _, state = sequence(x, condition=condition, return_state=True)
    torch.testing.assert_close(sequence.inverse(state, condition=condition), x)
    assert (sequence.inverse(state, condition=-condition) - x).norm() > 1e-3


def test_a_keyword_argument_may_be_the_input_itself_or_come_from_another_layer() -> None:
    def make(**options: Any) -> ReversibleSequence:
        return ReversibleSequence([Conditioned(4) for _ in range(5)], MidPoint(h=0.2), **options).double()

    encoder = nn.Linear(4, 4).double()
    records = []
    for options in ({}, {"backprop": "store"}):
        torch.manual_seed(0)
        sequence = make(**options)
        encoder.zero_grad()
        whole = nn.ModuleList([sequence, encoder])
        x = torch.randn(3, 4, dtype=torch.float64)
        records.append(
            training_step(whole, x, call=lambda x, s=sequence: s(x, condition=encoder(x)) + s(x, condition=x))
        )
    assert_agree(*records, 1e-12)
    assert records[0]["grad of 1.weight"] is not None


@pytest.mark.parametrize("only", [0, 1, 2])
@pytest.mark.parametrize("name", ["verlet", "midpoint", "leapfrog", "momentum"])
@pytest.mark.parametrize("num_fields", [2, 8])
def test_any_one_of_output_and_state_may_be_used_alone(name: str, only: int, num_fields: int) -> None:
    def used(outputs: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
        y, (p, q) = outputs
        return weighted_sum((y, p, q)[only])

    def make(**options: Any) -> ReversibleSequence:
        return dense_sequence(name, num_fields, **options)

    for backprop in ("reversible", "checkpoint"):
        records = []
        for strategy in (backprop, "store"):
            torch.manual_seed(0)
            sequence = make(backprop=strategy)
            x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
            used(sequence(x, return_state=True)).backward()
            records.append({"x": x.grad} | {n: p.grad for n, p in sequence.named_parameters()})
        # A parameter that the used member does not depend on has no gradient, or a gradient of zeros.
        for record in records:
            record.update({k: None if v is not None and not v.any() else v for k, v in record.items()})
        assert_agree(*records, 1e-10)


def broken(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the engine's backward return gradients that `change` has tampered with."""
    original = _Node.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(change(original(ctx, *grads)))

    monkeypatch.setattr(_Node, "backward", staticmethod(backward))


@pytest.mark.parametrize(
    "change",
    [
        lambda grads: [None if g is None else g * (1 + 1e-8) for g in grads],
        lambda grads: [*grads[:-1], None],
        lambda grads: [*grads[:3], None, *grads[4:]],
    ],
    ids=["a gradient off by 1e-8", "a parameter detached", "an input detached"],
)
def test_the_check_catches_wrong_gradients(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    broken(monkeypatch, change)
    x = torch.randn(2, 4, dtype=torch.float64)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare_with_store(lambda **o: dense_sequence("midpoint", 10, **o), x)


def test_the_check_catches_a_reversal_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from revode.schemes import Coupling

    original = Coupling.reverse
    monkeypatch.setattr(Coupling, "reverse", lambda *args, **kwargs: original(*args, **kwargs) * (1 + 1e-7))
    x = torch.randn(2, 4, dtype=torch.float64)
    with pytest.raises(AssertionError, match="differ by more than"):
        compare_with_store(lambda **o: dense_sequence("verlet", 20, **o), x)


def test_the_check_catches_one_wrong_bit() -> None:
    a = training_step(image_sequence("verlet", "symmetric", 4), torch.randn(1, 4, 3, 3))
    b = dict(a)
    name = "grad of input"
    b[name] = torch.nextafter(a[name], a[name] + 1)
    with pytest.raises(AssertionError, match=name):
        assert_bitwise(b, a)


def test_branches_that_move_the_state_are_tested() -> None:
    sequence = ReversibleSequence([small_conv(2) for _ in range(4)], Verlet(h=0.3))
    x = torch.randn(1, 4, 5, 5)
    assert (sequence(x) - x).norm() > 0.1
