"""Accuracies over seeds: mean, spread and number, always together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from revode.experiments.item import Outcome

ABSENT = "–"


def spread(values: Iterable[float], unit: str = "%", signed: bool = False) -> str:
    """Mean ± sample standard deviation and n, as ``64.12 ± 0.31 % (n = 3)``; a single value has no spread."""
    numbers = list(values)
    if not numbers:
        return ABSENT
    mean = statistics.fmean(numbers)
    text = f"{mean:+.2f}" if signed else f"{mean:.2f}"
    if len(numbers) > 1:
        text += f" ± {statistics.stdev(numbers):.2f}"
    return f"{text} {unit} (n = {len(numbers)})"


def grouped(outcomes: Iterable[Outcome], key: Callable[[Any], Any]) -> dict[Any, dict[int, float]]:
    """Key of the task -> seed -> accuracy in per cent, in the order of appearance."""
    found: dict[Any, dict[int, float]] = {}
    for outcome in outcomes:
        task = outcome.task
        found.setdefault(key(task), {})[task.seed] = task.accuracy(outcome.result)
    return found


def of_paper(value: float | None) -> str:
    """A number of the paper in per cent."""
    return ABSENT if value is None else f"{value:.2f} %"


def mean_and_deviation(values: Iterable[float]) -> tuple[float, float]:
    """For a figure; one value deviates by 0."""
    numbers = list(values)
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0
