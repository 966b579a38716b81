"""``revode reproduce ITEM``: regenerate a table or figure of the paper, with its numbers beside ours."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from revode_lab.reproduce import BUDGETS, ITEMS
from revode_lab.system import check_folder, keep_freed_memory, require, use_threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add item, budget and output."""
    lists = {"items": {name: text for name, (_, text) in ITEMS.items()}, "budgets": BUDGETS}
    rows = [line for title, entries in lists.items() for line in (f"{title}:", *_listed(entries), "")]
    parser.epilog = "\n".join([*rows, ""]) + (
        "examples: revode reproduce memory --budget smoke\n"
        "          revode reproduce table-1 --budget cpu --dry-run\n"
        "          revode reproduce small-data --budget cpu --seeds 3\n"
        "The same command goes on where it was stopped.\n"
        "exit codes: 0 done, 2 bad input, 3 a training diverged or a measurement failed,\n"
        "            130/143 stopped by a signal and resumable"
    )
    parser.add_argument("item", metavar="ITEM", help="one of the items below")
    parser.add_argument("--budget", choices=BUDGETS, default="smoke", help="how much of it, see below; default: smoke")
    parser.add_argument("--seeds", type=int, metavar="N", help="train with seeds 0 .. N-1; default: the item's own")
    parser.add_argument(
        "--data-root", metavar="DIR", help="folder of the data sets; default as in `revode data get --help`"
    )
    parser.add_argument("--out", metavar="DIR", help="where table, figures and JSON go; default results/ITEM-BUDGET")
    parser.add_argument("--runs", metavar="DIR", help="where the tasks' directories lie; default runs/reproduce")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; 0 leaves torch's choice")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="train in N processes, each with its share of every batch;\non a CPU faster than N threads",
    )
    parser.add_argument(
        "--autocast",
        choices=("none", "bfloat16"),
        default="none",
        help="precision of the branches in a training; states stay float32.\n"
        "bfloat16 is faster where the CPU has it (avx512_bf16, amx)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the tasks, with estimates of their time")


def _listed(entries: Mapping[str, str]) -> list[str]:
    """Return names in a column, each with its text, in lines of at most 79 characters."""
    first = max(map(len, entries)) + 4
    wrapped = {name: textwrap.wrap(text, 79 - first) for name, text in entries.items()}
    return [
        f"{f'  {name}' if not i else '':<{first}}{line}" for name, own in wrapped.items() for i, line in enumerate(own)
    ]


def run(args: argparse.Namespace) -> int:
    """Complete the item's tasks; 0 when all are done, 3 if one failed, 130 or 143 when a signal stopped it."""
    require()
    from revode_lab.reproduce.item import find_item, reproduce
    from revode_lab.reproduce.task import Setup, TrainingRun, listing
    from revode_lab.training.terminal import Interrupted

    most = max(2, os.cpu_count() or 1)
    if not 1 <= args.processes <= most:
        raise ValueError(f"--processes is {args.processes}; expected 1 to {most} on this machine")
    if args.seeds is not None and args.seeds < 1:
        raise ValueError(f"--seeds is {args.seeds}; expected at least 1")
    use_threads(args.threads)
    keep_freed_memory()
    check_folder(args.out)
    home = Path(args.runs) if args.runs else Setup.home
    setup = Setup(home, args.budget, args.seeds, args.data_root, args.threads, args.processes, args.autocast)
    item = find_item(args.item)
    plan = item.plan(setup)
    for task in plan.tasks:
        if isinstance(task, TrainingRun) and task.batch_size % args.processes:
            raise ValueError(
                f"--processes is {args.processes}, but {task.title} has batches of {task.batch_size} images; "
                f"give a divisor of {task.batch_size}"
            )
    if args.dry_run:
        print("\n".join([item.title, *textwrap.wrap(plan.note, 79), *listing(plan.tasks, setup)]))
        return 0
    try:
        with _terminable():
            found = reproduce(item, setup, Path(args.out) if args.out else None)
    except Interrupted as error:
        print(f"{error}; the same command goes on from there", flush=True)
        return error.exit_code
    except (KeyboardInterrupt, _Terminated) as error:  # in a measurement, or between tasks
        print("stopped; the same command goes on with the first task that is not finished", flush=True)
        return 143 if isinstance(error, _Terminated) else 130
    for path in found.files:
        print(f"  {path}")
    for title, problem in found.problems.items():
        print(f"{title}: {problem}")
    return 3 if found.problems else 0


class _Terminated(BaseException):
    """SIGTERM, on its way out."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM end the context as Ctrl-C does, so that finished tasks are written; trainings handle both themselves."""

    def stop(*_: Any) -> None:
        raise _Terminated

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread: whoever owns it handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
