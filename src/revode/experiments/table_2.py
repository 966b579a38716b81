"""Table 2: networks for 96x96 images on STL-10."""

from __future__ import annotations

from typing import Any

from revode.experiments import charts, paper
from revode.experiments.accuracies import ABSENT, grouped, mean_and_deviation, of_paper, spread
from revode.experiments.item import SMOKE, SMOKE_NOTE, Chart, Findings, Item, Outcome, Scope, Table
from revode.experiments.stl_subset import HOLD_OUT, SMOKE_HOLD_OUT, hold_out_remark
from revode.experiments.task import Task
from revode.experiments.training_run import TrainingRun

BASELINE = "resnet-32-stl"
"""A ResNet of the same size; the paper has none in this table."""
CPU: dict[str, Any] = {
    "epochs": 4,
    "batch_size": 32,
    "lr": 0.05,
    "validation": 0.0,
    "evaluate_every": 0,
    "report": False,
}
_TINY = {"blocks": [2, 2], "channels": [4, 8]}


def tasks(scope: Scope) -> list[Task]:
    """The trainings of a budget."""
    shared: dict[str, Any] = {"dataset": "stl10", "hold_out": 0 if scope.stl_test else HOLD_OUT}
    models = [*paper.STL, BASELINE]
    if scope.budget == "paper":
        shared["recipe"] = "stl"
    elif scope.budget == "cpu":
        models = ["hamiltonian-stl", BASELINE]
        shared |= {"recipe": "quick", "settings": CPU}
    else:
        shared = {
            "dataset": "digits",
            "hold_out": SMOKE_HOLD_OUT,
            "recipe": "digits",
            "settings": SMOKE,
            "options": _TINY,
        }
    return [TrainingRun(model=model, seed=seed, **shared) for model in models for seed in scope.seeds()]


def budget_note(scope: Scope) -> str:
    """What the numbers are."""
    images = "5,000" if scope.stl_test else "4,000"
    return {
        "smoke": SMOKE_NOTE,
        "cpu": f"CPU budget: {CPU['epochs']} epochs of {images} images by the recipe quick, equal for all networks; "
        "not the paper's schedule of 20,000 steps.",
        "paper": f"The paper's schedule of 20,000 steps, on {images} training images.",
    }[scope.budget]


def _ours(scope: Scope) -> str:
    return {"smoke": "smoke on digits", "cpu": f"CPU budget, {CPU['epochs']} epochs", "paper": "20,000 steps"}[
        scope.budget
    ]


def findings(scope: Scope, outcomes: list[Outcome]) -> Findings:
    """The table with the paper's numbers beside ours."""
    found = grouped(outcomes, lambda task: task.name)
    split = outcomes[0].task.split
    last = {outcome.task.name: outcome for outcome in outcomes}
    header = [
        "network",
        "in its blocks",
        "parameters",
        f"{split} accuracy, ours ({_ours(scope)})",
        f"test, paper ({paper.STL_SCHEDULE})",
    ]
    rows = [
        [
            name,
            last[name].task.norm,
            f"{last[name].result['params']:,}",
            spread(values.values()),
            of_paper(paper.STL.get(name)),
        ]
        for name, values in found.items()
    ]
    rows += [
        [f"baseline: {name}", ABSENT, ABSENT, ABSENT, of_paper(value)] for name, value in paper.STL_BASELINES.items()
    ]
    ours = {name: mean_and_deviation(values.values()) for name, values in found.items()}
    legend = f"paper, test, {paper.STL_SCHEDULE}"
    markup = charts.accuracy_bars(ours, paper.STL, f"ours, {split}, {_ours(scope)}", legend)
    chart = Chart(
        markup, f"Accuracy on the {split} images, ours ({_ours(scope)}); marks: the paper's on the test images."
    )
    return Findings([Table(header, rows)], [chart], hold_out_remark(outcomes[0].task))


ITEM = Item("table-2", "Table 2: STL-10", tasks, budget_note, findings)
