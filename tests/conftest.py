"""Every test runs on one thread from the same seed; a busy machine is no fault of a property."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from warm import WarmProcess

from revode_lab.data.catalogue import LAYOUTS

settings.register_profile(
    "revode",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("revode")


@pytest.fixture(autouse=True)
def one_thread_one_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None:  # one for the process, with the precision of whoever came first
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)


def pytest_collection_finish() -> None:
    """What is there by now stays, and no test that collects garbage need look at it (a fifth of a second each time)."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever starts a ``revode`` command as a process gets one that has imported torch already."""
    monkeypatch.setattr(subprocess, "Popen", WarmProcess)


@pytest.fixture
def real_root() -> Callable[[str], Path]:
    """The root of real data, or a skip that says what is missing."""

    def find(name: str) -> Path:
        root = os.environ.get("REVODE_DATA")
        if not root:
            pytest.skip("REVODE_DATA is not set, so there are no real data to test on")
        first = Path(root) / LAYOUTS[name].folder / LAYOUTS[name].train[0].name
        if not first.exists():
            pytest.skip(f"{first} is absent; `revode data get {name}` gets it")
        return Path(root)

    return find
