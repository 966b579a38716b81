"""The figures of a stability report, each a function from analyses to SVG: one network, or two to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from revode.charts import COLOURS, INK, chart_style, svg
from revode.stability.analysis import Analysis
from revode.stability.propagation import Sensitivity
from revode.stability.reversibility import LinearRevNet

_MARKERS = ("o", "x", "^", "s", "D", "v")
_LINES = ("-", "--")


def _axes(**options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(**options)
    return figure, figure.subplots()


def _name(analyses: Sequence[Analysis], analysis: Analysis, text: str) -> str:
    """A legend entry: with the network's name where there are two."""
    return f"{analysis.name}, {text}" if len(analyses) > 1 else text


def _mark_units(axes: Any, analysis: Analysis, shift: float = 0.5) -> None:
    """Thin lines where one unit ends and the next begins; between two blocks, or at a depth with `shift` 0."""
    for place in analysis.lyapunov.places:
        if place.kind == "enter" and place.unit > 0:
            axes.axvline(place.depth + shift, color=INK, linewidth=0.8, linestyle=":", alpha=0.7)


def spectra(analyses: Sequence[Analysis]) -> str:
    """Eigenvalues of the frozen ODE in the complex plane, one marker for each unit."""
    with chart_style():
        figure, axes = _axes(figsize=(5.4, 3.8))
        axes.axvline(0.0, color=INK, linewidth=0.8)
        for row, analysis in enumerate(analyses):
            for unit, (place, values) in enumerate(analysis.spectra.items()):
                label = _name(analyses, analysis, f"unit {place[0] + 1}")
                axes.scatter(
                    values.real, values.imag, s=14, marker=_MARKERS[(3 * row + unit) % 6],
                    color=COLOURS[(3 * row + unit) % 6], linewidths=0.9, alpha=0.75, label=label,
                )  # fmt: skip
        radius = max(float(v.abs().max()) for a in analyses for v in a.spectra.values()) or 1.0
        reach = max(float(v.real.abs().max()) for a in analyses for v in a.spectra.values())
        axes.set(xlabel="Re λ, 1/time", ylabel="Im λ, 1/time", xlim=_symmetric(max(1.15 * reach, 0.25 * radius)))
        _legend(axes, outside=len(analyses) > 1)
        return svg(figure)


def _symmetric(reach: float) -> tuple[float, float]:
    return -reach, reach


def _blocks(axes: Any) -> None:
    """Whole numbers on the axis that counts blocks."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _legend(axes: Any, outside: bool = False) -> None:
    if outside:
        axes.figure.set_figheight(max(4.1, axes.figure.get_figheight()))
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    else:
        axes.legend(fontsize="small")


def growth(analyses: Sequence[Analysis]) -> str:
    """By what factor perturbations have grown inside the units, over depth."""
    with chart_style():
        figure, axes = _axes()
        for row, analysis in enumerate(analyses):
            depths, tangent = growth_over_depth(analysis.lyapunov)
            for i in range(tangent.shape[1] if len(analyses) == 1 else 1):
                label = _name(analyses, analysis, "tangent" if i == 0 else f"tangent {i + 1}")
                axes.plot(depths, tangent[:, i], color=COLOURS[(2 * row + i) % 6], linestyle=_LINES[row], label=label)
            depths, finite = growth_over_depth(analysis.finite_size)
            axes.plot(
                depths, finite[:, 0], linestyle="none", marker=_MARKERS[row], markersize=4, markerfacecolor="none",
                color=INK, markevery=max(1, len(depths) // 20), label=_name(analyses, analysis, "finite size"),
            )  # fmt: skip
        _mark_units(axes, analyses[0], 0.0)
        axes.set(xlabel="depth, blocks", ylabel="growth, factor")
        _blocks(axes)
        _scale(axes)
        _legend(axes, outside=len(analyses) > 1)
        return svg(figure)


def growth_over_depth(found: Any) -> tuple[list[int], np.ndarray]:
    """Depths, and the factor of growth inside the units up to there."""
    inside = [i for i, place in enumerate(found.places) if place.kind in ("step", "leave")]
    total = found.log_growth[inside].cumsum(0).exp().numpy()
    keep = [j for j, i in enumerate(inside) if found.places[i].kind == "step"]
    return [0] + [found.places[inside[j]].depth for j in keep], np.concatenate(
        [np.ones((1, total.shape[1])), total[keep]]
    )


def _scale(axes: Any) -> None:
    """A logarithmic axis where values span more than a factor of four, a linear one below."""
    values = np.concatenate(
        [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines if len(line.get_ydata()) > 2]
    )
    positive = values[np.isfinite(values) & (values > 0)]
    if len(positive) and positive.max() / positive.min() > 4.0:
        axes.set_yscale("log")
        if positive.max() / positive.min() < 1e3:
            axes.yaxis.set_major_formatter(_short_numbers())
            axes.yaxis.set_minor_formatter(_short_numbers() if positive.max() / positive.min() < 10 else "")


def _short_numbers() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:g}")


def step_usage(analyses: Sequence[Analysis]) -> str:
    """The share of its bound that h uses in every block."""
    with chart_style():
        figure, axes = _axes()
        for row, analysis in enumerate(analyses):
            if not analysis.bounds:
                continue
            blocks = range(1, len(analysis.bounds) + 1)
            label = analysis.name if len(analyses) > 1 else "h / bound"
            usage = [100.0 * bound.usage for bound in analysis.bounds]
            axes.plot(blocks, usage, color=COLOURS[row], marker=_MARKERS[row], markersize=4, linewidth=1.0, label=label)
            cheap = [100.0 * bound.h / bound.cheap for bound in analysis.bounds]
            if len(analyses) == 1 and max(cheap) < 20 * max(usage):
                axes.plot(blocks, cheap, color=COLOURS[1], linestyle="--", linewidth=1.2, label="h / cheap estimate")
        axes.axhline(100.0, color=COLOURS[4], linewidth=1.2, label="unstable above")
        _mark_units(axes, analyses[0])
        axes.set(xlabel="block", ylabel="step size in use, % of its bound", ylim=(0, None))
        _blocks(axes)
        _legend(axes)
        return svg(figure)


def norms(analyses: Sequence[Analysis]) -> str:
    """Norms of signal and gradient over depth, each relative to where it starts."""
    with chart_style():
        figure, axes = _axes()
        for row, analysis in enumerate(analyses):
            found = analysis.propagation
            steps = [i for i, place in enumerate(found.places) if place.kind in ("enter", "step")]
            for colour, label, values, first in (
                (0, "signal", found.signal, steps[0]),
                (1, "gradient", found.gradient, steps[-1]),
            ):
                for unit in range(found.places[steps[-1]].unit + 1):
                    inside = [i for i in steps if found.places[i].unit == unit]
                    axes.plot(
                        [found.places[i].depth for i in inside], (values[inside] / values[first]).numpy(),
                        color=COLOURS[(colour + 2 * row) % 6], linestyle=_LINES[row],
                        label=_name(analyses, analysis, label) if unit == 0 else None,
                    )  # fmt: skip
        _mark_units(axes, analyses[0], 0.0)
        axes.set(xlabel="depth, blocks", ylabel="norm, relative to its start")
        _blocks(axes)
        _scale(axes)
        _legend(axes, outside=len(analyses) > 1)
        return svg(figure)


def energy(analysis: Analysis) -> str:
    """What stepping and what changing weights do to the Hamiltonian."""
    found = analysis.energy
    assert found is not None
    with chart_style():
        figure, axes = _axes()
        blocks = np.arange(1, len(found.before) + 1)
        change = 100.0 * found.step_change.abs().numpy()
        axes.plot(
            blocks,
            change,
            color=COLOURS[0],
            marker="o",
            markersize=3.5,
            linewidth=1.0,
            label="one step of the integrator",
        )
        inside = [j for j in range(len(found.units) - 1) if found.units[j] == found.units[j + 1]]
        jumps = 100.0 * found.jump.abs().numpy()
        axes.plot(
            blocks[inside] + 0.5, jumps, color=COLOURS[4], marker="^", markersize=3.5, linewidth=1.0,
            label="change to the next block's weights",
        )  # fmt: skip
        _mark_units(axes, analysis)
        axes.set(xlabel="block", ylabel="change of H, %", yscale="log")
        _blocks(axes)
        axes.yaxis.set_major_formatter(_short_numbers())
        _legend(axes, outside=True)
        return svg(figure)


def reconstruction(analyses: Sequence[Analysis]) -> str:
    """The relative error of the states on the way back, from the end of each unit."""
    with chart_style():
        figure, axes = _axes()
        for row, analysis in enumerate(analyses):
            start = 0
            for unit, profile in enumerate(analysis.profiles):
                label = _name(analyses, analysis, "float32") if unit == 0 else None
                axes.plot(
                    range(start, start + len(profile) - 1), profile[:-1], color=COLOURS[row], linestyle=_LINES[row],
                    marker=".", markersize=4, label=label,
                )  # fmt: skip
                start += len(profile) - 1
        _mark_units(axes, analyses[0], 0.0)
        axes.set(xlabel="depth, blocks", ylabel="relative reconstruction error", yscale="log")
        _blocks(axes)
        _legend(axes)
        return svg(figure)


def sensitivity(analyses: Sequence[Analysis]) -> str:
    """The answer of the class scores to noise and to an adversary."""
    with chart_style():
        figure, axes = _axes()
        for row, analysis in enumerate(analyses):
            for column, (label, found) in enumerate((("noise", analysis.noise), ("FGSM", analysis.adversary))):
                _answers(axes, found, _name(analyses, analysis, label), 2 * row + column, _LINES[row])
        axes.set(
            xlabel="size of the disturbance, input standard deviations", ylabel="change of the logits, %",
            xscale="log", yscale="log",
        )  # fmt: skip
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(_short_numbers())
        _legend(axes, outside=len(analyses) > 1)
        return svg(figure)


def _answers(axes: Any, found: Sequence[Sensitivity], label: str, index: int, line: str) -> None:
    sizes, changes = [row.size for row in found], [100.0 * row.logit_change for row in found]
    axes.plot(sizes, changes, color=COLOURS[index % 6], marker=_MARKERS[index % 6], linestyle=line, label=label)


def linear_revnet_map(found: LinearRevNet) -> str:
    """Growth in one block of the linear RevNet over (α, β), and the edge of its stable region."""
    with chart_style():
        figure, axes = _axes(figsize=(5.4, 3.8))
        alpha, beta = found.alpha.numpy(), found.beta.numpy()
        extent = (alpha[0], alpha[-1], beta[0], beta[-1])
        growth = found.predicted.t().log2().numpy()
        image = axes.imshow(growth, cmap="cividis", extent=extent, origin="lower", aspect="auto")
        fine = torch.linspace(float(found.alpha.min()), float(found.alpha.max()), 401)
        for sign in (-1.0, 1.0):
            side = fine[fine * sign > 4.0 / float(found.beta.abs().max())]
            axes.plot(side, -4.0 / side, color="white", linewidth=1.6)
        axes.axvline(0.0, color="white", linewidth=1.6)
        axes.axhline(0.0, color="white", linewidth=1.6)
        figure.colorbar(image, label="log₂ of the growth in a block")
        axes.set(xlabel="α, factor of G", ylabel="β, factor of F", xlim=(alpha[0], alpha[-1]), ylim=(beta[0], beta[-1]))
        axes.grid(visible=False)
        for x, y in ((alpha[-1] * 0.45, beta[0] * 0.25), (alpha[0] * 0.45, beta[-1] * 0.25)):
            axes.text(x, y, "stable", color="white", ha="center", va="center")
        return svg(figure)
