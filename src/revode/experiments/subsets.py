"""What the two figures of the subsampling study share: Hamiltonian against ResNet over shares of the training images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from revode.experiments import charts
from revode.experiments.accuracies import ABSENT, grouped, mean_and_deviation, spread
from revode.experiments.item import SMOKE, Chart, Findings, Outcome, Scope, Table
from revode.experiments.task import Task
from revode.experiments.training_run import TrainingRun

TINY: dict[str, Any] = {"blocks": [1, 1], "channels": [4, 8]}
SMOKE_FRACTIONS = (0.2, 0.1)


def make_runs(
    scope: Scope, networks: tuple[str, str], fractions: Iterable[float], seeds: int, **shared: Any
) -> list[Task]:
    """Both networks at every share with every seed; pairs of equal seed see the same images."""
    return [
        TrainingRun(model=model, fraction=fraction, seed=seed, **shared)
        for fraction in fractions
        for seed in scope.seeds(seeds)
        for model in networks
    ]


def make_smoke_runs(scope: Scope, networks: tuple[str, str], **shared: Any) -> list[Task]:
    """The study in small."""
    shared = {"dataset": "digits", "recipe": "digits", "settings": SMOKE, "options": TINY, **shared}
    return make_runs(scope, networks, SMOKE_FRACTIONS, 2, **shared)


def compare(outcomes: list[Outcome], networks: tuple[str, str], claims: Mapping[float, str], schedule: str) -> Findings:
    """Accuracy of both at every share, and the difference of runs with equal seeds beside the paper's claim."""
    found = grouped(outcomes, lambda task: (task.fraction, task.model))
    tasks = {outcome.task.fraction: outcome.task for outcome in outcomes}
    split = outcomes[0].task.split
    ours, theirs = networks
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
    series: dict[str, dict[float, tuple[float, float]]] = {}
    for (fraction, model), values in found.items():
        series.setdefault(model, {})[float(tasks[fraction].num_images)] = mean_and_deviation(values.values())
    markup = charts.accuracy_lines(series, "training images", f"{split} accuracy, %")
    chart = Chart(
        markup, f"Accuracy on the {split} images over the number of training images ({schedule}); bars: ± one std."
    )
    norms = {outcome.task.model: outcome.task.norm for outcome in outcomes}
    remark = "Inside the blocks: " + ", ".join(f"{model} has {norm}" for model, norm in norms.items()) + "."
    return Findings([Table(header, rows)], [chart], [remark], {"differences_in_points": gains})
