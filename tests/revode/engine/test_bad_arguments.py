"""Bad input gets one `ValueError` that names the argument, the value and the expectation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from branches import ALL_SCHEMES, tanh_layer
from torch import Tensor, nn

from revode import AdditiveCoupling, Leapfrog, MidPoint, ReversibleSequence, SymmetricField, Verlet

STRATEGIES = ("reversible", "checkpoint", "store")


def build(**options: Any) -> ReversibleSequence:
    options = {"branches": [tanh_layer(4)] * 2, "scheme": MidPoint(h=0.1)} | options
    return ReversibleSequence(options.pop("branches"), options.pop("scheme"), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backprop": "magic"}, r"backprop must be one of 'reversible', 'checkpoint', 'store', got 'magic'"),
        ({"backprop": None}, r"backprop must be one of .* got None"),
        ({"scheme": "verlet"}, r"scheme must be .* got 'verlet'"),
        ({"scheme": Verlet}, r"scheme must be .* got <class"),
        ({"branches": []}, r"MidPoint takes its branches in groups of 1, got 0"),
        (
            {"branches": [tanh_layer(2)] * 3, "scheme": Verlet()},
            r"Verlet takes its branches in groups of 2, got 3 branches",
        ),
        ({"branches": [tanh_layer(2), torch.tanh]}, r"branches\[1\] must be an nn.Module, got builtin"),
        ({"anchor_every": 0}, r"anchor_every must be a positive number of steps or None, got 0"),
        ({"anchor_every": 1.5}, r"anchor_every must be .* got 1\.5"),
        ({"anchor_every": True}, r"anchor_every must be .* got True"),
        ({"memory_budget": 0}, r"memory_budget must be a positive number of bytes or None, got 0"),
        ({"memory_budget": -5}, r"memory_budget must be .* got -5"),
        ({"memory_budget": 1e6}, r"memory_budget must be .* got 1000000\.0"),
        ({"memory_budget": True}, r"memory_budget must be .* got True"),
        ({"memory_budget": 10, "backprop": "store"}, r"memory_budget goes with backprop='reversible', got .*'store'"),
        ({"split_dim": "channels"}, r"split_dim must be .* got 'channels'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize("backprop", STRATEGIES)
@pytest.mark.parametrize("scheme", [Verlet(), AdditiveCoupling()], ids=repr)
def test_an_odd_split_is_named(scheme: Any, backprop: str) -> None:
    sequence = build(branches=[tanh_layer(2)] * 2, scheme=scheme, backprop=backprop)
    with pytest.raises(ValueError, match=rf"{type(scheme).__name__} splits dimension 1 .*size is 5 .*\(2, 5\)"):
        sequence(torch.randn(2, 5))


@pytest.mark.parametrize("split_dim", [2, 7, -3])
def test_a_split_dimension_that_the_input_lacks_is_named(split_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"{split_dim}.*\(2, 4\)"):
        build(scheme=Verlet(), split_dim=split_dim)(torch.randn(2, 4))


class Widening(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return torch.cat((q, q), dim=1)


@pytest.mark.parametrize("backprop", ["reversible", "checkpoint", "store"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_of_another_dtype_than_the_state_are_refused(dtype: torch.dtype, backprop: str) -> None:
    sequence = ReversibleSequence([SymmetricField(4) for _ in range(2)], MidPoint(h=0.1), backprop=backprop).to(dtype)
    with pytest.raises(ValueError, match="failed on a state"):
        sequence(torch.randn(2, 4, 5, 5))


def test_a_branch_as_wide_as_the_input_is_told_that_it_gets_half() -> None:
    sequence = ReversibleSequence([nn.Linear(8, 8), nn.Linear(8, 8)], AdditiveCoupling())
    with pytest.raises(ValueError, match="half of the input, as AdditiveCoupling splits it"):
        sequence(torch.randn(2, 8))


class Rounding(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return q.to(torch.float64)


class Three(nn.Module):
    def forward(self, q: Tensor) -> Any:
        return q, q, q


class NoValue(nn.Module):
    def forward(self, q: Tensor) -> Any:
        return None, q


class Broadcastable(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return q.mean(0, keepdim=True)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("backprop", STRATEGIES)
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize(
    ("branch", "message"),
    [
        (Widening(), r"\(Widening\) changes the shape of its state from \(2, 4\) to \(2, 8\)"),
        (Broadcastable(), r"\(Broadcastable\) changes the shape of its state from \(2, 4\) to \(1, 4\)"),
        (Rounding(), r"\(Rounding\) changes the dtype of its state from torch.float32 to torch.float64"),
        (Three(), r"\(Three\) must return a tensor, or \(tensor, aux\), got tuple"),
        (NoValue(), r"\(NoValue\) must return a tensor, or \(tensor, aux\), got NoneType"),
        (tanh_layer(3), r"\(Sequential\) failed on a state of shape \(2, 4\)"),
        (nn.Linear(4, 4).double(), r"\(Linear\) failed on a state of shape \(2, 4\)"),
        (SymmetricField(3, ndim=0), r"\(SymmetricField\).*3 channels.*\(2, 4\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_branch_that_breaks_the_rules_is_named_with_its_depth(
    branch: nn.Module, message: str, depth: int, backprop: str, exact: bool
) -> None:
    fields = [tanh_layer(4) for _ in range(4)]
    fields[depth] = branch
    for scheme in (MidPoint(h=0.1), Leapfrog(h=0.1)):
        sequence = ReversibleSequence(fields, scheme, backprop=backprop, exact=exact)
        with pytest.raises(ValueError, match=rf"branch {depth} {message}"):
            sequence(torch.randn(2, 4))
        with torch.no_grad(), pytest.raises(ValueError, match=rf"branch {depth} {message}"):
            sequence(torch.randn(2, 4))


@pytest.mark.parametrize("kind", [nn.Conv2d, SymmetricField])
def test_a_wrong_channel_count_says_what_and_where(kind: type[nn.Module]) -> None:
    make = (lambda c: nn.Conv2d(c, c, 3, padding=1)) if kind is nn.Conv2d else SymmetricField
    sequence = ReversibleSequence([make(3), make(3)], Verlet())
    with pytest.raises(ValueError, match=r"branch 0 .*\(2, 2, 5, 5\)"):
        sequence(torch.randn(2, 4, 5, 5))


@pytest.mark.parametrize("x", [torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.complex64)])
@pytest.mark.parametrize("backprop", STRATEGIES)
def test_an_input_that_is_not_real_is_refused(x: Tensor, backprop: str) -> None:
    with pytest.raises(ValueError, match=f"floating-point tensor, got dtype {x.dtype}"):
        build(backprop=backprop)(x)


@pytest.mark.parametrize("x", [None, 3.0, "x", {"x": 1}], ids=["None", "number", "text", "dict"])
def test_an_input_that_is_no_tensor_is_refused(x: Any) -> None:
    for scheme in (MidPoint(), Verlet()):
        with pytest.raises(ValueError, match=type(x).__name__):
            build(scheme=scheme)(x)


@pytest.mark.parametrize("name", ALL_SCHEMES)
@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(2, 4), r"state must be a pair of tensors.*got a tensor of shape \(2, 4\)"),
        ((torch.zeros(2, 4),), r"state must be a pair of tensors.* got tuple of 1"),
        ((torch.zeros(2, 4),) * 3, r"state must be a pair of tensors.* got tuple of 3"),
        ((torch.zeros(2, 4), None), r"state must be a pair of tensors"),
        (None, r"state must be a pair of tensors.* got NoneType"),
        ((torch.zeros(2, 4), torch.zeros(2, 3)), r"agree in shape.*\(2, 4\).*\(2, 3\)"),
        ((torch.zeros(2, 4), torch.zeros(2, 4).double()), r"agree in shape, dtype.*float32.*float64"),
    ],
)
def test_a_wrong_pair_into_inverse_is_named(name: str, state: Any, message: str) -> None:
    sequence = build(scheme=ALL_SCHEMES[name]())
    with pytest.raises(ValueError, match=message):
        sequence.inverse(state)


@pytest.mark.parametrize("name", ["verlet", "midpoint"])
def test_a_pair_of_the_wrong_size_into_inverse_is_named(name: str) -> None:
    sequence = build(scheme=ALL_SCHEMES[name]())
    with pytest.raises(ValueError, match=r"branch 1 .*\(2, 3\)"):
        sequence.inverse((torch.zeros(2, 3), torch.zeros(2, 3)))
    with pytest.raises(ValueError, match="agree in shape"):
        sequence((torch.zeros(2, 4), torch.zeros(1, 4)))


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((torch.full((2, 4), 5000.0), torch.zeros(2, 4)), "magnitude 5000"),
        ((torch.zeros(2, 4), torch.full((2, 4), float("nan"))), "NaN"),
        ((torch.zeros(2, 4).half(), torch.zeros(2, 4).half()), "float16"),
        ((torch.full((2, 4), 0.3), torch.zeros(2, 4)), r"multiples of 2\^-14"),
    ],
    ids=["out of range", "NaN", "half", "off the grid"],
)
def test_a_pair_that_no_exact_sequence_returned_is_refused_by_inverse(pair: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(exact=True).inverse(pair)


def test_a_keyword_that_a_branch_does_not_take_is_an_error_of_the_call() -> None:
    with pytest.raises(TypeError, match="no branch takes the keyword argument 'mask'"):
        build()(torch.randn(2, 4), mask=None)
