"""Peak memory of a step in a fresh process.

``python -m revode.benchmarks.footprint`` imports everything once and then forks for every request it reads, so that each
measurement has a process of its own without the seconds of an import. Nothing may run in parallel before the fork: threads
of OpenMP do not survive it.

In the child, a step of one sample comes first: it loads code, fills caches and makes room for gradients. The peak of the
real step above what is resident then is the footprint; what the allocator keeps of that one sample is missing from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
from typing import Any, Self

from revode.benchmarks.workloads import Workload


class Footprints:
    """The process that forks; a context, and a call for each measurement."""

    def __enter__(self) -> Self:
        if not hasattr(os, "fork"):
            raise ValueError("peak memory is measured in forked processes, which this system does not have")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "revode.benchmarks.footprint"],
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

    def peak_bytes(self, workload: Workload, method: str, threads: int, layout: str = "channels_last") -> int:
        """Peak bytes of one step beyond those of the idle process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"workload": workload.to_dict(), "method": method, "threads": threads, "layout": layout}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer.isdigit():
            raise RuntimeError(f"measuring the memory of {workload.name} by {method} failed: {answer or 'no answer'}")
        return int(answer)


def serve() -> None:
    """Answer requests, one line each, until there are no more."""
    import torch._dynamo  # noqa: F401 - what checkpointing and exact mode would import at their first call

    from revode.benchmarks import cases  # noqa: F401 - imported once, before any fork

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
        text = str(_measure(json.loads(line)))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        os.write(writing, text.encode())
    os._exit(0)


def _measure(request: dict[str, Any]) -> int:
    import warnings

    import torch

    from revode.benchmarks.cases import Case
    from revode.benchmarks.methods import METHODS

    warnings.simplefilter("ignore")
    torch.set_num_threads(request["threads"])
    method = METHODS[request["method"]]
    case = Case(Workload(**request["workload"]), method, layout=request["layout"])
    # A compiled step is specialised to its shapes, so it must be warmed up on the real batch.
    case.step(case.inputs if method.compiled else case.batch_of(1))
    before = _reset_peak()
    case.step()
    return max(0, _peak() - before)


def _reset_peak() -> int:
    """Give back what is free, start the peak anew where the system allows it, and say where it stands."""
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
