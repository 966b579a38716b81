"""Every test runs on one thread from the same seed; a busy machine is no fault of a property."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from warm import WarmProcess

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


def pytest_collection_finish() -> None:
    """What is there by now stays, and no test that collects garbage need look at it (a fifth of a second each time)."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever starts a ``revode`` command as a process gets one that has imported torch already."""
    monkeypatch.setattr(subprocess, "Popen", WarmProcess)
