"""``revode report RUN``: write a run's self-contained HTML report, or one page about several runs."""

from __future__ import annotations

import argparse

from revode_lab.system import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN, data root and page."""
    parser.epilog = "examples: revode report runs/first\n          revode report runs/first runs/second --out both.html"
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="a directory that `revode train` wrote; several: one page"
    )
    parser.add_argument("--data-root", metavar="DIR", help="folder of the data sets")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the page; RUN/report.html unless given, of several\ncomparison.html beside the first",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    require()
    from revode_lab.training.comparison import write_comparison
    from revode_lab.training.report import write_report

    several = len(args.runs) > 1
    print(write_comparison(args.runs, args.out) if several else write_report(args.runs[0], args.data_root, args.out))
    return 0
