"""The cost of a run, said before its first step: parameters, FLOPs, activation memory under each strategy, time.

Everything is measured on networks of its own, with the random states restored, so that planning changes no bit of a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from revode.memory import PeakActivations
from revode_lab.system import human_bytes, human_range
from revode_lab.training.config import Config
from revode_lab.training.distributed import process_group
from revode_lab.training.job import Job

_LONG = 10.0
"""Seconds of a step beside which preparing its kernels does not count."""

_MOST_RUNS, _ENOUGH = 7, 2.0
"""Runs of a step that is timed, and seconds after which there are no more."""


def make_plan(job: Job) -> dict[str, Any]:
    """Measure the network of the last level on one batch; the plan is part of ``result.json``.

    Returns:
        Trainable ``params``; ``flops_per_image`` of a forward pass; ``activation_bytes``, the peak kept for backward under
        each strategy; the run's own ``strategy``; ``seconds_per_step`` of an update; ``num_steps``.
    """
    settings = job.config.optimization
    size = settings.batch_size // job.group.world_size

    def step(network: nn.Module, count: int = size) -> None:
        with job.autocast():
            loss = F.cross_entropy(network(images[:count]).float(), labels[:count])
        loss.backward()

    def peak(network: nn.Module, count: int = size) -> int:
        with PeakActivations(network.parameters()) as counter:
            step(network, count)
        return counter.num_bytes

    def timed() -> None:
        if memory[own]:
            step(model)
        else:
            memory[own] = peak(model)

    with job.group.forked_randomness():
        model = job.fresh_model(level=-1)
        images, labels = job.images(torch.arange(size), 0, level=-1)
        own = model.config.backprop
        memory = dict.fromkeys(model.config.strategies, 0)
        # Counted on zeros: before any training, running statistics do not bound the states of a real image.
        with torch.no_grad(), FlopCounterMode(display=False) as flops:
            model.eval()(torch.zeros_like(images[:1]))
        for name in memory.keys() - {own}:
            # Activations grow linearly with the batch. (Batch norm over a single pixel cannot train on one image.) How far
            # reversing drifts is of no interest to a run that does not reverse.
            two, three = (peak(model.with_strategy(name, verify=False).train(), count) for count in (2, 3))
            memory[name] = two + (three - two) * (size - 2)
        model.train()
        if model.config.compile:
            timed()  # compiling can be long, and is no part of a step
        seconds = fastest(timed, job.group.device)
    return {
        "params": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "flops_per_image": flops.get_total_flops(),
        "activation_bytes": memory,
        "strategy": own,
        "seconds_per_step": seconds,
        "num_steps": job.num_steps,
    }


def dry_run(config: Config) -> list[str]:
    """Say what `config` would train and its cost, in lines; nothing is written."""
    with process_group(config.execution) as group:
        job = Job(config, group)
        plan = make_plan(job)
    data, every, levels = job.dataset, config.record.evaluate_every, config.optimization.levels
    counts = [len(split or ()) for split in (job.train_split, job.validation_split, data.test)]
    return [
        f"{config.model.name} on {data.name}, recipe {config.recipe}, would train on {group.device}",
        "  images       {:,} to train, {:,} to validate, {:,} to test".format(*counts),
        f"               {data.num_classes} classes, {data.channels}x{data.image_size}x{data.image_size}",
        *plan_lines(plan),
        f"  epochs       {plan['num_steps'] / job.steps_per_epoch:.3g} of {job.steps_per_epoch:,} steps, "
        + (f"scored every {every}" if every else "scored at the end"),
        *([f"  levels       {levels}"] if levels else []),
        "nothing was trained or written; without --dry-run it starts",
    ]


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """Return a plan for a reader, in lines of at most 80 characters."""
    memory = ", ".join(f"{name} {human_bytes(count)}" for name, count in plan["activation_bytes"].items())
    return [
        f"  parameters   {plan['params']:,}",
        f"  forward      {plan['flops_per_image'] / 1e6:,.1f} MFLOP an image",
        f"  activations  {memory}",
        f"               (this run: {plan['strategy']})",
        f"  time         {human_range(plan['seconds_per_step'] * plan['num_steps'])} for {plan['num_steps']:,} steps",
    ]


def fastest(action: Callable[[], object], device: torch.device) -> float:
    """Return seconds of `action`: the shortest of some runs, since what else the machine does only makes them longer.

    The first run also prepares kernels and does not count, unless it is so long that this makes no difference.
    """
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) <= _MOST_RUNS and sum(seconds[1:]) < _ENOUGH):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
        if seconds[0] > _LONG:
            return seconds[0]
    return min(seconds[1:])
