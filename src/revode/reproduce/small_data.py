"""Small data in detail: both networks of the subsampling study with both norms, each with a step size or rate of its own."""

from __future__ import annotations

import math
import statistics
from typing import Any

from revode import charts
from revode.reproduce import paper
from revode.reproduce.accuracy import SHORT
from revode.reproduce.item import (
    ABSENT,
    SMOKE,
    SMOKE_NOTE,
    TINY,
    Budget,
    Chart,
    Findings,
    Outcome,
    Scope,
    Table,
    grouped,
    spread,
    trained_item,
)
from revode.training.run import read_metrics

HAMILTONIAN, RESNET = "hamiltonian-subset", "resnet-subset"
CHOSEN: dict[tuple[str, str], dict[str, float]] = {
    (HAMILTONIAN, "batch"): {"h": 1.0, "lr": 0.05},
    (RESNET, "batch"): {"lr": 0.2},
    (HAMILTONIAN, "none"): {"h": 0.1, "lr": 0.05},
    (RESNET, "none"): {"lr": 0.05},
}
"""Network and norm -> step size and peak of the rate. Trials on validation images chose those with batch norm, and have still
to choose those with biases (docs/reproduction.md)."""
WORDS = {"batch": "batch norm", "none": "biases"}
SHARE, STEPS, BATCH = 0.04, 3_000, 50
CONFIDENCE = 0.95
LAST = 0.1
"""Share of the steps over which the training loss is averaged, and its slope is taken."""


def _label(model: str, norm: str) -> str:
    return f"{model.removesuffix('-subset')}, {WORDS[norm]}"


def small_data(scope: Scope) -> Budget:
    """4 % of CIFAR-10, four networks."""
    runs = []
    for (model, norm), chosen in CHOSEN.items():
        options: dict[str, Any] = {"norm": norm} | ({"h": chosen["h"]} if "h" in chosen else {})
        run: dict[str, Any] = {"model": model, "label": _label(model, norm), "options": options}
        if scope.budget == "smoke":
            run |= SMOKE | {"options": TINY | options, "fraction": 0.2}
        else:
            steps = STEPS if scope.budget == "cpu" else 80_000
            settings = {
                "epochs": None,
                "max_steps": steps,
                "batch_size": BATCH,
                "lr": chosen["lr"],
                "backprop": "store",
            }
            run |= {"dataset": "cifar10", "recipe": "quick", "fraction": SHARE}
            run["settings"] = settings | {"exact": 0} | SHORT
        runs.append(run)
    if scope.budget == "smoke":
        return Budget(SMOKE_NOTE, "smoke on digits", runs, seeds=2)
    if scope.budget == "paper":
        return Budget("As many steps as the paper's, 80,000, by the recipe quick.", "80,000 steps", runs, seeds=3)
    note = (
        f"CPU budget: {STEPS:,} steps of {BATCH} images by the recipe quick on {SHARE:.0%} of CIFAR-10, scored on all 10,000 "
        "test images; not the paper's schedule of 80,000 steps. h or the rate with batch norm was chosen on validation images."
    )
    return Budget(note, f"CPU budget, {STEPS:,} steps", runs, seeds=3)


def show_small_data(budget: Budget, outcomes: list[Outcome]) -> Findings:
    """Accuracies, paired differences, and how the training loss ends."""
    found = grouped(outcomes, lambda task: task.name)
    header = ["network", "h", "peak of the rate", f"test accuracy ({budget.schedule})"]
    header += ["training loss at the end", "its slope, per 1,000 steps"]
    rows, series = [], {}
    for name, accuracies in found.items():
        own = [outcome for outcome in outcomes if outcome.task.name == name]
        curves = [_training_loss(outcome) for outcome in own]
        ends = [_end(*curve) for curve in curves]
        settings = own[0].task.identity()
        row = [name, f"{settings['options'].get('h', ABSENT)}", f"{settings.get('lr', 0.1):g}"]
        row += [spread(accuracies.values()), f"{statistics.fmean(loss for loss, _ in ends):.3f}"]
        rows.append([*row, f"{statistics.fmean(slope for _, slope in ends):+.3f}"])
        series[name] = curves[0]
    differences = {
        f"{first} minus {second}": [
            found[first][seed] - found[second][seed] for seed in found[first] if seed in found[second]
        ]
        for first, second in _pairs(found)
    }
    compared = Table(
        ["difference", "points", f"{CONFIDENCE:.0%} confidence interval", "paper's claim"],
        [
            [name, spread(values, "points", signed=True), _interval(values), paper.CIFAR_SUBSET_GAINS[SHARE]]
            for name, values in differences.items()
        ],
        "Differences of runs with equal seeds, which see the same images:",
    )
    markup = charts.lines(series, "step", "training loss")
    chart = Chart(markup, f"Training loss of seed {outcomes[0].task.seed} on augmented images ({budget.schedule}).")
    return Findings([Table(header, rows), compared], [chart], [], {"differences_in_points": differences})


def _pairs(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Hamiltonian against ResNet, with each norm, and each with the other's."""
    ours = [_label(HAMILTONIAN, norm) for norm in WORDS]
    theirs = [_label(RESNET, norm) for norm in WORDS]
    return [(first, second) for first in ours for second in theirs if first in found and second in found]


def _training_loss(outcome: Outcome) -> tuple[list[int], list[float]]:
    lines = [line for line in read_metrics(outcome.folder) if line["kind"] == "train"]
    return [line["step"] for line in lines], [line["loss"] for line in lines]


def _end(steps: list[int], losses: list[float]) -> tuple[float, float]:
    """Mean and least-squares slope per 1,000 steps of the last part of a curve."""
    first = steps[-1] * (1 - LAST)
    last = [(step, loss) for step, loss in zip(steps, losses, strict=True) if step > first]
    x, y = zip(*last, strict=True)
    return statistics.fmean(y), 1_000 * statistics.linear_regression(x, y).slope if len(x) > 1 else 0.0


def _interval(values: list[float]) -> str:
    """Student's interval for the mean; one value has none."""
    if len(values) < 2:
        return ABSENT
    from scipy.stats import t

    half = float(t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return f"{mean - half:+.2f} to {mean + half:+.2f}"


ITEMS = (trained_item("small-data", "Small data: norms, step sizes and rates", small_data, show_small_data),)
