"""The figure of CIFAR-10's subsampling study."""

from __future__ import annotations

from typing import Any

from revode.experiments import paper, subsets
from revode.experiments.item import SMOKE_NOTE, Findings, Item, Outcome, Scope
from revode.experiments.task import Task

NETWORKS = ("hamiltonian-subset", "resnet-subset")
CPU_EPOCHS = {0.03: 48, 0.04: 36}
"""Share -> passes over it: the same number of steps at every share, as in the paper."""
CPU_STEPS = 1_440
CPU_SEEDS = 3
CPU: dict[str, Any] = {
    "batch_size": 50,
    "lr": 0.05,
    "validation": 0.0,
    "evaluate_every": 0,
    "report": False,
}
PAPER: dict[str, Any] = {
    "epochs": None, "max_steps": 80_000, "milestones": (40_000, 60_000), "milestone_unit": "steps", "evaluate_every": 0,
}  # fmt: skip
"""The recipe cifar counted in steps, which for all 50,000 images are its epochs: fewer images do not train less."""


def tasks(scope: Scope) -> list[Task]:
    """The trainings of a budget."""
    if scope.budget == "smoke":
        return subsets.make_smoke_runs(scope, NETWORKS)
    if scope.budget == "cpu":
        runs: list[Task] = []
        for fraction, epochs in CPU_EPOCHS.items():
            shared: dict[str, Any] = {"dataset": "cifar10", "recipe": "quick", "settings": {"epochs": epochs, **CPU}}
            runs += subsets.make_runs(scope, NETWORKS, [fraction], CPU_SEEDS, **shared)
        return runs
    shared = {"dataset": "cifar10", "recipe": "cifar", "settings": PAPER}
    return subsets.make_runs(scope, NETWORKS, paper.CIFAR_FRACTIONS, 1, **shared)


def budget_note(scope: Scope) -> str:
    """What the numbers are."""
    return {
        "smoke": SMOKE_NOTE,
        "cpu": f"CPU budget: {CPU_STEPS:,} steps of {CPU['batch_size']} images by the recipe quick at every share, "
        "equal for both networks, scored on all 10,000 test images; not the paper's schedule of 80,000 steps.",
        "paper": "The paper's schedule counted in steps: 80,000 at every share, learning rate / 10 after 40,000 and 60,000.",
    }[scope.budget]


def findings(scope: Scope, outcomes: list[Outcome]) -> Findings:
    """Both networks over the number of training images."""
    schedules = {"smoke": "smoke on digits", "cpu": f"CPU budget, {CPU_STEPS:,} steps", "paper": "80,000 steps"}
    return subsets.compare(outcomes, NETWORKS, paper.CIFAR_SUBSET_GAINS, schedules[scope.budget])


ITEM = Item("fig-cifar-subset", "Small data: shares of CIFAR-10", tasks, budget_note, findings)
