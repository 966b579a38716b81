"""Time steps of this code and of another checkout in turn, each in a process of its own that waits for its turn.

.venv/bin/python benchmarks/against.py OTHER/src --rounds 15     # OTHER: a worktree at the commit to compare with

Prints, for each case, the median over rounds of (time here / time there), in seconds of the processor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
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
"""Options of hamiltonian-74, with the dtype of its branches first."""


def step_of(case: str) -> Callable[[], None]:
    """Return a step of hamiltonian-74 on 32 images."""
    import revode

    torch.manual_seed(0)
    model: Any = revode.create_model("hamiltonian-74", **NETWORKS[case]).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(32, 3, 32, 32).contiguous(memory_format=torch.channels_last)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.startswith("bfloat16")):
            loss = model(x).square().mean()
        loss.backward()

    return step


def serve(case: str) -> None:
    """Time a step for each line that comes in, and print the seconds of the processor."""
    torch.set_num_threads(1)
    step = step_of(case)
    for _ in range(3):
        step()
    for _ in sys.stdin:
        begin = time.process_time()
        step()
        print(time.process_time() - begin, flush=True)


def compare(case: str, sources: list[str], rounds: int) -> list[float]:
    """Return the ratio of every round; both processes stay alive, and one at a time runs."""
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
    ratios = []
    for _ in range(rounds):
        seconds = []
        for worker in workers:
            assert worker.stdin is not None
            assert worker.stdout is not None
            print("go", file=worker.stdin, flush=True)
            seconds.append(float(worker.stdout.readline()))
        ratios.append(seconds[0] / seconds[1])
    for worker in workers:
        worker.communicate()
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", help="the src folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", metavar="CASE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
    else:
        for case in NETWORKS:
            ratios = compare(case, [str(Path(__file__).parents[1] / "src"), args.other], args.rounds)
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"hamiltonian-74, {case}: {middle:.3f} ({low:.3f} to {high:.3f})")
