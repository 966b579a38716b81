"""Complete an item's tasks one after the other, from where they stopped, and write what they found.

Markdown and HTML are for people, JSON for programs, SVG for both; each says how it was made.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from revode.charts import standalone
from revode.files import human_range, human_time, locked, processor, write_atomically, write_json
from revode.networks import create_model, describe
from revode.page import Page
from revode.reproduce.item import Budget, Item, Outcome, Table
from revode.reproduce.task import Setup, Task, TaskFailed, TrainingRun
from revode.training.diagnosis import Diverged
from revode.training.planning import fastest


@dataclass
class Reproduction:
    """What came of it: the files, and the tasks that found no result, each with a sentence."""

    files: list[Path] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def reproduce(
    item: Item, setup: Setup | None = None, out: Path | None = None, say: Callable[[str], None] = print
) -> Reproduction:
    """Complete every task of `item` and write its files.

    A task that is finished is not done again; a training that was stopped goes on from its checkpoint. A training that
    diverges and a measurement that fails are reported as such, and the others are done. When something stops the whole (a
    signal, an error), what is finished by then is written before it goes on its way.

    Args:
        item: What to reproduce.
        setup: Under which budget, with how many seeds; where the tasks' directories lie.
        out: Where the files go; ``results/ITEM-BUDGET`` unless given.
        say: Told what happens.

    Raises:
        Interrupted: A signal stopped a training, which is saved.
        ValueError: Bad input; missing data; a directory that another process is using.
    """
    setup = setup or Setup()
    plan, found = item.plan(setup), Reproduction()
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
                found.files = write_findings(item, plan, outcomes, found.problems, folder, setup)
    return found


def write_findings(
    item: Item, plan: Budget, outcomes: list[Outcome], problems: dict[str, str], out: Path, setup: Setup
) -> list[Path]:
    """Write everything into `out`; returns the files' paths.

    Args:
        item: What was done.
        plan: All its tasks.
        outcomes: The finished ones.
        problems: Title of a task that found no result -> why.
        out: The directory; made if absent.
        setup: Where and how.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {out} ({error.strerror}); give another --out") from error
    findings, origin = item.show(plan, outcomes), provenance(item, plan, outcomes, setup)
    finished = f"{origin['finished']} of {origin['of']} tasks are finished"
    markdown, page = [f"# {item.title}", f"**{plan.note}**"], Page(item.title, finished)
    page.text(plan.note)
    if origin["finished"] < origin["of"]:
        markdown.append(f"Incomplete: {finished}.")
    for table in findings.tables:
        markdown.append(_markdown_table(table))
        page.table(table.header, table.rows, table.caption)
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
    tasks = [_entry(outcome) for outcome in outcomes]
    write_json(for_programs, {**origin, "note": plan.note, **findings.numbers, "problems": problems, "tasks": tasks})
    return [for_people, for_programs, page.write(out / f"{item.name}.html"), *figures]


_LEFT_OUT = ("confusion", "plan", "test_accuracy", "test_loss", "validation_accuracy")
"""Entries of a training's result that belong to its own directory; its accuracy is given as its score."""


def _entry(outcome: Outcome) -> dict[str, Any]:
    """A task and its result, without what only its own directory needs."""
    task, score = outcome.task, {}
    if isinstance(task, TrainingRun):
        accuracy = task.accuracy(outcome.result) / 100.0
        score = {"score": {"split": task.split, "images": task.num_scored, "accuracy": accuracy}}
    result = {name: value for name, value in outcome.result.items() if name not in _LEFT_OUT}
    return {"title": task.title, "kind": type(task).__name__, "settings": task.identity(), "result": score | result}


def provenance(item: Item, plan: Budget, outcomes: Sequence[Outcome], setup: Setup) -> dict[str, Any]:
    """What the numbers depend on: command, seeds, time, versions, hardware."""
    trains = any(isinstance(task, TrainingRun) for task in plan.tasks)
    # Where data lie is the reader's own, and what trains nothing needs no flags.
    command = f"revode reproduce {item.name} --budget {setup.budget}"
    if trains:
        command += "" if setup.num_seeds is None else f" --seeds {setup.num_seeds}"
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


def _markdown_table(table: Table) -> str:
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


def measured_rate() -> float:
    """Floating-point operations a second of a training step of a small network, here and now."""
    with torch.random.fork_rng(devices=[]):
        model = create_model("hamiltonian-26").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = torch.randn(32, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        seconds = fastest(lambda: model(images).square().sum().backward(), images.device)
    return 4 * 32 * describe(model).flops / seconds


def listing(tasks: Sequence[Task], setup: Setup) -> list[str]:
    """One line a task: its state, its FLOPs and its time; and the sum of what is left."""
    rate = measured_rate()
    lines, total = [], 0.0
    for number, task in enumerate(tasks, 1):
        flops, size = task.flops(), ""
        state = "done" if setup.finished(task) is not None else "started" if setup.folder(task).exists() else "to do"
        total += 0.0 if state == "done" else flops
        if isinstance(task, TrainingRun):
            size = f"{task.num_images:,} images, {task.num_steps:,} steps of {task.batch_size}"
        lines.append(
            f"{number:>3}  {state:<8} {task.title:<58} {size:<44} {flops / 1e12:>10,.1f} TFLOP  {human_time(flops / rate):>8}"
        )
    lines.append(
        f"left to do: {total / 1e12:,.1f} TFLOP, {human_range(total / rate)} at the {rate / 1e9:.0f} GFLOP/s that a "
        "training step reaches on this CPU now (float32, one process)"
    )
    return lines
