"""Watchers of a running training: anything with ``on_step`` that returns numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import nn

from revode.training.config import RecordConfig


class Monitor(Protocol):
    """Called on rank 0 every ``record.monitor_every`` updates; its numbers become a line of ``metrics.jsonl``.

    It may look at the model and at its gradients, and must leave both as they are.
    """

    def on_step(self, model: nn.Module, step: int) -> Mapping[str, float]:
        """Name -> number after update `step`."""
        ...


def make_monitors(config: RecordConfig) -> list[Monitor]:
    """The monitors that ``--monitor`` names."""
    if not config.monitor:
        return []
    try:
        from revode.stability import StabilityMonitor  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise ValueError(f"--monitor cannot be used here ({error}); leave it out") from error
    return [StabilityMonitor()]
