"""Training makes no device wait between two lines of metrics: counted on a device that is only pretended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def found():
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot pretend a device in Python")
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, str(here / "loop_syncs.py")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_no_update_makes_a_device_wait_between_two_lines_of_metrics(found):
    waits = {name: case for name, case in found.items() if name != "divergence"}
    assert len(waits) == 4
    assert {name: case["between"] for name, case in waits.items() if case["between"]} == {}
    assert all(case["at lines"] for case in waits.values()), "numbers read for a line were not counted"


def test_divergence_on_a_device_is_found_before_anything_is_written_of_it(found):
    broken = found["divergence"]
    assert (broken["step"], broken["saved"], broken["lines"]) == (5, [], 1)
    assert "the parameter stem.conv.weight is not finite" in broken["text"]
