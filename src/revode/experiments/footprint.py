"""What one training step costs in bytes and seconds, measured in a fresh process.

In the process, a step of one image comes first: it loads code and makes room for gradients. The peak of the real steps above
what is resident then is the footprint. Bytes kept for backward are counted after that, in one more forward pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revode.engine import ReversibleSequence
from revode.engine.accounting import SavedTensors
from revode.experiments.task import Measurement, Place, TaskFailed
from revode.networks import StagedClassifier, create_model
from revode.networks.classifier import Stage

SQRT = "checkpoint-sqrt"
"""√N segments of √N blocks, recomputed by torch's own checkpointing."""


@dataclass(frozen=True, kw_only=True)
class StepCost(Measurement):
    """The cost of a training step.

    Attributes:
        model: The network.
        options: Its options.
        strategy: ``reversible``, ``store``, ``checkpoint`` or ``checkpoint-sqrt``.
        dataset: Whose images it has the shape of; their content is random.
        batch_size: Images.
        num_timed: Steps to time.
        fresh: Whether to start a process for it; else only the bytes kept for backward mean something.
    """

    model: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    dataset: str = "cifar10"
    batch_size: int = 32
    num_timed: int = 1
    fresh: bool = True

    @property
    def title(self) -> str:
        return f"{self.model} {self.strategy}, a step of {self.batch_size} images"

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def flops(self) -> float:
        from revode.experiments.estimates import forward_flops

        units = 4 * (1 + self.num_timed) + 1
        return units * self.batch_size * forward_flops(self.model, self.dataset, self.options)

    def measure(self, place: Place) -> dict[str, Any]:
        if not self.fresh:
            return measure_step(asdict(self), torch.get_num_threads()) | {"peak_bytes": None}
        request = json.dumps({"task": asdict(self), "threads": place.threads or torch.get_num_threads()})
        words = [sys.executable, "-m", "revode.experiments.footprint"]
        done = subprocess.run(words, input=request, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise TaskFailed(f"measuring {self.title} failed: {reason}")
        return json.loads(done.stdout)


def measure_step(task: dict[str, Any], threads: int) -> dict[str, Any]:
    """The numbers of a `StepCost`, in this process."""
    from revode import data

    torch.set_num_threads(threads)
    info = data.describe(task["dataset"])
    size = {"num_classes": info.num_classes, "in_channels": info.channels, "image_size": info.image_size}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _with_strategy(task["model"], task["options"] | size, task["strategy"])
        images = torch.randn(task["batch_size"], info.channels, info.image_size, info.image_size)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(len(images)) % info.num_classes
    _step(model, images[:1], labels[:1])
    before = _restart_peak()
    times = []
    for _ in range(task["num_timed"]):
        started = time.perf_counter()
        _step(model, images, labels)
        times.append(time.perf_counter() - started)
    peak = max(0, _status("VmHWM") - before) if before else None  # 0: the system does not tell
    with SavedTensors(exclude=[images, labels, *model.parameters(), *model.buffers()]) as saved:
        loss = _loss(model, images, labels)
    del loss
    return {
        "layers": model.num_layers,
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "saved_bytes": saved.num_bytes,
        "peak_bytes": peak,
        "seconds_per_step": statistics.median(times),
    }


def _loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(images), labels)


def _step(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Forward and backward; gradients keep their room."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    _loss(model, images, labels).backward()


def _with_strategy(name: str, options: dict[str, Any], strategy: str) -> StagedClassifier:
    if strategy != SQRT:
        return create_model(name, **options, backprop=strategy)
    model = create_model(name, **options, backprop="store")
    for stage in model.stages:
        body = cast(Stage, stage).body
        if isinstance(body, ReversibleSequence):
            cast(Stage, stage).body = Segments(body)
    return model


class Segments(nn.Module):
    """A sequence on pairs in √N segments, each recomputed as a whole in backward.

    Args:
        sequence: whose branches are used; its scheme must split the channels, so that a segment starts from a pair.
    """

    def __init__(self, sequence: ReversibleSequence) -> None:
        super().__init__()
        assert sequence.scheme.splits
        width, fields = sequence.scheme.fields_per_step, list(sequence.fields)
        num_blocks = len(fields) // width
        count = max(1, round(math.sqrt(num_blocks)))
        cuts = [width * round(i * num_blocks / count) for i in range(count + 1)]
        self.parts = nn.ModuleList(
            ReversibleSequence(fields[a:b], sequence.scheme, backprop="store") for a, b in itertools.pairwise(cuts)
        )

    def forward(self, x: Any) -> Any:
        state = x.chunk(2, dim=1) if isinstance(x, Tensor) else x
        for part in self.parts:
            state = checkpoint(_final_state, part, *state, use_reentrant=False, preserve_rng_state=False)
        return state


def _final_state(part: nn.Module, p: Tensor, q: Tensor) -> Any:
    return part((p, q), return_state=True)[1]


def _restart_peak() -> int:
    """Give back what is free, start the peak anew, and say how much is resident."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    """A line of this process's status, in bytes; 0 on systems without it."""
    with contextlib.suppress(OSError), open("/proc/self/status") as stream:
        for line in stream:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(measure_step(asked["task"], asked["threads"])))
