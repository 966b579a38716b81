"""The figures, each a function from numbers to SVG markup; `standalone` makes a file of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from revode.page import COLOURS, INK, chart_style, svg

MARKERS = ("o", "s", "^", "D", "v", "x")
Points = tuple[Sequence[float], Sequence[float]]


def standalone(markup: str) -> str:
    """SVG from `revode.page.svg` as a file of its own: with the namespaces and the colour that a page would give it."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    look = f'color="{INK}" font-family="DejaVu Sans, Verdana, sans-serif" stroke-linejoin="round"'
    return markup.replace("<svg ", f"<svg {names} {look} ", 1) + "\n"


def _axes(**options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(**options)
    return figure, figure.subplots()


def accuracy_bars(
    ours: Mapping[str, tuple[float, float]], paper: Mapping[str, float], our_name: str, paper_name: str
) -> str:
    """Our accuracies as bars with their deviation, the paper's as marks."""
    names = list(ours)
    with chart_style():
        figure, axes = _axes(figsize=(6.4, 1.3 + 0.34 * len(names)))
        means, deviations = zip(*ours.values(), strict=True)
        errors = list(deviations) if any(deviations) else None
        bars = axes.barh(names, means, xerr=errors, color=COLOURS[0], height=0.62, label=our_name, ecolor=INK)
        axes.bar_label(bars, [f"{mean:.1f}" for mean in means], label_type="center", color="white", fontsize=9)
        known = [name for name in names if name in paper]
        if known:
            axes.plot(
                [paper[name] for name in known], known, linestyle="none", marker="D", color=COLOURS[4], label=paper_name
            )
        axes.set(xlabel="accuracy, %", xlim=(0, 100))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        figure.legend(fontsize="small", loc="outside lower center", ncols=2)
        return svg(figure)


def accuracy_lines(series: Mapping[str, Mapping[float, tuple[float, float]]], xlabel: str, ylabel: str) -> str:
    """Accuracy over the number of training images, with deviations."""
    with chart_style():
        figure, axes = _axes()
        for index, (name, points) in enumerate(series.items()):
            x = sorted(points)
            means, deviations = [points[value][0] for value in x], [points[value][1] for value in x]
            axes.errorbar(x, means, yerr=deviations, color=COLOURS[index], marker=MARKERS[index], capsize=3, label=name)
        numbers = sorted({x for points in series.values() for x in points})
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if len(numbers) > 1:
            axes.set_xscale("log")
        axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
        axes.minorticks_off()
        axes.legend()
        return svg(figure)


def lines(
    series: Mapping[str, Points],
    xlabel: str,
    ylabel: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    mark: bool = False,
) -> str:
    """Curves, with a marker at every point if asked."""
    from matplotlib.ticker import NullLocator

    with chart_style():
        figure, axes = _axes()
        for index, (name, (x, y)) in enumerate(series.items()):
            marker = MARKERS[index % 6] if mark else None
            dash = "-" if index < len(COLOURS) else "--"
            axes.plot(x, y, color=COLOURS[index % 6], marker=marker, markersize=4, linestyle=dash, label=name)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if log_x:
            ticks = sorted({value for x, _ in series.values() for value in x})
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{value:g}" for value in ticks], fontsize=9)
            axes.xaxis.set_minor_locator(NullLocator())
        if log_y:
            axes.set_yscale("log")
            _plain_numbers(axes.yaxis, [value for _, y in series.values() for value in y])
        if len(series) > 1:
            axes.legend(fontsize="small")
        return svg(figure)


def _plain_numbers(axis: Any, values: Sequence[float]) -> None:
    """Write 0.02 and 50 on a logarithmic axis that spans little, and leave powers of ten where it spans much."""
    from matplotlib.ticker import FuncFormatter

    positive = [value for value in values if value > 0]
    ratio = max(positive) / min(positive) if positive else 1.0
    if ratio < 1e4:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}") if ratio < 10 else "")


def bars(values: Mapping[str, float], xlabel: str) -> str:
    """A number for each name."""
    with chart_style():
        figure, axes = _axes(figsize=(6.4, 0.9 + 0.4 * len(values)))
        colours = [COLOURS[index % 6] for index in range(len(values))]
        drawn = axes.barh(list(values), list(values.values()), color=colours, height=0.6)
        axes.bar_label(drawn, [f"{value:,.3g}" for value in values.values()], padding=4)
        axes.set(xlabel=xlabel, xlim=(0, 1.2 * max(values.values())))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        return svg(figure)


def eigenvalues(series: Mapping[str, Points]) -> str:
    """Clouds of eigenvalues in the complex plane."""
    with chart_style():
        figure, axes = _axes(figsize=(5.4, 3.8))
        axes.axvline(0.0, color=INK, linewidth=0.8)
        for index, (name, (real, imaginary)) in enumerate(series.items()):
            style = {
                "s": 14,
                "marker": MARKERS[index % 6],
                "color": COLOURS[index % 6],
                "linewidths": 0.9,
                "alpha": 0.75,
            }
            axes.scatter(real, imaginary, label=name, **style)
        reach = max(abs(value) for real, _ in series.values() for value in real)
        radius = max(abs(value) for _, imaginary in series.values() for value in imaginary)
        wide = max(1.15 * reach, 0.25 * radius, 1e-9)
        axes.set(xlabel="Re λ, 1/time", ylabel="Im λ, 1/time", xlim=(-wide, wide))
        axes.legend(fontsize="small")
        return svg(figure)
