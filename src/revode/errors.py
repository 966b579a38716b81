"""Errors for names that do not exist, with the nearest ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: str, choices: Iterable[str], way_out: str = "") -> ValueError:
    """Return the error for a name that does not exist: one sentence with the nearest names and the way out.

    >>> unknown("color", "gren", ["green", "blue"])
    ValueError("unknown color 'gren'; nearest: green; choose one of green, blue")

    Args:
        way_out: where all names are found; unless given, they are listed.
    """
    choices = list(choices)
    near = nearest(name, choices)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    way_out = way_out or f"choose one of {', '.join(name or repr(name) for name in choices)}"
    return ValueError(f"unknown {kind} {name!r}{hint}; {way_out}")


def nearest(name: str, choices: Iterable[str]) -> list[str]:
    """Return up to three of the choices that look like `name`, the most similar first.

    >>> nearest("gren", ["green", "blue"])
    ['green']
    """
    return difflib.get_close_matches(name, list(choices), n=3, cutoff=0.5)
