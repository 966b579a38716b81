"""A self-contained HTML page: text, cards, tables and inline SVG figures, without scripts and without requests.

    page = Page("hamiltonian-74 on cifar10", "seed 0")
    page.heading("Training")
    with chart_style():
        figure, axes = plt.subplots()
        ...
    page.figure(svg(figure), "Loss over steps.", alt="Loss falls from 2.3 to 0.1 over 2000 steps")
    page.write("report.html")

The page follows the reader's light or dark preference; figures made under `chart_style` take over its text colour.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import io
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

INK = "#7d7f84"
"""Colour of axes and text in figures: mid-grey where a figure stands alone, the page's own text colour once inlined."""

COLOURS = ("#2a86c8", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""After Okabe and Ito's colour-blind-safe cycle; no yellow and no black, which vanish on a light or a dark page, and a blue
light enough for the dark one."""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5c6066; --paper: #ffffff; --card: #f3f4f6; --line: #d5d8dc; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e7e9; --soft: #a3a7ad; --paper: #15171a; --card: #212429; --line: #3b3f45; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 64rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.25; }
h2 { margin: 2.5rem 0 .75rem; padding-bottom: .25rem; font-size: 1.25rem; border-bottom: 1px solid var(--line); }
p { max-width: 46rem; margin: .75rem 0; }
.subtitle, figcaption, caption, .note { color: var(--soft); font-size: .9rem; }
.subtitle { margin-top: .25rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 10rem), 1fr)); gap: .75rem; margin: 1rem 0; }
.card { padding: .75rem .9rem; background: var(--card); border-radius: .5rem; }
.card .value { font-size: 1.35rem; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.5rem; margin: 1rem 0; }
figure { margin: 0; }
figure svg { display: block; width: 100%; max-width: 40rem; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { margin-top: .35rem; max-width: 40rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
caption { text-align: left; padding-bottom: .35rem; }
th, td { padding: .3rem .75rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; white-space: nowrap; }
details { margin: .75rem 0; padding: .5rem .9rem; background: var(--card); border-radius: .5rem; }
summary { cursor: pointer; font-weight: 600; }
pre { margin: .5rem 0; overflow-x: auto; font: .85rem/1.45 ui-monospace, Consolas, "DejaVu Sans Mono", monospace; }
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #444; --paper: #fff; --card: #f6f6f6; --line: #bbb; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  figure, .card, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  pre { white-space: pre-wrap; }
  details::details-content { content-visibility: visible; height: auto; }
}
"""


class Page:
    """Collects blocks in order and renders them as one HTML document.

    All text is escaped; only `figure` (an SVG from `svg`) and `details` take markup.

    Args:
        title: Heading of the page and title of the window.
        subtitle: A line under the heading.
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title = title
        self.subtitle = subtitle
        self._blocks: list[tuple[str, str]] = []

    def _add(self, kind: str, markup: str) -> None:
        self._blocks.append((kind, markup))

    def heading(self, text: str) -> None:
        """Start a section."""
        self._add("heading", f"<h2>{_escape(text)}</h2>")

    def text(self, paragraph: str) -> None:
        """Add a paragraph."""
        self._add("text", f"<p>{_escape(paragraph)}</p>")

    def cards(self, cards: Iterable[tuple[str, object, str]]) -> None:
        """Add a row of key numbers, each a (label, value, note)."""
        items = "".join(
            f'<div class="card"><div class="note">{_escape(label)}</div><div class="value">{_escape(value)}</div>'
            f'<div class="note">{_escape(note)}</div></div>'
            for label, value, note in cards
        )
        self._add("cards", f'<div class="cards">{items}</div>')

    def table(self, header: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> None:
        """Add a table; columns of numbers are aligned to the right."""
        cells = [[_escape(cell) for cell in row] for row in rows]
        for row in cells:
            if len(row) != len(header):
                raise ValueError(f"table {caption!r} has {len(header)} columns, got a row of {len(row)}: {row}")
        numeric = [bool(cells) and all(_looks_numeric(row[i]) for row in cells) for i in range(len(header))]
        caption = f"<caption>{_escape(caption)}</caption>" if caption else ""
        head = _row("th", [_escape(name) for name in header], numeric)
        body = "".join(_row("td", row, numeric) for row in cells)
        table = f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"
        self._add("table", f'<div class="scroll">{table}</div>')

    def figure(self, svg: str, caption: str, alt: str) -> None:
        """Add an inline figure; figures that follow each other stand side by side where there is room.

        Args:
            svg: Markup from the function `svg`.
            caption: What the reader should see in it.
            alt: The same for a reader who cannot see it.
        """
        number = sum(kind == "figure" for kind, _ in self._blocks) + 1
        svg = _prefix_ids(svg, f"f{number}-")
        svg = svg.replace("<svg ", f'<svg role="img" aria-label="{_escape(alt)}" ', 1)
        self._add("figure", f"<figure>{svg}<figcaption>{_escape(caption)}</figcaption></figure>")

    def details(self, summary: str, html: str) -> None:
        """Add a section that opens on a click.

        Args:
            summary: The line always shown.
            html: Trusted markup, for instance from `preformatted`.
        """
        self._add("details", f"<details><summary>{_escape(summary)}</summary>{html}</details>")

    def render(self) -> str:
        """The document."""
        subtitle = f'<p class="subtitle">{_escape(self.subtitle)}</p>' if self.subtitle else ""
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<link rel="icon" href="data:,">\n<title>{_escape(self.title)}</title>\n<style>{_STYLE}</style>\n</head>\n'
            f"<body>\n<header><h1>{_escape(self.title)}</h1>{subtitle}</header>\n"
            f"<main>\n{self._body()}\n</main>\n</body>\n</html>\n"
        )

    def _body(self) -> str:
        """The blocks, with neighbouring figures in one grid."""
        parts: list[str] = []
        previous = ""
        for kind, markup in self._blocks:
            if kind == "figure" and previous != "figure":
                parts.append('<div class="figures">')
            if kind != "figure" and previous == "figure":
                parts.append("</div>")
            parts.append(markup)
            previous = kind
        if previous == "figure":
            parts.append("</div>")
        return "\n".join(parts)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the document in one atomic step: a reader finds the old page or the new one, never a part."""
        path = Path(path)
        text = self.render()
        descriptor, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.chmod(unfinished, 0o666 & ~_umask())
            os.replace(unfinished, path)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise
        return path


def preformatted(text: str) -> str:
    """Escaped markup for text whose line breaks and spaces matter, for `Page.details`."""
    return f"<pre>{_escape(text)}</pre>"


@contextlib.contextmanager
def chart_style() -> Iterator[None]:
    """Draw figures that read well on a light and on a dark page, in a column and on a phone."""
    import matplotlib
    from cycler import cycler

    settings: Any = {
        "figure.figsize": (5.4, 3.3),
        "figure.constrained_layout.use": True,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.8,
        "font.size": 11.0,
        "axes.titlesize": 11.5,
        "axes.prop_cycle": cycler(color=COLOURS),
        "svg.fonttype": "none",
        "svg.hashsalt": "revode",
        **{f"{name}color": INK for name in ("text.", "axes.edge", "axes.label", "xtick.", "ytick.", "grid.")},
    }
    with matplotlib.rc_context(settings):
        yield


def svg(figure: Any) -> str:
    """A matplotlib figure as SVG markup to stand inside a page, and close the figure.

    The same figure always gives the same markup; its ids start with a digest of it, so that two figures on one page do not
    refer to each other's parts.
    """
    import matplotlib
    from matplotlib import pyplot

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "revode"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    markup = stream.getvalue()
    markup = markup[markup.index("<svg") :]
    markup = re.sub(r"<metadata>.*?</metadata>", "", markup, flags=re.DOTALL)
    # Its style applies to the whole page; the page has the same rule for figures only.
    markup = re.sub(r"<style[^>]*>.*?</style>", "", markup, flags=re.DOTALL)
    markup = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", markup)
    markup = markup.replace(INK, "currentColor")
    return _prefix_ids(markup, f"s{hashlib.sha256(markup.encode()).hexdigest()[:8]}-").strip()


def _prefix_ids(markup: str, prefix: str) -> str:
    """Put `prefix` before every id and every reference to one."""
    return re.sub(r'(\bid="|url\(#|href="#)', lambda match: match[0] + prefix, markup)


def _escape(value: object) -> str:
    return html.escape(str(value), quote=True)


def _looks_numeric(cell: str) -> bool:
    return bool(re.fullmatch(r"[-+−]?[\d.,]+([eE×][-+\d]+)?\s?(%|[kMGT]?i?B|s|ms|x|×)?|–|-|", cell))


def _row(tag: str, cells: list[str], numeric: list[bool]) -> str:
    items = (
        f"<{tag}{' class=number' if number else ''}>{cell}</{tag}>" for cell, number in zip(cells, numeric, strict=True)
    )
    return f"<tr>{''.join(items)}</tr>"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
