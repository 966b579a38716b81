"""What an item of the paper is: its tasks under each budget, and what it says about their results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from revode.reproduce.task import Task, TrainingRun

ABSENT = "–"
SMOKE_NOTE = "Smoke budget: tiny networks for a few steps on the embedded digits. The numbers mean nothing."
TINY: dict[str, Any] = {"blocks": [2, 2], "channels": [4, 8]}
SMOKE: dict[str, Any] = {
    "dataset": "digits",
    "recipe": "digits",
    "options": TINY,
    "settings": {
        "epochs": None,
        "max_steps": 4,
        "batch_size": 16,
        "validation": 0.0,
        "evaluate_every": 0,
        "log_every": 1,
        "report": False,
    },
}
"""A training under the smoke budget, whatever the network."""


@dataclass(frozen=True)
class Scope:
    """What was asked for.

    Attributes:
        budget: ``smoke``, ``cpu`` or ``paper``.
        num_seeds: Seeds 0, 1, ...; None leaves it to the item.
        stl_test: Whether STL-10's test split is there.
    """

    budget: str
    num_seeds: int | None = None
    stl_test: bool = False

    def seeds(self, usual: int = 1) -> range:
        """The seeds of every training."""
        return range(usual if self.num_seeds is None else self.num_seeds)


@dataclass(frozen=True)
class Outcome:
    """A finished task with its result and its directory."""

    task: Any
    result: dict[str, Any]
    folder: Path


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
        tasks: The tasks of a scope.
        budget_note: What the scope is, in one sentence that no reader of the numbers may miss.
        findings: From finished tasks (any number of them, at least one) to what there is to show.
    """

    name: str
    title: str
    tasks: Callable[[Scope], list[Task]]
    budget_note: Callable[[Scope], str]
    findings: Callable[[Scope, list[Outcome]], Findings]


@dataclass(frozen=True)
class Budget:
    """The trainings of an item under one budget.

    Attributes:
        note: What the numbers are, in one sentence.
        schedule: The same in a few words, for the head of a column.
        runs: What `TrainingRun` takes, one entry for each training, without the seed.
        seeds: How many seeds each has unless the user says.
    """

    note: str
    schedule: str
    runs: list[dict[str, Any]]
    seeds: int = 1

    @classmethod
    def smoke(cls, models: Iterable[str], seeds: int = 1, **options: Any) -> Budget:
        """The item in small."""
        return cls(SMOKE_NOTE, "smoke on digits", [{"model": model, **SMOKE, **options} for model in models], seeds)


def trained_item(
    name: str,
    title: str,
    budget: Callable[[Scope], Budget],
    findings: Callable[[Budget, list[Outcome]], Findings],
) -> Item:
    """An item whose tasks are trainings."""

    def tasks(scope: Scope) -> list[Task]:
        chosen = budget(scope)
        return [TrainingRun(seed=seed, **run) for run in chosen.runs for seed in scope.seeds(chosen.seeds)]

    return Item(
        name,
        title,
        tasks,
        lambda scope: budget(scope).note,
        lambda scope, outcomes: findings(budget(scope), outcomes),
    )


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


def percent(value: float | None) -> str:
    """A number of the paper in per cent."""
    return ABSENT if value is None else f"{value:.2f} %"
