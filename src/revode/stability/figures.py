"""The figures of a stability report, each a function from analyses to SVG: one network, or two to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from revode.charts import COLOURS, INK, chart, eigenvalues, look, plain_numbers
from revode.stability.analysis import Analysis
from revode.stability.reversibility import LinearRevNet

_LINES = ("-", "--")


def _name(analyses: Sequence[Analysis], analysis: Analysis, text: str) -> str:
    """A legend entry: with the network's name where there are two."""
    return f"{analysis.name}, {text}" if len(analyses) > 1 else text


def _finish(axes: Any, analyses: Sequence[Analysis], shift: float, ylabel: str, **settings: Any) -> None:
    """What every figure over depth has: whole numbers of blocks, thin lines between units, a legend.

    Args:
        axes: Where it was drawn.
        analyses: Whose units are marked: the first's.
        shift: 0 where points are depths; 0.5 where they are blocks, so that lines lie between two of them.
        ylabel: Beside the y axis.
        settings: Of the axes besides.
    """
    from matplotlib.ticker import MaxNLocator

    for place in analyses[0].lyapunov.places:
        if place.kind == "enter" and place.unit > 0:
            axes.axvline(place.depth + shift, color=INK, linewidth=0.8, linestyle=":", alpha=0.7)
    axes.set(xlabel="block" if shift else "depth, blocks", ylabel=ylabel, **settings)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes, outside=len(analyses) > 1)


def _legend(axes: Any, outside: bool) -> None:
    if outside:
        axes.figure.set_figheight(max(4.1, axes.figure.get_figheight()))
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    else:
        axes.legend(fontsize="small")


def _scale(axes: Any) -> None:
    """A logarithmic axis where values span more than a factor of four, a linear one below."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    positive = values[np.isfinite(values) & (values > 0)]
    if len(positive) and positive.max() / positive.min() > 4.0:
        axes.set_yscale("log")
        plain_numbers(axes.yaxis, positive.tolist())


def spectra(analyses: Sequence[Analysis]) -> str:
    """Eigenvalues of the frozen ODE in the complex plane, one marker for each unit."""
    return eigenvalues(
        {
            _name(analyses, analysis, f"unit {place[0] + 1}"): (values.real.tolist(), values.imag.tolist())
            for analysis in analyses
            for place, values in analysis.spectra.items()
        }
    )


@chart()
def growth(axes: Any, analyses: Sequence[Analysis]) -> None:
    """By what factor perturbations have grown inside the units, over depth."""
    for row, analysis in enumerate(analyses):
        depths, tangent = growth_over_depth(analysis.lyapunov)
        for i in range(tangent.shape[1] if len(analyses) == 1 else 1):
            label = _name(analyses, analysis, "tangent" if i == 0 else f"tangent {i + 1}")
            axes.plot(depths, tangent[:, i], color=COLOURS[(2 * row + i) % 6], linestyle=_LINES[row], label=label)
        depths, finite = growth_over_depth(analysis.finite_size)
        style = look(row) | {"color": INK, "markersize": 4, "markerfacecolor": "none", "linestyle": "none"}
        label = _name(analyses, analysis, "finite size")
        axes.plot(depths, finite[:, 0], markevery=max(1, len(depths) // 20), label=label, **style)
    _scale(axes)
    _finish(axes, analyses, 0.0, "growth, factor")


def growth_over_depth(found: Any) -> tuple[list[int], np.ndarray]:
    """Depths, and the factor of growth inside the units up to there."""
    inside = [i for i, place in enumerate(found.places) if place.kind in ("step", "leave")]
    total = found.log_growth[inside].cumsum(0).exp().numpy()
    keep = [j for j, i in enumerate(inside) if found.places[i].kind == "step"]
    start = np.ones((1, total.shape[1]))
    return [0] + [found.places[inside[j]].depth for j in keep], np.concatenate([start, total[keep]])


@chart()
def step_usage(axes: Any, analyses: Sequence[Analysis]) -> None:
    """The share of its bound that h uses in every block."""
    for row, analysis in enumerate(analyses):
        if not analysis.bounds:
            continue
        blocks = range(1, len(analysis.bounds) + 1)
        label = analysis.name if len(analyses) > 1 else "h / bound"
        usage = [100.0 * bound.usage for bound in analysis.bounds]
        axes.plot(blocks, usage, markersize=4, linewidth=1.0, label=label, **look(row))
        cheap = [100.0 * bound.h / bound.cheap for bound in analysis.bounds]
        if len(analyses) == 1 and max(cheap) < 20 * max(usage):
            axes.plot(blocks, cheap, color=COLOURS[1], linestyle="--", linewidth=1.2, label="h / cheap estimate")
    axes.axhline(100.0, color=COLOURS[4], linewidth=1.2, label="unstable above")
    _finish(axes, analyses, 0.5, "step size in use, % of its bound", ylim=(0, None))


@chart()
def norms(axes: Any, analyses: Sequence[Analysis]) -> None:
    """Norms of signal and gradient over depth, each relative to where it starts."""
    for row, analysis in enumerate(analyses):
        found = analysis.propagation
        steps = [i for i, place in enumerate(found.places) if place.kind in ("enter", "step")]
        signal, gradient = found.signal / found.signal[steps[0]], found.gradient / found.gradient[steps[-1]]
        for column, (label, values) in enumerate((("signal", signal), ("gradient", gradient))):
            style: dict[str, Any] = {"color": COLOURS[(column + 2 * row) % 6], "linestyle": _LINES[row]}
            for unit in range(found.places[steps[-1]].unit + 1):
                inside = [i for i in steps if found.places[i].unit == unit]
                style["label"] = None if unit else _name(analyses, analysis, label)
                axes.plot([found.places[i].depth for i in inside], values[inside].numpy(), **style)
    _scale(axes)
    _finish(axes, analyses, 0.0, "norm, relative to its start")


@chart()
def energy(axes: Any, analysis: Analysis) -> None:
    """What stepping and what changing weights do to the Hamiltonian."""
    found = analysis.energy
    assert found is not None
    blocks = np.arange(1, len(found.before) + 1)
    inside = [j for j in range(len(found.units) - 1) if found.units[j] == found.units[j + 1]]
    style = {"markersize": 3.5, "linewidth": 1.0}
    change, jump = 100.0 * found.step_change.abs().numpy(), 100.0 * found.jump.abs().numpy()
    axes.plot(blocks, change, color=COLOURS[0], marker="o", label="one step of the integrator", **style)
    axes.plot(
        blocks[inside] + 0.5, jump, color=COLOURS[4], marker="^", label="change to the next block's weights", **style
    )
    _finish(axes, [analysis], 0.5, "change of H, %", yscale="log")
    plain_numbers(axes.yaxis, [*change.tolist(), *jump.tolist()])
    _legend(axes, outside=True)


@chart()
def reconstruction(axes: Any, analyses: Sequence[Analysis]) -> None:
    """The relative error of the states on the way back, from the end of each unit."""
    for row, analysis in enumerate(analyses):
        style: dict[str, Any] = {"color": COLOURS[row], "linestyle": _LINES[row], "marker": ".", "markersize": 4}
        start = 0
        for unit, profile in enumerate(analysis.profiles):
            style["label"] = None if unit else _name(analyses, analysis, "float32")
            axes.plot(range(start, start + len(profile) - 1), profile[:-1], **style)
            start += len(profile) - 1
    _finish(axes, analyses, 0.0, "relative reconstruction error", yscale="log")


@chart()
def sensitivity(axes: Any, analyses: Sequence[Analysis]) -> None:
    """The answer of the class scores to noise and to an adversary."""
    changes: list[float] = []
    for row, analysis in enumerate(analyses):
        for column, (label, found) in enumerate((("noise", analysis.noise), ("FGSM", analysis.adversary))):
            answers = [100.0 * answer.logit_change for answer in found]
            style = look(2 * row + column) | {"linestyle": _LINES[row], "label": _name(analyses, analysis, label)}
            axes.plot([answer.size for answer in found], answers, **style)
            changes += answers
    axes.set(xlabel="size of the disturbance, input standard deviations", ylabel="change of the logits, %")
    axes.set(xscale="log", yscale="log")
    plain_numbers(axes.xaxis, [answer.size for answer in analyses[0].noise])
    plain_numbers(axes.yaxis, changes)
    _legend(axes, outside=len(analyses) > 1)


@chart(figsize=(5.4, 3.8))
def linear_revnet_map(axes: Any, found: LinearRevNet) -> None:
    """Growth in one block of the linear RevNet over (α, β), and the edge of its stable region."""
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
    axes.figure.colorbar(image, label="log₂ of the growth in a block")
    axes.set(xlabel="α, factor of G", ylabel="β, factor of F", xlim=extent[:2], ylim=extent[2:])
    axes.grid(visible=False)
    for x, y in ((alpha[-1] * 0.45, beta[0] * 0.25), (alpha[0] * 0.45, beta[-1] * 0.25)):
        axes.text(x, y, "stable", color="white", ha="center", va="center")
