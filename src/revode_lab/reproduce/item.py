"""Items of the paper: complete their tasks from where they stopped, and write the findings.

Markdown and HTML are for people, JSON for programs, SVG for both; each says how it was made.
"""

from __future__ import annotations

import datetime
import importlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from revode.errors import unknown
from revode.files import write_atomically
from revode_lab.charts import standalone
from revode_lab.data.catalogue import LAYOUTS, data_root
from revode_lab.page import Page
from revode_lab.reproduce import ITEMS
from revode_lab.reproduce.task import Setup, Task, TaskFailed, TrainingRun
from revode_lab.system import human_bytes, human_time, locked, processor, write_json
from revode_lab.training.diagnosis import Diverged
from revode_lab.training.run import read_metrics

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
    """The tasks of an item under one budget.

    Attributes:
        note: The meaning of the numbers in one sentence; ``{images}`` in it stands for the images of the first training.
        schedule: The same in a few words, for the head of a column.
        tasks: One row for each task, with seed 0.
        seeds: Default number of seeds.
    """

    note: str
    schedule: str
    tasks: Sequence[Task]
    seeds: int = 1


class Outcome(NamedTuple):
    """A finished task with its result and its directory."""

    task: Any
    result: dict[str, Any]
    folder: Path

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of this kind that a training wrote."""
        return [line for line in read_metrics(self.folder) if line["kind"] == kind]

    def metrics(self, kind: str, quantity: str) -> tuple[list[int], list[float]]:
        """Return the course of a quantity in a training: steps and values."""
        lines = self.lines(kind)
        return [line["step"] for line in lines], [line[quantity] for line in lines]


class Table(NamedTuple):
    """A table, at least one row of it: head of the column -> text of the cell, alike in all rows."""

    rows: list[dict[str, str]]
    caption: str = ""


class Chart(NamedTuple):
    """A figure: SVG markup, and what one sees in it. `name` is part of its file's name, or empty for the only one."""

    markup: str
    caption: str
    name: str = ""


@dataclass(frozen=True)
class Findings:
    """The page of an item: tables, charts, remarks; `numbers` go into its JSON besides the tasks' own."""

    tables: list[Table]
    charts: list[Chart]
    remarks: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper: its budgets, and a function from a budget and finished tasks to findings."""

    name: str
    title: str
    budgets: Mapping[str, Budget]
    show: Callable[[Budget, list[Outcome]], Findings]

    def plan(self, setup: Setup) -> Budget:
        """Return the budget with a task for each seed; images are held out only where there is no test split."""
        if setup.budget not in self.budgets:
            raise unknown("budget", setup.budget, self.budgets)
        budget, tasks, root = self.budgets[setup.budget], [], data_root(setup.data_root)
        for task in budget.tasks:
            if isinstance(task, TrainingRun) and task.dataset in LAYOUTS and not LAYOUTS[task.dataset].lacks_test(root):
                task = replace(task, hold_out=0)
            tasks += task.for_seeds(range(setup.num_seeds or budget.seeds))
        images = next((f"{task.num_images:,}" for task in tasks if isinstance(task, TrainingRun)), "")
        return replace(budget, note=budget.note.format(images=images), tasks=tasks)


def find_item(name: str) -> Item:
    """Return the item called `name`; raise ValueError with the choices and the nearest one for an unknown name."""
    if name not in ITEMS:
        raise unknown("item", name, ITEMS)
    module = importlib.import_module(f"revode_lab.reproduce.{ITEMS[name][0]}")
    return next(item for item in module.ITEMS if item.name == name)


def percent(value: float | None) -> str:
    """Return a number of the paper in per cent."""
    return ABSENT if value is None else f"{value:.2f} %"


class Reproduction(NamedTuple):
    """The written files, and the tasks without a result, each with a sentence."""

    files: list[Path]
    problems: dict[str, str]


def reproduce(
    item: Item, setup: Setup | None = None, out: Path | None = None, say: Callable[[str], None] = print
) -> Reproduction:
    """Complete every task of `item` and write its files, into ``results/ITEM-BUDGET`` unless `out` is given.

    A finished task is not done again; a training that was stopped goes on from its checkpoint. A training that diverges and a
    measurement that fails are reported, and the others are done. On a signal or error, finished tasks are written first.

    Raises:
        Interrupted: A signal stopped a training, which is saved.
        ValueError: Bad input; missing data; a directory that another process is using.
    """
    setup = setup or Setup()
    plan, found = item.plan(setup), Reproduction([], {})
    outcomes: list[Outcome] = []
    say(f"{item.title}\n{plan.note}")
    with locked(setup.home / f"{item.name}-{setup.budget}"):
        try:
            for number, task in enumerate(plan.tasks, 1):
                known = setup.finished(task)
                say(f"[{number}/{len(plan.tasks)}] {task.title}{': finished before' if known is not None else ''}")
                try:
                    result = task.execute(setup) if known is None else known
                    outcomes.append(Outcome(task, result, setup.folder(task)))
                except (Diverged, TaskFailed) as error:
                    found.problems[task.title] = str(error)
                    say(f"{error}\n{error.diagnosis}" if isinstance(error, Diverged) else str(error))
        finally:
            if outcomes:
                folder = out or Path("results") / f"{item.name}-{setup.budget}"
                found.files.extend(_write(item, plan, outcomes, found.problems, folder, setup))
    return found


def _write(
    item: Item, plan: Budget, outcomes: list[Outcome], problems: dict[str, str], out: Path, setup: Setup
) -> list[Path]:
    """Write what the finished ones of the plan's tasks found; returns the files' paths."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {out} ({error.strerror}); give another --out") from error
    findings, origin = item.show(plan, outcomes), _origin(item, plan, outcomes, setup)
    finished = f"{origin['finished']} of {origin['of']} tasks are finished"
    markdown, page = [f"# {item.title}", f"**{plan.note}**"], Page(item.title, finished)
    page.text(plan.note)
    if origin["finished"] < origin["of"]:
        markdown.append(f"Incomplete: {finished}.")
    tasks = [_entry(outcome, setup) for outcome in outcomes]
    trained = [conditions(own) for own in by_training(tasks).values()]
    for table in [*findings.tables, *([Table(trained, TRAINED)] if trained else [])]:
        header, rows = list(table.rows[0]), [list(row.values()) for row in table.rows]
        lines = [[cell.replace("|", "\\|") for cell in row] for row in [header, ["---"] * len(header), *rows]]
        markdown += [table.caption] if table.caption else []
        markdown.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        page.table(header, rows, table.caption)
    figures = []
    for chart in findings.charts:
        figures.append(out / f"{item.name}{'-' if chart.name else ''}{chart.name}.svg")
        write_atomically(figures[-1], standalone(chart.markup))
        markdown.append(f"![{chart.caption}]({figures[-1].name})\n\n{chart.caption}")
        page.figure(chart.markup, chart.caption, chart.caption)
    for text in (*findings.remarks, *(f"{title}: {problem}" for title, problem in problems.items())):
        markdown.append(text)
        page.text(text)
    facts = _facts(origin)
    markdown += ["## How it was made", "\n".join(f"- {name}: {fact}" for name, fact in facts.items())]
    page.heading("How it was made")
    page.table(["what", "value"], [[name, fact.strip("`")] for name, fact in facts.items()])
    for_people, for_programs = out / f"{item.name}.md", out / f"{item.name}.json"
    write_atomically(for_people, "\n\n".join(markdown) + "\n")
    write_json(for_programs, {**origin, "note": plan.note, **findings.numbers, "problems": problems, "tasks": tasks})
    return [for_people, for_programs, page.write(out / f"{item.name}.html"), *figures]


_LEFT_OUT = ("confusion", "plan", "test_accuracy", "test_loss", "validation_accuracy")
"""Entries of a training's result that belong to its own directory; its accuracy is given as its score."""


def by_training(entries: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return title without its seed -> the entries of all seeds, of the trainings among the tasks in an item's JSON."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if entry["kind"] == "TrainingRun":
            found.setdefault(entry["title"].rpartition(", seed ")[0], []).append(entry)
    return found


TRAINED = (
    "How each was trained. Activations: the most bytes kept for backward at any moment of a step, by all processes; "
    "hours: of one seed."
)


def conditions(own: list[dict[str, Any]]) -> dict[str, str]:
    """Return the conditions of one training, from its entries."""
    results = [entry["result"] for entry in own]
    number = results[0]["num_processes"]
    return {
        "training": own[0]["title"].rpartition(", seed ")[0],
        "gradients": results[0]["gradients"],
        "activations kept": human_bytes(number * results[0]["peak_activation_bytes"]),
        "epochs": f"{results[0]['epochs']:.3g}",
        "seeds": ", ".join(str(result["seed"]) for result in results),
        "hours": f"{statistics.fmean(result['seconds'] for result in results) / 3600:.2g}"
        + (f" in {number} processes" if number > 1 else ""),
    }


def _entry(outcome: Outcome, setup: Setup) -> dict[str, Any]:
    """Return a task and its result, without the entries that only its own directory needs."""
    task = outcome.task
    score: dict[str, Any] = {}
    if isinstance(task, TrainingRun):
        accuracy = task.accuracy(outcome.result) / 100.0
        score = {"score": {"split": task.split, "images": task.num_scored, "accuracy": accuracy}}
        score["gradients"] = task.gradients(setup)
    result = {name: value for name, value in outcome.result.items() if name not in _LEFT_OUT}
    return {"title": task.title, "kind": type(task).__name__, "settings": task.identity(), "result": score | result}


def _origin(item: Item, plan: Budget, outcomes: list[Outcome], setup: Setup) -> dict[str, Any]:
    """Return the origin of the numbers: command, seeds, time, versions, hardware."""
    trains = any(task.is_of_training for task in plan.tasks)
    # Where data lie is the reader's own, and what trains nothing needs neither processes nor precision.
    command = f"revode reproduce {item.name} --budget {setup.budget}"
    if any(hasattr(task, "seed") for task in plan.tasks):
        command += "" if setup.num_seeds is None else f" --seeds {setup.num_seeds}"
    if trains:
        command += f" --processes {setup.processes}" if setup.processes > 1 else ""
        command += f" --autocast {setup.autocast}" if setup.autocast != "none" else ""
    results = [outcome.result for outcome in outcomes]
    distinct = {
        name: list({json.dumps(result[name], sort_keys=True): result[name] for result in results}.values())
        for name in ("versions", "machine")
    }
    return {
        "item": item.name,
        "budget": setup.budget,
        "command": command,
        "processes": setup.processes,
        "autocast": setup.autocast if trains else "none",
        "finished": len(outcomes),
        "of": len(plan.tasks),
        "seeds": sorted({outcome.task.seed for outcome in outcomes if hasattr(outcome.task, "seed")}),
        "seconds": round(sum(result["seconds"] for result in results), 1),
        "versions": distinct["versions"],
        "machines": distinct["machine"],
        "processor": processor(),
        "commits": sorted({str(result["commit"]) for result in results if result["commit"]}),
        "written": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _facts(origin: dict[str, Any]) -> dict[str, str]:
    """Return the origin in words, for a reader who repeats it."""
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
