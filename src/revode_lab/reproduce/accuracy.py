"""Tables of accuracies beside the paper's: table 1, table 2, and multilevel training."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from revode.networks import PAPER_PARAMETERS
from revode_lab import charts
from revode_lab.reproduce import paper
from revode_lab.reproduce.item import (
    ABSENT,
    SHORT,
    SMOKE,
    SMOKE_NOTE,
    Budget,
    Chart,
    Findings,
    Item,
    Outcome,
    Table,
    percent,
)
from revode_lab.reproduce.task import Setup, TrainingRun
from revode_lab.system import human_time
from revode_lab.training.config import mean_cost, parse_levels

NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "stl10": "STL-10"}
BASELINE = "resnet-32-stl"
"""A ResNet of the same size; the paper has none in table 2."""
HOLD_OUT, SMOKE_HOLD_OUT = 1_000, 200
"""Images that stand in for STL-10's test split where that is absent; 80 %, the paper's largest share, are what they leave."""
HAMILTONIAN = "hamiltonian-74"
STL_SHORT: dict[str, Any] = {
    "dataset": "stl10",
    "recipe": "quick",
    "hold_out": HOLD_OUT,
    "settings": {"epochs": 4, "batch_size": 32, "lr": 0.05, **SHORT},
}
"""A short training on STL-10."""


def trainings(models: Iterable[str], shares: Iterable[float] = (1.0,), **row: Any) -> list[TrainingRun]:
    """Return a training of every network on every share of the images, alike in all else."""
    return [TrainingRun(model=model, fraction=share, **row) for share in shares for model in models]


def smoke(models: Iterable[str], shares: Iterable[float] = (1.0,), seeds: int = 1, hold_out: int = 0) -> Budget:
    """Return the smoke budget of an item that trains these networks."""
    return Budget(SMOKE_NOTE, "smoke on digits", trainings(models, shares, hold_out=hold_out, **SMOKE), seeds)


# Chosen by trials of the Hamiltonian network on validation images (docs/training.md). Everything is stored: 0.5 GB for 128
# images, and the fastest way on a CPU.
FAST: dict[str, Any] = {
    "batch_size": 128,
    "lr": 0.25,
    "warmup_fraction": 0.2,
    "label_smoothing": 0.1,
    "flips": "alternating",
    "clip": 0.0,
    "smoothness": 0.0,
    "backprop": "store",
    "compile": True,
    "exact": 0,
    "validation": 0.0,
}


# Reversible networks are trained reversibly, their states on a grid of 12 bits, which holds the states of h = 1; the
# gradients are then, bit for bit, those of storing on that grid.
REVERSIBLY: dict[str, Any] = {**FAST, "backprop": "reversible", "exact": 12}


def smoke_levels(layers: int = 18) -> dict[str, Any]:
    """Return the smoke budget's training of a tiny network of so many layers in two levels."""
    levels = f"{layers}@4:1,{layers}@8:1"
    return {**SMOKE, "settings": {"levels": levels, "batch_size": 256, "log_every": 1, **SHORT}}


PAPERS_74 = Budget(
    "The paper's schedule: 160 epochs.",
    paper.CIFAR_SCHEDULE,
    [TrainingRun(model=HAMILTONIAN, dataset="cifar10", recipe="cifar")],
)
# Small images first (docs/multilevel.md).
LEVELS_74 = {
    "smoke": Budget(SMOKE_NOTE, "smoke on digits", trainings([HAMILTONIAN], **smoke_levels())),
    "cpu": Budget(
        "CPU budget: 80 epochs of 50,000 images, 40 of them at 16x16, 24 at 24x24 and 16 at 32x32, with batch norm and h = 1 "
        "in the blocks, and squares of 8x8 cut out of the images; not the paper's schedule of 160 epochs, nor its biases and "
        "h = 0.1.",
        "CPU budget, 80 epochs",
        [
            TrainingRun(
                model=HAMILTONIAN,
                dataset="cifar10",
                recipe="quick",
                label=f"{HAMILTONIAN}, batch norm, h = 1, levels",
                options={"norm": "batch", "h": 1.0},
                settings={"levels": "74@16:40,74@24:24,74@32:16", **REVERSIBLY, "cutout": 8, "evaluate_every": 8},
            )
        ],
    ),
    "paper": PAPERS_74,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "resnet-32": {},
    "revnet-38": {},
    "hamiltonian-74": {"norm": "batch", "h": 1.0},
    "midpoint-26": {"norm": "batch", "h": 1.0},
    "leapfrog-26": {"norm": "batch", "h": 0.3},
}
"""A network of each family -> its options with batch norm and the h that validation images chose (docs/reproduction.md)."""


# One recipe for all families, in levels as `levels-74`.
def in_levels(model: str) -> TrainingRun:
    """Return the training of one family's network in levels."""
    layers = model.rpartition("-")[2]
    settings = FAST if model == "resnet-32" else REVERSIBLY
    levels = f"{layers}@16:10,{layers}@24:13,{layers}@32:9"
    return TrainingRun(
        model=model,
        dataset="cifar10",
        recipe="quick",
        options=FAMILIES[model],
        settings={"levels": levels, **settings, "evaluate_every": 4},
    )


TABLE_1 = {
    "smoke": smoke(paper.CIFAR),
    "cpu": Budget(
        "CPU budget: 32 epochs of 50,000 images by one recipe for all networks, 10 of them at 16x16, 13 at 24x24 and 9 at "
        "32x32, with batch norm everywhere and each network's best h (1 for Hamiltonian and MidPoint, 0.3 for Leapfrog); not "
        "the paper's schedule of 160 epochs, nor its h = 0.1.",
        "CPU budget, 32 epochs",
        [in_levels(model) for model in FAMILIES],
    ),
    "paper": Budget(
        "The paper's schedule: 160 epochs (hamiltonian-1202: 80,000 steps of 32 images).",
        paper.CIFAR_SCHEDULE,
        [TrainingRun(model=name, dataset=images, recipe="auto") for name, row in paper.CIFAR.items() for images in row],
    ),
}


def _stl_levels(model: str, options: dict[str, Any], levels: str) -> TrainingRun:
    settings = {**FAST, "batch_size": 50, "lr": 0.2, "levels": levels, "report": False}
    return TrainingRun(
        model=model, options=options, dataset="stl10", recipe="quick", hold_out=HOLD_OUT, settings=settings
    )


# Batch and rate are those chosen for small data (docs/reproduction.md). The ResNet has more than twice as many epochs,
# as its steps take less than half as long.
TABLE_2 = {
    "smoke": Budget(
        SMOKE_NOTE,
        "smoke on digits",
        [
            TrainingRun(model=model, hold_out=SMOKE_HOLD_OUT, **smoke_levels(layers))
            for model, layers in (("hamiltonian-stl", 18), (BASELINE, 10))
        ],
    ),
    "cpu": Budget(
        "CPU budget: about 30 minutes of one core for each network, first at 48x48, then at 96x96, on {images} images with "
        "batch norm; not the paper's schedule of 20,000 steps.",
        "CPU budget, 30 minutes",
        [
            _stl_levels("hamiltonian-stl", FAMILIES["hamiltonian-74"], "74@48:12,74@96:3"),
            _stl_levels(BASELINE, {}, "32@48:27,32@96:7"),
        ],
    ),
    "paper": Budget(
        "The paper's schedule of 20,000 steps, on {images} training images.",
        paper.STL_SCHEDULE,
        trainings([*paper.STL, BASELINE], dataset="stl10", recipe="stl", hold_out=HOLD_OUT),
    ),
}


def grouped(outcomes: Iterable[Outcome], key: Callable[[Any], Any]) -> dict[Any, dict[int, float]]:
    """Return key of the task -> seed -> accuracy in per cent, in the order of appearance."""
    found: dict[Any, dict[int, float]] = {}
    for task, result, _ in outcomes:
        found.setdefault(key(task), {})[task.seed] = task.accuracy(result)
    return found


def mean_and_deviation(values: Iterable[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation; one value deviates by 0."""
    numbers = list(values)
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def spread(values: Iterable[float], unit: str = "%", signed: bool = False) -> str:
    """Return mean ± sample standard deviation and n, as ``64.12 ± 0.31 % (n = 3)``; a single value has no spread."""
    numbers = list(values)
    if not numbers:
        return ABSENT
    mean, deviation = mean_and_deviation(numbers)
    text = f"{mean:+.2f}" if signed else f"{mean:.2f}"
    if len(numbers) > 1:
        text += f" ± {deviation:.2f}"
    return f"{text} {unit} (n = {len(numbers)})"


def hold_out_remark(outcomes: list[Outcome]) -> list[str]:
    """Return a remark on the images that stand in for the test split; nothing where there is one."""
    num_images = outcomes[0].task.hold_out
    if not num_images:
        return []
    return [
        f"There is no test split here: accuracies are on {num_images:,} hold-out images of the training split, stratified by "
        "class, drawn anew with each seed and equal for all networks. They are scored once, with the last weights, so nothing "
        "is chosen on them. The paper's numbers are on the 8,000 test images."
    ]


def show_table_1(budget: Budget, outcomes: list[Outcome]) -> Findings:
    """Show accuracies beside the paper's, and bars for the first data set, compared with the paper's first."""
    printed, schedule = paper.CIFAR, paper.CIFAR_SCHEDULE
    found = grouped(outcomes, lambda task: (task.name, task.dataset))
    networks: dict[str, Outcome] = {}
    for outcome in outcomes:
        networks.setdefault(outcome.task.name, outcome)
    split, usual = outcomes[0].task.split, next(iter(next(iter(printed.values()))))
    on_test = "" if split == "test" else " test"  # the paper's numbers always are; said where ours are not
    datasets = {o.task.dataset: o.task.dataset if o.task.dataset in NAMES else usual for o in outcomes}
    in_paper = {name: outcome.task.label or outcome.task.model for name, outcome in networks.items()}
    known = PAPER_PARAMETERS.keys() & in_paper.values()
    rows = []
    for name, outcome in networks.items():
        row = {"network": name, "in its blocks": outcome.task.norm, "parameters": f"{outcome.result['params']:,}"}
        if known:
            row["paper's, M"] = f"{PAPER_PARAMETERS[in_paper[name]][0]:.2f}" if in_paper[name] in known else ABSENT
        for dataset, theirs in datasets.items():
            ours = found.get((name, dataset), {}).values()
            row[f"{NAMES.get(dataset, dataset)} {split}, ours ({budget.schedule})"] = spread(ours)
            row[f"{NAMES[theirs]}{on_test}, paper ({schedule})"] = percent(printed.get(in_paper[name], {}).get(theirs))
        rows.append(row)
    first, theirs = next(iter(datasets.items()))
    shown = NAMES.get(first, first)
    means = {name: mean_and_deviation(values.values()) for (name, dataset), values in found.items() if dataset == first}
    markup = charts.bars(
        {name: mean for name, (mean, _) in means.items()},
        "accuracy, %",
        name=f"ours, {shown}{'' if split == 'test' else f' {split}'}, {budget.schedule}",
        deviations=[deviation for _, deviation in means.values()],
        marks={name: printed[key][theirs] for name, key in in_paper.items() if key in printed},
        marks_name=f"paper, {NAMES[theirs]}{on_test}, {schedule}",
        largest=100.0,
    )
    caption = f"{split.capitalize()} accuracy on {shown}, ours ({budget.schedule})"
    caption += f"; marks: the paper's on {NAMES[theirs]}{on_test}."
    return Findings([Table(rows)], [Chart(markup, caption)])


def show_course(budget: Budget, outcomes: list[Outcome]) -> Findings:
    """Show the accuracy beside the paper's, and its course."""
    task, result = outcomes[0].task, outcomes[0].result
    (accuracies,) = grouped(outcomes, lambda task: task.model).values()
    seconds = sum(outcome.result["seconds"] for outcome in outcomes) / len(outcomes)
    row = {
        "network": task.name,
        "data": task.dataset,
        "recipe": result["recipe"],
        "epochs": f"{result['epochs']:g}",
        "time": human_time(seconds),
        "test accuracy, ours": spread(accuracies.values()),
        f"paper, CIFAR-10 ({paper.CIFAR_SCHEDULE})": percent(paper.CIFAR[HAMILTONIAN]["cifar10"]),
    }
    series = {}
    for outcome in outcomes:
        for kind, name in (("train", "train"), ("evaluation", "test")):
            steps, fractions = outcome.metrics(kind, "accuracy")
            if steps:
                series[f"{name}, seed {outcome.task.seed}"] = steps, [100 * fraction for fraction in fractions]
    caption = f"Accuracy over the course of training. {budget.note}"
    return Findings([Table([row])], [Chart(charts.lines(series, "step", "accuracy, %"), caption)])


def show_table_2(budget: Budget, outcomes: list[Outcome]) -> Findings:
    """Show accuracies, their cost, and the course of the training."""
    rows, series = [], {}
    for name, own in by_network(outcomes).items():
        theirs = percent(paper.STL.get(own[0].task.model, {}).get("stl10"))
        rows.append(_in_levels(budget, own) | {f"STL-10 test, paper ({paper.STL_SCHEDULE})": theirs})
        steps, fractions = own[0].metrics("train", "accuracy")
        series[name] = [step / own[0].result["steps"] for step in steps], [100 * fraction for fraction in fractions]
    markup = charts.lines(series, "share of the steps", "training accuracy, %")
    caption = "Accuracy on the augmented training images over the course of each training, on images of the level."
    others = ", ".join(f"{name} ({percent(accuracy)})" for name, accuracy in paper.STL_BASELINES.items())
    remarks = [*hold_out_remark(outcomes), f"The paper compares its networks with those of {others}."]
    return Findings([Table(rows)], [Chart(markup, caption)], remarks)


def by_network(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    """Return the outcomes of every network, in the order of appearance."""
    names = dict.fromkeys(outcome.task.name for outcome in outcomes)
    return {name: [outcome for outcome in outcomes if outcome.task.name == name] for name in names}


def _in_levels(budget: Budget, own: list[Outcome]) -> dict[str, str]:
    """Return cost and accuracy of a network's trainings."""
    task, result = own[0].task, own[0].result
    levels = task.config(Setup()).optimization.levels
    return {
        "network": task.name,
        "levels": levels or ABSENT,
        "epochs": f"{result['epochs']:g}",
        "in epochs of whole images": f"{result['epochs'] * mean_cost(parse_levels(levels)):.2f}",
        "time": human_time(statistics.fmean(outcome.result["seconds"] for outcome in own)),
        f"{task.split} accuracy, ours ({budget.schedule})": spread(task.accuracy(outcome.result) for outcome in own),
    }


ITEMS = (
    Item("table-1", "Table 1: CIFAR-10 and CIFAR-100", TABLE_1, show_table_1),
    Item("table-2", "Table 2: STL-10", TABLE_2, show_table_2),
    Item("levels-74", "hamiltonian-74 on CIFAR-10, multilevel", LEVELS_74, show_course),
)
