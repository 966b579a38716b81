"""Measure time, memory and gradient error of a training step beside the alternatives (``make bench`` installs the peers).

A *workload* is a network and a batch; a *method* is a way to get its gradient. Every method runs the same branches with the
same parameters on the same input.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import WIDE, Row, Settings, block_seconds, measure
from methods import METHODS, Method, find
from report import conditions, read, replaced, text, write
from workloads import DEPTHS, WORKLOADS, Workload

from revode_lab.system import check_folder, keep_freed_memory, write_json

_EPILOG = """example: python benchmarks/bench.py --quick
         python benchmarks/bench.py --workload stage-32x32 --method revode --method store
         python benchmarks/bench.py --workload hamiltonian-74 --dtype bfloat16 --extra
exit codes: 0 done, 1 a workload failed and has no rows, 2 bad input"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this script."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="the main workloads only, under 3 minutes on 2 cores")
    add("--workload", action="append", metavar="NAME", help="one workload; may be repeated; default: all")
    known = "default: all that are installed\nand apply; store is always run, for the ratios"
    add("--method", action="append", metavar="NAME", help=f"one method; may be repeated; {known}")
    add("--threads", type=int, metavar="N", help="CPU threads; default: torch's choice")
    add("--repeats", type=int, metavar="N", help="repetitions; default: 3 to 15, by time")
    add("--batch", type=int, metavar="N", help="another batch than the workloads' own")
    lower = "branches under autocast, with\nbatch norm; without other libraries"
    add("--dtype", default="float32", metavar="NAME", help=f"float32 (default), or bfloat16: {lower}")
    more = "also memory budgets on hamiltonian-74, and compiled steps\nthere and on the stages (slow)"
    add("--extra", action="store_true", help=more)
    add("--out", metavar="DIR", help="write benchmarks.json there")
    add("--blocks", metavar="DIR", help="only time a block over depth, and write blocks.json there")
    given = "measure only what\n--workload names, and replace its rows of that dtype"
    add("--rows", metavar="FILE", help=f"take the rows of this benchmarks.json; {given}")
    return parser


def main(words: list[str] | None = None) -> int:
    """Run the benchmarks and return the exit code."""
    try:
        return run(build_parser().parse_args(words))
    except (ValueError, OSError) as error:
        _note(str(error))
        return 2


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; return the exit code."""
    if args.batch is not None and args.batch < 1:
        raise ValueError(f"--batch must be at least 1, got {args.batch}")
    check_folder(args.out)
    threads = torch.get_num_threads() if args.threads is None else args.threads
    if args.blocks:
        settings = Settings(threads=threads, repeats=args.repeats)
        write_json(Path(args.blocks, "blocks.json"), block_seconds([WORKLOADS[name] for name in DEPTHS], settings))
        return 0
    start, failed = time.monotonic(), False
    rows, facts = read(Path(args.rows)) if args.rows else ([], {})
    if args.workload or not args.rows:
        keep_freed_memory()
        limits: dict[str, Any] = {"budget": 10.0, "fewest": 2} if args.quick else {}
        settings = Settings(threads=threads, repeats=args.repeats, **limits)
        facts = conditions(settings)
        measured, failed = _measure(_plan(args), settings)
        rows = replaced(rows, measured)
        _note(f"{len(measured)} rows in {time.monotonic() - start:.0f} s")
    if rows:
        print(text(rows))
    if args.out:
        print(write(rows, facts, Path(args.out)), file=sys.stderr)
    return int(failed)


def _plan(args: argparse.Namespace) -> list[tuple[Workload, list[Method]]]:
    """Return workloads, each with the methods to run on it."""
    names = args.workload or [name for name, workload in WORKLOADS.items() if workload.quick or not args.quick]
    plan = []
    for found in find("workload", names, WORKLOADS):
        workload = found.with_dtype(args.dtype)
        own = workload.quick if args.quick and workload.quick else workload.methods
        chosen = find("method", args.method or [*own, *(workload.extra if args.extra else ())], METHODS)
        plan.append((workload if args.batch is None else replace(workload, batch=args.batch), chosen))
    absent = {method.name: None for _, chosen in plan for method in chosen if not method.available}
    if absent:
        _note(f"not installed, so without rows: {', '.join(absent)} (make bench sets them up)")
    return plan


def _measure(plan: list[tuple[Workload, list[Method]]], settings: Settings) -> tuple[list[Row], bool]:
    """Return rows, and True if a workload failed, which costs its own rows only."""
    rows: list[Row] = []
    failed = False
    for workload, methods in plan:
        _note(f"measuring {workload.name}")
        try:
            found = measure(workload, methods, settings)
        except (RuntimeError, ValueError) as error:
            failed = True
            _note(f"{workload.name} failed and has no rows: {error}")
            continue
        rows.extend(found)
        for row in found:
            if row.spread > WIDE:
                _note(
                    f"{row.method}'s quartiles lie {row.spread:.0%} of its median apart: its time means little; "
                    "end other programs, or give more --repeats"
                )
        if not found:
            names = ", ".join(method.name for method in methods)
            _note(f"{workload.name} has no rows: {names} is not installed, or cannot run it")
    return rows, failed


def _note(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
