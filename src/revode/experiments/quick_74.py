"""hamiltonian-74 on CIFAR-10 by the recipe quick: what two cores reach within three hours."""

from __future__ import annotations

from typing import Any

from revode.experiments import charts, paper
from revode.experiments.accuracies import grouped, of_paper, spread
from revode.experiments.item import SMOKE, SMOKE_NOTE, Chart, Findings, Item, Outcome, Scope, Table
from revode.experiments.task import Task
from revode.experiments.training_run import TrainingRun
from revode.training.planning import human_time
from revode.training.recipes import RECIPES
from revode.training.runs import read_metrics

MODEL = "hamiltonian-74"
_TINY = {"blocks": [2, 2], "channels": [4, 8]}


def tasks(scope: Scope) -> list[Task]:
    """One training for each seed."""
    shared: dict[str, Any]
    if scope.budget == "smoke":
        shared = {"dataset": "digits", "recipe": "digits", "settings": SMOKE, "options": _TINY}
    else:
        shared = {"dataset": "cifar10", "recipe": "quick" if scope.budget == "cpu" else "cifar"}
    return [TrainingRun(model=MODEL, seed=seed, **shared) for seed in scope.seeds()]


def budget_note(scope: Scope) -> str:
    """What the numbers are."""
    return {
        "smoke": SMOKE_NOTE,
        "cpu": f"CPU budget: {RECIPES['quick']['epochs']} epochs of 50,000 images by the recipe quick; not the paper's "
        "schedule of 160 epochs.",
        "paper": "The paper's schedule: 160 epochs.",
    }[scope.budget]


def findings(scope: Scope, outcomes: list[Outcome]) -> Findings:
    """The accuracy beside the paper's, and its course."""
    accuracies = grouped(outcomes, lambda task: task.model)[MODEL]
    first = outcomes[0].result
    header = ["network", "data", "recipe", "epochs", "time", "test accuracy, ours"]
    header.append(f"paper, CIFAR-10 ({paper.CIFAR_SCHEDULE})")
    seconds = sum(outcome.result["seconds"] for outcome in outcomes) / len(outcomes)
    row = [MODEL, outcomes[0].task.dataset, first["recipe"], f"{first['epochs']:g}", human_time(seconds)]
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
