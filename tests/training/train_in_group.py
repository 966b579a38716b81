"""Run by test_processes.py under torchrun: one process of a group that trains a network without batch statistics.

torchrun --nproc-per-node=2 train_in_group.py FOLDER name=value ...
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from tiny_runs import tiny, without_batch_statistics

from revode.training import Interrupted, job, train


class StopAt:
    """A monitor that asks this process, rank 0, to stop."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, model: Any, step: int) -> dict[str, float]:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}


def main(folder: str, *words: str) -> int:
    settings: dict[str, Any] = dict(word.split("=") for word in words)
    stop_at = int(settings.pop("stop_at", 0))
    job.create_model = without_batch_statistics
    monitors = [StopAt(stop_at)] if stop_at else []
    try:
        train(tiny(**settings, monitor_every=1), folder, resume="auto", monitors=monitors)
    except Interrupted as error:
        print(f"{error}", flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
