"""The two figures of the subsampling study: Hamiltonian against ResNet over shares of the training images."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from revode import charts
from revode.reproduce import paper
from revode.reproduce.accuracy import HOLD_OUT, SHORT, SMOKE_HOLD_OUT, STL_SHORT, hold_out_remark
from revode.reproduce.item import (
    ABSENT,
    Budget,
    Chart,
    Findings,
    Outcome,
    Scope,
    Table,
    grouped,
    mean_and_deviation,
    spread,
    trained_item,
)

CIFAR_NETWORKS = ("hamiltonian-subset", "resnet-subset")
STL_NETWORKS = ("hamiltonian-subset-stl", "resnet-subset-stl")
SMOKE_FRACTIONS = (0.2, 0.1)
CPU_STEPS = 1_440
CPU_EPOCHS = {0.03: 48, 0.04: 36}
"""Share of CIFAR-10 -> passes over it: the same number of steps at every share, as in the paper."""
CPU: dict[str, Any] = {"batch_size": 50, "lr": 0.05, **SHORT}
CIFAR_PAPER: dict[str, Any] = {
    "epochs": None, "max_steps": 80_000, "milestones": (40_000, 60_000), "milestone_unit": "steps", "evaluate_every": 0,
}  # fmt: skip
"""The recipe cifar counted in steps, which for all 50,000 images are its epochs: fewer images do not train less."""
STL_PAPER: dict[str, Any] = {"milestones": (2_340, 3_120, 3_900), "milestone_unit": "steps", "evaluate_every": 0}
"""The recipe stl with its milestones counted in steps, 39 to an epoch of all 5,000 images."""


def _smoke(networks: tuple[str, str], **shared: Any) -> Budget:
    budget = Budget.smoke(networks, seeds=2, **shared)
    runs = [run | {"fraction": fraction} for fraction in SMOKE_FRACTIONS for run in budget.runs]
    return dataclasses.replace(budget, runs=runs)


def cifar_subset(scope: Scope) -> Budget:
    """Shares of CIFAR-10."""
    if scope.budget == "smoke":
        return _smoke(CIFAR_NETWORKS)
    if scope.budget == "paper":
        shared: dict[str, Any] = {"dataset": "cifar10", "recipe": "cifar", "settings": CIFAR_PAPER}
        runs = [{"model": m, "fraction": share, **shared} for share in paper.CIFAR_FRACTIONS for m in CIFAR_NETWORKS]
        note = (
            "The paper's schedule counted in steps: 80,000 at every share, learning rate / 10 after 40,000 and 60,000."
        )
        return Budget(note, "80,000 steps", runs)
    runs = [
        {
            "model": model,
            "dataset": "cifar10",
            "recipe": "quick",
            "fraction": fraction,
            "settings": {"epochs": epochs, **CPU},
        }
        for fraction, epochs in CPU_EPOCHS.items()
        for model in CIFAR_NETWORKS
    ]
    note = (
        f"CPU budget: {CPU_STEPS:,} steps of {CPU['batch_size']} images by the recipe quick at every share, "
        "equal for both networks, scored on all 10,000 test images; not the paper's schedule of 80,000 steps."
    )
    return Budget(note, f"CPU budget, {CPU_STEPS:,} steps", runs, seeds=3)


def stl_subset(scope: Scope) -> Budget:
    """Shares of STL-10."""
    if scope.budget == "smoke":
        return _smoke(STL_NETWORKS, hold_out=SMOKE_HOLD_OUT)
    shared: dict[str, Any] = {"dataset": "stl10", "hold_out": 0 if scope.stl_test else HOLD_OUT}
    if scope.budget == "paper":
        shared |= {"recipe": "stl", "settings": STL_PAPER}
        fractions, schedule = paper.STL_FRACTIONS, "20,000 steps"
        note = "The paper's schedule counted in steps: 20,000 at every share."
    else:
        shared |= {"recipe": "quick", "settings": STL_SHORT}
        fractions, schedule = (0.4, 0.1), "CPU budget, 4 epochs"
        note = (
            f"CPU budget: 4 epochs by the recipe quick, batch {STL_SHORT['batch_size']}, equal for both networks; "
            "not the paper's schedule of 20,000 steps."
        )
    runs = [{"model": model, "fraction": fraction, **shared} for fraction in fractions for model in STL_NETWORKS]
    return Budget(note, schedule, runs)


def _compare(budget: Budget, outcomes: list[Outcome], claims: Mapping[float, str]) -> Findings:
    """Accuracy of both at every share, and the difference of runs with equal seeds beside the paper's claim."""
    found = grouped(outcomes, lambda task: (task.fraction, task.model))
    tasks = {outcome.task.fraction: outcome.task for outcome in outcomes}
    split, schedule = outcomes[0].task.split, budget.schedule
    ours, theirs = dict.fromkeys(run["model"] for run in budget.runs)
    header = ["share", "images", "steps", f"{ours}, {split} ({schedule})", f"{theirs}, {split} ({schedule})"]
    header += ["difference, points", "paper's claim, points"]
    rows, gains = [], {}
    for fraction, task in tasks.items():
        first, second = found.get((fraction, ours), {}), found.get((fraction, theirs), {})
        differences = [first[seed] - second[seed] for seed in first if seed in second]
        gains[f"{fraction:g}"] = differences
        cells = [f"{100 * fraction:g} %", f"{task.num_images:,}", f"{task.num_steps:,}"]
        cells += [spread(first.values()), spread(second.values()), spread(differences, "points", signed=True)]
        rows.append([*cells, claims.get(fraction, ABSENT)])
    series, errors = {}, {}
    for model in dict.fromkeys(model for _, model in found):
        points = sorted(
            (tasks[f].num_images, *mean_and_deviation(v.values())) for (f, m), v in found.items() if m == model
        )
        numbers, means, errors[model] = map(list, zip(*points, strict=True))
        series[model] = numbers, means
    markup = charts.lines(series, "training images", f"{split} accuracy, %", log_x=True, mark=True, errors=errors)
    caption = f"Accuracy on the {split} images over the number of training images ({schedule}); bars: ± one std."
    norms = {outcome.task.model: outcome.task.norm for outcome in outcomes}
    remark = "Inside the blocks: " + ", ".join(f"{model} has {norm}" for model, norm in norms.items()) + "."
    return Findings([Table(header, rows)], [Chart(markup, caption)], [remark], {"differences_in_points": gains})


def show_cifar_subset(budget: Budget, outcomes: list[Outcome]) -> Findings:
    """Both networks over the number of training images."""
    return _compare(budget, outcomes, paper.CIFAR_SUBSET_GAINS)


def show_stl_subset(budget: Budget, outcomes: list[Outcome]) -> Findings:
    """Both networks over the number of training images."""
    found = _compare(budget, outcomes, paper.STL_SUBSET_GAINS)
    average = "On average over the shares, the paper reports 3.4 points for Hamiltonian."
    return dataclasses.replace(found, remarks=[*found.remarks, *hold_out_remark(outcomes), average])


ITEMS = (
    trained_item("fig-cifar-subset", "Small data: shares of CIFAR-10", cifar_subset, show_cifar_subset),
    trained_item("fig-stl-subset", "Small data: shares of STL-10", stl_subset, show_stl_subset),
)
