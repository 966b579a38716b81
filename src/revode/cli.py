"""The ``revode`` command: find the subcommand, parse, call, and turn errors for people into one sentence."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from revode.commands import HelpFormatter

COMMANDS = {
    "models": "every named network, its parameters beside the paper's",
    "data": "fetch and verify data sets",
    "train": "train a network; with no argument, a Hamiltonian network on the embedded digits",
    "eval": "score a training run",
    "report": "write a run's self-contained HTML report",
    "export": "export a run's model to ONNX",
    "analyze": "stability report of a model or run",
    "reproduce": "regenerate a table or figure of the paper",
    "bench": "time, memory and gradient error against the alternatives",
}
"""Subcommand -> one line of help; the module of the same name under ``revode.commands`` does the rest."""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser; only `command`'s own arguments are loaded."""
    parser = argparse.ArgumentParser(
        prog="revode",
        description="Train residual networks of any depth in the activation memory of one block.",
        epilog="example: revode train hamiltonian-74 --dataset cifar10 --recipe quick",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", formatter_class=HelpFormatter
        )
        if name == command:
            importlib.import_module(f"revode.commands.{name}").add_arguments(subparser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 bad input, others as the command says."""
    argv = sys.argv[1:] if argv is None else argv
    command = next((word for word in argv if word in COMMANDS), None)
    parser = build_parser(command)
    args = parser.parse_args(argv)
    if args.version:
        from revode import __version__

        print(f"revode {__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return importlib.import_module(f"revode.commands.{args.command}").run(args)
    except BrokenPipeError:  # whoever read our output has gone
        sys.stderr.close()
        return 141
    except (ValueError, OSError) as error:
        if os.environ.get("REVODE_TRACEBACK"):
            raise
        print(f"revode {args.command}: {_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _sentence(error: Exception) -> str:
    """What went wrong; of the system's own errors without their numbers."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
