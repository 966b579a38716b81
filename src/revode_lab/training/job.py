"""The data, network, optimizer and averaged weights of a configuration, level by level.

The learning rate is a pure function of the step, so that a resumed run needs to remember nothing of it.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from revode.networks import NetworkConfig, Resampling, StagedClassifier, build, config_at_depth, model_config
from revode.regularizers import decay_groups
from revode_lab import data
from revode_lab.training.config import Config, OptimizationConfig, parse_levels
from revode_lab.training.distributed import Group, replicate

_NUM_MEASURED = 16
"""Batches on which a new level measures the statistics of its batch norms."""


def build_model(config: Config, info: data.DatasetInfo, level: int = -1) -> StagedClassifier:
    """Return the network of `config` for the images of a data set, at its last or an earlier level, with fresh weights."""
    return build(level_networks(config, info)[level])


def level_networks(config: Config, info: data.DatasetInfo) -> list[NetworkConfig]:
    """Return the network of every level, with the level's ``image_size``; without levels, the named one.

    In depth (Chang et al. 2018) a level starts with the weights of the one before, refined in time; in resolution (Haber et
    al. 2017) with the same weights on images whose pixels are averaged over fewer.
    """
    last = model_config(config.model.name, **network_options(config, info))
    levels = parse_levels(config.optimization.levels)
    if not levels:
        return [last]
    if (levels[-1].layers, levels[-1].edge) != (last.num_layers, info.image_size):
        raise ValueError(
            f"the last of the levels has {levels[-1].layers} layers on images of edge {levels[-1].edge}; expected "
            f"{last.name}'s {last.num_layers} layers and the data set's edge {info.image_size}"
        )
    depths = {n: last if n == last.num_layers else config_at_depth(last, f"{last.family}-{n}") for n, _, _ in levels}
    return [replace(depths[level.layers], image_size=level.edge) for level in levels]


def network_options(config: Config, info: data.DatasetInfo) -> dict[str, Any]:
    """Return the options of that network."""
    settings = config.model
    if model_config(settings.name).scores_points:
        raise ValueError(
            f"`revode train` trains classifiers of whole images, and {settings.name} scores every point: "
            "examples/volumes.py shows how to train it"
        )
    options: dict[str, Any] = {**info.network_options}
    if "name" in settings.options:
        raise ValueError(
            "options has name, which is not an option: name the network itself, as in `revode train MODEL`"
        )
    for name, value in options.items():
        if settings.options.get(name, value) != value:
            found = settings.options[name]
            raise ValueError(f"options has {name}={found}, but {info.name} has {value}; leave it to the data set")
    flags: dict[str, Any] = {"exact": settings.exact or None, "compile": config.execution.compile or None}
    flags["backprop"] = None if settings.backprop == "auto" else settings.backprop
    for name, value in flags.items():
        if value is not None and settings.options.get(name, value) != value:
            raise ValueError(f"{name} is {value}, but options has {name}={settings.options[name]}; give one of them")
    return options | {name: value for name, value in flags.items() if value is not None} | settings.options


def choose_images(config: Config, dataset: data.Dataset) -> tuple[data.Split, data.Split | None]:
    """Return the images that a run trains on, and those that it holds out, if any."""
    settings, seed = config.data, config.execution.seed
    split = data.subset(dataset.train, settings.train_fraction, seed)
    return data.hold_out(split, settings.validation, seed) if settings.validation else (split, None)


class Job:
    """A configured training: its constants (data, sizes) and its state (weights, momenta, averages).

    Attributes:
        level: The level that it is at.
        level_ends: Updates after which each level is over; there is one level if none are named.
        model: The network itself.
        network: The model or its replica, to be called in training.
    """

    def __init__(self, config: Config, group: Group, level: int = 0) -> None:
        self.config, self.group, self.level = config, group, level
        execution = config.execution
        model_config(config.model.name)  # a network that does not exist should not cost reading images first
        self.level_networks = level_networks(config, data.describe(config.data.dataset, config.record.data_root))
        self.dataset = data.load(config.data.dataset, config.record.data_root).to(group.device)
        if config.data.cutout >= self.dataset.image_size:
            raise ValueError(
                f"cutout is {config.data.cutout}, but the images of {self.dataset.name} have an edge of "
                f"{self.dataset.image_size}: little would be left of them; give a smaller one"
            )
        self.train_split, self.validation_split = choose_images(config, self.dataset)
        self.steps_per_epoch, self.num_steps = self._count_steps()
        self.levels = parse_levels(config.optimization.levels)
        ends = itertools.accumulate(level.epochs * self.steps_per_epoch for level in self.levels)
        self.level_ends = list(ends) or [self.num_steps]

        torch.manual_seed(execution.seed)
        model = self.fresh_model()
        # Equal weights everywhere, then noise of its own for each process.
        torch.manual_seed(execution.seed + group.rank)
        self._train(model)

    def _train(self, model: StagedClassifier) -> None:
        """Make `model` the one that is trained."""
        optimization = self.config.optimization
        self.model = model
        self.network = replicate(self.model, self.group)
        self.optimizer = make_optimizer(self.model, optimization)
        self.average = AveragedWeights(self.model, optimization.ema) if optimization.ema else None

    def level_at(self, step: int) -> int:
        """Return the level of the update from `step` to `step + 1`; behind the end it is the last."""
        return min(bisect.bisect_right(self.level_ends, step), len(self.level_ends) - 1)

    @property
    def is_exact(self) -> bool:
        """True if its states lie on the grid, which they may leave."""
        return bool(self.level_networks[self.level].exact)

    @property
    def is_cut(self) -> bool:
        """True at a level before the last: at the end of a run, ``max_steps`` came first."""
        return self.level < len(self.level_networks) - 1

    def work(self, step: int) -> float:
        """Return the cost of the updates up to `step`, in proportion."""
        costs = [level.cost for level in self.levels] or [1]
        spans = zip(costs, [0, *self.level_ends], self.level_ends, strict=False)
        return sum(cost * (min(step, end) - start) for cost, start, end in spans if step > start)

    def enter_level(self, level: int, epoch: int) -> None:
        """Go on at another level: weights, momenta and averages go with it, statistics are measured anew."""
        self.level = level
        model, wanted = self.model, self.level_networks[level]
        if replace(model.config, image_size=wanted.image_size) != wanted:
            self._refine()
        else:
            model.config = wanted
        self._measure_statistics(epoch)
        with self.averaged():
            if self.average is not None:
                self._measure_statistics(epoch)

    def _refine(self) -> None:
        """Put the network of this level in the place of the one before."""
        old, optimizer, average = self.model, self.optimizer, self.average
        with self.group.forked_randomness():
            self._train(self.fresh_model())
        resampling = Resampling(old, self.model)
        self.model.load_state_dict(resampling.weights(old.state_dict()))
        own = dict(self.model.named_parameters())
        momenta = {name: optimizer.state[p].get("momentum_buffer") for name, p in old.named_parameters()}
        found = resampling.gradients({name: tensor for name, tensor in momenta.items() if tensor is not None})
        for name in own.keys() & found.keys():
            self.optimizer.state[own[name]] = {"momentum_buffer": own[name].detach().clone().copy_(found[name])}
        if self.average is not None and average is not None:
            self.average.num_updates = average.num_updates
            for name, tensor in resampling.weights(average.tensors).items():
                if name in self.average.tensors:
                    self.average.tensors[name].copy_(tensor)

    def _measure_statistics(self, epoch: int) -> None:
        """Measure statistics of batch norms over the first batches of an epoch, the same in all processes."""
        size, seed = self.config.optimization.batch_size, self.config.execution.seed
        batches = itertools.islice(data.batches(len(self.train_split), size, seed=seed, epoch=epoch), _NUM_MEASURED)
        with self.autocast():
            update_bn((self.images(indices, epoch)[0] for indices in batches), self.model)

    def _count_steps(self) -> tuple[int, int]:
        """Return the updates in an epoch and in all."""
        settings, count = self.config.optimization, self.group.world_size
        data.batches(len(self.train_split), settings.batch_size, seed=0, epoch=0, world_size=count)  # may refuse
        return count_steps(settings, len(self.train_split))

    def fresh_model(self, level: int | None = None) -> StagedClassifier:
        """Return the network of a level with fresh weights, on its device and in its memory format, not yet wrapped."""
        model = build(self.level_networks[self.level if level is None else level]).to(self.group.device)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def evaluation_split(self) -> tuple[str, data.Split] | None:
        """The images scored during training: the held-out ones, else the test images, which then choose nothing."""
        if self.validation_split is not None:
            return "validation", self.validation_split
        return None if self.dataset.test is None else ("test", self.dataset.test)

    def batches_from(self, step: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the epoch and this process's images of every update from `step` on."""
        epoch, skip = divmod(step, self.steps_per_epoch)
        count, size = len(self.train_split), self.config.optimization.batch_size
        share = {"seed": self.config.execution.seed, "rank": self.group.rank, "world_size": self.group.world_size}
        while True:
            for indices in data.batches(count, size, epoch=epoch, start_step=skip, **share):
                yield epoch, indices
            epoch, skip = epoch + 1, 0

    def images(self, indices: Tensor, epoch: int, level: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the images at `indices` as the network sees them in `epoch`, at this level or another, and their labels."""
        batch, settings = self.train_split.take(indices), self.config.data
        if settings.augment:
            draw: dict[str, Any] = {"seed": self.config.execution.seed, "epoch": epoch}
            draw |= {"flips": settings.flips, "cutout": settings.cutout}
            x = data.augment(batch.images, indices, self.dataset, **draw)
        else:
            x = data.standardise(batch.images, self.dataset)
        x = x.contiguous(memory_format=torch.channels_last)
        return data.resample(x, self.image_edge(level)), batch.labels

    def image_edge(self, level: int | None = None) -> int:
        """Return the image size at this level, or at another."""
        return self.level_networks[self.level if level is None else level].image_size

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context with the precision of the forward pass."""
        name = self.config.execution.autocast
        if name == "none":
            return contextlib.nullcontext()
        return torch.autocast(self.group.device.type, dtype=getattr(torch, name))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the update from `step` to `step + 1`."""
        settings, first, last = self.config.optimization, 0, self.num_steps
        if settings.rate_per_level:
            level = self.level_at(step)
            first = self.level_ends[level - 1] if level else 0
            last = min(last, self.level_ends[level])
        return learning_rate(settings, step - first, last - first, self.steps_per_epoch)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model its averaged weights inside, if it keeps an average."""
        if self.average is None:
            yield
            return
        self.average.swap(self.model)
        try:
            yield
        finally:
            self.average.swap(self.model)


def make_optimizer(model: nn.Module, config: OptimizationConfig) -> torch.optim.SGD:
    """Return SGD with momentum; convolution and linear weights decay, biases and norms do not."""
    return torch.optim.SGD(
        decay_groups(model, config.weight_decay), lr=config.lr, momentum=config.momentum, nesterov=config.nesterov
    )


def count_steps(config: OptimizationConfig, num_images: int) -> tuple[int, int]:
    """Return the updates in an epoch of this many images, and in all."""
    per_epoch = data.num_batches(num_images, config.batch_size)
    bounds = [config.max_steps, config.epochs and config.epochs * per_epoch]
    return per_epoch, min(bound for bound in bounds if bound is not None)


def learning_rate(config: OptimizationConfig, step: int, num_steps: int, steps_per_epoch: int) -> float:
    """Return the learning rate of the update from `step` to `step + 1` in a run of `num_steps`."""
    if config.schedule == "one-cycle":
        return config.lr * one_cycle(step / max(1, num_steps), config.warmup_fraction)
    if config.schedule == "step":
        unit = steps_per_epoch if config.milestone_unit == "epochs" else 1
        passed = bisect.bisect_right([milestone * unit for milestone in sorted(config.milestones)], step)
        return config.lr * 0.1**passed
    return config.lr


def one_cycle(progress: float, rise: float, start: float = 0.04, end: float = 0.001) -> float:
    """Return a cosine up from `start` to 1 over the share `rise` of the run, then a cosine down to `end` (Smith 2018)."""
    if progress < rise:
        return start + (1 - start) * 0.5 * (1 - math.cos(math.pi * progress / rise))
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * (progress - rise) / (1 - rise)))


class AveragedWeights:
    """The exponential moving average of parameters and floating-point buffers.

    Its decay rises to `decay` as (1 + n) / (10 + n), so that the first, random weights do not linger.
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
