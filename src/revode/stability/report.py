"""From an analysis to its page."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from revode.page import Page
from revode.stability import figures
from revode.stability.analysis import Analysis
from revode.stability.reversibility import LinearRevNet, linear_revnet
from revode.stability.sentences import comparison, sentences

PAGE, NUMBERS = "stability.html", "stability.json"


def write_page(analyses: Sequence[Analysis], folder: str | Path, source: str) -> Path:
    """Write the page and the numbers; returns the page's path.

    Args:
        analyses: one network, or two to compare.
        folder: where to write; made if absent.
        source: what the images are, in words.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(f"the page needs matplotlib ({error}); install revode[analyze]") from error
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {folder} ({error.strerror}); give another --out") from error
    numbers = [analysis.to_dict() for analysis in analyses]
    (folder / NUMBERS).write_text(json.dumps(numbers[0] if len(numbers) == 1 else numbers, indent=1) + "\n")
    return _page(analyses, source).write(folder / PAGE)


def _page(analyses: Sequence[Analysis], source: str) -> Page:
    first = analyses[0]
    title = f"Stability of {' against '.join(analysis.name for analysis in analyses)}"
    page = Page(title, f"{first.num_images} images ({source}), {', '.join(dict.fromkeys(first.schemes))}")
    _cards(page, first)
    said = sentences(first)
    if len(analyses) > 1:
        page.table(
            ["", *(analysis.name for analysis in analyses)], comparison(analyses), "Both networks on the same images."
        )
    _growth_section(page, analyses, said)
    _step_section(page, analyses, said)
    _reversing_section(page, analyses, said)
    _sensitivity_section(page, analyses, said)
    _revnet_section(page)
    _numbers_section(page, analyses)
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


def _growth_section(page: Page, analyses: Sequence[Analysis], said: dict[str, str]) -> None:
    page.heading("Do perturbations grow?")
    page.text(said["perturbations"])
    page.text(said["signals"])
    page.text(said["eigenvalues"])
    if "energy" in said:
        page.text(said["energy"])
    page.figure(
        figures.growth(analyses),
        "Growth of small perturbations inside the units. Lines: tangent vectors. Markers: two trajectories. "
        "Dotted: borders of units.",
        said["perturbations"],
    )
    page.figure(
        figures.norms(analyses),
        "Norm of the signal from the first block on, and of the loss's gradient from the last block back.",
        said["signals"],
    )
    page.figure(
        figures.spectra(analyses),
        "Eigenvalues of the ODE in the middle block of each unit, on a patch of the first image's state. To the right of "
        "the line, perturbations grow.",
        said["eigenvalues"],
    )
    if analyses[0].energy is not None:
        page.figure(
            figures.energy(analyses[0]),
            f"Change of the Hamiltonian of {analyses[0].name}, without its sign, by its two causes.",
            said["energy"],
        )


def _step_section(page: Page, analyses: Sequence[Analysis], said: dict[str, str]) -> None:
    page.heading("How large may a step be?")
    page.text(said["step size"])
    if not any(analysis.bounds for analysis in analyses):
        return
    text = (
        "The bound on h of every block at a frozen state. Norms are certified to 2 %, the bounds err on the safe side."
    )
    if any(bound.basis == "state" for analysis in analyses for bound in analysis.bounds):
        text += " Where a norm depends on the state, the bound is that of the first image's state."
    page.figure(figures.step_usage(analyses), text, said["step size"])


def _reversing_section(page: Page, analyses: Sequence[Analysis], said: dict[str, str]) -> None:
    page.heading("Can it be reversed?")
    page.text(said["reversing"])
    page.figure(
        figures.reconstruction(analyses),
        "Relative error of the pair on the way back through each unit, which starts anew at the unit's end.",
        said["reversing"],
    )
    header = ["network", "blocks"]
    header += [f"{kind} {what}" for kind in _DRIFT_KINDS for what in ("state", "gradient")]
    page.table(
        header,
        [row for analysis in analyses for row in _drift_rows(analysis)],
        "The first blocks of the deepest unit: relative error of its input found back, and of its gradients to store's. "
        "Grid: float32 with exact=True.",
    )


_DRIFT_KINDS = {"float32": ("float32", False), "float64": ("float64", False), "grid": ("float32", True)}


def _drift_rows(analysis: Analysis) -> list[list[str]]:
    """Errors by depth; one column for each kind of arithmetic and error, a dash where the grid does not apply."""
    found = {(row.depth, row.dtype, row.exact): row for row in analysis.drifts}
    rows = []
    for depth in sorted({row.depth for row in analysis.drifts}):
        cells = [analysis.name, str(depth)]
        for kind in _DRIFT_KINDS.values():
            row = found.get((depth, *kind))
            cells += (
                ["–", "–"] if row is None else [f"{e:.1e}" if e else "0" for e in (row.reconstruction, row.gradient)]
            )
        rows.append(cells)
    return rows


def _sensitivity_section(page: Page, analyses: Sequence[Analysis], said: dict[str, str]) -> None:
    page.heading("How sensitive are the class scores?")
    page.text(said["sensitivity"])
    page.figure(
        figures.sensitivity(analyses),
        "Change of the logits under Gaussian noise, and under one step of the same size for each pixel along the sign "
        "of the gradient (FGSM).",
        said["sensitivity"],
    )


@functools.cache
def _linear_map() -> tuple[LinearRevNet, float]:
    """The linear RevNet on a fine grid, and the largest difference of |ξ| to a long simulation on a coarse one."""
    ticks = torch.linspace(-3.0, 3.0, 49)
    coarse = linear_revnet(ticks[::6], ticks[::6])
    return linear_revnet(ticks, ticks, num_steps=8), float((coarse.simulated - coarse.predicted).abs().max())


def _revnet_section(page: Page) -> None:
    page.heading("The linear RevNet")
    found, error = _linear_map()
    text = (
        "With branches F(z) = βz and G(y) = αy, a RevNet multiplies its modes by the roots ξ of ξ² - (2 + αβ)ξ + 1 = 0 in "
        "every block. It is stable only where -4 ≤ αβ ≤ 0: opposite signs and small. Verlet's minus sign and an h within "
        "its bound put every mode of a Hamiltonian network there, at a frozen state. "
        f"Simulated growth differs from |ξ| by at most {error:.0e}."
    )
    page.text(text)
    page.figure(
        figures.linear_revnet_map(found),
        "Growth of the linear RevNet for each block. Inside the white lines |ξ| = 1.",
        "The stable region is where alpha and beta have opposite signs and their product is above -4.",
    )


def _numbers_section(page: Page, analyses: Sequence[Analysis]) -> None:
    page.heading("Numbers")
    for analysis in analyses:
        short = {name: value for name, value in analysis.to_dict().items() if not isinstance(value, list)}
        page.details(f"{analysis.name}, measured in {analysis.seconds:.0f} s", json.dumps(short, indent=1))
    calibrated = [f"{a.num_calibrated} of {a.name}" for a in analyses if a.num_calibrated]
    if calibrated:
        page.text(
            "Batch norms that had seen no data took the statistics of these images: " + ", ".join(calibrated) + "."
        )
