"""The peak of a process is its own, whoever started it."""

from __future__ import annotations

import subprocess
import sys

import pytest

LARGE = 1_500_000_000

PROGRAM = f"""
import os, sys
held = b"x" * {LARGE}
program = "from revode_lab.training.terminal import memory_in_use; print(memory_in_use())"
os.execv(sys.executable, [sys.executable, "-c", program])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak since the program began")
def test_the_peak_is_not_that_of_the_program_that_started_this_one() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=240)
    number, unit = done.stdout.split()[-2:]
    assert done.stdout.startswith("process peak ")
    assert float(number) * {"MB": 1e6, "GB": 1e9}[unit] < LARGE / 2
