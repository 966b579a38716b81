"""Complete an item's tasks one after the other, from where they stopped, and write what they found.

Markdown is for people, JSON for programs, SVG for both; each says how it was made.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from revode.charts import standalone
from revode.data.catalogue import LAYOUTS, data_root
from revode.files import human_time, locked, processor, write_atomically, write_json
from revode.page import Page
from revode.reproduce.catalogue import BUDGETS
from revode.reproduce.item import Findings, Item, Outcome, Scope, Table
from revode.reproduce.task import Setup, TaskFailed, TrainingRun
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
    with locked(setup.home / f"{item.name}-{scope.budget}"):
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


_LEFT_OUT = ("confusion", "plan", "test_accuracy", "test_loss", "validation_accuracy")
"""Entries of a training's result that belong to its own directory; its accuracy is given as `TrainingRun.score`."""


def command(item: Item, scope: Scope, setup: Setup) -> str:
    """The command that makes these files; where data lie is the reader's own, and what trains nothing needs no flags."""
    flags = "" if scope.num_seeds is None else f" --seeds {scope.num_seeds}"
    flags += setup.flags
    trains = any(task.is_training for task in item.tasks(scope))
    return f"revode reproduce {item.name} --budget {scope.budget}{flags if trains else ''}"


def write_findings(
    item: Item,
    scope: Scope,
    outcomes: list[Outcome],
    problems: dict[str, str],
    num_tasks: int,
    out: Path,
    setup: Setup,
) -> list[Path]:
    """Write everything into `out`; returns the files' paths.

    Args:
        item: What was done.
        scope: How.
        outcomes: The finished tasks.
        problems: Title of a task that found no result -> why.
        num_tasks: Tasks in all.
        out: The directory; made if absent.
        setup: Where and how.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {out} ({error.strerror}); give another --out") from error
    findings = item.findings(scope, outcomes)
    origin = provenance(item, scope, outcomes, num_tasks, setup)
    files = []
    for chart in findings.charts:
        path = out / f"{item.name}{'-' if chart.name else ''}{chart.name}.svg"
        write_atomically(path, standalone(chart.markup))
        files.append(path)
    page = out / f"{item.name}.md"
    write_atomically(page, markdown(item, scope, findings, origin, problems))
    files.insert(0, html(item, scope, findings, origin, problems).write(out / f"{item.name}.html"))
    numbers = out / f"{item.name}.json"
    tasks = [_entry(outcome) for outcome in outcomes]
    note = item.budget_note(scope)
    write_json(numbers, {**origin, "note": note, **findings.numbers, "problems": problems, "tasks": tasks})
    return [page, numbers, *files]


def _entry(outcome: Outcome) -> dict[str, Any]:
    """A task and its result, without what only its own directory needs."""
    task = outcome.task
    result = {name: value for name, value in outcome.result.items() if name not in _LEFT_OUT}
    if isinstance(task, TrainingRun):
        result = {"score": task.score(outcome.result), **result}
    return {"title": task.title, "kind": type(task).__name__, "settings": task.identity(), "result": result}


def provenance(item: Item, scope: Scope, outcomes: Sequence[Outcome], num_tasks: int, setup: Setup) -> dict[str, Any]:
    """What the numbers depend on: command, seeds, time, versions, hardware."""
    results = [outcome.result for outcome in outcomes]
    seeds = sorted({outcome.task.seed for outcome in outcomes if hasattr(outcome.task, "seed")})
    return {
        "item": item.name,
        "budget": scope.budget,
        "command": command(item, scope, setup),
        "processes": setup.processes,
        "autocast": setup.autocast if any(outcome.task.is_training for outcome in outcomes) else "none",
        "finished": len(outcomes),
        "of": num_tasks,
        "seeds": seeds,
        "seconds": round(sum(result["seconds"] for result in results), 1),
        "versions": _distinct(result["versions"] for result in results),
        "machines": _distinct(result["machine"] for result in results),
        "processor": processor(),
        "commits": sorted({str(result["commit"]) for result in results if result["commit"]}),
        "written": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _distinct(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found = {json.dumps(value, sort_keys=True): value for value in values}
    return list(found.values())


def markdown(item: Item, scope: Scope, findings: Findings, origin: dict[str, Any], problems: dict[str, str]) -> str:
    """The page."""
    parts = [f"# {item.title}", f"**{item.budget_note(scope)}**"]
    if origin["finished"] < origin["of"]:
        parts.append(f"Incomplete: {origin['finished']} of {origin['of']} tasks are finished.")
    parts += [table_lines(table) for table in findings.tables]
    for chart in findings.charts:
        name = f"{item.name}{'-' if chart.name else ''}{chart.name}.svg"
        parts.append(f"![{chart.caption}]({name})\n\n{chart.caption}")
    parts += findings.remarks
    parts += [f"{title}: {problem}" for title, problem in problems.items()]
    parts += ["## How it was made", "\n".join(f"- {name}: {fact}" for name, fact in _facts(origin).items())]
    return "\n\n".join(parts) + "\n"


def html(item: Item, scope: Scope, findings: Findings, origin: dict[str, Any], problems: dict[str, str]) -> Page:
    """The same for a browser, with its figures inside."""
    page = Page(item.title, f"{origin['finished']} of {origin['of']} tasks are finished")
    page.text(item.budget_note(scope))
    for table in findings.tables:
        page.table(table.header, table.rows, table.caption)
    for chart in findings.charts:
        page.figure(chart.markup, chart.caption, chart.caption)
    for remark in (*findings.remarks, *(f"{title}: {problem}" for title, problem in problems.items())):
        page.text(remark)
    page.heading("How it was made")
    page.table(["what", "value"], [[name, fact.strip("`")] for name, fact in _facts(origin).items()])
    return page


def table_lines(table: Table) -> str:
    """A table in Markdown."""
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return f"{table.caption}\n\n{text}" if table.caption else text


def _facts(origin: dict[str, Any]) -> dict[str, str]:
    """What a reader must know to repeat it."""
    hardware = "; ".join(
        f"{m['system']}, {m['cores']} cores, threads: {m['threads']}, {m.get('gpu', m['device'])}"
        for m in origin["machines"]
    )
    software = "; ".join(", ".join(f"{name} {number}" for name, number in v.items()) for v in origin["versions"])
    facts = {
        "command": f"`{origin['command']}`",
        "tasks": f"{origin['finished']} of {origin['of']} finished",
        "seeds": ", ".join(map(str, origin["seeds"])) or "0",
        "time": f"{human_time(origin['seconds'])} in all tasks",
        "hardware": f"{origin['processor']}; {hardware}",
        "versions": software,
        "commit": ", ".join(origin["commits"]) or "not from a repository",
        "written": origin["written"],
    }
    if origin["autocast"] != "none":
        facts["precision"] = (
            f"trainings with convolutions in {origin['autocast']} and states in float32; where a gradient is computed by "
            "reversing, but for damped networks, states lie on the grid of `exact`, so that reversing adds no error to it"
        )
    return facts
