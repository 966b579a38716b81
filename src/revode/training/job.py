"""Everything a configuration stands for, built: data, network, optimizer, and the average of the weights.

The learning rate is a pure function of the step, so that a resumed run needs to remember nothing of it.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from revode import data
from revode.networks import StagedClassifier, create_model
from revode.networks.zoo import model_config
from revode.regularizers import decay_groups
from revode.training.config import Config, OptimizationConfig
from revode.training.distributed import Group, parallelize, synchronize_batch_norm


def build_model(config: Config, info: data.DatasetInfo) -> StagedClassifier:
    """The network of `config` for the images of a data set, with fresh weights."""
    return create_model(config.model.name, **network_options(config, info))


def network_options(config: Config, info: data.DatasetInfo) -> dict[str, Any]:
    """The options of that network."""
    settings = config.model
    options: dict[str, Any] = {
        "num_classes": info.num_classes,
        "in_channels": info.channels,
        "image_size": info.image_size,
    }
    if "name" in settings.options:
        raise ValueError(
            "options has name, which is not an option: name the network itself, as in `revode train MODEL`"
        )
    for name, value in options.items():
        if settings.options.get(name, value) != value:
            found = settings.options[name]
            raise ValueError(f"options has {name}={found}, but {info.name} has {value}; leave it to the data set")
    if settings.backprop != "auto":
        options["backprop"] = settings.backprop
    if settings.exact:
        options["exact"] = settings.exact
    return options | settings.options


def choose_images(config: Config, dataset: data.Dataset) -> tuple[data.Split, data.Split | None]:
    """The images that a run trains on, and those that it holds out, if any."""
    settings, seed = config.data, config.execution.seed
    split = data.subset(dataset.train, settings.train_fraction, seed)
    return data.hold_out(split, settings.validation, seed) if settings.validation else (split, None)


class Job:
    """A configured training: what is fixed (data, sizes) and what moves (weights, momentum, averages).

    Args:
        config: The configuration.
        group: The processes it runs on.

    Attributes:
        model: The network itself.
        network: What to call in training: the model, perhaps replicated, sharded or compiled.
        notes: What the user should know, in sentences.
    """

    def __init__(self, config: Config, group: Group) -> None:
        self.config, self.group = config, group
        execution, optimization = config.execution, config.optimization
        # A network that does not exist should not cost a download first.
        model_config(config.model.name, **network_options(config, data.describe(config.data.dataset)))
        self.dataset = data.load(config.data.dataset, config.record.data_root).to(group.device)
        self.train_split, self.validation_split = choose_images(config, self.dataset)
        self.memory_format = torch.channels_last if execution.channels_last else torch.contiguous_format
        self.steps_per_epoch, self.num_steps = self._count_steps()
        self.notes: list[str] = []

        torch.manual_seed(execution.seed)
        self.model: nn.Module = self.fresh_model()
        # Equal weights everywhere, then noise of its own for each process.
        torch.manual_seed(execution.seed + group.rank)
        if execution.sync_batch_norm:
            self.model, note = synchronize_batch_norm(self.model, group)
            self.notes.append(f"--sync-batch-norm: {note}")
        self.network = parallelize(self.model, execution, group)
        if execution.compile:
            self.network = cast(nn.Module, torch.compile(self.network))
        self.optimizer = make_optimizer(self.model, optimization)
        self.average = AveragedWeights(self.model, optimization.ema) if optimization.ema else None
        self.scaler = torch.amp.GradScaler(group.device.type, enabled=execution.autocast == "float16")

    def _count_steps(self) -> tuple[int, int]:
        """Updates in an epoch and in all."""
        settings, parts = self.config.optimization, self.group.world_size * self.config.optimization.accumulate
        if settings.batch_size % parts:
            raise ValueError(
                f"batch size {settings.batch_size} does not divide into {settings.accumulate} micro-batches on each of "
                f"{self.group.world_size} processes; use a multiple of {parts}"
            )
        data.batches(len(self.train_split), settings.batch_size, seed=0, epoch=0)  # refuses what cannot be cut
        per_epoch = data.num_batches(len(self.train_split), settings.batch_size)
        bounds = [settings.max_steps, settings.epochs and settings.epochs * per_epoch]
        return per_epoch, min(bound for bound in bounds if bound is not None)

    @property
    def sharded(self) -> bool:
        """Whether the weights are spread over processes."""
        return self.config.execution.parallel == "fsdp" and self.group.world_size > 1

    def fresh_model(self) -> nn.Module:
        """The network with fresh weights, on its device and in its memory format, not yet wrapped."""
        model = build_model(self.config, self.dataset).to(self.group.device)
        if self.sharded:
            return model  # FSDP2 shards contiguous parameters only
        return model.to(memory_format=self.memory_format)  # type: ignore[call-overload]

    @property
    def evaluation_split(self) -> tuple[str, data.Split] | None:
        """What is scored during training: the held-out images, else the test images, which then choose nothing."""
        if self.validation_split is not None:
            return "validation", self.validation_split
        return None if self.dataset.test is None else ("test", self.dataset.test)

    def batches_from(self, step: int) -> Iterator[tuple[int, Tensor]]:
        """The epoch and this process's images of every update from `step` on."""
        epoch, skip = divmod(step, self.steps_per_epoch)
        while True:
            for indices in data.batches(
                len(self.train_split),
                self.config.optimization.batch_size,
                seed=self.config.execution.seed,
                epoch=epoch,
                rank=self.group.rank,
                world_size=self.group.world_size,
                start_step=skip,
            ):
                yield epoch, indices
            epoch, skip = epoch + 1, 0

    def images(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """The images at `indices` as the network sees them in `epoch`, and their labels."""
        batch = self.train_split.take(indices)
        if not self.config.data.augment:
            return data.standardise(batch.images, self.dataset, memory_format=self.memory_format), batch.labels
        seed, memory_format = self.config.execution.seed, self.memory_format
        x = data.augment(batch.images, indices, self.dataset, seed=seed, epoch=epoch, memory_format=memory_format)
        return x, batch.labels

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of the forward pass."""
        name = self.config.execution.autocast
        if name == "none":
            return contextlib.nullcontext()
        return torch.autocast(self.group.device.type, dtype=getattr(torch, name))

    def learning_rate(self, step: int) -> float:
        """The learning rate of the update from `step` to `step + 1`."""
        return learning_rate(self.config.optimization, step, self.num_steps, self.steps_per_epoch)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the model has its averaged weights, if it keeps an average."""
        if self.average is None:
            yield
            return
        self.average.swap(self.model)
        try:
            yield
        finally:
            self.average.swap(self.model)


def make_optimizer(model: nn.Module, config: OptimizationConfig) -> torch.optim.SGD:
    """SGD with momentum; convolution and linear weights decay, biases and norms do not."""
    return torch.optim.SGD(
        decay_groups(model, config.weight_decay), lr=config.lr, momentum=config.momentum, nesterov=config.nesterov
    )


def learning_rate(config: OptimizationConfig, step: int, num_steps: int, steps_per_epoch: int) -> float:
    """The learning rate of the update from `step` to `step + 1`.

    Args:
        config: Peak, kind of schedule and its constants.
        step: Updates done so far.
        num_steps: Updates of the whole run.
        steps_per_epoch: What an epoch's milestone is worth.
    """
    if config.schedule == "one-cycle":
        return config.lr * one_cycle(step / max(1, num_steps), config.warmup_fraction)
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "cosine":
        progress = max(0, step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
        return config.lr * warmup * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    if config.schedule == "step":
        unit = steps_per_epoch if config.milestone_unit == "epochs" else 1
        passed = bisect.bisect_right([milestone * unit for milestone in sorted(config.milestones)], step)
        return config.lr * warmup * config.decay_factor**passed
    return config.lr * warmup


def one_cycle(progress: float, rise: float, start: float = 0.04, end: float = 0.001) -> float:
    """A cosine up from `start` to 1 over the share `rise` of the run, then a cosine down to `end` (Smith 2018)."""
    if progress < rise:
        return start + (1 - start) * 0.5 * (1 - math.cos(math.pi * progress / rise))
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * (progress - rise) / (1 - rise)))


class AveragedWeights:
    """The exponential moving average of parameters and floating-point buffers.

    Its decay rises to `decay` as (1 + n) / (10 + n), so that the first, random weights do not linger.

    Args:
        model: The model to follow.
        decay: What is kept of the average in each update.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        self.tensors = {name: tensor.detach().clone() for name, tensor in _state(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the model."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for name, tensor in _state(model).items():
            if tensor.is_floating_point():
                self.tensors[name].lerp_(tensor.detach(), 1 - decay)
            else:
                self.tensors[name].copy_(tensor)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange the average with the model's own weights; twice is as before."""
        for name, tensor in _state(model).items():
            held = tensor.detach().clone()
            tensor.detach().copy_(self.tensors[name])
            self.tensors[name].copy_(held)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
