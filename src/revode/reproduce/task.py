"""A task: one piece of work with a directory of its own, done once and found again by what it is.

A `Measurement` is short and starts anew when it was stopped; a `TrainingRun` goes on from its last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from revode.engine.grid import DEFAULT_BITS
from revode.files import commit, locked, machine, read_json, versions, write_json
from revode.networks.config import ReversibleConfig
from revode.networks.zoo import model_config
from revode.training.config import Config, configure
from revode.training.run import RESULT

HOME = Path("runs") / "reproduce"


@dataclass(frozen=True)
class Setup:
    """Where and how tasks are done; threads change the last bits of what they find, processes the batch statistics.

    What changes more than bits is part of a training's directory and of the command that its page names.

    Attributes:
        home: The directory of the tasks' directories.
        data_root: Folder of the data sets.
        threads: CPU threads of a process; 0 leaves torch's choice.
        processes: Processes of a training, each with its share of every batch.
        autocast: Precision of a training's branches, as ``revode train --autocast`` takes it.
    """

    home: Path = HOME
    data_root: str | None = None
    threads: int = 0
    processes: int = 1
    autocast: str = "none"

    def folder(self, task: Task) -> Path:
        """The directory of a task: its name for people, and a digest of all that decides its result."""
        shared = f"-in-{self.processes}" if task.is_training and self.processes > 1 else ""
        precision = f"-{self.autocast}" if task.is_training and self.autocast != "none" else ""
        return self.home / f"{task.slug}{shared}{precision}-{task.digest}"

    @property
    def flags(self) -> str:
        """How a command says what changes more than bits."""
        shared = f" --processes {self.processes}" if self.processes > 1 else ""
        return shared + (f" --autocast {self.autocast}" if self.autocast != "none" else "")

    def check(self, task: Task) -> None:
        """Refuse a task whose batches cannot be shared among the processes."""
        batch = getattr(task, "batch_size", 0) if task.is_training else 0
        if batch % self.processes:
            raise ValueError(
                f"--processes is {self.processes}, but {task.title} has batches of {batch} images; give a divisor of {batch}"
            )

    def finished(self, task: Task) -> dict[str, Any] | None:
        """The result of a task that was done before."""
        return read_json(self.folder(task) / RESULT)


class TaskFailed(RuntimeError):
    """A task that could not be done here, for instance because memory is too small; the others can."""


class Task(ABC):
    """What all tasks can say."""

    is_training: ClassVar[bool] = False
    """Whether several processes may do it together, and in lower precision."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The task in a few words."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """All that decides the result, as plain values: tasks of equal identity are the same task."""

    @abstractmethod
    def flops(self) -> float:
        """Floating-point operations it takes, roughly."""

    @abstractmethod
    def execute(self, setup: Setup) -> dict[str, Any]:
        """Do it in its directory, from where it stopped if that can be, and return its result."""

    @property
    def slug(self) -> str:
        """The title as part of a file's name."""
        return re.sub(r"[^a-z0-9.]+", "-", self.title.lower()).strip("-")

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of the identity."""
        text = json.dumps([type(self).__name__, self.identity()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def complete(self, setup: Setup) -> dict[str, Any]:
        """The result, found or made."""
        return setup.finished(self) or self.execute(setup)


class Measurement(Task):
    """A task that is short enough to start anew when it was stopped."""

    @abstractmethod
    def measure(self, setup: Setup) -> dict[str, Any]:
        """The numbers, as plain values."""

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


TRAIN_IMAGES = {"digits": 1_437, "cifar10": 50_000, "cifar100": 50_000, "stl10": 5_000}
TEST_IMAGES = {"digits": 360, "cifar10": 10_000, "cifar100": 10_000, "stl10": 8_000}

_NORMS = {"none": "biases", "batch": "batch norm", "tv": "batch-independent norm"}

_FREE = frozenset(
    "device threads data_root report log_every checkpoint_every tensorboard monitor monitor_every evaluation_batch_size".split()
)
"""Settings that leave a run the same run."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Task):
    """One training.

    Where images are held out, they are scored once, at the end, with the last weights: nothing is chosen on them.

    Attributes:
        model: The network.
        dataset: The images.
        recipe: Whose settings it takes.
        fraction: Share of the training split to train on; with held-out images, at most what they leave.
        hold_out: Images held out of the training split, stratified, to stand in for a test split that is not there.
        seed: Of weights, order, augmentation, subset and hold-out.
        options: Options of the network.
        settings: What differs from the recipe.
        label: The network in words, where its name does not say all.
    """

    is_training = True

    model: str
    dataset: str
    recipe: str
    fraction: float = 1.0
    hold_out: int = 0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        """The network in words."""
        return self.label or self.model

    @property
    def title(self) -> str:
        share = "" if self.fraction == 1.0 else f" {100 * self.fraction:g} percent"
        return f"{self.name} on {self.dataset}{share}, seed {self.seed}"

    @property
    def norm(self) -> str:
        """What its blocks have between convolution and activation, in words."""
        return _NORMS[model_config(self.model, **self.options).norm]

    @property
    def num_images(self) -> int:
        """Images it trains on."""
        total = TRAIN_IMAGES[self.dataset]
        return min(round(self.fraction * total), total - self.hold_out)

    @property
    def split(self) -> str:
        """What its accuracy is measured on."""
        return "hold-out" if self.hold_out else "test"

    @property
    def num_scored(self) -> int:
        """Images that its accuracy is measured on."""
        return self.hold_out or TEST_IMAGES[self.dataset]

    def accuracy(self, result: dict[str, Any]) -> float:
        """The accuracy in per cent."""
        return 100.0 * result["validation_accuracy" if self.hold_out else "test_accuracy"]

    def score(self, result: dict[str, Any]) -> dict[str, Any]:
        """The accuracy as a fraction, and what it is measured on."""
        return {"split": self.split, "images": self.num_scored, "accuracy": self.accuracy(result) / 100.0}

    def config(self, setup: Setup) -> Config:
        """The configuration for the training room."""
        values: dict[str, Any] = {"model": self.model, "dataset": self.dataset, "recipe": self.recipe, **self.settings}
        values |= {"seed": self.seed, "options": self.options}
        values |= {"data_root": setup.data_root, "threads": setup.threads}
        if setup.autocast != "none":
            values["autocast"] = setup.autocast
            network = model_config(self.model, **self.options)
            if isinstance(network, ReversibleConfig) and not network.damping:
                # Reversing then adds nothing to a gradient, in bfloat16 either.
                values.setdefault("exact", DEFAULT_BITS)
        used = self.num_images + self.hold_out
        values["train_fraction"] = used / TRAIN_IMAGES[self.dataset]
        if self.hold_out:
            values |= {"validation": self.hold_out / used, "evaluate_every": 0}
        config = configure(**values)
        if config.optimization.batch_size > self.num_images:
            config = configure(**{**values, "batch_size": self.num_images})
        return config

    def identity(self) -> dict[str, Any]:
        ours, usual = self.config(Setup()).leaves(), Config().leaves()
        return {name: ours[name] for name in ours if name not in _FREE and ours[name] != usual[name]}

    @property
    def batch_size(self) -> int:
        """Images per update."""
        return self.config(Setup()).optimization.batch_size

    @property
    def num_steps(self) -> int:
        """Updates in all."""
        settings = self.config(Setup()).optimization
        bounds = [settings.max_steps, settings.epochs and settings.epochs * self._steps_per_epoch]
        return min(bound for bound in bounds if bound is not None)

    @property
    def _steps_per_epoch(self) -> int:
        """Full batches of its images, without those that the recipe keeps to choose the weights on."""
        config = self.config(Setup())
        kept = 0 if self.hold_out else round(config.data.validation * self.num_images)
        return (self.num_images - kept) // config.optimization.batch_size

    @property
    def num_epochs(self) -> float:
        """Passes over its training images."""
        return self.num_steps / self._steps_per_epoch

    def flops(self) -> float:
        from revode.reproduce.estimates import forward_flops, step_units

        config = self.config(Setup())
        one = forward_flops(self.model, self.dataset, self.options)
        every = config.record.evaluate_every
        evaluations = max(1, int(self.num_epochs // every)) if every else 1
        trained = self.num_steps * self.batch_size * step_units(self.model, self.options)
        return one * (trained + evaluations * self.num_scored)

    def execute(self, setup: Setup) -> dict[str, Any]:
        """Train, or go on from the last checkpoint; the training room locks the directory."""
        from revode.training.distributed import ProcessFailed, train_in_processes
        from revode.training.loop import train

        if setup.processes == 1:
            where_and_how = ("data_root", "threads")  # may differ from those of a stopped run
            return train(self.config(setup), setup.folder(self), resume="auto", given=where_and_how)
        try:
            return train_in_processes(self.config(setup), setup.folder(self), setup.processes)
        except ProcessFailed as error:
            raise TaskFailed(str(error)) from error
