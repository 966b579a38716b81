"""A run killed without warning, at any step, ends with the bits of an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import assert_same_bits, tiny

from revode_lab.training import train

SETTINGS = {"ema": 0.9, "schedule": "one-cycle", "label_smoothing": 0.1, "log_every": 3, "max_steps": 18}


def kill_and_resume(folder: Path, settings: dict, steps: list[int]) -> None:
    script = Path(__file__).with_name("kill_and_resume.py")
    words = [sys.executable, str(script), str(folder), json.dumps(settings), *map(str, steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def test_killed_before_between_and_on_checkpoints_it_ends_with_the_same_bits(tmp_path):
    """8 steps are an epoch and 5 lie between checkpoints."""
    compare(SETTINGS, [3, 10, 14], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_steps_it_ends_with_the_same_bits(seed, tmp_path):
    draw = random.Random(seed)
    settings = draw.choice([SETTINGS, {"schedule": "step", "milestones": [1]}])
    compare({**settings, "max_steps": 20, "seed": seed}, sorted({*draw.sample(range(1, 20), 4), 20}), tmp_path)


def compare(settings: dict, steps: list[int], tmp_path: Path) -> None:
    settings = {**settings, "monitor_every": 1}
    train(tiny(**settings), tmp_path / "whole")
    kill_and_resume(tmp_path / "killed", settings, steps)
    assert_same_bits(tmp_path / "killed", tmp_path / "whole")
