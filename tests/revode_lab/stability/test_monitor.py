"""The monitor: chosen numbers every N steps, and a training that does not notice."""

import math

import pytest
import torch
from small_networks import FAMILIES, images, small_network

from revode_lab.stability import StabilityMonitor
from revode_lab.stability.monitor import DEFAULT_QUANTITIES, QUANTITIES


@pytest.mark.parametrize("family", FAMILIES)
def test_every_quantity_is_a_number_on_every_family(family):
    found = StabilityMonitor(images(), quantities=tuple(QUANTITIES)).on_step(small_network(family), 0)
    expected = set(QUANTITIES) - ({"step_usage"} if family == "revnet" else set())
    assert set(found) == expected
    assert all(isinstance(value, float) and math.isfinite(value) for value in found.values())


def test_it_measures_every_n_steps_only():
    monitor = StabilityMonitor(images(), every=10, quantities=("signal_growth",))
    model = small_network("hamiltonian")
    assert [bool(monitor.on_step(model, step)) for step in (1, 9, 10, 15, 20)] == [False, False, True, False, True]


def test_without_images_it_draws_some_of_the_models_size():
    assert set(StabilityMonitor().on_step(small_network("hamiltonian"), 0)) == set(DEFAULT_QUANTITIES)


def train(monitor):
    torch.manual_seed(0)
    model = small_network("revnet")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.randn(4, 3, 8, 8)
        loss = torch.nn.functional.cross_entropy(model(x), torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        if monitor is not None:
            assert monitor.on_step(model, step)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_training_is_bit_for_bit_the_same_with_and_without_it():
    plain, watched = train(None), train(StabilityMonitor(quantities=tuple(QUANTITIES)))
    assert plain[0] == watched[0]
    assert all(torch.equal(plain[1][name], watched[1][name]) for name in plain[1])


def test_usage_follows_the_weights():
    model = small_network("hamiltonian")
    monitor = StabilityMonitor(images(), quantities=("step_usage",))
    before = monitor.on_step(model, 0)["step_usage"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 2.0
    assert monitor.on_step(model, 1)["step_usage"] == pytest.approx(4 * before, rel=0.01)


def test_diverged_weights_have_no_numbers():
    model = small_network("hamiltonian")
    next(model.parameters()).data.fill_(math.nan)
    assert StabilityMonitor(images()).on_step(model, 0) == {}


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="every must be a positive number of steps, got 0"):
        StabilityMonitor(every=0)
    with pytest.raises(ValueError, match=r"a monitor can follow perturbation_growth, .*; got 'entropy'"):
        StabilityMonitor(quantities=("entropy",))
    with pytest.raises(ValueError, match="no reversible units"):
        StabilityMonitor(images()).on_step(torch.nn.Linear(2, 2), 0)


def test_statistics_that_are_not_finite_have_no_numbers():
    model = small_network("hamiltonian", norm="batch")
    next(m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)).running_var[0] = float("inf")
    assert StabilityMonitor(images()).on_step(model, 0) == {}
