"""A task: one piece of work with a directory of its own, done once and found again by what it is.

A measurement is short and starts anew when it was stopped; a `TrainingRun` goes on from its last checkpoint. `listing` says
before what tasks cost.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from revode.engine import DEFAULT_BITS
from revode.networks import create_model, describe, model_config
from revode.operators import NORMS
from revode_lab import data
from revode_lab.system import commit, human_range, human_time, locked, machine, read_json, versions, write_json
from revode_lab.training.config import FREE, Config, configure, mean_cost, parse_levels
from revode_lab.training.job import count_steps
from revode_lab.training.planning import fastest
from revode_lab.training.run import RESULT


@dataclass(frozen=True)
class Setup:
    """Options of ``revode reproduce``: where and how tasks are done; None for `num_seeds` leaves the number to the item.

    Threads change the last bits of results; processes change the batch statistics. What changes more than bits is part of a
    training's directory, below `home`, and of the command that its page names.
    """

    home: Path = Path("runs") / "reproduce"
    budget: str = "smoke"
    num_seeds: int | None = None
    data_root: str | None = None
    threads: int = 0
    processes: int = 1
    autocast: str = "none"

    def folder(self, task: Task) -> Path:
        """Return the directory of a task: its name for people, and a digest of all that decides its result."""
        name = task.slug
        if task.is_of_training:
            name += f"-in-{self.processes}" if self.processes > 1 else ""
            name += f"-{self.autocast}" if self.autocast != "none" else ""
        return self.home / f"{name}-{task.digest}"

    def finished(self, task: Task) -> dict[str, Any] | None:
        """Return the result of a task that was done before, or None."""
        return read_json(self.folder(task) / RESULT)


class TaskFailed(RuntimeError):
    """A task that could not be done here, for instance because memory is too small; the others can."""


@dataclass(frozen=True)
class Task:
    """One piece of work. A measurement has a `title`, its `flops`, and `measure`."""

    is_of_training: ClassVar[bool] = False
    """True if processes and precision of trainings decide its result."""

    @property
    def title(self) -> str:
        """The task in a few words."""
        raise NotImplementedError

    @property
    def size(self) -> str:
        """The amount of work in words, where its title does not say it."""
        return ""

    def flops(self) -> float:
        """Return its floating-point operations, roughly."""
        raise NotImplementedError

    def measure(self, setup: Setup) -> dict[str, Any]:
        """Return the numbers, as plain values."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """Return all that decides the result, as plain values: tasks of equal identity are the same task."""
        return asdict(self)

    def for_seeds(self, seeds: range) -> list[Any]:
        """Return the task with each of the seeds, if it has one."""
        return [replace(self, seed=seed) for seed in seeds] if hasattr(self, "seed") else [self]

    @property
    def slug(self) -> str:
        """The title as part of a file's name."""
        return re.sub(r"[^a-z0-9.]+", "-", self.title.lower()).strip("-")

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of the identity."""
        text = json.dumps([type(self).__name__, self.identity()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def execute(self, setup: Setup) -> dict[str, Any]:
        """Measure under the directory's lock, and keep the numbers with what they depend on."""
        folder = setup.folder(self)
        with locked(folder):
            found = setup.finished(self)  # another process may have been quicker
            if found is not None:
                return found
            started = time.perf_counter()
            numbers = self.measure(setup)
            environment = {"machine": machine(), "versions": versions(), "commit": commit()}
            result = {**numbers, "seconds": round(time.perf_counter() - started, 3), **environment}
            write_json(folder / RESULT, result)
            return result


@dataclass(frozen=True, kw_only=True)
class NetworkTask(Task):
    """A task about a named network with these options, on images of a data set."""

    model: str
    dataset: str = "cifar10"
    options: dict[str, Any] = field(default_factory=dict)
    label: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """The network in words, with its depth where options make it another than the name says."""
        name, layers = self.label or self.model, model_config(self.model, **self.options).num_layers
        same = layers == model_config(self.model).num_layers or self.model not in name
        return name if same else f"{name} cut to {layers} layers"

    def forward_flops(self) -> int:
        """Return the floating-point operations of one image's forward pass."""
        options = self.options | data.describe(self.dataset).network_options
        return _flops(self.model, json.dumps(options, sort_keys=True))


@functools.cache
def _flops(model: str, options: str) -> int:
    chosen = json.loads(options)
    if model_config(model).row.integrates:
        chosen["init"] = "independent"  # smooth kernels cost time to draw, and the count is the same
    with torch.random.fork_rng(devices=[]):
        return describe(create_model(model, **chosen)).flops


@dataclass(frozen=True, kw_only=True)
class TrainingRun(NetworkTask):
    """One training.

    Where images are held out, they are scored once, at the end, with the last weights: nothing is chosen on them.

    Attributes:
        fraction: Share of the training split to train on; with held-out images, at most the rest.
        hold_out: Images held out of the training split, stratified, in place of an absent test split.
        seed: Of weights, order, augmentation, subset and hold-out.
        settings: Settings that differ from the recipe.
        label: The network in words, where its name does not say all.
    """

    is_of_training = True

    recipe: str
    fraction: float = 1.0
    hold_out: int = 0
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    label: str = ""  # type: ignore[misc]

    @property
    def title(self) -> str:
        share = "" if self.fraction == 1.0 else f" {100 * self.fraction:g} percent"
        return f"{self.name} on {self.dataset}{share}, seed {self.seed}"

    @property
    def size(self) -> str:
        return f"{self.num_images:,} images, {self.num_steps:,} steps of {self.batch_size}"

    @property
    def norm(self) -> str:
        """The norm between convolution and activation, in words."""
        return NORMS[model_config(self.model, **self.options).norm].words

    @property
    def num_images(self) -> int:
        """Images it trains on."""
        total = data.describe(self.dataset).num_train
        return min(round(self.fraction * total), total - self.hold_out)

    @property
    def split(self) -> str:
        """The images of its accuracy: hold-out or test."""
        return "hold-out" if self.hold_out else "test"

    @property
    def num_scored(self) -> int:
        """The number of these images."""
        return self.hold_out or data.describe(self.dataset).num_test

    def accuracy(self, result: dict[str, Any]) -> float:
        """Return the accuracy in per cent."""
        return 100.0 * result["validation_accuracy" if self.hold_out else "test_accuracy"]

    def config(self, setup: Setup) -> Config:
        """Return the configuration of the training."""
        values: dict[str, Any] = {"model": self.model, "dataset": self.dataset, "recipe": self.recipe, **self.settings}
        values |= {"seed": self.seed, "options": self.options, "data_root": setup.data_root, "threads": setup.threads}
        if setup.autocast != "none":
            values["autocast"] = setup.autocast
            network = model_config(self.model, **self.options)
            if network.row.scheme is not None and not network.damping:
                # Reversing then adds nothing to a gradient, in bfloat16 either.
                values.setdefault("exact", DEFAULT_BITS)
        used = self.num_images + self.hold_out
        values["train_fraction"] = used / data.describe(self.dataset).num_train
        if self.hold_out:
            values |= {"validation": self.hold_out / used, "evaluate_every": 0}
        config = configure(**values)
        if config.optimization.batch_size > self.num_images:
            config = configure(**{**values, "batch_size": self.num_images})
        return config

    def gradients(self, setup: Setup) -> str:
        """Return the gradient strategy in words."""
        asked, network = self.config(setup).model, model_config(self.model, **self.options)
        strategy = network.backprop if asked.backprop == "auto" else asked.backprop
        if strategy != "reversible":
            return {"store": "stored", "checkpoint": "checkpointed"}[strategy]
        return "reversible, exact" if asked.exact or network.exact else "reversible"

    def identity(self) -> dict[str, Any]:
        ours, usual = self.config(Setup()).leaves(), Config().leaves()
        return {name: ours[name] for name in ours if name not in FREE and ours[name] != usual[name]}

    @property
    def batch_size(self) -> int:
        """Images per update."""
        return self.config(Setup()).optimization.batch_size

    @property
    def num_steps(self) -> int:
        """Updates in all; the images that the recipe keeps to choose the weights on are not trained on."""
        config = self.config(Setup())
        kept = 0 if self.hold_out else round(config.data.validation * self.num_images)
        return count_steps(config.optimization, self.num_images - kept)[1]

    def flops(self) -> float:
        """Return the operations: backward counts two forward passes, recomputing states one; scoring is left out."""
        config = self.config(Setup())
        stored = "store" in (config.model.backprop, model_config(self.model, **self.options).backprop)
        share = mean_cost(parse_levels(config.optimization.levels))
        images = self.num_steps * self.batch_size * (3 if stored else 4) * share
        return images * self.forward_flops()

    def execute(self, setup: Setup) -> dict[str, Any]:
        """Train, or go on from the last checkpoint; `train` locks the directory."""
        from revode_lab.training.distributed import ProcessFailed, train_in_processes
        from revode_lab.training.loop import train

        if setup.processes == 1:
            where_and_how = ("data_root", "threads")  # may differ from those of a stopped run
            return train(self.config(setup), setup.folder(self), resume="auto", given=where_and_how)
        try:
            return train_in_processes(self.config(setup), setup.folder(self), setup.processes)
        except ProcessFailed as error:
            raise TaskFailed(str(error)) from error


def measured_rate() -> float:
    """Return the floating-point operations a second of a training step of a small network, here and now."""
    with torch.random.fork_rng(devices=[]):
        model = create_model("hamiltonian-26").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = torch.randn(32, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        seconds = fastest(lambda: model(images).square().sum().backward(), images.device)
    return 4 * 32 * describe(model).flops / seconds


def listing(tasks: Sequence[Task], setup: Setup) -> list[str]:
    """Return lines of at most 79 characters: state, size, FLOPs and time of each task, and the sum of the work left."""
    rate = measured_rate()
    lines, total = [], 0.0
    for number, task in enumerate(tasks, 1):
        flops = task.flops()
        state = "done" if setup.finished(task) is not None else "started" if setup.folder(task).exists() else "to do"
        total += 0.0 if state == "done" else flops
        cost = f"{flops / 1e12:>10,.1f} TFLOP  {human_time(flops / rate):>8}"
        lines += textwrap.wrap(f"{number:>3}  {state:<8} {task.title}", 79, subsequent_indent=" " * 14)
        lines += [f"{'':<14}{task.size:<38} {cost}"]
    left = (
        f"left to do: {total / 1e12:,.1f} TFLOP, {human_range(total / rate)} at the {rate / 1e9:.0f} GFLOP/s that a "
        "training step reaches on this CPU now (float32, one process)"
    )
    return lines + textwrap.wrap(left, 79)
