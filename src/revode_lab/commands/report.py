"""``revode report RUN``: write a run's self-contained HTML report."""

from __future__ import annotations

import argparse

from revode_lab.commands import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN, and where its data and the page are."""
    parser.epilog = "example: revode report runs/first"
    parser.add_argument("run", metavar="RUN", help="a directory that `revode train` wrote")
    parser.add_argument("--data-root", metavar="DIR", help="folder of the data sets")
    parser.add_argument("--out", metavar="FILE", help="the page; RUN/report.html unless given")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    require()
    from revode_lab.training.report import write_report

    print(write_report(args.run, args.data_root, args.out))
    return 0
