"""1,202 layers: does the loss fall, what does a step cost, do gradients survive the depth?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from revode import charts
from revode.files import human_bytes
from revode.reproduce import paper
from revode.reproduce.item import ABSENT, SMOKE, SMOKE_NOTE, Chart, Findings, Item, Outcome, Scope, Table, percent
from revode.reproduce.step_cost import StepCost
from revode.reproduce.task import Measurement, Setup, Task, TaskFailed, TrainingRun
from revode.training.run import read_metrics

DEEP, BASELINE = "hamiltonian-1202", "resnet-1202"
CPU_STEPS, NUM_TIMED, NUM_IMAGES = 300, 3, 4
CPU: dict[str, Any] = {
    "max_steps": CPU_STEPS, "evaluate_every": 0, "log_every": 5, "checkpoint_every": 25, "report": False,
}  # fmt: skip
NOTES = {
    "smoke": SMOKE_NOTE,
    "cpu": f"CPU budget: {CPU_STEPS} steps of 32 images; not the paper's schedule of 80,000 steps.",
    "paper": "The paper's schedule: 80,000 steps of 32 images.",
}


@dataclass(frozen=True, kw_only=True)
class OverDepth(Measurement):
    """Norms of signal and gradient at every depth of a run's network, before and after training."""

    run: TrainingRun
    num_images: int = NUM_IMAGES

    @property
    def title(self) -> str:
        return f"{self.run.model} over depth, seed {self.run.seed}"

    def identity(self) -> dict[str, Any]:
        return {"run": self.run.identity(), "num_images": self.num_images}

    def flops(self) -> float:
        from revode.reproduce.estimates import forward_flops

        return 2 * 5 * self.num_images * forward_flops(self.run.model, self.run.dataset, self.run.options)

    def measure(self, setup: Setup) -> dict[str, Any]:
        from revode import data
        from revode.stability import signal_propagation
        from revode.training.job import build_model
        from revode.training.run import load_run

        if setup.finished(self.run) is None:
            raise TaskFailed(f"{self.title}: its training has no result")
        dataset = data.load(self.run.dataset, setup.data_root)
        batch = dataset.split("test").take(torch.arange(self.num_images))
        images = data.standardise(batch.images, dataset)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.run.seed)
            fresh = build_model(self.run.config(setup), dataset)
        numbers: dict[str, Any] = {}
        for name, model in (("initial", fresh), ("trained", load_run(setup.folder(self.run)).model)):
            found = signal_propagation(model, images, batch.labels, chunk=self.num_images)
            steps = [i for i, step in enumerate(found.places) if step.kind == "step"]
            numbers[name] = {
                "depth": [found.places[i].depth for i in steps],
                "gradient": [float(found.gradient[i]) for i in steps],
                "signal": [float(found.signal[i]) for i in steps],
                "gradient_growth": found.gradient_growth,
                "signal_growth": found.signal_growth,
            }
        return numbers


def tasks(scope: Scope) -> list[Task]:
    """The costs first, as they are short; then the training, and what it did to gradients over depth."""
    run: dict[str, Any] = {"dataset": "cifar10", "recipe": "cifar-1202", "options": {}, "settings": {}}
    cost: dict[str, Any] = {"batch_size": 32, "num_timed": NUM_TIMED, "fresh": True}
    if scope.budget == "smoke":
        run, cost = SMOKE, {"batch_size": 4, "num_timed": 1, "fresh": False}
    if scope.budget == "cpu":
        run |= {"settings": CPU}
    cost |= {"dataset": run["dataset"], "options": run["options"]}
    found: list[Task] = [
        StepCost(model=model, strategy=strategy, **cost)
        for model, strategy in ((DEEP, "reversible"), (DEEP, "store"), (BASELINE, "store"))
    ]
    for seed in scope.seeds():
        training = TrainingRun(model=DEEP, seed=seed, **run)
        found += [training, OverDepth(run=training)]
    return found


def findings(scope: Scope, outcomes: list[Outcome]) -> Findings:
    """Costs, loss curve, gradients over depth."""
    tables, found = [], []
    for kind, show in ((StepCost, _costs), (TrainingRun, _training), (OverDepth, _over_depth)):
        own = [outcome for outcome in outcomes if isinstance(outcome.task, kind)]
        if own:
            table, chart = show(scope, own)
            tables.append(table)
            found.append(chart)
    remarks = [
        "Bytes and seconds are those of one forward and backward pass, without the optimizer. The paper reports that 1,202 "
        "layers train on one GPU with 10 GB of memory, and that there is no issue of exploding or vanishing gradients.",
        "The states before a unit's first block are left out: there the channels that the transition fills with zeros meet a "
        "batch norm of variance 0, whose slope is 1/√ε = 316. Their gradient is large and goes nowhere: they are constants.",
    ]
    return Findings(tables, found, remarks)


def _costs(scope: Scope, costs: list[Outcome]) -> tuple[Table, Chart]:
    header = ["network, strategy", "parameters", "layers", "batch", "kept for backward", "peak of a fresh process"]
    rows = []
    for task, result in ((outcome.task, outcome.result) for outcome in costs):
        row = [f"{task.model}, {task.strategy}", f"{result['params']:,}", str(result["layers"]), str(task.batch_size)]
        row.append(human_bytes(result["saved_bytes"]))
        row.append(ABSENT if result["peak_bytes"] is None else human_bytes(result["peak_bytes"]))
        row.append(f"{result['seconds_per_step']:.3g} s")
        rows.append([*row, "fits into 10 GB" if task.strategy == "reversible" else ABSENT])
    table = Table([*header, "time of a step", "paper"], rows, "What a step costs")
    known = all(outcome.result["peak_bytes"] is not None for outcome in costs)
    which = "peak_bytes" if known else "saved_bytes"
    values = {f"{o.task.model}, {o.task.strategy}": o.result[which] / 1e6 for o in costs}
    label = "peak of a fresh process in a step, MB" if known else "kept for backward, MB"
    return table, Chart(charts.bars(values, label), f"Memory of one training step: {label}.", "memory")


def _training(scope: Scope, runs: list[Outcome]) -> tuple[Table, Chart]:
    header = ["run", "steps", "training loss, first → last line", "peak activations"]
    header += [f"test accuracy, ours ({scope.budget} budget)", f"paper ({paper.DEEP_SCHEDULE})"]
    rows, series = [], {}
    for task, result, folder in ((outcome.task, outcome.result, outcome.folder) for outcome in runs):
        curve = [line for line in read_metrics(folder) if line["kind"] == "train"]
        losses = f"{curve[0]['loss']:.3f} → {curve[-1]['loss']:.3f}"
        row = [task.title, f"{result['steps']:,}", losses, human_bytes(result["peak_activation_bytes"])]
        rows.append([*row, f"{task.accuracy(result):.2f} %", percent(paper.CIFAR[DEEP]["cifar10"])])
        series[task.title] = [line["step"] for line in curve], [line["loss"] for line in curve]
    markup = charts.lines(series, "step", "training loss")
    return Table(header, rows, "Training"), Chart(markup, f"Training loss of {DEEP}. {NOTES[scope.budget]}", "loss")


def _over_depth(scope: Scope, profiles: list[Outcome]) -> tuple[Table, Chart]:
    header = ["network", "norm of the state, smallest to largest", "norm of the gradient by the state", "paper"]
    rows = []
    for task, result in ((outcome.task, outcome.result) for outcome in profiles):
        for when in ("initial", "trained"):
            ranges = [_range(result[when][what]) for what in ("signal", "gradient")]
            rows.append([f"{task.title}, {when} weights", *ranges, "neither exploding nor vanishing"])
    first = profiles[0].result
    series = {f"{when} weights": (first[when]["depth"], first[when]["gradient"]) for when in ("initial", "trained")}
    markup = charts.lines(series, "depth, blocks", "norm of the gradient by the state", log_y=True)
    caption = "Norm of the loss's gradient by the state at every depth, geometric mean over images."
    return Table(header, rows, "After each of the blocks"), Chart(markup, caption, "gradient")


def _range(values: list[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g} (factor {max(values) / min(values):.3g})"


ITEMS = (Item("depth-1202", "1,202 layers", tasks, lambda scope: NOTES[scope.budget], findings),)
