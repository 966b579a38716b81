"""A training run of an item: network, data, share of it, seed, and what differs from a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from revode.engine.grid import DEFAULT_BITS
from revode.networks.config import ReversibleConfig
from revode.networks.zoo import model_config
from revode.reproduce.task import Setup, Task, TaskFailed
from revode.training.config import Config, configure

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
        from revode.training.launching import ProcessFailed, train_in_processes
        from revode.training.loop import train

        if setup.processes == 1:
            where_and_how = ("data_root", "threads")  # may differ from those of a stopped run
            return train(self.config(setup), setup.folder(self), resume="auto", given=where_and_how)
        try:
            return train_in_processes(self.config(setup), setup.folder(self), setup.processes)
        except ProcessFailed as error:
            raise TaskFailed(str(error)) from error
