"""Two processes under torchrun (gloo) give the gradient of one, also with accumulation over micro-batches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

SCRIPT = Path(__file__).with_name("two_processes.py")
TOLERANCE = 1e-12

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch lacks gloo")


def run_two_processes() -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULTS")[1])


def assert_small(errors: dict[str, float | str]) -> None:
    wrong = {name: error for name, error in errors.items() if isinstance(error, str) or not error <= TOLERANCE}
    assert not wrong


def test_two_processes_replicated_or_sharded_give_the_gradient_of_one() -> None:
    """All cases in one launch, which takes longer than they do."""
    found = run_two_processes()
    inside = found["fsdp"].pop("inside a branch")
    assert isinstance(inside, str), inside
    assert re.match(r"BranchError: branch 3 .*sharded by itself", inside)
    assert_small(found["ddp"])
    assert_small(found["fsdp"])
    assert_each_branch_is_reduced_when_it_is_done(found["order"]["fsdp"])
    assert_buckets_are_reduced_on_the_way(found["order"]["ddp"]["order"])


def assert_each_branch_is_reduced_when_it_is_done(found: dict[str, Any]) -> None:
    assert found["forward"] <= 2
    assert found["backward"] <= 2
    assert found["shards"] == found["parameters"] / 2
    order = [entry for entry in found["order"] if entry.startswith("run")]
    assert order == [f"run {number}" for number in reversed(range(20))]
    at = [index for index, entry in enumerate(found["order"]) if entry == "reduce"]
    assert at[2] < found["order"].index("run 14")  # the head, and the first branches, long before the last one runs


def assert_buckets_are_reduced_on_the_way(order: list[str]) -> None:
    assert order.count("reduce") > 4
    assert order.index("reduce") < order.index("run 5")  # before the last quarter of 20 branches begins


def test_the_check_catches_a_wrong_gradient() -> None:
    with pytest.raises(AssertionError):
        assert_small({"a": 1e-15, "b": 2e-12})
    with pytest.raises(AssertionError):
        assert_small({"a": "RuntimeError: no"})
