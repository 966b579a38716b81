"""What an item of the paper is: rows of tasks under each budget, and a function that shows what they found."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from revode.data.catalogue import LAYOUTS, data_root
from revode.files import unknown
from revode.reproduce.task import Setup, Task, TrainingRun
from revode.training.run import read_metrics

ABSENT = "–"
SMOKE_NOTE = "Smoke budget: tiny networks for a few steps on the embedded digits. The numbers mean nothing."
TINY: dict[str, Any] = {"blocks": [2, 2], "channels": [4, 8]}
SHORT: dict[str, Any] = {"validation": 0.0, "evaluate_every": 0, "report": False}
"""Settings of a training that is scored once, at its end."""
FEW_STEPS: dict[str, Any] = {"epochs": None, "max_steps": 4, "batch_size": 16, "log_every": 1, **SHORT}
SMOKE: dict[str, Any] = {"dataset": "digits", "recipe": "digits", "options": TINY, "settings": FEW_STEPS}
"""A training under the smoke budget, whatever the network."""


@dataclass(frozen=True)
class Budget:
    """What an item does under one budget.

    Attributes:
        note: What the numbers are, in one sentence that no reader of them may miss; ``{images}`` in it stands for the number
            of images of the first training.
        schedule: The same in a few words, for the head of a column.
        tasks: One row for each task, with seed 0.
        seeds: How many seeds each has unless the user says.
    """

    note: str
    schedule: str
    tasks: Sequence[Task]
    seeds: int = 1


def trainings(models: Iterable[str], shares: Iterable[float] = (1.0,), **row: Any) -> list[TrainingRun]:
    """A training of every network on every share of the images, alike in all else."""
    return [TrainingRun(model=model, fraction=share, **row) for share in shares for model in models]


def smoke(models: Iterable[str], shares: Iterable[float] = (1.0,), seeds: int = 1, hold_out: int = 0) -> Budget:
    """The smoke budget of an item that trains these networks."""
    return Budget(SMOKE_NOTE, "smoke on digits", trainings(models, shares, hold_out=hold_out, **SMOKE), seeds)


@dataclass(frozen=True)
class Outcome:
    """A finished task with its result and its directory."""

    task: Any
    result: dict[str, Any]
    folder: Path

    def metrics(self, kind: str, quantity: str) -> tuple[list[int], list[float]]:
        """The course of a quantity in a training: steps and values."""
        lines = [line for line in read_metrics(self.folder) if line["kind"] == kind]
        return [line["step"] for line in lines], [line[quantity] for line in lines]


@dataclass(frozen=True)
class Table:
    """A table for Markdown; cells are text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure: SVG markup, and what one sees in it. `name` is part of its file's name, or empty for the only one."""

    markup: str
    caption: str
    name: str = ""


@dataclass(frozen=True)
class Findings:
    """What an item has to show, in the order tables, charts, remarks; `numbers` go into its JSON besides the tasks' own."""

    tables: list[Table]
    charts: list[Chart]
    remarks: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper.

    Attributes:
        name: On the command line.
        title: Heading of its page.
        budgets: What it does under each budget.
        show: From a budget and finished tasks (any number of them, at least one) to what there is to show.
    """

    name: str
    title: str
    budgets: Mapping[str, Budget]
    show: Callable[[Budget, list[Outcome]], Findings]

    def plan(self, setup: Setup) -> Budget:
        """The budget that was asked for, with a task for each seed; images are held out only where there is no test split."""
        if setup.budget not in self.budgets:
            raise unknown("budget", setup.budget, self.budgets)
        budget, tasks, root = self.budgets[setup.budget], [], data_root(setup.data_root)
        for task in budget.tasks:
            if isinstance(task, TrainingRun) and task.dataset in LAYOUTS and not LAYOUTS[task.dataset].lacks_test(root):
                task = replace(task, hold_out=0)
            tasks += task.for_seeds(range(setup.num_seeds or budget.seeds))
        images = next((f"{task.num_images:,}" for task in tasks if isinstance(task, TrainingRun)), "")
        return replace(budget, note=budget.note.format(images=images), tasks=tasks)


def spread(values: Iterable[float], unit: str = "%", signed: bool = False) -> str:
    """Mean ± sample standard deviation and n, as ``64.12 ± 0.31 % (n = 3)``; a single value has no spread."""
    numbers = list(values)
    if not numbers:
        return ABSENT
    mean, deviation = mean_and_deviation(numbers)
    text = f"{mean:+.2f}" if signed else f"{mean:.2f}"
    if len(numbers) > 1:
        text += f" ± {deviation:.2f}"
    return f"{text} {unit} (n = {len(numbers)})"


def mean_and_deviation(values: Iterable[float]) -> tuple[float, float]:
    """For a figure; one value deviates by 0."""
    numbers = list(values)
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def grouped(outcomes: Iterable[Outcome], key: Callable[[Any], Any]) -> dict[Any, dict[int, float]]:
    """Key of the task -> seed -> accuracy in per cent, in the order of appearance."""
    found: dict[Any, dict[int, float]] = {}
    for outcome in outcomes:
        found.setdefault(key(outcome.task), {})[outcome.task.seed] = outcome.task.accuracy(outcome.result)
    return found


def differences(first: dict[int, float], second: dict[int, float]) -> list[float]:
    """First minus second, of equal seeds."""
    return [first[seed] - second[seed] for seed in first if seed in second]


def percent(value: float | None) -> str:
    """A number of the paper in per cent."""
    return ABSENT if value is None else f"{value:.2f} %"


def hold_out_remark(outcomes: list[Outcome]) -> list[str]:
    """How the images were chosen that stand in for the test split; nothing where there is one."""
    num_images = outcomes[0].task.hold_out
    if not num_images:
        return []
    return [
        f"There is no test split here: accuracies are on {num_images:,} hold-out images of the training split, stratified by "
        "class, drawn anew with each seed and equal for all networks. They are scored once, with the last weights, so nothing "
        "is chosen on them. The paper's numbers are on the 8,000 test images."
    ]
