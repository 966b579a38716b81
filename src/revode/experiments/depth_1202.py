"""1,202 layers: does the loss fall, what does a step cost, do gradients survive the depth?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from revode.experiments import charts, paper
from revode.experiments.accuracies import ABSENT, of_paper
from revode.experiments.footprint import StepCost
from revode.experiments.item import SMOKE, SMOKE_NOTE, Chart, Findings, Item, Outcome, Scope, Table
from revode.experiments.task import Measurement, Place, Task, TaskFailed
from revode.experiments.training_run import TrainingRun
from revode.files import human_bytes
from revode.training.runs import read_metrics

DEEP, BASELINE = "hamiltonian-1202", "resnet-1202"
CPU_STEPS, NUM_TIMED, NUM_IMAGES = 300, 3, 4
CPU: dict[str, Any] = {
    "max_steps": CPU_STEPS, "evaluate_every": 0, "log_every": 5, "checkpoint_every": 25, "report": False,
}  # fmt: skip
_TINY: dict[str, Any] = {"blocks": [3, 3], "channels": [4, 8]}


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
        from revode.experiments.estimates import forward_flops

        return 2 * 5 * self.num_images * forward_flops(self.run.model, self.run.dataset, self.run.options)

    def measure(self, place: Place) -> dict[str, Any]:
        from revode import data
        from revode.stability import signal_propagation
        from revode.training.job import build_model
        from revode.training.scoring import load_run

        if place.finished(self.run) is None:
            raise TaskFailed(f"{self.title}: its training has no result")
        dataset = data.load(self.run.dataset, place.data_root)
        batch = dataset.split("test").take(torch.arange(self.num_images))
        images = data.standardise(batch.images, dataset)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.run.seed)
            fresh = build_model(self.run.config(place), dataset)
        numbers: dict[str, Any] = {}
        for name, model in (("initial", fresh), ("trained", load_run(place.folder(self.run)).model)):
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
    dataset, batch, options = "cifar10", 32, {}
    settings, recipe = {"smoke": SMOKE, "cpu": CPU, "paper": {}}[scope.budget], "cifar-1202"
    fresh = scope.budget != "smoke"
    if scope.budget == "smoke":
        dataset, batch, options, recipe = "digits", 4, _TINY, "digits"
    shared: dict[str, Any] = {"dataset": dataset, "batch_size": batch, "options": options, "fresh": fresh}
    shared["num_timed"] = NUM_TIMED if fresh else 1
    found: list[Task] = [
        StepCost(model=DEEP, strategy="reversible", **shared),
        StepCost(model=DEEP, strategy="store", **shared),
        StepCost(model=BASELINE, strategy="store", **shared),
    ]
    for seed in scope.seeds():
        run = TrainingRun(model=DEEP, dataset=dataset, recipe=recipe, seed=seed, options=options, settings=settings)
        found += [run, OverDepth(run=run)]
    return found


def budget_note(scope: Scope) -> str:
    """What the numbers are."""
    return {
        "smoke": SMOKE_NOTE,
        "cpu": f"CPU budget: {CPU_STEPS} steps of 32 images; not the paper's schedule of 80,000 steps.",
        "paper": "The paper's schedule: 80,000 steps of 32 images.",
    }[scope.budget]


def findings(scope: Scope, outcomes: list[Outcome]) -> Findings:
    """Costs, loss curve, gradients over depth."""
    costs = [outcome for outcome in outcomes if isinstance(outcome.task, StepCost)]
    runs = [outcome for outcome in outcomes if isinstance(outcome.task, TrainingRun)]
    profiles = [outcome for outcome in outcomes if isinstance(outcome.task, OverDepth)]
    tables = [_cost_table(costs)] if costs else []
    found = [_cost_chart(costs)] if costs else []
    if runs:
        tables.append(_run_table(scope, runs))
        found.append(_loss_chart(scope, runs))
    if profiles:
        tables.append(_growth_table(profiles))
        found.append(_gradient_chart(profiles[0]))
    remark = (
        "Bytes and seconds are those of one forward and backward pass, without the optimizer. The paper reports that 1,202 "
        "layers train on one GPU with 10 GB of memory, and that there is no issue of exploding or vanishing gradients."
    )
    entry = (
        "The states before a unit's first block are left out: there the channels that the transition fills with zeros meet a "
        "batch norm of variance 0, whose slope is 1/√ε = 316. Their gradient is large and goes nowhere: they are constants."
    )
    return Findings(tables, found, [remark, entry])


def _cost_table(costs: list[Outcome]) -> Table:
    rows = []
    for task, result in ((outcome.task, outcome.result) for outcome in costs):
        peak = ABSENT if result["peak_bytes"] is None else human_bytes(result["peak_bytes"])
        seconds = f"{result['seconds_per_step']:.3g} s"
        rows.append(
            [f"{task.model}, {task.strategy}", f"{result['params']:,}", str(result["layers"]), str(task.batch_size)]
        )
        rows[-1] += [
            human_bytes(result["saved_bytes"]),
            peak,
            seconds,
            "fits into 10 GB" if (task.model, task.strategy) == (DEEP, "reversible") else ABSENT,
        ]
    header = ["network, strategy", "parameters", "layers", "batch", "kept for backward", "peak of a fresh process"]
    return Table([*header, "time of a step", "paper"], rows, "What a step costs")


def _cost_chart(costs: list[Outcome]) -> Chart:
    known = all(outcome.result["peak_bytes"] is not None for outcome in costs)
    which = "peak_bytes" if known else "saved_bytes"
    values = {f"{o.task.model}, {o.task.strategy}": o.result[which] / 1e6 for o in costs}
    label = "peak of a fresh process in a step, MB" if known else "kept for backward, MB"
    return Chart(charts.bars(values, label), f"Memory of one training step: {label}.", "memory")


def _train_rows(outcome: Outcome) -> list[dict[str, Any]]:
    return [row for row in read_metrics(outcome.folder) if row["kind"] == "train"]


def _run_table(scope: Scope, runs: list[Outcome]) -> Table:
    rows = []
    for outcome in runs:
        result, curve = outcome.result, _train_rows(outcome)
        losses = f"{curve[0]['loss']:.3f} → {curve[-1]['loss']:.3f}"
        rows.append([outcome.task.title, f"{result['steps']:,}", losses, human_bytes(result["peak_activation_bytes"])])
        rows[-1] += [f"{outcome.task.accuracy(result):.2f} %", of_paper(paper.CIFAR[DEEP]["cifar10"])]
    header = [
        "run",
        "steps",
        "training loss, first → last line",
        "peak activations",
        f"test accuracy, ours ({scope.budget} budget)",
    ]
    return Table([*header, f"paper ({paper.DEEP_SCHEDULE})"], rows, "Training")


def _loss_chart(scope: Scope, runs: list[Outcome]) -> Chart:
    series = {}
    for outcome in runs:
        rows = _train_rows(outcome)
        series[outcome.task.title] = [row["step"] for row in rows], [row["loss"] for row in rows]
    return Chart(
        charts.lines(series, "step", "training loss"), f"Training loss of {DEEP}. {budget_note(scope)}", "loss"
    )


def _growth_table(profiles: list[Outcome]) -> Table:
    rows = [
        [
            f"{outcome.task.title}, {when} weights",
            *(_range(outcome.result[when][what]) for what in ("signal", "gradient")),
            "neither exploding nor vanishing",
        ]
        for outcome in profiles
        for when in ("initial", "trained")
    ]
    header = ["network", "norm of the state, smallest to largest", "norm of the gradient by the state", "paper"]
    return Table(header, rows, "After each of the blocks")


def _range(values: list[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g} (factor {max(values) / min(values):.3g})"


def _gradient_chart(outcome: Outcome) -> Chart:
    series = {
        f"{when} weights": (outcome.result[when]["depth"], outcome.result[when]["gradient"])
        for when in ("initial", "trained")
    }
    markup = charts.lines(series, "depth, blocks", "norm of the gradient by the state", log_y=True)
    return Chart(
        markup, "Norm of the loss's gradient by the state at every depth, geometric mean over images.", "gradient"
    )


ITEM = Item("depth-1202", "1,202 layers", tasks, budget_note, findings)
