"""Accounting: bytes are counted once for each storage, without what lives anyway."""

from __future__ import annotations

import pytest
import torch
from allocations import Allocations
from torch import nn

from revode.memory import SavedTensors, graph_bytes


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
