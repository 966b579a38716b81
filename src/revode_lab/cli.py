"""The ``revode`` command: find the subcommand, parse, call, and turn errors for people into one sentence."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import NoReturn

from revode.errors import nearest

COMMANDS = {
    "models": "every named network, its parameters beside the paper's",
    "data": "fetch and verify data sets",
    "train": "train a network; with no argument, a Hamiltonian network on the embedded digits",
    "eval": "score a training run",
    "report": "write a self-contained HTML report of a run, or one page about several",
    "export": "export a run's model to ONNX",
    "analyze": "stability report of a model or run",
    "reproduce": "regenerate a table or figure of the paper",
}
"""Subcommand -> one line of help; the module of the same name under ``revode_lab.commands`` does the rest."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence: what is wrong, the nearest flag or command, and where help is."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 after one line."""
        print(f"{self.prog}: {message}; `{self.prog} --help` lists all", file=sys.stderr)
        sys.exit(2)

    def refuse(self, words: list[str]) -> NoReturn:
        """Exit as `error` does, on words that no argument takes."""
        word = words[0].partition("=")[0]
        near = nearest(word, self.flags()) if word.startswith("-") else []
        kind = "flag" if word.startswith("-") else "argument"
        self.error(f"unknown {kind} {word}{_hint(near)}")

    def flags(self) -> list[str]:
        """Return its long flags, and those of the commands below it."""
        below = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        own = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        return own + [flag for action in below for parser in action.choices.values() for flag in parser.flags()]


def build_parser(command: str | None = None) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser, and those of the subcommands; only `command`'s own arguments are loaded."""
    parser = Parser(
        prog="revode",
        description="Train residual networks of any depth in the activation memory of one block.",
        epilog="example: revode train hamiltonian-74 --dataset cifar10 --recipe quick",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    group = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    subparsers: dict[str, Parser] = {}
    for name, text in COMMANDS.items():
        subparsers[name] = group.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    if command is not None:
        importlib.import_module(f"revode_lab.commands.{command}").add_arguments(subparsers[command])
    return parser, subparsers


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the arguments; what is wrong with them ends the process with code 2 and one sentence."""
    first = next((word for word in argv if not word.startswith("-")), None)
    parser, subparsers = build_parser(first if first in COMMANDS else None)
    if first is not None and first not in COMMANDS:
        near = nearest(first, COMMANDS)
        parser.error(f"unknown command {first}{_hint(near)}")
    args, rest = parser.parse_known_args(argv)
    if rest:
        subparsers.get(args.command, parser).refuse(rest)
    return args


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 bad input, others as the command says."""
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.version:
        from revode import __version__

        print(f"revode {__version__}")
        return 0
    if args.command is None:
        build_parser()[0].print_help()
        return 0
    try:
        return importlib.import_module(f"revode_lab.commands.{args.command}").run(args)
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


def _hint(near: list[str]) -> str:
    return f", nearest: {', '.join(near)}" if near else ""


def _sentence(error: Exception) -> str:
    """Return the message of an error; of the system's own errors without their numbers."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
