"""What a run will cost, said before its first step: parameters, FLOPs, activation memory under each strategy, time.

Everything is measured on a copy of the network, with the random states restored, so that planning changes no bit of a run.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from revode.engine import STRATEGIES, ReversibleSequence
from revode.files import human_bytes, human_range

_LONG = 10.0
"""Seconds of a step beside which preparing its kernels does not count."""

_MOST_RUNS, _ENOUGH = 7, 2.0
"""Runs of a step that is timed, and seconds after which there are no more."""


class PeakActivations:
    """A context that counts the bytes alive for backward while it is entered, and keeps their peak.

    Unlike a count of all that is saved, this sees memory come back: a reversible step saves one branch at a time.

    Args:
        exclude: Tensors that are alive anyway, usually the parameters.
    """

    def __init__(self, exclude: Any = ()) -> None:
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in exclude}
        self._uses: dict[int, int] = {}
        self._live = 0
        self.num_bytes = 0

    def _pack(self, tensor: Tensor) -> _Held:
        return _Held(tensor, self)

    def _acquire(self, key: int, num_bytes: int) -> None:
        if key in self._excluded:
            return
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] == 1:
            self._live += num_bytes
            self.num_bytes = max(self.num_bytes, self._live)

    def _release(self, key: int, num_bytes: int) -> None:
        if key in self._excluded:
            return
        self._uses[key] -= 1
        if not self._uses[key]:
            self._live -= num_bytes

    def __enter__(self) -> PeakActivations:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)


class _Held:
    """A saved tensor that tells the counter when the graph lets go of it."""

    def __init__(self, tensor: Tensor, counter: PeakActivations) -> None:
        self.tensor = tensor.detach()  # a node that kept its own output would keep itself
        self._counter = counter
        self._entry = (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        counter._acquire(*self._entry)

    def __del__(self) -> None:
        self._counter._release(*self._entry)


@dataclass(frozen=True)
class Plan:
    """The cost of a run.

    Attributes:
        params: Trainable parameters.
        flops_per_image: Of one forward pass, multiplications and additions.
        activation_bytes: Strategy -> peak bytes kept for backward at the run's micro-batch.
        strategy: The one that the run uses.
        seconds_per_step: Of one update.
        num_steps: Updates in the run.
    """

    params: int
    flops_per_image: int
    activation_bytes: dict[str, int]
    strategy: str
    seconds_per_step: float
    num_steps: int

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The plan for a reader, in lines of at most 80 characters."""
        memory = ", ".join(f"{name} {human_bytes(count)}" for name, count in self.activation_bytes.items())
        return [
            f"  parameters   {self.params:,}",
            f"  forward      {self.flops_per_image / 1e6:,.1f} MFLOP an image",
            f"  activations  {memory}",
            f"               (this run: {self.strategy})",
            f"  time         {human_range(self.seconds_per_step * self.num_steps)} for {self.num_steps:,} steps",
        ]


def make_plan(
    model: nn.Module, images: Tensor, num_steps: int, accumulate: int, autocast: Callable[[], Any], labels: Tensor
) -> Plan:
    """Measure a copy of `model` on one micro-batch.

    Args:
        model: The network, on its device and not yet wrapped.
        images: One micro-batch as the network sees it.
        num_steps: Updates in the run.
        accumulate: Micro-batches of an update.
        autocast: Makes the precision context of the run.
        labels: Of the images.
    """
    devices = [images.device] if images.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        trial = copy.deepcopy(model).train()
        sequences = [module for module in trial.modules() if isinstance(module, ReversibleSequence)]
        strategy = sequences[0].backprop if sequences else "store"

        def step(count: int) -> None:
            with autocast():
                loss = F.cross_entropy(trial(images[:count]).float(), labels[:count])
            loss.backward()

        seconds = fastest(lambda: step(len(images)), images.device) * accumulate
        memory = {}
        for name in STRATEGIES if sequences else ("store",):
            trial = copy.deepcopy(model).train()
            use_strategy(trial, name)
            memory[name] = _extrapolate(trial, step, len(images))
        return Plan(
            params=sum(p.numel() for p in model.parameters() if p.requires_grad),
            flops_per_image=_flops(copy.deepcopy(model), images[:1]),
            activation_bytes=memory,
            strategy=strategy,
            seconds_per_step=seconds,
            num_steps=num_steps,
        )


def use_strategy(model: nn.Module, strategy: str) -> None:
    """Set every reversible sequence of `model` to compute its gradients by `strategy`; a budget goes with reversible only."""
    if _budget(model) is not None and strategy != "reversible":
        classifier: Any = model
        classifier.config = classifier.config.with_options(memory_budget=None)
    for module in model.modules():
        if isinstance(module, ReversibleSequence):
            if strategy != module.backprop:
                module.memory_budget = None
            module.backprop = strategy


def _budget(model: nn.Module) -> int | None:
    """The memory budget of a whole network, which it divides among its sequences when it is called."""
    return getattr(getattr(model, "config", None), "memory_budget", None)


def _extrapolate(model: nn.Module, step: Callable[[int], None], num_images: int) -> int:
    """Peak bytes at `num_images`, from their peaks at two and three images: activations grow linearly with the batch.

    (Batch norm over a single pixel cannot train on one image.) Under a memory budget they do not, and all images are taken.
    """
    peaks = []
    for count in (2, 3) if num_images > 3 and _budget(model) is None else (num_images,):
        with PeakActivations(model.parameters()) as peak:
            step(count)
        peaks.append(peak.num_bytes)
    return peaks[0] + (peaks[-1] - peaks[0]) * (num_images - 2)


def fastest(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of `action`: the shortest of some runs, since what else the machine does only makes them longer.

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


@torch.no_grad()
def _flops(model: nn.Module, image: Tensor) -> int:
    """Counted on zeros: before any training, running statistics do not bound the states of a real image."""
    model.eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros_like(image))
    return counter.get_total_flops()
