"""Two processes under torchrun (gloo) give the gradient of one, also with accumulation over micro-batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

SCRIPT = Path(__file__).with_name("two_processes.py")
TOLERANCE = 1e-6

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
    assert_small(found["ddp"])
    branch = found["fsdp"].pop("a single branch")
    assert_small(found["fsdp"])
    assert_refused_or_small(branch)
    assert_one_part_at_a_time_is_whole(found["memory"])


def assert_refused_or_small(branch: float | str) -> None:
    if isinstance(branch, str):
        assert branch.startswith("BranchError: branch 3 (FSDPSequential)")
        assert "fully_shard" in branch
    else:
        assert branch <= TOLERANCE


def assert_one_part_at_a_time_is_whole(found: dict[str, Any]) -> None:
    """Of parts that are sharded one by one."""
    parts, whole = found["parts"], found["whole"]
    assert parts["forward"] == parts["backward"] == [1]
    assert whole["forward"] == whole["backward"] == [4]
    assert parts["states"] == 2 * 4  # the final pair of each
    assert parts["evaluations"] == 2 * 20
    assert parts["shards"] == parts["parameters"] / 2


def test_the_check_catches_a_wrong_gradient() -> None:
    with pytest.raises(AssertionError):
        assert_small({"a": 1e-8, "b": 2e-6})
    with pytest.raises(AssertionError):
        assert_small({"a": "RuntimeError: no"})
