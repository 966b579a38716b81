"""Watchers of a running training: anything with ``on_step`` that returns numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from revode.data import standardise
from revode.training.job import Job

_NUM_IMAGES = 4


class Monitor(Protocol):
    """Called on rank 0 every ``record.monitor_every`` updates; its numbers become a line of ``metrics.jsonl``.

    It may look at the model and at its gradients, and must leave both as they are.
    """

    def on_step(self, model: nn.Module, step: int) -> Mapping[str, float]:
        """Name -> number after update `step`."""
        ...


def make_monitors(job: Job) -> list[Monitor]:
    """The monitor that ``--monitor`` asks for, on the first training images without augmentation."""
    if not job.config.record.monitor:
        return []
    from revode.stability import StabilityMonitor
    from revode.stability.walk import reversible_units

    reversible_units(job.model)  # refuses a network that has none, before anything is written
    images = job.train_split.take(torch.arange(_NUM_IMAGES)).images
    return [StabilityMonitor(standardise(images, job.dataset), num_images=_NUM_IMAGES)]
