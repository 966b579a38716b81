"""What branches return beside their value, and sequences cut in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from branches import Conditioned, tanh_layer
from gradients import assert_agree, assert_bitwise, training_step
from torch import Tensor, nn

from revode import AdditiveCoupling, MidPoint, ReversibleSequence
from revode.engine import STRATEGIES
from revode.memory import SavedTensors


class Routed(nn.Module):
    """Two experts and their router; returns the router's probabilities and a count, in a nest."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.router = nn.Linear(features, 2)
        self.experts = nn.Linear(features, 2 * features)
        self.noise = nn.Dropout(0.3)

    def forward(self, q: Tensor) -> tuple[Tensor, dict[str, Any]]:
        odds = self.noise(self.router(q)).softmax(-1)
        u = torch.einsum("bk,bkf->bf", odds, self.experts(q).tanh().unflatten(-1, (2, -1)))
        return u, {"load": odds.mean(0), "chosen": [odds.argmax(-1), "router"], "state": q}


def routed(features: int, number: int = 6, **options: Any) -> ReversibleSequence:
    torch.manual_seed(0)
    fields = [Routed(features) if index % 2 else tanh_layer(features) for index in range(number)]
    return ReversibleSequence(fields, MidPoint(h=0.3), **options)


def with_aux(sequence: ReversibleSequence, only_aux: bool = False) -> Any:
    def call(x: Tensor) -> list[Tensor]:
        y, aux = sequence(x, return_aux=True)
        assert len(aux) == len(sequence.fields)
        assert [found is None for found in aux] == [not isinstance(field, Routed) for field in sequence.fields]
        assert all(found["chosen"][1] == "router" and not found["chosen"][0].requires_grad for found in aux[1::2])
        tensors = [tensor for found in aux[1::2] for tensor in (found["load"], found["state"])]
        return tensors if only_aux else [y, *tensors]

    return call


@pytest.mark.parametrize("only_aux", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"anchor_every": 2}, {"backprop": "checkpoint"}, {"memory_budget": 4_000}],
    ids=str,
)
def test_gradients_of_aux_are_those_of_store(options: dict[str, Any], exact: bool, only_aux: bool) -> None:
    x = torch.randn(5, 4, dtype=torch.float32 if exact else torch.float64)
    ours = routed(4, exact=exact, **options).to(x.dtype)
    stored = routed(4, exact=exact, backprop="store").to(x.dtype)
    records = [training_step(s, x, call=with_aux(s, only_aux)) for s in (ours, stored)]
    if only_aux:  # what nothing depends on has no gradient, or one of zeros
        for record in records:
            record.update({k: None if v is not None and not v.any() else v for k, v in record.items()})
    assert_bitwise(*records) if exact else assert_agree(*records, 1e-12)
    assert records[0]["grad of fields.1.router.weight"] is not None


@pytest.mark.parametrize("backprop", STRATEGIES)
def test_aux_is_dropped_unless_it_is_asked_for(backprop: str) -> None:
    sequence = routed(4, backprop=backprop).eval()
    x = torch.randn(3, 4)
    y, state, aux = sequence(x, return_state=True, return_aux=True)
    assert torch.equal(sequence(x), y)
    assert torch.equal(aux[1]["state"], [pair[1] for pair in sequence.states(x)][1])
    torch.testing.assert_close(sequence.inverse(state), x)


def test_aux_adds_nothing_to_what_is_kept_and_does_not_leak() -> None:
    x = torch.randn(64, 4)
    kept = []
    for return_aux in (False, True):
        sequence = routed(4).eval()
        with SavedTensors(sequence.parameters()) as saved:
            sequence(x, return_aux=return_aux)
        kept.append(saved.num_bytes)
    assert kept[0] == kept[1]


def test_a_duplicated_input_gives_the_mean_of_its_two_ways() -> None:
    F, G = Conditioned(4), tanh_layer(4)
    sequence = ReversibleSequence([F, G], AdditiveCoupling(start="duplicate")).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)  # three dimensions, and nothing to be said about them
    condition = torch.randn(3, 5, 4, dtype=torch.float64)
    y = x + F(x, condition)
    expected = (y + x + G(y)) / 2
    found, state = sequence(x, condition=condition, return_state=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(sequence.inverse(state, condition=condition), x)


@pytest.mark.parametrize("backprop", STRATEGIES)
def test_aux_that_nobody_asked_for_warns_once_in_training(backprop: str) -> None:
    sequence = routed(4, backprop=backprop)
    with torch.no_grad():
        sequence(torch.randn(2, 4))
    with pytest.warns(UserWarning, match=r"branch 1 \(Routed\) returned \(u, aux\), and nobody asked for the aux"):
        sequence(torch.randn(2, 4))
    sequence(torch.randn(2, 4))
