"""From one configuration to a result one can trust: the loop, its run directory and its report.

    config = revode_lab.training.configure(model="hamiltonian-74", dataset="cifar10", recipe="quick", epochs=2)
    result = revode_lab.training.train(config, out="runs/first")

Names are loaded on first use; `config` needs no torch, so that ``revode train --help`` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from revode_lab.training.config import RECIPES as RECIPES
    from revode_lab.training.config import Config as Config
    from revode_lab.training.config import configure as configure
    from revode_lab.training.diagnosis import Diverged as Diverged
    from revode_lab.training.loop import Monitor as Monitor
    from revode_lab.training.loop import train as train
    from revode_lab.training.report import write_report as write_report
    from revode_lab.training.run import export_onnx as export_onnx
    from revode_lab.training.run import load_run as load_run
    from revode_lab.training.terminal import Interrupted as Interrupted

_HOMES = {
    "Config": "config",
    "Diverged": "diagnosis",
    "Interrupted": "terminal",
    "Monitor": "loop",
    "RECIPES": "config",
    "configure": "config",
    "export_onnx": "run",
    "load_run": "run",
    "train": "loop",
    "write_report": "report",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"revode_lab.training.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'revode_lab.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
