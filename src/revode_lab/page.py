"""A self-contained HTML page: text, cards, tables and inline SVG figures, without scripts and without requests.

    page = Page("hamiltonian-74 on cifar10", "seed 0")
    page.heading("Training")
    page.figure(charts.lines(...), "Loss over steps.", alt="Loss falls from 2.3 to 0.1 over 2000 steps")
    page.write("report.html")

The page follows the reader's light or dark preference; figures of `revode_lab.charts` take over its text colour. What it looks
like is in ``page.html``.
"""

from __future__ import annotations

import html
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from revode.files import write_atomically

_TEMPLATE = Path(__file__).with_name("page.html")
_NUMBER = re.compile(r"[-+−]?[\d.,]+([eE×][-+\d]+)?\s?(%|[kMGT]?i?B|s|ms|x|×)?|–|-|")


class Page:
    """Collects blocks in order and renders them as one HTML document; all text is escaped.

    `refresh` is the number of seconds after which an open page loads itself anew; 0: never.
    """

    def __init__(self, title: str, subtitle: str = "", refresh: int = 0) -> None:
        self.title, self.subtitle, self.refresh = title, subtitle, refresh
        self._blocks: list[dict[str, Any]] = []

    def _add(self, kind: str, **content: Any) -> None:
        self._blocks.append({"kind": kind, **content})

    def heading(self, text: str) -> None:
        """Start a section."""
        self._add("heading", text=text)

    def text(self, paragraph: str) -> None:
        """Add a paragraph."""
        self._add("text", text=paragraph)

    def cards(self, cards: Iterable[tuple[str, object, str]]) -> None:
        """Add a row of key numbers, each a (label, value, note)."""
        self._add("cards", cards=list(cards))

    def table(self, header: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> None:
        """Add a table; columns of numbers are aligned to the right."""
        cells = [list(map(str, row)) for row in rows]
        for row in cells:
            if len(row) != len(header):
                raise ValueError(f"table {caption!r} has {len(header)} columns, got a row of {len(row)}: {row}")
        numeric = [bool(cells) and all(_NUMBER.fullmatch(row[i]) for row in cells) for i in range(len(header))]
        self._add("table", header=header, rows=cells, caption=caption, numeric=numeric)

    def figure(self, svg: str, caption: str, alt: str) -> None:
        """Add an inline figure from `revode_lab.charts`; `alt` is its description for a reader who cannot see it."""
        number = sum(block["kind"] == "figure" for block in self._blocks) + 1
        svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>f{number}-", svg)  # figures do not refer to each other's parts
        svg = svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(alt)}" ', 1)
        self._add("figure", svg=svg, caption=caption)

    def details(self, summary: str, text: str) -> None:
        """Add text that opens on a click of its summary; its line breaks and spaces are kept."""
        self._add("details", summary=summary, text=text)

    def render(self) -> str:
        """Return the document."""
        from jinja2 import Environment

        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
        groups = [(kind, list(blocks)) for kind, blocks in itertools.groupby(self._blocks, key=lambda b: b["kind"])]
        template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
        return template.render(title=self.title, subtitle=self.subtitle, refresh=self.refresh, groups=groups)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the document in one atomic step: a reader finds the old page or the new one, never a part."""
        path = Path(path)
        write_atomically(path, self.render())
        return path
