"""The configuration of a training run: one frozen tree, checked once, written to ``config.yaml``.

Every leaf has a name of its own, which is its key in YAML (inside its section) and its flag on the command line. The tree
holds what decides the numbers of a run; where it is written and whether it resumes are arguments of `train`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


def _leaf(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network, and how its gradients are computed."""

    name: str = _leaf("hamiltonian-digits", "a name of `revode models`")
    backprop: Literal["auto", "reversible", "checkpoint", "store"] = _leaf(
        "auto", "gradient strategy; auto: the network's own"
    )
    exact: int = _leaf(0, "bits k of the grid 2^-k for bit-exact reversing; 0 is off, 14 is customary")
    options: dict[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"help": "further options of the network, as h=0.05,init=smooth"}
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images."""

    dataset: str = _leaf("digits", "digits, cifar10, cifar100 or stl10")
    train_fraction: float = _leaf(1.0, "stratified, seeded share of the training images")
    validation: float = _leaf(
        0.0, "share of the training images held out to choose best.ckpt; 0 keeps the last weights"
    )
    augment: bool = _leaf(True, "random crops, and flips where they keep the meaning")


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """SGD with momentum, and its schedule. Steps are updates of the weights."""

    epochs: int | None = _leaf(40, "passes over the training images; none leaves the length to max-steps")
    max_steps: int | None = _leaf(None, "stop after this many updates, if that comes first")
    batch_size: int = _leaf(64, "images per update, over all processes")
    accumulate: int = _leaf(1, "micro-batches that an update's batch is cut into")
    lr: float = _leaf(0.1, "learning rate (its peak, for one-cycle)")
    schedule: Literal["constant", "step", "cosine", "one-cycle"] = _leaf("one-cycle", "course of the learning rate")
    milestones: tuple[int, ...] = _leaf((), "where `step` divides the learning rate, as 80,120")
    milestone_unit: Literal["epochs", "steps"] = _leaf("epochs", "what milestones count")
    decay_factor: float = _leaf(0.1, "what `step` multiplies the learning rate by")
    warmup_steps: int = _leaf(0, "updates over which the learning rate rises from 0 (not for one-cycle)")
    warmup_fraction: float = _leaf(0.3, "share of a one-cycle run in which the learning rate rises")
    momentum: float = _leaf(0.9, "momentum of SGD")
    nesterov: bool = _leaf(False, "Nesterov's momentum")
    weight_decay: float = _leaf(2e-4, "decay of convolution and linear weights")
    smoothness: float = _leaf(2e-4, "decay of the weights' change over depth, the paper's R_h")
    label_smoothing: float = _leaf(0.0, "mass spread over the wrong classes")
    clip: float = _leaf(0.0, "largest norm of the gradient; 0 does not clip")
    ema: float = _leaf(0.0, "decay of the averaged weights that are scored and kept; 0 is off")


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """Where and how it runs."""

    seed: int = _leaf(0, "of initial weights, order, augmentation and subsets")
    device: str = _leaf("auto", "cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
    threads: int = _leaf(0, "CPU threads; 0 leaves torch's choice. The bits of a run depend on it")
    autocast: Literal["none", "bfloat16", "float16"] = _leaf("none", "precision of the branches; states stay float32")
    compile: bool = _leaf(False, "torch.compile the network")
    channels_last: bool = _leaf(True, "memory format of the images")
    parallel: Literal["ddp", "fsdp"] = _leaf("ddp", "under torchrun: replicate or shard the network")
    sync_batch_norm: bool = _leaf(False, "under torchrun on GPUs: batch statistics over all processes")


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What is written down, and how often. Nothing here changes the weights."""

    log_every: int = _leaf(20, "updates between lines of metrics.jsonl")
    evaluate_every: int = _leaf(1, "epochs between evaluations; 0 evaluates at the end only")
    checkpoint_every: int = _leaf(200, "updates between checkpoints")
    evaluation_batch_size: int = _leaf(500, "images per forward pass of an evaluation")
    monitor: bool = _leaf(False, "follow the stability of the network during training")
    monitor_every: int = _leaf(100, "updates between calls of the monitor")
    report: bool = _leaf(True, "write report.html at the end")
    tensorboard: bool = _leaf(False, "also write TensorBoard events")
    data_root: str | None = _leaf(None, "folder of the data sets; default as in `revode data get --help`")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole tree."""

    recipe: str = _leaf("auto", "the recipe that gave the defaults")
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimization: OptimizationConfig = dataclasses.field(default_factory=OptimizationConfig)
    execution: ExecutionConfig = dataclasses.field(default_factory=ExecutionConfig)
    record: RecordConfig = dataclasses.field(default_factory=RecordConfig)

    def __post_init__(self) -> None:
        _check_values(self)

    def leaves(self) -> dict[str, Any]:
        """Leaf name -> value, over all sections."""
        values: dict[str, Any] = {}
        for top in dataclasses.fields(self):
            part = getattr(self, top.name)
            if dataclasses.is_dataclass(part):
                values |= {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
            else:
                values[top.name] = part
        return values

    def to_dict(self) -> dict[str, Any]:
        """The tree as plain dicts, lists, numbers and strings."""
        return _plain(dataclasses.asdict(self))

    def to_yaml(self) -> str:
        """The tree as YAML that `read_yaml` reads back."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


MOST_THREADS = 1024
"""More make the thread pool fail."""

_AT_LEAST = {
    "epochs": 1, "max_steps": 1, "batch_size": 1, "accumulate": 1, "warmup_steps": 0, "log_every": 1, "evaluate_every": 0,
    "checkpoint_every": 1, "evaluation_batch_size": 1, "monitor_every": 1, "threads": 0, "exact": 0, "lr": 0.0,
    "weight_decay": 0.0, "smoothness": 0.0, "clip": 0.0, "seed": 0, "decay_factor": 0.0,
}  # fmt: skip
_FRACTIONS = ("validation", "momentum", "label_smoothing", "ema", "warmup_fraction")
"""Settings in [0, 1)."""


def _check_values(config: Config) -> None:
    values = config.leaves()
    for name, bound in _AT_LEAST.items():
        value = values[name]
        if value is not None and not bound <= value < float("inf"):
            raise ValueError(f"{name} is {value}; expected at least {bound:g}")
    for name in _FRACTIONS:
        if not 0 <= values[name] < 1:
            raise ValueError(f"{name} is {values[name]}; expected a number from 0 up to, not including, 1")
    if values["threads"] > MOST_THREADS:
        raise ValueError(f"threads is {values['threads']}; expected at most {MOST_THREADS}")
    if values["seed"] >= 2**63:
        raise ValueError(f"seed is {values['seed']}; expected less than 2^63")
    if not 0 < values["train_fraction"] <= 1:
        raise ValueError(f"train_fraction is {values['train_fraction']}; expected a number above 0 and at most 1")
    if values["epochs"] is None and values["max_steps"] is None:
        raise ValueError("epochs and max_steps are both none; give one of them")
    if values["batch_size"] % values["accumulate"]:
        raise ValueError(
            f"accumulate is {values['accumulate']}, which does not divide the batch size "
            f"{values['batch_size']}; choose a divisor"
        )
    if values["schedule"] == "step" and not values["milestones"]:
        raise ValueError("schedule is step without milestones; give milestones, as 80,120")
    if values["nesterov"] and not values["momentum"]:
        raise ValueError("nesterov needs momentum above 0")
