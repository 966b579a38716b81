"""What an item of the paper is: its tasks under each budget, and what it says about their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from revode.experiments.task import Task


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


SMOKE_NOTE = "Smoke budget: tiny networks for a few steps on the embedded digits. The numbers mean nothing."
SMOKE: dict[str, Any] = {
    "epochs": None, "max_steps": 4, "batch_size": 16, "validation": 0.0, "evaluate_every": 0, "log_every": 1, "report": False,
}  # fmt: skip
"""Settings of a smoke run, besides the recipe for digits."""
