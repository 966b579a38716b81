"""Run by test_processes.py under torchrun: one process of a group that trains a network without batch statistics.

torchrun --nproc-per-node=2 train_in_group.py FOLDER name=value ...
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from tiny_runs import tiny, without_batch_statistics

from revode_lab.training import Interrupted, job, loop, train


def stop_at(step: int) -> None:
    """Have rank 0 receive SIGTERM in the update after `step`."""
    apply_gradient = loop.Training.apply_gradient

    def apply_and_stop(self: Any) -> None:
        apply_gradient(self)
        if self.position.step + 1 == step and self.job.group.leads:
            os.kill(os.getpid(), signal.SIGTERM)

    loop.Training.apply_gradient = apply_and_stop


def main(folder: str, *words: str) -> int:
    settings: dict[str, Any] = dict(word.split("=") for word in words)
    stop_at(int(settings.pop("stop_at", 0)))
    job.build = without_batch_statistics
    try:
        train(tiny(**settings), folder, resume="auto")
    except Interrupted as error:
        print(f"{error}", flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.setswitchinterval(10)  # no other thread gets the interpreter by the way: whoever leaves must wait for them
    sys.exit(main(*sys.argv[1:]))
