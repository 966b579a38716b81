"""BDIA: signs drawn in training, and the plain network in eval mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from branches import Attention, conv_norm_relu, gelu_conv, tanh_layer
from gradients import assert_agree, training_step
from torch import Tensor, nn

from revode import BDIA, MidPoint, ReversibleSequence
from revode.engine import STRATEGIES


def plain(fields: Any, x: Tensor) -> Tensor:
    for field in fields:
        x = x + field(x)
    return x


@pytest.mark.parametrize("backprop", STRATEGIES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("make", [conv_norm_relu, gelu_conv])
def test_in_eval_mode_it_is_the_plain_network_bit_for_bit(make: Any, exact: bool, backprop: str) -> None:
    fields = [make(4) for _ in range(8)]
    sequence = ReversibleSequence(fields, BDIA(), exact=exact, backprop=backprop).eval()
    x = torch.randn(3, 4, 5, 5)
    expected = plain(fields, x)
    assert torch.equal(sequence(x), expected)
    with torch.no_grad():
        assert torch.equal(sequence(x), plain(fields, x))
    ours = training_step(sequence, x)
    assert_agree(ours, training_step(sequence, x, call=lambda x: plain(fields, x)), 1e-5)


def test_signs_differ_between_samples_and_steps_and_follow_the_seed() -> None:
    sequence = ReversibleSequence([tanh_layer(4) for _ in range(6)], BDIA(h=0.3))
    x = torch.ones(64, 4)
    torch.manual_seed(0)
    first, second = sequence(x), sequence(x)
    torch.manual_seed(0)
    assert torch.equal(first, sequence(x))
    assert not torch.equal(first, second)
    assert len({tuple(row.tolist()) for row in first}) > 10
    couplings = BDIA().couplings(50, x, True)
    signs = torch.stack([coupling.carry for coupling in couplings])
    assert set(signs.unique().tolist()) == {-0.5, 0.5}
    assert abs(float(signs.mean())) < 0.05


def test_the_mean_over_signs_is_close_to_the_plain_network() -> None:
    fields = [tanh_layer(4).double() for _ in range(3)]
    sequence = ReversibleSequence(fields, BDIA(h=0.05))
    x = torch.randn(1, 4, dtype=torch.float64).expand(20_000, -1)
    with torch.no_grad():
        mean, target = sequence(x).mean(0), sequence.eval()(x[:1])[0]
    assert (mean - target).norm() < 0.05 * (target - x[0]).norm()


@pytest.mark.parametrize("exact", [False, True])
def test_dropout_and_signs_are_replayed_together(exact: bool) -> None:
    records = []
    for backprop in STRATEGIES:
        torch.manual_seed(0)
        fields = [Attention(8) for _ in range(6)]
        sequence = ReversibleSequence(fields, BDIA(h=0.5), backprop=backprop, exact=exact)
        records.append(training_step(sequence, torch.randn(3, 5, 8)))
    for record in records[:2]:
        assert_agree(record, records[2], 0.0 if exact else 1e-4)


@pytest.mark.parametrize("scheme", [BDIA(), MidPoint(0.2, blend=0.0)], ids=repr)
def test_what_cannot_be_inverted_says_so(scheme: Any) -> None:
    sequence = ReversibleSequence([tanh_layer(4)] * 3, scheme)
    _, state = sequence(torch.randn(2, 4), return_state=True)
    with pytest.raises(ValueError, match=r"cannot be inverted: it"):
        sequence.inverse(state)
    with pytest.raises(ValueError, match="cannot be inverted"):
        next(sequence.states_back(state))


def test_inverse_of_states_halved_exactly_says_what_it_lacks() -> None:
    sequence = ReversibleSequence([tanh_layer(4)] * 3, MidPoint(0.2, blend=0.5), exact=True)
    _, state = sequence(torch.randn(2, 4), return_state=True)
    with pytest.raises(ValueError, match=r"exact=14 with MidPoint.* from the final pair alone.*use exact=False"):
        sequence.inverse(state)


def test_a_blend_of_zero_is_the_plain_network_and_keeps_a_state_for_each_branch() -> None:
    fields = nn.ModuleList(tanh_layer(4) for _ in range(5))
    x = torch.randn(2, 4, dtype=torch.float64)
    sequence = ReversibleSequence(list(fields), MidPoint(1.0, blend=0.0)).double()
    assert sequence.segment_length() == 1
    ours = training_step(sequence, x)
    assert_agree(ours, training_step(sequence, x, call=lambda x: plain(fields, x)), 1e-12)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled_as_a_whole_it_runs_in_eval() -> None:
    sequence = ReversibleSequence([tanh_layer(4) for _ in range(3)], BDIA(), verify=False).eval()
    x = torch.randn(2, 4)
    with torch.no_grad():
        compiled = torch.compile(sequence, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), plain(sequence.fields, x))
