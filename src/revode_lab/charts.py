"""Figures as SVG markup, all in one style: they read well on a light and on a dark page, in a column and on a phone.

A chart is a function that draws on axes, under `chart`; what it returns is markup for `revode_lab.page`, and `standalone` makes
a file of it.

    @chart()
    def loss(axes, steps, losses):
        axes.plot(steps, losses)
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec

INK = "#7d7f84"
"""Colour of axes and text in figures: mid-grey where a figure stands alone, the page's own text colour once inlined."""

COLOURS = ("#2a86c8", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""After Okabe and Ito's colour-blind-safe cycle; no yellow and no black, which vanish on a light or a dark page, and a blue
light enough for the dark one."""

MARKERS = ("o", "s", "^", "D", "v", "x")
Points = tuple[Sequence[float], Sequence[float]]
P = ParamSpec("P")


STYLE: dict[Any, Any] = {
    "figure.figsize": (5.4, 3.3),
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": "small",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "font.size": 11.0,
    "axes.titlesize": 11.5,
    "axes.prop_cycle": f"cycler(color={COLOURS})",
    "svg.fonttype": "none",
    "svg.hashsalt": "revode",
    **{f"{name}color": INK for name in ("text.", "axes.edge", "axes.label", "xtick.", "ytick.", "grid.")},
}
"""Of all figures, as settings of matplotlib."""


def chart_style() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws in the style of all figures."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def chart(**options: Any) -> Callable[[Callable[Concatenate[Any, P], None]], Callable[P, str]]:
    """Decorate a function that draws on axes: it then returns the markup of a figure with these options."""

    def decorate(draw: Callable[Concatenate[Any, P], None]) -> Callable[P, str]:
        @functools.wraps(draw)
        def drawn(*args: P.args, **kwargs: P.kwargs) -> str:
            from matplotlib.figure import Figure

            with chart_style():
                figure = Figure(**options)
                draw(figure.subplots(), *args, **kwargs)
                return svg(figure)

        return drawn

    return decorate


def svg(figure: Any) -> str:
    """Return a matplotlib figure as SVG markup to stand inside a page; equal figures give equal markup."""
    stream = io.StringIO()
    with chart_style():
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    markup = stream.getvalue()
    markup = markup[markup.index("<svg") :]
    markup = re.sub(r"<metadata>.*?</metadata>", "", markup, flags=re.DOTALL)
    # Its style applies to the whole page; the page has the same rule for figures only.
    markup = re.sub(r"<style[^>]*>.*?</style>", "", markup, flags=re.DOTALL)
    markup = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", markup)
    return markup.replace(INK, "currentColor").strip()


def standalone(markup: str) -> str:
    """Return a chart as a file of its own: with the namespaces and the colour that a page would give it."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    look = f'color="{INK}" font-family="DejaVu Sans, Verdana, sans-serif" stroke-linejoin="round"'
    return markup.replace("<svg ", f"<svg {names} {look} ", 1) + "\n"


def look(index: int) -> dict[str, Any]:
    """Return colour and marker of the series at this index."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def plain_numbers(axis: Any, values: Sequence[float]) -> None:
    """Write 0.02 and 50 on a logarithmic axis that spans little, and leave powers of ten where it spans much.

    An axis of two decades or less has ticks within each decade, so that more than one has a number.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator

    positive = [value for value in values if value > 0]
    ratio = max(positive) / min(positive) if positive else 1.0
    if ratio < 300:
        axis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 6, 8) if ratio < 10 else (1, 2, 5)))
        axis.set_minor_formatter("")
    if ratio < 1e4:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _span(axes: Any, values: Sequence[float]) -> None:
    """Have the y axis reach over a fifth of its largest value, so that noise does not look like a course."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    missing = 0.2 * max(abs(low), abs(high)) - (high - low)
    if missing > 0:
        axes.set_ylim(low - missing / 2, high + missing / 2)


@chart()
def lines(
    axes: Any,
    series: Mapping[str, Points],
    xlabel: str,
    ylabel: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    mark: bool = False,
    errors: Mapping[str, Sequence[float]] | None = None,
    borders: Sequence[float] | None = None,
    levels: Mapping[str, float] | None = None,
) -> None:
    """Draw curves by name, broken at NaN. An axis of whole numbers has no ticks between them.

    Args:
        log_x: x is logarithmic, with a tick at each of its values.
        log_y: y is logarithmic where its values span a factor of four.
        mark: Every point has a marker.
        errors: Name -> half the length of the bar at each point.
        borders: Places of thin lines on an axis of whole numbers.
        levels: Name -> height of a line across; the axis then starts at 0.
    """
    for index, (name, (x, y)) in enumerate(series.items()):
        style = look(index) | {"linestyle": "-" if index < len(COLOURS) else "--"}
        style |= {"markersize": 4} if mark or len(x) < 3 else {"marker": None}
        axes.errorbar(x, y, yerr=(errors or {}).get(name), capsize=3 if errors else 0, label=name, **style)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    for border in borders or ():
        axes.axvline(border, color=INK, linewidth=0.8, linestyle=":", alpha=0.7)
    if borders is not None or all(float(value).is_integer() for x, _ in series.values() for value in x):
        axes.locator_params(axis="x", integer=True)
    for name, height in (levels or {}).items():
        axes.axhline(height, color=COLOURS[4], linewidth=1.2, label=name)
        axes.set_ylim(bottom=0.0)
    if log_x:
        ticks = sorted({value for x, _ in series.values() for value in x})
        axes.set_xscale("log" if len(ticks) > 1 else "linear")
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks], fontsize=9)
        axes.set_xticks([], minor=True)
    values = [value for _, y in series.values() for value in y if math.isfinite(value)]
    positive = [value for value in values if value > 0]
    if log_y and positive and max(positive) > 4 * min(positive):
        axes.set_yscale("log")
        plain_numbers(axes.yaxis, positive)
    elif not levels:
        _span(axes, values)
    wide = max(map(len, series), default=0) > 36
    if len(series) > 3 or (len(series) > 1 and wide):  # a legend that would lie on the curves
        axes.figure.set_figheight(axes.figure.get_figheight() + (0.22 if wide else 0.11) * len(series))
        axes.figure.legend(loc="outside lower center", ncols=1 if wide else 2)
    elif len(series) + len(levels or ()) > 1:
        axes.legend()


@chart()
def bars(
    axes: Any,
    values: Mapping[str, float],
    label: str,
    *,
    unit: str = "",
    highlight: str | None = None,
    name: str = "",
    deviations: Sequence[float] | None = None,
    marks: Mapping[str, float] | None = None,
    marks_name: str = "",
    largest: float | None = None,
) -> None:
    """Draw a bar for each name.

    Args:
        unit: Unit behind each number.
        highlight: The bar in full colour, if the others are to be pale.
        name, marks_name: Names of bars and marks in the legend.
        deviations: Half the length of an error bar at each.
        marks: Name -> a value to mark beside the bar.
        largest: The end of the axis; a little beyond the longest bar unless given.
    """
    names, numbers = list(values), list(values.values())
    axes.figure.set_size_inches(6.4, 0.9 + 0.36 * len(names) + (0.4 if marks else 0.0))
    errors = list(deviations) if deviations and any(deviations) else None
    drawn = axes.barh(names, numbers, xerr=errors, color=COLOURS[0], height=0.62, label=name or None, ecolor=INK)
    for bar, own in zip(drawn, names, strict=True):
        bar.set_alpha(1.0 if highlight in (None, own) else 0.45)
    inside = {"label_type": "center", "color": "white", "fontsize": 9} if marks else {"padding": 4}
    axes.bar_label(drawn, [f"{number:,.3g}{unit}" for number in numbers], **inside)
    known = [own for own in names if own in (marks or {})]
    if marks and known:
        places = [marks[own] for own in known]
        axes.plot(places, known, linestyle="none", marker="D", color=COLOURS[4], label=marks_name)
    axes.set(xlabel=label, xlim=(0, largest or 1.2 * max(numbers)))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    if name:
        axes.figure.legend(loc="outside lower center", ncols=2)


def pictures(rows: Sequence[Sequence[tuple[Any, str]]]) -> str:
    """Draw rows of images (tensors of channels, height and width), each under its caption.

    An image of three channels has its colours, as bytes or as fractions of 1. One channel is drawn in grey, from its least to
    its largest value.
    """
    from matplotlib.figure import Figure

    columns = max(map(len, rows))
    lines = max(caption.count("\n") + 1 for row in rows for _, caption in row)
    with chart_style():
        figure = Figure(figsize=(5.4, len(rows) * (5.4 / columns + 0.2 * lines)))
        grid = figure.subplots(len(rows), columns, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for i, row in enumerate(rows):
            for axes, (image, caption) in zip(grid[i], row, strict=False):
                pixels = image.detach().permute(1, 2, 0).numpy()
                if pixels.shape[2] != 3:
                    shown = pixels[:, :, 0]
                else:
                    shown = pixels if pixels.dtype == "uint8" else pixels.clip(0, 1)
                axes.imshow(shown, cmap="gray", interpolation="nearest")
                axes.set_title(caption, fontsize=9, color=INK)
        return svg(figure)


@chart(figsize=(5.4, 5.0))
def shares(axes: Any, counts: Sequence[Sequence[int]], names: Sequence[str], across: str, down: str) -> None:
    """Draw a matrix of counts, shaded by their share of the row."""
    import numpy
    from matplotlib.colors import to_rgb

    table = numpy.array(counts)
    part = table / table.sum(1, keepdims=True).clip(min=1)
    axes.imshow(numpy.dstack([numpy.broadcast_to(to_rgb(COLOURS[0]), (*part.shape, 3)), part]), interpolation="nearest")
    axes.grid(False)
    axes.set(xlabel=across, ylabel=down)
    if len(names) <= 20:
        axes.set_xticks(range(len(names)), names, rotation=45 if max(map(len, names)) > 2 else 0, ha="right")
        axes.set_yticks(range(len(names)), names)
        for i, j in zip(*numpy.nonzero(table), strict=True):
            colour = "white" if part[i, j] > 0.5 else INK
            axes.text(j, i, str(table[i, j]), ha="center", va="center", fontsize=9, color=colour)


@chart(figsize=(5.4, 3.8))
def eigenvalues(axes: Any, series: Mapping[str, Points]) -> None:
    """Draw clouds of eigenvalues in the complex plane, as real and imaginary parts."""
    axes.axvline(0.0, color=INK, linewidth=0.8)
    for index, (name, (real, imaginary)) in enumerate(series.items()):
        axes.scatter(real, imaginary, s=14, linewidths=0.9, alpha=0.75, label=name, **look(index))
    reach = max(abs(value) for real, _ in series.values() for value in real)
    radius = max(abs(value) for _, imaginary in series.values() for value in imaginary)
    wide = max(1.15 * reach, 0.25 * radius, 1e-9)
    axes.set(xlabel="Re λ, 1/time", ylabel="Im λ, 1/time", xlim=(-wide, wide))
    axes.legend()
