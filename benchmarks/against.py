"""Time a step of hamiltonian-74 by this code and by another checkout, in turn, in two processes that wait for each other.

.venv/bin/python benchmarks/against.py OTHER/src [ROUNDS]     # OTHER: a worktree at the commit to compare with

Prints quartiles over rounds of (time here / time there), in seconds of the processor, one thread.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

NETWORKS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, exact": {"exact": True},
    "float32, batch norm": {"norm": "batch"},
    "bfloat16, exact, batch norm": {"exact": 12, "norm": "batch", "h": 0.3},
    "bfloat16, exact, batch norm, compiled": {"exact": 12, "norm": "batch", "h": 0.3, "compile": True},
}


def serve(case: str) -> None:
    """Time a step of 32 images for each line that comes in; print the seconds."""
    import revode

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = revode.create_model("hamiltonian-74", **NETWORKS[case])
    model.to(memory_format=torch.channels_last)
    x = torch.randn(32, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    for line in itertools.chain(["warm up"] * 3, sys.stdin):
        begin = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.startswith("bfloat16")):
            loss = model(x).square().mean()
        loss.backward()
        if line != "warm up":
            print(time.process_time() - begin, flush=True)


def compare(case: str, sources: list[str], rounds: int) -> list[float]:
    """Return the ratio of each round."""
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--serve", case],
            env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for source in sources
    ]

    def seconds(worker: Any) -> float:
        print("go", file=worker.stdin, flush=True)
        return float(worker.stdout.readline())

    ratios = [seconds(workers[0]) / seconds(workers[1]) for _ in range(rounds)]
    for worker in workers:
        worker.communicate()
    return ratios


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        for case in NETWORKS:
            ratios = compare(case, [str(Path(__file__).parents[1] / "src"), sys.argv[1]], int([*sys.argv, 15][2]))
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"hamiltonian-74, {case}: {middle:.3f} ({low:.3f} to {high:.3f})")
