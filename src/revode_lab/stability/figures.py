"""The figures of a stability report: what each shows of one network, as curves by name, and how they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from revode.schemes import AdditiveCoupling
from revode_lab import charts
from revode_lab.stability.analysis import Analysis
from revode_lab.stability.dynamics import amplification

Curves = dict[str, charts.Points]


class Figure(NamedTuple):
    """A figure of the page.

    Attributes:
        curves: what it shows of one network; nothing where the network has no such thing.
        draw: from the networks and all their curves to markup.
        caption: what the reader should see in it.
    """

    curves: Callable[[Analysis], Curves]
    draw: Callable[[Sequence[Analysis], Curves], str]
    caption: str

    def markup(self, analyses: Sequence[Analysis]) -> str | None:
        """Return the figure, with names of networks in its legend where there are two; None where there is nothing to show."""
        series = {(a.name, label): points for a in analyses for label, points in self.curves(a).items()}
        named = {", ".join(key) if len(analyses) > 1 else key[1]: points for key, points in series.items()}
        return self.draw(analyses, named) if named else None


def _over_depth(ylabel: str, shift: float = 0.0, **options: Any) -> Callable[[Sequence[Analysis], Curves], str]:
    """Return a function that draws curves over depth with thin lines between the first network's units.

    A shift of 0.5 goes with points that are blocks, so that lines lie between two of them.
    """

    def draw(analyses: Sequence[Analysis], series: Curves) -> str:
        entries = [place for place in analyses[0].lyapunov.places if place.kind == "enter"]
        borders = [place.depth + shift for place in entries[1:]]
        settings = {"log_y": True, "borders": borders} | options
        return charts.lines(series, "block" if shift else "depth, blocks", ylabel, **settings)

    return draw


def _growth(analysis: Analysis) -> Curves:
    depths, factors = analysis.lyapunov.over_depth()
    return {f"perturbation {i}": (depths, column.tolist()) for i, column in enumerate(factors.t(), start=1)}


def _norms(analysis: Analysis) -> Curves:
    found = analysis.propagation
    steps = [i for i, place in enumerate(found.places) if place.kind in ("enter", "step")]
    units = [[i for i in steps if found.places[i].unit == unit] for unit in range(found.places[-1].unit + 1)]
    depths = [[found.places[i].depth for i in own] for own in units]
    values = {"signal": found.signal / found.signal[steps[0]], "gradient": found.gradient / found.gradient[steps[-1]]}
    return {
        name: _broken(zip(depths, (value[own].tolist() for own in units), strict=True))
        for name, value in values.items()
    }


def _broken(pieces: Iterable[charts.Points]) -> charts.Points:
    """Return one curve of several pieces that are not joined."""
    x: list[float] = []
    y: list[float] = []
    for more_x, more_y in pieces:
        x += [*more_x, float("nan")]
        y += [*more_y, float("nan")]
    return x, y


def _eigenvalues(analysis: Analysis) -> Curves:
    return {f"unit {unit + 1}": (v.real.tolist(), v.imag.tolist()) for (unit, _), v in analysis.spectra.items()}


def _energy(analysis: Analysis) -> Curves:
    found = analysis.energy
    if found is None:
        return {}
    blocks = range(1, len(found.units) + 1)
    between = [block + 0.5 for block, a, b in zip(blocks, found.units, found.units[1:], strict=False) if a == b]
    return {
        "one step of the integrator": (blocks, (100.0 * found.step_change.abs()).tolist()),
        "change to the next block's weights": (between, (100.0 * found.jump.abs()).tolist()),
    }


def _step_usage(analysis: Analysis) -> Curves:
    if not analysis.bounds:
        return {}
    blocks = range(1, len(analysis.bounds) + 1)
    return {"h / bound": (blocks, [100.0 * bound.usage for bound in analysis.bounds])}


def _reconstruction(analysis: Analysis) -> Curves:
    pieces, start = [], 0
    for profile in analysis.profiles:
        pieces.append((range(start, start + len(profile) - 1), profile[:-1]))
        start += len(profile) - 1
    return {"float32": _broken(pieces)} if pieces else {}


def _sensitivity(analysis: Analysis) -> Curves:
    kinds = {"noise": analysis.noise, "FGSM": analysis.adversary}
    return {kind: ([a.size for a in found], [100.0 * a.logit_change for a in found]) for kind, found in kinds.items()}


FIGURES = {
    "perturbations": Figure(
        _growth,
        _over_depth("growth, factor"),
        "Growth of small perturbations inside the units, one for each tangent vector. "
        "Dotted: borders of units, of the first network where there are two; what transitions do is left out.",
    ),
    "signals": Figure(
        _norms,
        _over_depth("norm, relative to its start"),
        "Norm of the signal from the first block on, and of the loss's gradient from the last block back. Both jump at "
        "borders of units (dotted: those of the first network): there a transition averages pixels and adds channels, "
        "which is no step of the ODE.",
    ),
    "eigenvalues": Figure(
        _eigenvalues,
        lambda analyses, series: charts.eigenvalues(series),
        "Eigenvalues of the ODE in the middle block of each unit, on a patch of the first image's state. To the right of "
        "the line, perturbations grow.",
    ),
    "energy": Figure(
        _energy,
        _over_depth("change of H, %", 0.5, mark=True),
        "Change of the Hamiltonian, without its sign, by its two causes.",
    ),
    "step size": Figure(
        _step_usage,
        _over_depth("step size in use, % of its bound", 0.5, log_y=False, levels={"unstable above": 100.0}),
        "The bound on h of every block at a frozen state. Norms are certified to 2 %, the bounds err on the safe side. "
        "Where a norm depends on the state, the bound is that of the first image's state.",
    ),
    "reversing": Figure(
        _reconstruction,
        _over_depth("relative reconstruction error"),
        "Relative error of the pair on the way back through each unit. It starts anew at the end of each unit (dotted), "
        "whose last pair is kept.",
    ),
    "sensitivity": Figure(
        _sensitivity,
        lambda analyses, series: charts.lines(
            series, "size of the disturbance, input standard deviations", "change of the logits, %",
            log_x=True, log_y=True, mark=True,
        ),
        "Change of the logits under Gaussian noise, and under one step of the same size for each pixel along the sign "
        "of the gradient (FGSM).",
    ),
}  # fmt: skip
"""Subject -> its figure, which the subject's sentence describes to a reader who cannot see it."""


@charts.chart(figsize=(5.4, 3.8))
def linear_revnet_map(axes: Any, reach: float = 3.0) -> None:
    """Return growth in one block of the linear RevNet over (α, β) up to `reach`, and the edge of its stable region."""
    ticks = torch.linspace(-reach, reach, 49, dtype=torch.float64)
    growth = amplification(AdditiveCoupling(), *torch.meshgrid(ticks, ticks, indexing="xy")).abs().amax(-1)
    extent = (-reach, reach, -reach, reach)
    image = axes.imshow(growth.log2().numpy(), cmap="cividis", extent=extent, origin="lower", aspect="auto")
    fine = torch.linspace(-reach, reach, 401)
    for sign in (-1.0, 1.0):
        side = fine[fine * sign > 4.0 / reach]
        axes.plot(side, -4.0 / side, color="white", linewidth=1.6)
    axes.axvline(0.0, color="white", linewidth=1.6)
    axes.axhline(0.0, color="white", linewidth=1.6)
    axes.figure.colorbar(image, label="log₂ of the growth in a block")
    axes.set(xlabel="α, factor of G", ylabel="β, factor of F", xlim=extent[:2], ylim=extent[2:])
    axes.grid(visible=False)
    for x, y in ((0.45 * reach, -0.25 * reach), (-0.45 * reach, 0.25 * reach)):
        axes.text(x, y, "stable", color="white", ha="center", va="center")
