"""From an analysis to its page: sections of sentences and figures."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from revode.files import write_atomically
from revode.page import Page
from revode.stability import figures
from revode.stability.analysis import Analysis
from revode.stability.reversibility import LinearRevNet, linear_revnet
from revode.stability.sentences import comparison, sentences, verdict

PAGE, NUMBERS = "stability.html", "stability.json"


class Figure(NamedTuple):
    """A figure of the page: how it is drawn, its caption, and the subject whose sentence describes it to who cannot see it."""

    draw: Callable[[Any], str]
    caption: str
    subject: str


SECTIONS: dict[str, tuple[Figure, ...]] = {
    "Do perturbations grow?": (
        Figure(
            figures.growth,
            "Growth of small perturbations inside the units. Lines: tangent vectors. Markers: two trajectories. "
            "Dotted: borders of units; what the transition does there is left out.",
            "perturbations",
        ),
        Figure(
            figures.norms,
            "Norm of the signal from the first block on, and of the loss's gradient from the last block back. It jumps at "
            "borders of units (dotted): there a transition averages pixels and adds channels, which is no step of the ODE.",
            "signals",
        ),
        Figure(
            figures.spectra,
            "Eigenvalues of the ODE in the middle block of each unit, on a patch of the first image's state. To the right of "
            "the line, perturbations grow.",
            "eigenvalues",
        ),
        Figure(
            lambda analyses: figures.energy(analyses[0]),
            "Change of the Hamiltonian of the first network, without its sign, by its two causes.",
            "energy",
        ),
    ),
    "How large may a step be?": (
        Figure(
            figures.step_usage,
            "The bound on h of every block at a frozen state. Norms are certified to 2 %, the bounds err on the safe side. "
            "Where a norm depends on the state, the bound is that of the first image's state.",
            "step size",
        ),
    ),
    "Can it be reversed?": (
        Figure(
            figures.reconstruction,
            "Relative error of the pair on the way back through each unit. It starts anew at the end of each unit (dotted), "
            "whose last pair is kept.",
            "reversing",
        ),
    ),
    "How sensitive are the class scores?": (
        Figure(
            figures.sensitivity,
            "Change of the logits under Gaussian noise, and under one step of the same size for each pixel along the sign "
            "of the gradient (FGSM).",
            "sensitivity",
        ),
    ),
}
"""Heading -> its figures; each comes with the sentence of its subject, if the analysis has one."""


def write_page(analyses: Sequence[Analysis], folder: str | Path, source: str) -> Path:
    """Write the page and the numbers; returns the page's path.

    Args:
        analyses: one network, or two to compare.
        folder: where to write; made if absent.
        source: what the images are, in words.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {folder} ({error.strerror}); choose another directory") from error
    numbers = [analysis.to_dict() for analysis in analyses]
    write_atomically(folder / NUMBERS, json.dumps(numbers[0] if len(numbers) == 1 else numbers, indent=1) + "\n")
    return _page(analyses, source).write(folder / PAGE)


def _page(analyses: Sequence[Analysis], source: str) -> Page:
    first, said = analyses[0], sentences(analyses[0])
    title = f"Stability of {' against '.join(analysis.name for analysis in analyses)}"
    page = Page(title, f"{first.num_images} images ({source}), {', '.join(dict.fromkeys(first.schemes))}")
    for analysis in analyses:
        page.text(verdict(analysis))
    _cards(page, first)
    if len(analyses) > 1:
        names = [analysis.name for analysis in analyses]
        page.table(["", *names], comparison(analyses), "Both networks on the same images.")
    for heading, own in SECTIONS.items():
        page.heading(heading)
        known = [figure for figure in own if figure.subject in said]
        for figure in known:
            page.text(said[figure.subject])
        for figure in known:
            if figure.subject != "step size" or any(analysis.bounds for analysis in analyses):
                page.figure(figure.draw(analyses), figure.caption, said[figure.subject])
        if heading == "Can it be reversed?":
            _drift_table(page, analyses)
    _linear_revnet(page)
    _numbers(page, analyses)
    return page


def _cards(page: Page, analysis: Analysis) -> None:
    top = analysis.tightest
    page.cards(
        [
            ("growth of perturbations", f"{analysis.lyapunov.growth:.3g}×", f"over {analysis.num_layers} layers"),
            ("step size", "no bound" if top is None else f"{top.usage:.0%}", "of its bound, tightest layer"),
            ("gradient", f"{analysis.propagation.gradient_growth:.3g}×", "growth on its way back"),
            ("largest real part", f"{analysis.max_real:.1e}", "of the frozen ODE's eigenvalues"),
            ("reversing", f"{max(map(max, analysis.profiles)):.1e}", "relative error in float32"),
        ]
    )


_DRIFT_KINDS = {"float32": ("float32", False), "float64": ("float64", False), "grid": ("float32", True)}


def _drift_table(page: Page, analyses: Sequence[Analysis]) -> None:
    """Errors by depth, a table for each network; a dash where the grid does not apply."""
    for analysis in analyses:
        found = {(row.depth, row.dtype, row.exact): row for row in analysis.drifts}
        rows = []
        for depth in sorted({row.depth for row in analysis.drifts}):
            kinds = [found.get((depth, *kind)) for kind in _DRIFT_KINDS.values()]
            cells = ["–" if row is None else f"{_short(row.reconstruction)}, {_short(row.gradient)}" for row in kinds]
            rows.append([str(depth), *cells])
        page.table(
            ["blocks", *_DRIFT_KINDS],
            rows,
            f"The first blocks of the deepest unit of {analysis.name}: relative error of its input found back, and of its "
            "gradients to store's. Grid: float32 with exact=True.",
        )


def _short(error: float) -> str:
    return f"{error:.1e}" if error else "0"


@functools.cache
def _linear_map() -> tuple[LinearRevNet, float]:
    """The linear RevNet on a fine grid, and the largest difference of |ξ| to a long simulation on a coarse one."""
    ticks = torch.linspace(-3.0, 3.0, 49)
    coarse = linear_revnet(ticks[::6], ticks[::6])
    return linear_revnet(ticks, ticks, num_steps=8), float((coarse.simulated - coarse.predicted).abs().max())


def _linear_revnet(page: Page) -> None:
    page.heading("The linear RevNet")
    found, error = _linear_map()
    page.text(
        "With branches F(z) = βz and G(y) = αy, a RevNet multiplies its modes by the roots ξ of ξ² - (2 + αβ)ξ + 1 = 0 in "
        "every block. It is stable only where -4 ≤ αβ ≤ 0: opposite signs and small. Verlet's minus sign and an h within "
        "its bound put every mode of a Hamiltonian network there, at a frozen state. "
        f"Simulated growth differs from |ξ| by at most {error:.0e}."
    )
    page.figure(
        figures.linear_revnet_map(found),
        "Growth of the linear RevNet for each block. Inside the white lines |ξ| = 1.",
        "The stable region is where alpha and beta have opposite signs and their product is above -4.",
    )


def _numbers(page: Page, analyses: Sequence[Analysis]) -> None:
    page.heading("Numbers")
    for analysis in analyses:
        short = {name: value for name, value in analysis.to_dict().items() if not isinstance(value, list)}
        page.details(f"{analysis.name}, measured in {analysis.seconds:.0f} s", json.dumps(short, indent=1))
    calibrated = [f"{a.num_calibrated} of {a.name}" for a in analyses if a.num_calibrated]
    if calibrated:
        page.text(
            "Batch norms that had seen no data took the statistics of these images: " + ", ".join(calibrated) + "."
        )
