"""What one training step of a network costs in bytes and seconds, measured as ``revode bench`` measures it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from revode.networks.zoo import model_config
from revode.reproduce.task import Measurement, Setup, TaskFailed

METHODS = {"reversible": "revode", "checkpoint-sqrt": "checkpoint-sqrt", "checkpoint": "checkpoint", "store": "store"}
"""Strategy -> the method of ``revode bench`` that runs it."""


@dataclass(frozen=True, kw_only=True)
class StepCost(Measurement):
    """The cost of a training step.

    Attributes:
        model: The network.
        options: Its options.
        strategy: ``reversible``, ``store``, ``checkpoint`` or ``checkpoint-sqrt``.
        dataset: Whose images it has the shape of; their content is random.
        batch_size: Images.
        num_timed: Steps to time.
        fresh: Whether to start a process for it; else only the bytes kept for backward mean something.
    """

    model: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    dataset: str = "cifar10"
    batch_size: int = 32
    num_timed: int = 1
    fresh: bool = True

    @property
    def title(self) -> str:
        return f"{self.model} {self.strategy}, a step of {self.batch_size} images"

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def flops(self) -> float:
        from revode.reproduce.estimates import forward_flops

        units = 4 * (1 + self.num_timed) + 1
        return units * self.batch_size * forward_flops(self.model, self.dataset, self.options)

    def measure(self, setup: Setup) -> dict[str, Any]:
        from revode import data
        from revode.bench.footprint import Footprints, measure_step
        from revode.bench.workloads import Workload

        info = data.describe(self.dataset)
        size = {"num_classes": info.num_classes, "in_channels": info.channels, "image_size": info.image_size}
        options = {"name": self.model, **self.options, **size}
        workload = Workload(name=self.model, title="", kind="network", batch=self.batch_size, options=options)
        method, threads = METHODS[self.strategy], setup.threads or torch.get_num_threads()
        try:
            if self.fresh:
                with Footprints() as footprints:
                    found = footprints.measure(workload, method, threads, num_timed=self.num_timed)
            else:
                found = measure_step(workload, method, threads) | {"peak_bytes": None}
        except RuntimeError as error:
            raise TaskFailed(str(error)) from error
        return {"layers": model_config(self.model, **self.options).num_layers, **found}
