"""The figures of a training report, each a function from numbers to SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
from torch import Tensor

from revode.charts import INK, chart_style, svg
from revode.training.depth import UnitProfile

_STRATEGY_COLOURS = {"reversible": "C2", "checkpoint": "C1", "store": "C0"}


def _axes(**options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(**options)
    return figure, figure.subplots()


def curves(rows: list[dict[str, Any]], quantity: str, label: str, scale: float = 1.0, log: bool = False) -> str:
    """A quantity of the metrics over steps: training, and evaluation where it has it."""
    with chart_style():
        figure, axes = _axes()
        for kind, style in (
            ("train", {"color": "C0"}),
            ("evaluation", {"color": "C1", "marker": "o", "markersize": 3.5}),
        ):
            found = [row for row in rows if row.get("kind") == kind and row.get(quantity) is not None]
            if found:
                name = kind if kind == "train" else str(found[-1].get("split", kind))
                axes.plot([row["step"] for row in found], [scale * row[quantity] for row in found], label=name, **style)
        axes.set(xlabel="step", ylabel=label)
        if log:
            axes.set_yscale("log")
        if len(axes.lines) > 1:
            axes.legend()
        return svg(figure)


def memory_bars(activation_bytes: dict[str, int], used: str) -> str:
    """Activation memory under each strategy, the run's own in full colour."""
    with chart_style():
        figure, axes = _axes(figsize=(5.4, 2.2))
        names = list(activation_bytes)
        sizes = [activation_bytes[name] / 1e6 for name in names]
        bars = axes.barh(names, sizes, color=[_STRATEGY_COLOURS.get(name, "C3") for name in names], height=0.6)
        for bar, name in zip(bars, names, strict=True):
            bar.set_alpha(1.0 if name == used else 0.45)
        axes.bar_label(bars, [f"{size:.3g} MB" for size in sizes], padding=4)
        axes.set(xlabel="activations kept for backward, MB", xlim=(0, 1.25 * max(sizes)))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        return svg(figure)


def over_depth(profiles: list[UnitProfile], values: Callable[[UnitProfile], Sequence[float]], label: str) -> str:
    """A quantity of every branch over depth, unit after unit."""
    with chart_style():
        figure, axes = _axes()
        start = 1
        for index, profile in enumerate(profiles):
            numbers = numpy.array(values(profile), dtype=float)
            places = numpy.arange(start, start + len(numbers))
            # Exact reconstruction is an error of 0, which a logarithmic axis cannot show.
            axes.plot(places, numpy.maximum(numbers, 1e-12), color=f"C{index % 6}", label=profile.name, marker=".")
            start += len(numbers)
        axes.set(xlabel="branch, from input to output", ylabel=label, yscale="log")
        if len(profiles) > 1:
            axes.legend(ncols=min(4, len(profiles)), fontsize="small")
        return svg(figure)


def class_bars(accuracies: list[float], names: Sequence[str]) -> str:
    """Accuracy of every class, worst first where there are many."""
    order = sorted(range(len(names)), key=lambda i: accuracies[i])[:20] if len(names) > 20 else range(len(names))
    with chart_style():
        figure, axes = _axes(figsize=(5.4, 0.8 + 0.26 * len(order)))
        bars = axes.barh([names[i] for i in order], [100 * accuracies[i] for i in order], color="C0", height=0.7)
        axes.bar_label(bars, [f"{100 * accuracies[i]:.1f}" for i in order], padding=3, fontsize="small")
        axes.set(xlabel="accuracy, %", xlim=(0, 112))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        return svg(figure)


def confusion_matrix(confusion: list[list[int]], names: Sequence[str]) -> str:
    """True classes down, predicted classes across; shares of the true class, counts of mistakes written in."""
    counts = numpy.array(confusion)
    shares = counts / counts.sum(1, keepdims=True).clip(min=1)
    small = len(names) <= 20
    with chart_style():
        figure, axes = _axes(figsize=(5.4, 5.0))
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.grid(False)
        axes.set(xlabel="predicted", ylabel="true")
        if small:
            axes.set_xticks(range(len(names)), names, rotation=45 if max(map(len, names)) > 2 else 0, ha="right")
            axes.set_yticks(range(len(names)), names)
            for i, j in zip(*numpy.nonzero(counts), strict=True):
                colour = "#ffffff" if shares[i, j] > 0.5 else "#303030"
                axes.text(j, i, str(counts[i, j]), ha="center", va="center", fontsize=9, color=colour)
        return svg(figure)


def mistakes(images: Tensor, captions: Sequence[str]) -> str:
    """Images with a caption each, in rows of four."""
    from matplotlib.figure import Figure

    columns = 4
    rows = -(-len(captions) // columns)
    with chart_style():
        figure = Figure(figsize=(5.4, 1.62 * rows))
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes in grid:
            axes.set_axis_off()
        for axes, image, caption in zip(grid, images, captions, strict=False):
            pixels = image.permute(1, 2, 0).numpy()
            axes.imshow(pixels if pixels.shape[2] == 3 else pixels[:, :, 0], cmap="gray", interpolation="nearest")
            axes.set_title(caption, fontsize=9, color=INK)
        return svg(figure)
