"""Every method computes the gradient of the same function, and is counted fairly."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import methods
import pytest
import torch
import workloads
from cases import Case
from measure import applicable
from methods import METHODS
from workloads import Workload

from revode.schemes import Leapfrog, MidPoint, Momentum

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
RIGHT = [name for name in methods.DEFAULT if name != "revode-exact"]


@pytest.mark.parametrize("name", RIGHT)
def test_gradient_agrees_with_store_in_fp64(name: str, tiny: Workload) -> None:
    method = METHODS[name]
    if not method.available:
        pytest.skip(f"{name} is not installed: make bench sets it up")
    if method not in applicable(tiny, [method]):
        pytest.skip(f"{name} cannot run this scheme")
    expected = Case(tiny, METHODS["store"], torch.float64).gradient(2)
    found = Case(tiny, method, torch.float64).gradient(2)
    tolerance = 1e-9
    assert expected.norm() > 0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_gradient_in_exact_mode_differs_by_the_grid_only(tiny: Workload) -> None:
    exact = METHODS["revode-exact"]
    if not applicable(tiny, [exact]):
        pytest.skip("this scheme has no exact mode")
    expected = Case(tiny, METHODS["store"]).gradient(2)
    found = Case(tiny, exact).gradient(2)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_all_methods_start_from_the_same_parameters(tiny: Workload) -> None:
    first, second = (Case(tiny, METHODS[name]).parameters for name in ("store", "revode"))
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_bytes_kept_fall_from_store_to_checkpoint_to_reversible(tiny_stage: Workload) -> None:
    deep = dataclasses.replace(tiny_stage, options={**tiny_stage.options, "depth": 12})
    store, checkpoint, sqrt, revode = (
        Case(deep, METHODS[name]).saved_bytes() for name in ("store", "checkpoint", "checkpoint-sqrt", "revode")
    )
    assert store > checkpoint > sqrt > revode
    pair = 4 * math.prod((2, 8, 6, 6))
    assert checkpoint == 12 * pair  # one for each block but the first, whose is the input; and the output


def test_tensors_that_peers_hide_are_counted(tiny_stage: Workload) -> None:
    for name in ("memcnn", "revtorch"):
        if METHODS[name].available:
            assert Case(tiny_stage, METHODS[name]).saved_bytes() >= 4 * math.prod((2, 8, 6, 6))


def test_budget_keeps_what_it_may(tiny_stage: Workload) -> None:
    least, between, most = (
        Case(tiny_stage, METHODS[name]).saved_bytes() for name in ("revode", "revode-budget-75", "store")
    )
    assert least < between < most
    stored, budgeted = (Case(tiny_stage, METHODS[name]).gradient(2) for name in ("store", "revode-budget-75"))
    torch.testing.assert_close(budgeted, stored, rtol=1e-4, atol=1e-6 * float(stored.abs().max()))


def test_methods_are_named_as_the_design_says() -> None:
    names = "store checkpoint checkpoint-sqrt revode revode-exact memcnn revtorch revlib"
    assert list(methods.DEFAULT) == names.split()


def test_peers_run_only_their_schemes() -> None:
    for scheme in (MidPoint(0.1), Leapfrog(0.1), Momentum(0.9)):
        assert not any(METHODS[name].supports(scheme) for name in methods.PEERS)


def test_absent_peer_is_not_applicable(tiny_stage: Workload, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(methods, "library", lambda name: None)
    assert not any(METHODS[name].available for name in methods.PEERS)
    names = [method.name for method in applicable(tiny_stage, [METHODS[name] for name in methods.DEFAULT])]
    assert names == ["store", "checkpoint", "checkpoint-sqrt", "revode", "revode-exact"]
    assert methods.version("memcnn") == "absent"


def test_peers_leave_the_import_path_as_it_was() -> None:
    import sys

    before = list(sys.path)
    assert methods.library("no_such_library_anywhere") is None
    assert sys.path == before


def test_images_and_kernels_are_in_channels_last(tiny_stage: Workload) -> None:
    case = Case(tiny_stage, METHODS["store"])
    tensors = [case.inputs, *(parameter for parameter in case.parameters if parameter.dim() == 4)]
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors)


def test_workloads_hold_what_was_asked_for() -> None:
    asked = {"stage-32x32", "stage-16x16", "stage-8x8", "hamiltonian-74", "hamiltonian-1202", "attention-12"}
    asked |= {"depth-10", "depth-100", "depth-1000"}
    assert asked <= set(workloads.WORKLOADS)
    assert workloads.WORKLOADS["hamiltonian-74"].batch == 100
    assert workloads.WORKLOADS["hamiltonian-1202"].batch == 32
