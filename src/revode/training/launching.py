"""A training in several processes of this machine: what `train` does, without torchrun around the caller.

Two processes of one thread each use two cores better than two threads do: convolutions of one image batch wait for each
other, two halves of it do not (measured in docs/training.md).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from revode.files import read_json
from revode.training.config import Config, from_leaves
from revode.training.interruption import Interrupted, Interruption
from revode.training.runs import RESULT, read_metrics

_POLL, _PATIENCE = 0.2, 30.0
"""Seconds between looks at the processes, and until those are killed whose peer has failed."""


class ProcessFailed(RuntimeError):
    """A process of a training ended with an error, which it has printed."""


def train_in_processes(config: Config, folder: Path, num_processes: int) -> dict[str, Any]:
    """Train into `folder`, or go on with the run there, and return what its ``result.json`` holds.

    Args:
        config: The configuration. Without a number of threads, the cores are divided among the processes.
        folder: The run directory.
        num_processes: How many; each takes an equal share of every batch.

    Raises:
        ProcessFailed: One of them failed, or the training diverged.
        Interrupted: A signal stopped the run after it was saved.
    """
    if not config.execution.threads:
        threads = max(1, torch.get_num_threads() // num_processes)
        config = from_leaves({**config.leaves(), "threads": threads})
    with tempfile.TemporaryDirectory() as scratch, Interruption() as interruption:
        file = Path(scratch) / "config.yaml"
        file.write_text(config.to_yaml(), encoding="utf-8")
        processes = _start(file, folder, num_processes, config.execution.threads)
        try:
            codes = _wait(processes, interruption)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        result = read_json(folder / RESULT)
        if not any(codes) and result is not None:
            return result
        if interruption.signal_number:
            steps = [line["step"] for line in read_metrics(folder)]
            raise Interrupted(interruption.signal_number, max(steps, default=0), folder)
        if 2 in codes:
            raise ValueError(f"the training in {folder} was refused, as said above")
        raise ProcessFailed(f"the training in {folder} failed in one of {num_processes} processes (exit codes {codes})")


def _start(file: Path, folder: Path, num_processes: int, threads: int) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "revode.cli", "train", "--config", str(file), "--out", str(folder)]
    shared = {
        "WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": str(threads),
    }
    return [
        subprocess.Popen(
            [*command, "--resume", "auto"],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_processes)
    ]


def _wait(processes: list[subprocess.Popen[bytes]], interruption: Interruption) -> list[int]:
    """The exit codes. A signal is passed on once; when one process fails, the others get a moment to do so too."""
    told, deadline = False, float("inf")
    while any(process.poll() is None for process in processes):
        if interruption.signal_number and not told:
            told = True
            for process in processes:
                process.send_signal(signal.SIGTERM)
        if deadline == float("inf") and any(process.poll() for process in processes):
            deadline = time.monotonic() + _PATIENCE
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(_POLL)
    return [process.wait() for process in processes]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
