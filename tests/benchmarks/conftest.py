"""Tiny workloads of every kind."""

from __future__ import annotations

import pytest
from workloads import Workload, attention, network, stage

TINY = {
    workload.name: workload
    for workload in (
        Workload(name="tiny-stage", title="", make=stage, batch=2, options={"channels": 8, "size": 6, "depth": 3}),
        Workload(
            name="tiny-attention",
            title="",
            make=attention,
            batch=2,
            options={"width": 8, "tokens": 5, "pairs": 2, "heads": 2},
        ),
        Workload(name="tiny-hamiltonian", title="", make=network, batch=2, options={"name": "hamiltonian-26"}),
    )
}


@pytest.fixture(params=TINY)
def tiny(request: pytest.FixtureRequest) -> Workload:
    """Each workload in turn."""
    return TINY[request.param]


@pytest.fixture
def tiny_stage() -> Workload:
    """Additive couplings, which nearly every method can run."""
    return TINY["tiny-stage"]
