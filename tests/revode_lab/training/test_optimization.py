"""Schedules as formulas, averages as sums, random states as they were."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from revode_lab.training.checkpoint import random_states, restore_random_states
from revode_lab.training.config import OptimizationConfig
from revode_lab.training.job import AveragedWeights, learning_rate, make_optimizer


def rates(num_steps: int = 100, steps_per_epoch: int = 10, **settings) -> list[float]:
    config = OptimizationConfig(**{"lr": 1.0, **settings})
    return [learning_rate(config, step, num_steps, steps_per_epoch) for step in range(num_steps)]


def test_step_schedule_drops_at_its_milestones():
    found = rates(schedule="step", milestones=(3, 6))
    assert found[29] == 1.0
    assert found[30] == pytest.approx(0.1)
    assert found[60] == pytest.approx(0.01)
    assert rates(schedule="step", milestones=(30, 60), milestone_unit="steps") == found


def test_one_cycle_rises_to_its_peak_and_falls():
    found = rates(schedule="one-cycle", warmup_fraction=0.3)
    assert found[0] == pytest.approx(0.04)
    assert max(found) == found[30] == pytest.approx(1.0)
    assert found[-1] < 0.01


def test_constant_stays():
    assert set(rates(schedule="constant")) == {1.0}


def test_average_is_the_weighted_sum_of_what_it_saw():
    model = nn.Linear(1, 1)
    values = [1.0, 3.0, -2.0, 5.0]
    nn.init.zeros_(model.weight)
    average = AveragedWeights(model, 0.5)
    expected = 0.0
    for number, value in enumerate(values, 1):
        nn.init.constant_(model.weight, value)
        average.update(model)
        decay = min(0.5, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * value
    assert average.tensors["weight"].item() == pytest.approx(expected)


def test_swapping_twice_restores_every_bit():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    average = AveragedWeights(model, 0.9)
    model(torch.randn(5, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    average.swap(model)
    assert not torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])
    average.swap(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_biases_and_norms_do_not_decay():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    groups = make_optimizer(model, OptimizationConfig(weight_decay=0.1)).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for parameter in model.parameters():
        assert decays[id(parameter)] == (0.1 if parameter.dim() > 1 else 0.0)


def test_random_states_come_back():
    states = random_states()
    first = torch.rand(3)
    restore_random_states(states)
    assert torch.equal(torch.rand(3), first)
    assert math.isfinite(first.sum())
