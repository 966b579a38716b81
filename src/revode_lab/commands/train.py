"""``revode train [MODEL]``: train a network into a run directory."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from revode_lab.system import keep_freed_memory, require
from revode_lab.training.config import LEAVES, RECIPES, add_flags, configure, read_yaml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the run directory, and one flag per setting."""
    parser.allow_abbrev = False
    parser.epilog = (
        "examples: revode train\n"
        "          revode train hamiltonian-74 --recipe quick --out runs/first\n"
        "          revode train --out runs/first --resume auto\n"
        "          torchrun --nproc-per-node 2 -m revode_lab.cli train --out runs/two\n"
        "exit codes: 0 done, 2 bad input, 3 diverged, 130/143 stopped and resumable"
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a name of `revode models`; the recipe's own unless given"
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help=f"named settings: {', '.join(RECIPES)};\nwithout it, those that suit the data set",
    )
    parser.add_argument("--config", metavar="FILE", help="settings in YAML, as --print-config writes them")
    parser.add_argument("--print-config", action="store_true", help="print all settings as YAML and exit")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be trained and what it would cost, and exit"
    )
    parser.add_argument("--out", metavar="DIR", help="the run directory; a new one under runs/ unless given")
    parser.add_argument(
        "--resume", metavar="auto|PATH", help="go on with the run in --out, or from a run or checkpoint"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a run in --out")
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Train and return 0 when done, 3 when training diverged, 130 or 143 when a signal stopped it."""
    require()
    given = {name: value for name, value in vars(args).items() if name in LEAVES}
    if args.model is not None:
        given["name"] = args.model
    config = configure(args.config, **given)
    if args.print_config:
        print(config.to_yaml(), end="")
        return 0

    from revode_lab.training.diagnosis import Diverged
    from revode_lab.training.loop import train
    from revode_lab.training.planning import dry_run
    from revode_lab.training.terminal import Interrupted

    keep_freed_memory()
    if args.dry_run:
        print("\n".join(dry_run(config)))
        return 0
    asked = set(given)
    if args.config:
        asked |= set(read_yaml(args.config))
    try:
        train(config, args.out, resume=args.resume, overwrite=args.overwrite, given=sorted(asked - {"recipe"}))
    except Diverged as error:
        print(f"revode train: {error}\n{error.diagnosis}", file=sys.stderr)
        print(f"the last good checkpoint, if one was written, is in {error.folder}", file=sys.stderr)
        return 3
    except Interrupted as error:
        if int(os.environ.get("RANK", "0")) == 0:
            folder = error.folder
            print(f"{error}; go on with:\n  revode train --out {shlex.quote(str(folder))} --resume auto", flush=True)
        return error.exit_code
    return 0
