"""Everything a configuration stands for, built: data, network, optimizer; and the one step that all of it is for."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revode import data
from revode.networks import StagedClassifier, create_model
from revode.networks.zoo import model_config
from revode.regularizers import smoothness_gradient_
from revode.training.config import Config
from revode.training.distributed import Group, gradients_stay_local, parallelize, synchronize_batch_norm
from revode.training.optimization import AveragedWeights, learning_rate, make_optimizer


@dataclass(frozen=True)
class StepResult:
    """What one update saw: sums over this process's images, and the norm of the gradient over all."""

    loss_sum: float
    num_correct: int
    num_images: int
    gradient_norm: float

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are numbers."""
        return math.isfinite(self.loss_sum) and math.isfinite(self.gradient_norm)


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


class Job:
    """A configured training: what is fixed (data, sizes) and what moves (weights, momentum, averages).

    Args:
        config: The configuration.
        group: The processes it runs on.
    """

    def __init__(self, config: Config, group: Group) -> None:
        self.config = config
        self.group = group
        # A network that does not exist should not cost a download first.
        model_config(config.model.name, **network_options(config, data.describe(config.data.dataset)))
        self.dataset = data.load(config.data.dataset, config.record.data_root).to(group.device)
        self.train_split, self.validation_split = self._choose_images()
        self.memory_format = torch.channels_last if config.execution.channels_last else torch.contiguous_format
        self._count_steps()
        torch.manual_seed(config.execution.seed)
        self.model: nn.Module = self._make_model()
        # Equal weights everywhere, then noise of its own for each process.
        torch.manual_seed(config.execution.seed + group.rank)
        self.notes: list[str] = []

    def _choose_images(self) -> tuple[data.Split, data.Split | None]:
        settings, seed = self.config.data, self.config.execution.seed
        split = data.subset(self.dataset.train, settings.train_fraction, seed)
        return data.hold_out(split, settings.validation, seed) if settings.validation else (split, None)

    def _count_steps(self) -> None:
        settings, parts = self.config.optimization, self.group.world_size * self.config.optimization.accumulate
        if settings.batch_size % parts:
            raise ValueError(
                f"batch size {settings.batch_size} does not divide into {settings.accumulate} micro-batches on each of "
                f"{self.group.world_size} processes; use a multiple of {parts}"
            )
        data.batches(len(self.train_split), settings.batch_size, seed=0, epoch=0)  # refuses what cannot be cut
        self.steps_per_epoch = data.num_batches(len(self.train_split), settings.batch_size)
        bounds = [settings.max_steps, settings.epochs and settings.epochs * self.steps_per_epoch]
        self.num_steps = min(bound for bound in bounds if bound is not None)

    def _make_model(self) -> nn.Module:
        model = build_model(self.config, self.dataset).to(self.group.device)
        if self.config.execution.parallel == "fsdp" and self.group.world_size > 1:
            return model  # FSDP2 shards contiguous parameters only
        return model.to(memory_format=self.memory_format)  # type: ignore[call-overload]

    def start(self) -> None:
        """Make what needs the final parameters: the wrapped network, the optimizer, the average."""
        execution, optimization = self.config.execution, self.config.optimization
        if execution.sync_batch_norm:  # not earlier: rank 0 plans alone, and would wait for the others' statistics
            self.model, note = synchronize_batch_norm(self.model, self.group)
            self.notes.append(f"--sync-batch-norm: {note}")
        self.network = parallelize(self.model, execution, self.group)
        if execution.compile:
            self.network = cast(nn.Module, torch.compile(self.network))
        self.optimizer = make_optimizer(self.model, optimization)
        self.average = AveragedWeights(self.model, optimization.ema) if optimization.ema else None
        self.scaler = torch.amp.GradScaler(self.group.device.type, enabled=execution.autocast == "float16")

    @property
    def evaluation_split(self) -> tuple[str, data.Split] | None:
        """What is scored during training: the held-out images, else the test images, which then choose nothing."""
        if self.validation_split is not None:
            return "validation", self.validation_split
        return None if self.dataset.test is None else ("test", self.dataset.test)

    def batches_from(self, step: int) -> Iterator[tuple[int, Tensor]]:
        """The epoch and this process's images of every update from `step` on."""
        settings = self.config.optimization
        epoch, skip = divmod(step, self.steps_per_epoch)
        while True:
            for indices in data.batches(
                len(self.train_split),
                settings.batch_size,
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
        if self.config.data.augment:
            x = data.augment(
                batch.images,
                indices,
                self.dataset,
                seed=self.config.execution.seed,
                epoch=epoch,
                memory_format=self.memory_format,
            )
        else:
            x = data.standardise(batch.images, self.dataset, memory_format=self.memory_format)
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

    def accumulate_gradient(self, indices: Tensor, epoch: int) -> StepResult:
        """The gradient of the batch's mean loss, with decay and clipping, left in the parameters."""
        settings = self.config.optimization
        loss_sum, num_correct = 0.0, 0
        parts = indices.chunk(settings.accumulate)
        for number, part in enumerate(parts, 1):
            x, labels = self.images(part, epoch)
            with gradients_stay_local(self.network, number < len(parts)):
                with self.autocast():
                    scores = self.network(x)
                loss = F.cross_entropy(scores.float(), labels, label_smoothing=settings.label_smoothing)
                self.scaler.scale(loss / len(parts)).backward()
            loss_sum += float(loss.detach()) * len(part)
            num_correct += int((scores.argmax(1) == labels).sum())
        self.scaler.unscale_(self.optimizer)
        return StepResult(loss_sum, num_correct, len(indices), self._finish_gradient())

    def _finish_gradient(self) -> float:
        """Add the smoothness decay, clip, and return the norm before clipping."""
        settings = self.config.optimization
        if settings.smoothness:
            smoothness_gradient_(self.model, settings.smoothness)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if settings.clip:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), settings.clip, norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # type: ignore[union-attr]

    def apply_gradient(self, step: int) -> None:
        """Update weights and average, and clear the gradient."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.model)

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
