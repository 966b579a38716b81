"""hamiltonian-74 on CIFAR-10 by the recipe quick: what two cores reach in about two hours.

With batch norm and a larger step than the paper's network has: validation images chose both (docs/training.md). States live
on the grid, so that reversing adds no error to the gradient, in bfloat16 either; the budget recomputes only what does not fit.
"""

from __future__ import annotations

from typing import Any

from revode.experiments import charts, paper
from revode.experiments.accuracies import grouped, of_paper, spread
from revode.experiments.item import SMOKE, SMOKE_NOTE, Chart, Findings, Item, Outcome, Scope, Table
from revode.experiments.task import Task
from revode.experiments.training_run import TrainingRun
from revode.files import human_time
from revode.training.recipes import RECIPES
from revode.training.runs import read_metrics

MODEL = "hamiltonian-74"
OPTIONS: dict[str, Any] = {"norm": "batch", "h": 0.3, "memory_budget": 100_000_000}
CPU: dict[str, Any] = {"exact": 14, "validation": 0.0, "evaluate_every": 5}
_TINY = {"blocks": [2, 2], "channels": [4, 8]}


def tasks(scope: Scope) -> list[Task]:
    """One training for each seed."""
    shared: dict[str, Any]
    if scope.budget == "smoke":
        shared = {"dataset": "digits", "recipe": "digits", "settings": SMOKE, "options": _TINY}
    else:
        shared = {"dataset": "cifar10", "recipe": "cifar"}
    if scope.budget == "cpu":
        label = f"{MODEL}, batch norm, h = {OPTIONS['h']}"
        shared |= {"recipe": "quick", "options": OPTIONS, "settings": CPU, "label": label}
    return [TrainingRun(model=MODEL, seed=seed, **shared) for seed in scope.seeds()]


def budget_note(scope: Scope) -> str:
    """What the numbers are."""
    return {
        "smoke": SMOKE_NOTE,
        "cpu": f"CPU budget: {RECIPES['quick']['epochs']} epochs of 50,000 images by the recipe quick, with batch norm and "
        f"h = {OPTIONS['h']} in the blocks; not the paper's schedule of 160 epochs, nor its biases and h = 0.1.",
        "paper": "The paper's schedule: 160 epochs.",
    }[scope.budget]


def findings(scope: Scope, outcomes: list[Outcome]) -> Findings:
    """The accuracy beside the paper's, and its course."""
    accuracies = grouped(outcomes, lambda task: task.model)[MODEL]
    first = outcomes[0].result
    header = ["network", "data", "recipe", "epochs", "time", "test accuracy, ours"]
    header.append(f"paper, CIFAR-10 ({paper.CIFAR_SCHEDULE})")
    seconds = sum(outcome.result["seconds"] for outcome in outcomes) / len(outcomes)
    row = [
        outcomes[0].task.name,
        outcomes[0].task.dataset,
        first["recipe"],
        f"{first['epochs']:g}",
        human_time(seconds),
    ]
    row += [spread(accuracies.values()), of_paper(paper.CIFAR[MODEL]["cifar10"])]
    series = {}
    for outcome in outcomes:
        for kind in ("train", "evaluation"):
            rows = [line for line in read_metrics(outcome.folder) if line["kind"] == kind]
            if rows:
                name = rows[-1].get("split", kind)
                points = [line["step"] for line in rows], [100 * line["accuracy"] for line in rows]
                series[f"{name}, seed {outcome.task.seed}"] = points
    chart = Chart(
        charts.lines(series, "step", "accuracy, %"), f"Accuracy over the course of training. {budget_note(scope)}"
    )
    return Findings([Table(header, [row])], [chart])


ITEM = Item("quick-74", "hamiltonian-74 on CIFAR-10", tasks, budget_note, findings)
