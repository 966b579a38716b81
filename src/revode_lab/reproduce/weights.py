"""Does a reversible training end with the weights of a stored one? Both for a few steps, each in a process of its own."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from revode_lab import charts
from revode_lab.fresh import in_fresh_process
from revode_lab.reproduce.accuracy import FAMILIES, HAMILTONIAN, REVERSIBLY
from revode_lab.reproduce.item import FEW_STEPS, SHORT, SMOKE, SMOKE_NOTE, Budget, Chart, Findings, Item, Outcome, Table
from revode_lab.reproduce.task import Setup, Task, TaskFailed, TrainingRun
from revode_lab.system import human_bytes, peak, reset_peak
from revode_lab.training.config import Config

STRATEGIES = ("reversible", "store")


@dataclass(frozen=True, kw_only=True)
class Weights(Task):
    """The weights at the end of a training, as a digest, and the peak of its process above the idle one."""

    is_of_training = True

    run: TrainingRun

    @property
    def title(self) -> str:
        return f"{self.run.name}, {self.run.settings['backprop']}, seed {self.run.seed}"

    @property
    def size(self) -> str:
        return self.run.size

    def identity(self) -> dict[str, Any]:
        return self.run.identity()

    def for_seeds(self, seeds: range) -> list[Weights]:
        return [replace(self, run=run) for run in self.run.for_seeds(seeds)]

    def flops(self) -> float:
        return self.run.flops()

    def measure(self, setup: Setup) -> dict[str, Any]:
        try:
            return in_fresh_process(trained, self.run.config(setup))
        except RuntimeError as error:
            raise TaskFailed(str(error)) from error


class Peak:
    """The peak of this process in all updates of a training but the first, above what the process had before."""

    def __init__(self) -> None:
        self.idle = reset_peak()
        self.whole = 0

    def on_step(self, model: Any, step: int) -> dict[str, float]:
        """Forget what planning and the first update took; from then on take the peak."""
        if step == 1:
            reset_peak()
        self.whole = peak()
        return {}


def trained(config: Config) -> dict[str, Any]:
    """Train; return a digest of the weights, bytes kept, and the peak of the updates."""
    from safetensors.torch import load_file

    from revode_lab.training import train

    with tempfile.TemporaryDirectory() as folder:
        watch = Peak()
        result = train(config, Path(folder) / "run", monitors=[watch])
        digest = hashlib.sha256()
        for name, tensor in sorted(load_file(Path(folder) / "run" / "model.safetensors").items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    kept = ("steps", "params", "test_accuracy", "test_loss", "peak_activation_bytes")
    return {
        "weights": digest.hexdigest(),
        "peak_bytes": watch.whole - watch.idle,
        "idle_bytes": watch.idle,
        **{name: result[name] for name in kept},
    }


def _both(**run: Any) -> list[Task]:
    settings = run.pop("settings")
    return [Weights(run=TrainingRun(**run, settings={**settings, "backprop": way})) for way in STRATEGIES]


TINY_RUN = {**SMOKE, "settings": FEW_STEPS | {"exact": 12, "monitor_every": 1}}
STEPS = {"epochs": None, "max_steps": 200, "batch_size": 100, "compile": False, "monitor_every": 1, **SHORT}
SAME_WEIGHTS = {
    "smoke": Budget(SMOKE_NOTE, "smoke on digits", _both(model=HAMILTONIAN, **TINY_RUN)),
    "cpu": Budget(
        "CPU budget: 200 steps of 100 images, from the same seed; not the paper's schedule of 160 epochs.",
        "200 steps",
        _both(
            model=HAMILTONIAN,
            dataset="cifar10",
            recipe="quick",
            options=FAMILIES[HAMILTONIAN],
            settings={**REVERSIBLY, **STEPS},
        ),
    ),
    "paper": Budget(
        "The paper's schedule: 160 epochs.",
        "160 epochs",
        _both(model=HAMILTONIAN, dataset="cifar10", recipe="cifar", settings={"exact": 14}),
    ),
}


def show_same_weights(budget: Budget, outcomes: list[Outcome]) -> Findings:
    """Return digests and peaks side by side, and whether all weights are equal."""
    rows = [
        {
            "training": outcome.task.title,
            "weights, SHA-256": f"{outcome.result['weights'][:16]}…",
            "test loss": f"{outcome.result['test_loss']!r}",
            "activations kept": human_bytes(outcome.result["peak_activation_bytes"]),
            "peak above the idle process": human_bytes(outcome.result["peak_bytes"]),
        }
        for outcome in outcomes
    ]
    same = len({outcome.result["weights"] for outcome in outcomes}) == 1
    remark = (
        f"The weights are {'equal, bit for bit' if same else '**not equal**'}. The peak counts all of an update: images in "
        "memory, convolutions, the optimizer and the average of the weights."
    )
    peaks = {task.title: (result["peak_bytes"] + result["idle_bytes"]) / 1e6 for task, result, _ in outcomes}
    chart = Chart(
        charts.bars(peaks, "peak of the process, MB", name=budget.schedule),
        "Peak resident memory, the idle process included.",
    )
    return Findings([Table(rows)], [chart], [remark], {"equal": same})


ITEMS = (Item("same-weights", "A reversible training and a stored one, bit for bit", SAME_WEIGHTS, show_same_weights),)
