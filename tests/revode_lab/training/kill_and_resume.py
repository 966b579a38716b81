"""Run by test_kill.py: train, be killed with SIGKILL at given steps, resume, until done. Children are forked: torch loads once.

python kill_and_resume.py FOLDER SETTINGS-AS-JSON STEP STEP ...
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch._dynamo  # noqa: F401 (an optimizer imports it at its first step: once here, not in every child)
from tiny_runs import tiny

from revode_lab.training import train


class KillAt:
    """A monitor that ends this process as a power cut would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, model: Any, step: int) -> dict[str, float]:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}


def in_child(action: Any) -> int:
    """Exit status of `action` in a forked process; minus the signal's number if one ended it."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def main(folder: str, settings: str, *steps: str) -> None:
    config = tiny(**json.loads(settings))
    for step in map(int, steps):
        status = in_child(lambda step=step: train(config, folder, resume="auto", monitors=[KillAt(step)]))
        assert status == -signal.SIGKILL, f"step {step}: {status}"
    status = in_child(lambda: train(config, folder, resume="auto"))
    assert status == 0, status


if __name__ == "__main__":
    main(*sys.argv[1:])
