"""Complete an item's tasks one after the other, from where they stopped, and write what they found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from revode.data.catalogue import LAYOUTS, data_root
from revode.files import locked
from revode.reproduce.catalogue import BUDGETS
from revode.reproduce.item import Item, Outcome, Scope
from revode.reproduce.task import Setup, TaskFailed
from revode.reproduce.writing import write_findings
from revode.training.diagnosis import Diverged


@dataclass
class Reproduction:
    """What came of it: the files, and the tasks that found no result, each with a sentence."""

    files: list[Path] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def make_scope(budget: str, num_seeds: int | None, root: str | None) -> Scope:
    """The scope of a command, checked."""
    if budget not in BUDGETS:
        raise ValueError(f"unknown budget {budget!r}; choose one of {', '.join(BUDGETS)}")
    if num_seeds is not None and num_seeds < 1:
        raise ValueError(f"--seeds is {num_seeds}; expected at least 1")
    layout = LAYOUTS["stl10"]
    has_test = any((data_root(root) / layout.folder / file.name).exists() for file in layout.test)
    return Scope(budget, num_seeds, has_test)


def default_out(item: Item, scope: Scope) -> Path:
    """Where the small files go that are kept in the repository."""
    return Path("results") / f"{item.name}-{scope.budget}"


def reproduce(
    item: Item,
    scope: Scope,
    setup: Setup | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> Reproduction:
    """Complete every task of `item` and write its files.

    A task that is finished is not done again; a training that was stopped goes on from its checkpoint. A training that
    diverges and a measurement that fails are reported as such, and the others are done. When something stops the whole (a
    signal, an error), what is finished by then is written before it goes on its way.

    Args:
        item: What to reproduce.
        scope: Under which budget, with how many seeds.
        setup: Where the tasks' directories lie.
        out: Where the files go; ``results/ITEM-BUDGET`` unless given.
        say: Told what happens.

    Raises:
        Interrupted: A signal stopped a training, which is saved.
        ValueError: Bad input; missing data; a directory that another process is using.
    """
    setup = setup or Setup()
    tasks = item.tasks(scope)
    found = Reproduction()
    outcomes: list[Outcome] = []
    say(f"{item.title}\n{item.budget_note(scope)}")
    with locked(setup.home / f"{item.name}-{scope.budget}", "--runs"):
        try:
            for number, task in enumerate(tasks, 1):
                known = setup.finished(task)
                say(f"[{number}/{len(tasks)}] {task.title}{': finished before' if known is not None else ''}")
                try:
                    outcomes.append(Outcome(task, task.complete(setup), setup.folder(task)))
                except Diverged as error:
                    found.problems[task.title] = str(error)
                    say(f"{error}\n{error.diagnosis}")
                except TaskFailed as error:
                    found.problems[task.title] = str(error)
                    say(str(error))
        finally:
            if outcomes:
                target = out or default_out(item, scope)
                found.files = write_findings(item, scope, outcomes, found.problems, len(tasks), target, setup)
    return found
