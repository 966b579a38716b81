"""The machine and the versions that rows were measured with."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch

from revode import __version__
from revode.benchmarks import methods, peers
from revode.benchmarks.run import Settings


def conditions(settings: Settings) -> dict[str, str]:
    """What a reader must know to compare: processor, threads, versions, load, date.

    Args:
        settings: how the rows were measured.
    """
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(settings.threads),
        "layout": settings.layout,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "revode": __version__,
    }
    if hasattr(os, "getloadavg"):
        found["load before"] = f"{os.getloadavg()[0]:.1f}"
    return found | {name: peers.version(name) for name in methods.PEERS}


def _processor() -> str:
    """The model and its widest vector instructions, where the system says."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor() or platform.machine()
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    return f"{fields.get('model name', platform.machine())} ({torch.backends.cpu.get_cpu_capability()})"
