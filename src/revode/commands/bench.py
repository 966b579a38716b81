"""``revode bench``: time, memory and gradient error against the alternatives."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from revode.commands import check_folder

_EPILOG = """example: revode bench --quick
         revode bench --workload stage-32x32 --method revode --method store
         revode bench --profile stage-32x32
         revode bench --out docs --markdown
exit codes: 0 done, 1 a workload failed and has no rows, 2 bad input"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, how, and where to write."""
    parser.epilog = _EPILOG
    parser.add_argument("--quick", action="store_true", help="the main workloads only, under 3 minutes on 2 cores")
    parser.add_argument(
        "--workload", action="append", metavar="NAME", help="one workload; may be repeated; default: all"
    )
    parser.add_argument(
        "--method",
        action="append",
        metavar="NAME",
        help="one method; may be repeated; default: all that are installed\nand apply; store is always run, for the ratios",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: torch's choice")
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions; default: 3 to 15, by time")
    parser.add_argument("--batch", type=int, metavar="N", help="another batch than the workloads' own")
    parser.add_argument(
        "--layout", default="channels_last", metavar="NAME", help="of the input: channels_last (default) or contiguous"
    )
    parser.add_argument("--compile", action="store_true", help="add revode-compiled on all stage workloads (slow)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON and nothing else")
    parser.add_argument("--out", metavar="DIR", help="write benchmarks.json and the figures there")
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="with --out: write benchmarks.md, too, and measure what it needs:\nmemory budgets and one compiled stage",
    )
    parser.add_argument(
        "--rows",
        metavar="FILE",
        help="the rows of a benchmarks.json; nothing but what --workload\nnames is measured, in place of its rows",
    )
    parser.add_argument("--profile", metavar="WORKLOAD", help="where the time of a step goes (of --method, or revode)")


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    if args.markdown and not args.out:
        raise ValueError("--markdown writes a page: say where with --out DIR")
    if args.batch is not None and args.batch < 1:
        raise ValueError(f"--batch must be at least 1, got {args.batch}")
    if args.profile:
        return _profile(args)
    from revode.benchmarks.conditions import conditions
    from revode.benchmarks.report import read, write
    from revode.benchmarks.table import text

    check_folder(args.out)
    start, failed = time.monotonic(), False
    rows, facts = [], {}
    if args.rows:
        rows, facts = read(Path(args.rows))
    if args.workload or not args.rows:
        settings = _settings(args)
        facts = conditions(settings)
        measured, failed = _measure(_plan(args), settings)
        rows = _replace(rows, measured)
    if args.json:
        print(json.dumps([row.summary() for row in rows], indent=1))
    elif rows:
        print(text(rows))
    if args.out:
        for path in write(rows, facts, Path(args.out), page=args.markdown):
            print(path, file=sys.stderr)
    if args.workload or not args.rows:
        _note(f"{len(rows)} rows in {time.monotonic() - start:.0f} s")
    return int(failed)


def _settings(args: argparse.Namespace) -> Any:
    import torch

    from revode.benchmarks.run import Settings

    threads = torch.get_num_threads() if args.threads is None else args.threads
    limits: dict[str, Any] = {"budget": 10.0, "fewest": 2} if args.quick else {}
    return Settings(threads=threads, repeats=args.repeats, layout=args.layout, **limits)


def _plan(args: argparse.Namespace) -> list[tuple[Any, list[Any]]]:
    """Workloads, each with the methods to run on it."""
    from revode.benchmarks import methods, workloads

    names = args.workload or [w.name for w in workloads.WORKLOADS.values() if w.quick or not args.quick]
    wanted = methods.find(args.method) if args.method else None
    plan = []
    for workload in workloads.find(names):
        own = workload.quick if args.quick and workload.quick else workload.methods
        chosen = methods.find([*own, *_extra(args, workload)]) if wanted is None else wanted
        plan.append((workload if args.batch is None else workload.with_batch(args.batch), chosen))
    _say_absent({method.name: method for _, chosen in plan for method in chosen}.values())
    return plan


def _extra(args: argparse.Namespace, workload: Any) -> list[str]:
    """Methods beyond the default ones."""
    from revode.benchmarks import methods, workloads

    found = []
    compiled = workloads.STAGES if args.compile else workloads.STAGES[:1] if args.markdown else ()
    if workload.name in compiled:
        found.append("revode-compiled")
    if args.markdown and workload.name == "hamiltonian-74":
        found += [method.name for method in methods.METHODS.values() if method.budget is not None]
    return found


def _say_absent(methods: Any) -> None:
    absent = [method.name for method in methods if not method.available]
    if absent:
        _note(f"not installed, so without rows: {', '.join(absent)} (make bench sets them up)")


def _measure(plan: list[tuple[Any, list[Any]]], settings: Any) -> tuple[list[Any], bool]:
    """Rows, and whether a workload failed: that costs its own rows, not those of the others."""
    from revode.benchmarks.footprint import Footprints
    from revode.benchmarks.run import measure, with_block_times
    from revode.benchmarks.workloads import DEPTHS

    rows: list[Any] = []
    failed = False
    with Footprints() as footprints:
        for workload, methods in plan:
            _note(f"measuring {workload.name}")
            try:
                found = measure(workload, methods, settings, footprints)
                rows.extend(found)
                if not found:
                    names = ", ".join(method.name for method in methods)
                    _note(f"{workload.name} has no rows: {names} is not installed, or cannot run it")
            except (RuntimeError, ValueError) as error:
                failed = True
                _note(f"{workload.name} failed and has no rows: {error}")
    over_depth = [workload for workload, _ in plan if workload.name in DEPTHS]
    if len(over_depth) > 1:
        _note("measuring the time of a block over depth")
        rows = with_block_times(rows, over_depth, settings)
    return rows, failed


def _replace(old: list[Any], new: list[Any]) -> list[Any]:
    """The rows of both, new ones in place of all old ones of their workloads, in the order of the registry."""
    from revode.benchmarks.workloads import WORKLOADS

    measured = {row.workload for row in new}
    rows = [row for row in old if row.workload not in measured] + new
    return sorted(rows, key=lambda row: list(WORKLOADS).index(row.workload))


def _profile(args: argparse.Namespace) -> int:
    import torch

    from revode.benchmarks import methods, workloads
    from revode.benchmarks.cases import Case
    from revode.benchmarks.profile import profile_step, text
    from revode.benchmarks.run import applicable

    (workload,) = workloads.find([args.profile])
    if args.batch is not None:
        workload = workload.with_batch(args.batch)
    torch.set_num_threads(_settings(args).threads)
    for method in methods.find(args.method or ["revode"]):
        if not applicable(workload, [method]):
            raise ValueError(f"{method.name} is not installed, or cannot run {workload.name}")
        case = Case(workload, method, layout=args.layout)
        print(text(case, *profile_step(case, args.repeats or 3)))
    return 0


def _note(line: str) -> None:
    print(f"revode bench: {line}", file=sys.stderr, flush=True)
