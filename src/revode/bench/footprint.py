"""Peak memory of a step in a fresh process.

``python -m revode.bench.footprint`` imports everything once and then forks for every request it reads, so that each
measurement has a process of its own without the seconds of an import. Nothing may run in parallel before the fork: threads
of OpenMP do not survive it.

In the child, a step of one sample comes first: it loads code, fills caches and makes room for gradients. The peak of the
real step above what is resident then is the footprint; what the allocator keeps of that one sample is missing from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import warnings
from typing import Any, Self

from revode.bench.workloads import Workload


class Footprints:
    """The process that forks; a context, and a call for each measurement."""

    def __enter__(self) -> Self:
        if not hasattr(os, "fork"):
            raise ValueError("peak memory is measured in forked processes, which this system does not have")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "revode.bench.footprint"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def measure(
        self, workload: Workload, method: str, threads: int, layout: str = "channels_last", num_timed: int = 1
    ) -> dict[str, Any]:
        """What `measure_step` finds in a process of its own, and ``peak_bytes``: those beyond the idle process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = [dataclasses.asdict(workload), method, threads, layout, num_timed]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer.startswith("{"):
            raise RuntimeError(f"measuring the memory of {workload.name} by {method} failed: {answer or 'no answer'}")
        return json.loads(answer)


def serve() -> None:
    """Answer requests, one line each, until there are no more."""
    import torch._dynamo  # noqa: F401 - what checkpointing and exact mode would import at their first call

    from revode.bench import cases  # noqa: F401 - imported once, before any fork

    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _answer(line, writing)
        os.close(writing)
        with os.fdopen(reading) as stream:
            answer = stream.read()
        os.waitpid(child, 0)
        print(answer.replace("\n", " ") or "the process died", flush=True)


def _answer(line: str, writing: int) -> None:
    """Measure, write and leave, whatever happens."""
    try:
        workload, *how = json.loads(line)
        text = json.dumps(measure_step(Workload(**workload), *how))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        os.write(writing, text.encode())
    os._exit(0)


def measure_step(
    workload: Workload, method: str, threads: int, layout: str = "channels_last", num_timed: int = 1
) -> dict[str, Any]:
    """The cost of a step in this process: parameters, bytes kept for backward, seconds, and the growth of its peak.

    Args:
        workload: what to run.
        method: by which way.
        threads: of torch.
        layout: memory format of the input.
        num_timed: steps to take.
    """
    import torch

    from revode.bench.cases import Case
    from revode.bench.measure import clock
    from revode.bench.methods import METHODS

    torch.set_num_threads(threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = Case(workload, METHODS[method], layout=layout)
        # A compiled step is specialised to its shapes, so it must be warmed up on the real batch.
        case.step(case.inputs if case.method.compiled else case.batch_of(1))
        before = _reset_peak()
        times = [clock(case.step) for _ in range(num_timed)]
        peak = max(0, _peak() - before)
        return {
            "params": sum(parameter.numel() for parameter in case.parameters),
            "saved_bytes": case.saved_bytes(),
            "peak_bytes": peak,
            "seconds_per_step": statistics.median(times),
        }


def _reset_peak() -> int:
    """Give back free memory, restart the peak where the system allows it, and return the peak."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
    return _peak()


def _peak() -> int:
    """The peak resident set in bytes."""
    with contextlib.suppress(OSError), open("/proc/self/status") as stream:
        for line in stream:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    serve()
