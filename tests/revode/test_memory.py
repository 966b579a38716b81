"""Accounting: bytes are counted once for each storage, without what lives anyway."""

from __future__ import annotations

import pytest
import torch
from allocations import Allocations
from torch import nn

import revode
from revode.memory import PeakActivations, SavedTensors, graph_bytes


def test_tanh_saves_its_output() -> None:
    x = torch.randn(100, requires_grad=True)
    with SavedTensors() as saved:
        y = torch.tanh(x)
    assert saved.num_bytes == 400
    assert graph_bytes(y, [x]) == 400


def test_what_was_counted_is_let_go() -> None:
    x = torch.randn(100, requires_grad=True)
    with Allocations([x]) as allocations, SavedTensors() as saved:
        torch.tanh(x)
    assert saved.num_bytes == 400
    assert not allocations.alive()


def test_a_storage_saved_twice_or_through_a_view_counts_once() -> None:
    x = torch.randn(100, requires_grad=True)
    with SavedTensors() as saved:
        y = torch.tanh(x)
        z = y * y.view(10, 10).view(100)
    assert saved.num_bytes == 400
    assert graph_bytes(z, [x]) == 400


def test_a_view_counts_the_whole_storage_that_it_keeps_alive() -> None:
    x = torch.randn(1000, requires_grad=True)
    big = x * 1.0
    with SavedTensors() as saved:
        big[:10].sin()
    assert saved.num_bytes == 4000


def test_parameters_and_inputs_named_by_the_caller_do_not_count() -> None:
    layer, x = nn.Linear(10, 10), torch.randn(5, 10)
    with SavedTensors(exclude=[*layer.parameters(), x]) as saved:
        y = layer(x)
    assert saved.num_bytes == 0
    assert graph_bytes(y, [x], [*layer.parameters(), x]) == 0
    with SavedTensors(exclude=layer.parameters()) as saved:
        layer(x)
    assert saved.num_bytes == 200


def test_the_graph_is_counted_up_to_the_inputs_only() -> None:
    x = torch.randn(100, requires_grad=True)
    middle = torch.tanh(x)
    y = torch.exp(-middle)
    assert graph_bytes(y, [middle]) == 400
    assert graph_bytes(y, [x]) == 800


@pytest.mark.parametrize("freed", [False, True])
def test_a_graph_that_was_freed_keeps_nothing_new(freed: bool) -> None:
    x = torch.randn(100, requires_grad=True)
    with SavedTensors() as saved:
        y = torch.tanh(x)
        if freed:
            y.sum().backward()
        torch.exp(x)
    assert saved.num_bytes == 800


def test_nothing_is_counted_outside_the_block() -> None:
    x = torch.randn(100, requires_grad=True)
    with SavedTensors() as saved:
        pass
    torch.tanh(x)
    assert saved.num_bytes == 0


def test_both_agree_on_a_real_branch() -> None:
    branch = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    with SavedTensors(exclude=branch.parameters()) as saved:
        y = branch(x)
    counted = graph_bytes(y, [x], branch.parameters())
    assert counted == pytest.approx(saved.num_bytes, rel=0.05)
    assert saved.num_bytes >= 4 * (2 * 4 * 36 + 2 * 2 * 8 * 36)  # x, the first convolution's output, ReLU's output


@pytest.mark.parametrize(("blend", "bits"), [(2.0**-n, bits) for n, bits in enumerate((0, 1, 2, 4, 4, 8, 8))])
@pytest.mark.parametrize("num_steps", [5, 50])
def test_what_a_walk_of_ones_own_keeps_is_counted(num_steps: int, blend: float, bits: int) -> None:
    """No hook on saved tensors sees it, since the end of such a walk is not known."""
    x = torch.randn(8, 16)
    branches = [nn.Linear(16, 16) for _ in range(num_steps)]

    def run() -> torch.Tensor:
        walk = revode.Walk(revode.MidPoint(0.1, blend=blend), exact=True, verify=False)
        state = walk.enter(x)
        for branch in branches:
            state = walk.step(branch, state)
        return state[1]

    parameters = [p for branch in branches for p in branch.parameters()]
    expected = 2 * x.nbytes + (num_steps - 1) * x.numel() * bits // 8  # the first step has no p
    with SavedTensors(parameters) as saved:
        y = run()
    assert saved.num_bytes == expected
    assert graph_bytes(y, [], parameters) == expected
    with PeakActivations(parameters) as peak:
        y = run()
    assert expected <= peak.num_bytes <= expected + 2 * x.nbytes
