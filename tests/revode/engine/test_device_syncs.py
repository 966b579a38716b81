"""No device waits for the host in a step: counted on a device that is only pretended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot pretend a device in Python",
)
def test_no_step_of_any_strategy_makes_a_device_wait() -> None:
    script = Path(__file__).with_name("device_syncs.py")
    paths = {**os.environ, "PYTHONPATH": str(script.parents[2])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=paths)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found.pop("control"), "a number read on the host was not counted"
    assert len(found) > 90
    assert {case: waits for case, waits in found.items() if waits} == {}
