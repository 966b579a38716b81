"""The figure of STL-10's subsampling study."""

from __future__ import annotations

import dataclasses
from typing import Any

from revode.experiments import paper, subsets
from revode.experiments.item import SMOKE_NOTE, Findings, Item, Outcome, Scope
from revode.experiments.task import Task
from revode.experiments.training_run import TrainingRun

NETWORKS = ("hamiltonian-subset-stl", "resnet-subset-stl")
HOLD_OUT, SMOKE_HOLD_OUT = 1_000, 200
"""Images that stand in for the test split where that is absent; 80 %, the paper's largest share, are what they leave."""
CPU_FRACTIONS = (0.4, 0.1)
CPU: dict[str, Any] = {
    "epochs": 4,
    "batch_size": 32,
    "lr": 0.05,
    "validation": 0.0,
    "evaluate_every": 0,
    "report": False,
}
PAPER: dict[str, Any] = {"milestones": (2_340, 3_120, 3_900), "milestone_unit": "steps", "evaluate_every": 0}
"""The recipe stl with its milestones counted in steps, 39 to an epoch of all 5,000 images."""


def tasks(scope: Scope) -> list[Task]:
    """The trainings of a budget."""
    if scope.budget == "smoke":
        return subsets.make_smoke_runs(scope, NETWORKS, hold_out=SMOKE_HOLD_OUT)
    shared: dict[str, Any] = {"dataset": "stl10", "hold_out": 0 if scope.stl_test else HOLD_OUT}
    if scope.budget == "cpu":
        return subsets.make_runs(scope, NETWORKS, CPU_FRACTIONS, 1, recipe="quick", settings=CPU, **shared)
    return subsets.make_runs(scope, NETWORKS, paper.STL_FRACTIONS, 1, recipe="stl", settings=PAPER, **shared)


def budget_note(scope: Scope) -> str:
    """What the numbers are."""
    return {
        "smoke": SMOKE_NOTE,
        "cpu": f"CPU budget: {CPU['epochs']} epochs by the recipe quick, batch {CPU['batch_size']}, equal for both networks; "
        "not the paper's schedule of 20,000 steps.",
        "paper": "The paper's schedule counted in steps: 20,000 at every share.",
    }[scope.budget]


def hold_out_remark(run: TrainingRun) -> list[str]:
    """How the images were chosen that stand in for the test split; nothing where there is one."""
    if not run.hold_out:
        return []
    return [
        f"There is no test split here: accuracies are on {run.hold_out:,} hold-out images of the training split, stratified by "
        "class, drawn anew with each seed and equal for all networks. They are scored once, with the last weights, so nothing "
        "is chosen on them. The paper's numbers are on the 8,000 test images."
    ]


def findings(scope: Scope, outcomes: list[Outcome]) -> Findings:
    """Both networks over the number of training images."""
    schedules = {"smoke": "smoke on digits", "cpu": f"CPU budget, {CPU['epochs']} epochs", "paper": "20,000 steps"}
    found = subsets.compare(outcomes, NETWORKS, paper.STL_SUBSET_GAINS, schedules[scope.budget])
    average = "On average over the shares, the paper reports 3.4 points for Hamiltonian."
    return dataclasses.replace(found, remarks=[*found.remarks, *hold_out_remark(outcomes[0].task), average])


ITEM = Item("fig-stl-subset", "Small data: shares of STL-10", tasks, budget_note, findings)
