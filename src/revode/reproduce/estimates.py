"""What an item will cost, before it is started: from the networks' FLOPs and this machine's rate."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import torch

from revode import data
from revode.files import human_range, human_time
from revode.networks import create_model, describe, model_config
from revode.reproduce.task import Setup, Task
from revode.training.planning import fastest


def step_units(model: str, options: dict[str, Any]) -> int:
    """Forward passes that a training step is worth: backward counts two, computing states again counts one."""
    return 3 if model_config(model, **options).backprop == "store" else 4


def forward_flops(model: str, dataset: str, options: dict[str, Any]) -> int:
    """Floating-point operations of one image's forward pass."""
    info = data.describe(dataset)
    return _flops(model, info.channels, info.image_size, json.dumps(options, sort_keys=True))


@functools.cache
def _flops(model: str, channels: int, image_size: int, options: str) -> int:
    chosen = json.loads(options) | {"in_channels": channels, "image_size": image_size}
    if model_config(model).row.integrates:
        chosen["init"] = "independent"  # smooth kernels cost time to draw, and the count is the same
    with torch.random.fork_rng(devices=[]):
        return describe(create_model(model, **chosen)).flops


@functools.cache
def measured_rate() -> float:
    """Floating-point operations a second of a training step of a small network, here and now."""
    with torch.random.fork_rng(devices=[]):
        model = create_model("hamiltonian-26").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = torch.randn(32, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        seconds = fastest(lambda: model(images).square().sum().backward(), images.device)
    return 4 * 32 * describe(model).flops / seconds


def listing(tasks: Sequence[Task], setup: Setup) -> list[str]:
    """One line a task: its state, its FLOPs and its time; and the sum of what is left."""
    rate = measured_rate()
    lines, total = [], 0.0
    for number, task in enumerate(tasks, 1):
        flops = task.flops()
        folder = setup.folder(task)
        state = "done" if setup.finished(task) is not None else "started" if folder.exists() else "to do"
        total += 0.0 if state == "done" else flops
        steps = getattr(task, "num_steps", None)
        size = f"{task.num_images:,} images, {steps:,} steps of {task.batch_size}" if steps else ""  # type: ignore[attr-defined]
        lines.append(
            f"{number:>3}  {state:<8} {task.title:<58} {size:<44} {flops / 1e12:>10,.1f} TFLOP  {human_time(flops / rate):>8}"
        )
    lines.append(
        f"left to do: {total / 1e12:,.1f} TFLOP, {human_range(total / rate)} at the {rate / 1e9:.0f} GFLOP/s that a "
        "training step reaches on this CPU now (float32, one process)"
    )
    return lines
