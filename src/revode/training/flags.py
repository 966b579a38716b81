"""Every setting of `Config` as a flag of argparse; needs neither torch nor a file."""

from __future__ import annotations

import argparse
import typing
from typing import Any, Literal

from revode.training.settings import LEAVES, SECTIONS, Leaf, convert

_WITHOUT_FLAG = ("name", "recipe")
"""Settings that have an argument of their own: MODEL and ``--recipe``."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per setting, grouped by section. A flag that is not given leaves no trace in the namespace."""
    for section in SECTIONS:
        group = parser.add_argument_group(section)
        for leaf in LEAVES.values():
            if leaf.section == section and leaf.name not in _WITHOUT_FLAG:
                _add_flag(group, leaf)


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings whose flags were given."""
    return {name: value for name, value in vars(args).items() if name in LEAVES}


def _add_flag(group: Any, leaf: Leaf) -> None:
    flag = f"--{leaf.name.replace('_', '-')}"
    if leaf.annotation is bool:
        group.add_argument(
            flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=leaf.help.replace("%", "%%")
        )
        return
    literal = typing.get_origin(leaf.annotation) is Literal
    group.add_argument(
        flag,
        type=_parser_of(leaf),
        metavar="|".join(typing.get_args(leaf.annotation)) if literal else _METAVARS.get(leaf.annotation, "VALUE"),
        default=argparse.SUPPRESS,
        help=leaf.help.replace("%", "%%"),
    )


_METAVARS = {int: "N", float: "X", str: "NAME", int | None: "N", str | None: "DIR"}


def _parser_of(leaf: Leaf) -> Any:
    def parse(text: str) -> Any:
        try:
            return convert(leaf, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse
