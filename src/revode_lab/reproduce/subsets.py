"""Small data: Hamiltonian against ResNet over shares of the training images, and in detail on 4 % of CIFAR-10."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from revode_lab import charts
from revode_lab.reproduce import paper
from revode_lab.reproduce.accuracy import (
    HOLD_OUT,
    SMOKE_HOLD_OUT,
    STL_SHORT,
    by_network,
    grouped,
    hold_out_remark,
    mean_and_deviation,
    smoke,
    spread,
    trainings,
)
from revode_lab.reproduce.item import (
    ABSENT,
    SHORT,
    SMOKE,
    SMOKE_NOTE,
    TINY,
    Budget,
    Chart,
    Findings,
    Item,
    Outcome,
    Table,
)
from revode_lab.reproduce.task import TrainingRun

HAMILTONIAN, RESNET = CIFAR_NETWORKS = ("hamiltonian-subset", "resnet-subset")
STL_NETWORKS = ("hamiltonian-subset-stl", "resnet-subset-stl")
SMOKE_FRACTIONS = (0.2, 0.1)
CIFAR_PAPER: dict[str, Any] = {
    "epochs": None, "max_steps": 80_000, "milestones": (40_000, 60_000), "milestone_unit": "steps", "evaluate_every": 0,
}  # fmt: skip
"""The recipe cifar counted in steps, which for all 50,000 images are its epochs: fewer images do not train less."""
STL_PAPER: dict[str, Any] = {"milestones": (2_340, 3_120, 3_900), "milestone_unit": "steps", "evaluate_every": 0}
"""The recipe stl with its milestones counted in steps, 39 to an epoch of all 5,000 images."""


STL_SUBSET = {
    "smoke": smoke(STL_NETWORKS, SMOKE_FRACTIONS, seeds=2, hold_out=SMOKE_HOLD_OUT),
    "cpu": Budget(
        "CPU budget: 4 epochs by the recipe quick, batch 32, equal for both networks; "
        "not the paper's schedule of 20,000 steps.",
        "CPU budget, 4 epochs",
        trainings(STL_NETWORKS, (0.4, 0.1), **STL_SHORT),
    ),
    "paper": Budget(
        "The paper's schedule counted in steps: 20,000 at every share.",
        "20,000 steps",
        trainings(
            STL_NETWORKS, paper.STL_FRACTIONS, dataset="stl10", recipe="stl", settings=STL_PAPER, hold_out=HOLD_OUT
        ),
    ),
}


def differences(first: dict[int, float], second: dict[int, float]) -> list[float]:
    """Return first minus second, of equal seeds."""
    return [first[seed] - second[seed] for seed in first if seed in second]


def show_subset(budget: Budget, outcomes: list[Outcome]) -> Findings:
    """Show the accuracy of both at every share, and the difference of runs with equal seeds beside the paper's claim."""
    found = grouped(outcomes, lambda task: (task.fraction, task.name))
    tasks = {outcome.task.fraction: outcome.task for outcome in outcomes}
    split, schedule = outcomes[0].task.split, budget.schedule
    ours, theirs = dict.fromkeys(task.name for task in budget.tasks if isinstance(task, TrainingRun))
    is_stl = outcomes[0].task.model in STL_NETWORKS
    claims = paper.SUBSET_GAINS["stl10" if is_stl else "cifar10"]
    rows, gains = [], {}
    for share in sorted(tasks):
        task, first, second = tasks[share], found.get((share, ours), {}), found.get((share, theirs), {})
        gains[f"{share:g}"] = differences(first, second)
        row = {"share": f"{100 * share:g} %", "images": f"{task.num_images:,}", "steps": f"{task.num_steps:,}"}
        row[f"{ours}, {split} ({schedule})"] = spread(first.values())
        row[f"{theirs}, {split} ({schedule})"] = spread(second.values())
        row["difference, points"] = spread(gains[f"{share:g}"], "points", signed=True)
        row["paper's claim, points"] = claims.get(share, ABSENT)
        rows.append(row)
    series, errors = {}, {}
    for model in dict.fromkeys(model for _, model in found):
        points = sorted(
            (tasks[f].num_images, *mean_and_deviation(v.values())) for (f, m), v in found.items() if m == model
        )
        numbers, means, errors[model] = map(list, zip(*points, strict=True))
        series[model] = numbers, means
    markup = charts.lines(series, "training images", f"{split} accuracy, %", log_x=True, mark=True, errors=errors)
    caption = f"Accuracy on the {split} images over the number of training images ({schedule}); bars: ± one std."
    norms = {outcome.task.name: outcome.task.norm for outcome in outcomes}
    remarks = ["Inside the blocks: " + ", ".join(f"{model} has {norm}" for model, norm in norms.items()) + "."]
    if is_stl:
        average = "On average over the shares, the paper reports 3.4 points for Hamiltonian."
        remarks += [*hold_out_remark(outcomes), average]
    return Findings([Table(rows)], [Chart(markup, caption)], remarks, {"differences_in_points": gains})


CHOSEN: dict[str, tuple[str, dict[str, Any], float]] = {
    "hamiltonian, batch norm": (HAMILTONIAN, {"norm": "batch", "h": 1.0}, 0.2),
    "resnet, batch norm": (RESNET, {"norm": "batch"}, 0.2),
    "hamiltonian, biases": (HAMILTONIAN, {"norm": "none", "h": 0.3}, 0.2),
    "resnet, biases": (RESNET, {"norm": "none"}, 0.2),
}
"""Label -> network, its options and the peak of its rate, as trials on validation images chose them (docs/reproduction.md)."""
SHARE, STEPS, BATCH = 0.04, 3_000, 50
CONFIDENCE = 0.95
LAST = 0.1
"""Share of the steps over which the training loss is averaged, and its slope is taken."""


def _small_data(num_steps: int, share: float = SHARE, labels: Iterable[str] = CHOSEN) -> list[TrainingRun]:
    """Return trainings of these of the four networks on a share of CIFAR-10 for this many steps."""
    alike = {"epochs": None, "max_steps": num_steps, "batch_size": BATCH, "backprop": "store", "exact": 0, **SHORT}
    row: dict[str, Any] = {"dataset": "cifar10", "recipe": "quick", "fraction": share}
    return [
        TrainingRun(model=model, label=label, options=options, settings={**alike, "lr": rate}, **row)
        for label, (model, options, rate) in CHOSEN.items()
        if label in labels
    ]


PAPER_SHARES = sorted(paper.CIFAR_FRACTIONS, key=lambda share: share != SHARE)
"""The paper's, first the one that is shown in detail."""
BATCH_NORM = [label for label, (_, options, _) in CHOSEN.items() if options["norm"] == "batch"]
SMALL_DATA = {
    "smoke": Budget(
        SMOKE_NOTE,
        "smoke on digits",
        [
            TrainingRun(
                model=CHOSEN[label][0], label=label, fraction=share, **{**SMOKE, "options": TINY | CHOSEN[label][1]}
            )
            for share, labels in zip(SMOKE_FRACTIONS, (CHOSEN, BATCH_NORM), strict=True)
            for label in labels
        ],
        seeds=2,
    ),
    "cpu": Budget(
        f"CPU budget: {STEPS:,} steps of {BATCH} images by the recipe quick on {SHARE:.0%} and 10% of CIFAR-10, 500 on 1%, "
        "scored on all 10,000 test images; not the paper's schedule of 80,000 steps. h and rates were chosen on validation "
        f"images, at {SHARE:.0%}.",
        f"CPU budget, {STEPS:,} steps",
        [*_small_data(STEPS), *_small_data(500, 0.01, BATCH_NORM), *_small_data(STEPS, 0.1, BATCH_NORM)],
        seeds=3,
    ),
    "paper": Budget(
        "The paper's schedule counted in steps: 80,000 at every share, learning rate / 10 after 40,000 and 60,000.",
        "80,000 steps",
        trainings(CIFAR_NETWORKS, PAPER_SHARES, dataset="cifar10", recipe="cifar", settings=CIFAR_PAPER),
    ),
}


def show_small_data(budget: Budget, outcomes: list[Outcome]) -> Findings:
    """Show accuracies, paired differences and the last training losses at the first share; both networks over all shares."""
    share = outcomes[0].task.fraction
    first = [outcome for outcome in outcomes if outcome.task.fraction == share]
    found = grouped(first, lambda task: task.name)
    rows, series, models = [], {}, {}
    for name, own in by_network(first).items():
        curves = [outcome.metrics("train", "loss") for outcome in own]
        losses, slopes = zip(*(_end(*curve) for curve in curves), strict=True)
        settings = own[0].task.identity()
        row = {"network": name, "h": f"{settings.get('options', {}).get('h', ABSENT)}"}
        row["peak of the rate"] = f"{settings.get('lr', 0.1):g}"
        row[f"test accuracy ({budget.schedule})"] = spread(found[name].values())
        row["training loss at the end"] = f"{statistics.fmean(losses):.3f}"
        row["its slope, per 1,000 steps"] = f"{statistics.fmean(slopes):+.3f}"
        rows.append(row)
        series[name], models[name] = curves[0], own[0].task.model
    # Hamiltonian against ResNet, with each norm, and each with the other's.
    gains = {
        f"{ours} minus {theirs}": differences(found[ours], found[theirs])
        for ours in found
        for theirs in found
        if models[ours] == HAMILTONIAN and models[theirs] == RESNET
    }
    compared = [
        {
            "difference": name,
            "points": spread(values, "points", signed=True),
            f"{CONFIDENCE:.0%} confidence interval": _interval(values),
            "paper's claim": paper.SUBSET_GAINS["cifar10"][SHARE],
        }
        for name, values in gains.items()
    ]
    tables = [Table(rows)]
    if compared:
        tables.append(Table(compared, "Differences of runs with equal seeds, which see the same images:"))
    markup = charts.lines(series, "step", "training loss")
    chart = Chart(markup, f"Training loss of seed {outcomes[0].task.seed} on augmented images ({budget.schedule}).")
    drawn, remarks, numbers = [chart], [], {"differences_in_points": gains}
    alike = [outcome for outcome in outcomes if not outcome.task.label.endswith("biases")]
    if alike:
        tasks = [task for task in budget.tasks if isinstance(task, TrainingRun) and not task.label.endswith("biases")]
        over = show_subset(replace(budget, tasks=tasks), alike)
        tables.append(over.tables[0]._replace(caption="Over the share of the images:"))
        drawn.append(over.charts[0]._replace(name="shares"))
        remarks, numbers["differences_over_shares"] = over.remarks, over.numbers["differences_in_points"]
    return Findings(tables, drawn, remarks, numbers)


def _end(steps: list[int], losses: list[float]) -> tuple[float, float]:
    """Return mean and least-squares slope per 1,000 steps of the last part of a curve."""
    first = steps[-1] * (1 - LAST)
    last = [(step, loss) for step, loss in zip(steps, losses, strict=True) if step > first]
    x, y = zip(*last, strict=True)
    return statistics.fmean(y), 1_000 * statistics.linear_regression(x, y).slope if len(x) > 1 else 0.0


def _interval(values: list[float]) -> str:
    """Return Student's interval for the mean; one value has none."""
    if len(values) < 2:
        return ABSENT
    from scipy.stats import t

    mean, deviation = mean_and_deviation(values)
    half = float(t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1)) * deviation / math.sqrt(len(values))
    return f"{mean - half:+.2f} to {mean + half:+.2f}"


ITEMS = (
    Item("fig-stl-subset", "Small data: shares of STL-10", STL_SUBSET, show_subset),
    Item("small-data", "Small data: a few per cent of CIFAR-10", SMALL_DATA, show_small_data),
)
