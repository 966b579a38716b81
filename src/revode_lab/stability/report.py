"""From an analysis to words: sentences, the summary for a terminal, and the page."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from revode.files import write_atomically
from revode_lab.page import Page
from revode_lab.stability.analysis import Analysis
from revode_lab.stability.figures import FIGURES, linear_revnet_map

PAGE, NUMBERS = "stability.html", "stability.json"
CALM = 10.0
"""Growth of perturbations over a whole network from which on it is not called stable."""


def verdict(analysis: Analysis) -> str:
    """Say in one sentence if the network is stable, and why."""
    top = analysis.tightest
    growth = f"perturbations grow {analysis.lyapunov.growth:.3g} times over its {analysis.num_layers} layers"
    faults = [growth] if not analysis.lyapunov.growth < CALM else []
    if top is not None and top.usage > 1.0:
        faults.append(f"a step uses {top.usage:.0%} of its bound")
    if faults:
        return f"{analysis.name} is not stable on these images: {' and '.join(faults)}."
    bound = "" if top is None else f", every step is within its bound (at most {top.usage:.0%} of it)"
    error = analysis.reconstruction_error
    found = "" if error is None else f", and states are found back to {error:.0e}"
    return f"{analysis.name} is stable on these images: {growth}{bound}{found}."


def sentences(analysis: Analysis) -> dict[str, str]:
    """Return a sentence on each subject."""
    lyapunov, signals = analysis.lyapunov, analysis.propagation
    noise, adversary = analysis.noise[-2], analysis.adversary[-2]
    found = {
        "step size": _step_size(analysis),
        "perturbations": f"Perturbations grow {lyapunov.growth:.3g} times over {analysis.num_layers} layers "
        f"(leading Lyapunov exponent {float(lyapunov.exponents[0]):+.3g} in T = {lyapunov.time:g}).",
        "signals": f"Inside the units the signal grows {signals.signal_growth:.3g} times and the gradient, on its way "
        f"back, {signals.gradient_growth:.3g} times.",
        "eigenvalues": _eigenvalues(analysis),
        "energy": _energy(analysis),
        "reversing": _reversing(analysis),
        "sensitivity": f"Noise of {noise.size:g} standard deviations of the input moves the logits by "
        f"{noise.logit_change:.1%}, an adversary (FGSM) of the same size by {adversary.logit_change:.1%}, and changes "
        f"{adversary.flipped:.0%} of the predicted classes.",
    }
    return {subject: sentence for subject, sentence in found.items() if sentence}


def _step_size(analysis: Analysis) -> str:
    top = analysis.tightest
    if top is None:
        return (
            "There is no bound on the step of this scheme: nothing in it keeps perturbations from growing, "
            "only training can."
        )
    where = f"block {top.step + 1} of unit {top.unit + 1}"
    text = f"At h = {top.h:g} the tightest layer ({where}) uses {top.usage:.0%} of its bound: "
    if top.usage > 1.0:
        text += f"even at a frozen state it may grow. h up to {top.sharp:.3g} would be within."
    else:
        text += f"h could be up to {top.sharp:.3g}."
    flipped = sum(bound.flipped for bound in analysis.bounds)
    if flipped:
        text += (
            f" In {flipped} of {len(analysis.bounds)} layers a batch norm has negative weights or an activation has a negative "
            "slope; there a step within its bound may grow all the same."
        )
    return text


def _eigenvalues(analysis: Analysis) -> str:
    if analysis.axis_distance is None or analysis.max_real is None:
        return ""
    if analysis.axis_distance < 1e-6:
        return (
            f"With weights and state frozen, all eigenvalues lie on the imaginary axis "
            f"(real parts below {analysis.axis_distance:.0e} of the largest modulus, {analysis.radius:.3g})."
        )
    where = f"real parts reach {analysis.max_real:+.3g} at a largest modulus of {analysis.radius:.3g}"
    if analysis.max_real < 0.0:
        return (
            f"With weights and state frozen, all eigenvalues lie left of the imaginary axis, as damping wants: {where}."
        )
    return f"Even with weights and state frozen, eigenvalues leave the imaginary axis: {where}."


def _energy(analysis: Analysis) -> str:
    if analysis.energy is None:
        return ""
    step, jump = analysis.energy.step_change.abs().median(), analysis.energy.jump.abs()
    if not len(jump):
        return f"The Hamiltonian changes by {float(step):.2g} of itself in a typical step."
    return (
        f"A typical step changes the Hamiltonian by {float(step):.2%}; going over to the next block's weights changes it "
        f"by {float(jump.median()):.2%}, which no bound on h forbids."
    )


def _reversing(analysis: Analysis) -> str:
    worst = analysis.reconstruction_error
    if worst is None:
        return "Its blocks are not reversible: nothing is walked back, and there is no ODE step to have eigenvalues or a bound."
    text = f"Walking back in float32 finds the states of a unit to a relative error of {worst:.1e}"
    exact = [row for row in analysis.drifts if row.exact]
    if exact and all(row.reconstruction == 0.0 and row.gradient == 0.0 for row in exact):
        text += "; on the grid (exact=True) states and gradients come back bit for bit"
    return f"{text}."


def _number(value: float | None, form: str) -> str:
    """Return the number, or a dash where the network has none."""
    return "–" if value is None else format(value, form)


COMPARED: dict[str, Callable[[Analysis], str]] = {
    "layers": lambda a: f"{a.num_layers}",
    "h in use, of its bound": lambda a: "–" if a.tightest is None else f"{a.tightest.usage:.0%}",
    "growth of perturbations": lambda a: f"{a.lyapunov.growth:.3g}",
    "leading Lyapunov exponent": lambda a: f"{float(a.lyapunov.exponents[0]):+.3g}",
    "growth of the signal": lambda a: f"{a.propagation.signal_growth:.3g}",
    "growth of the gradient": lambda a: f"{a.propagation.gradient_growth:.3g}",
    "largest real part": lambda a: _number(a.max_real, ".2g"),
    "reconstruction error": lambda a: _number(a.reconstruction_error, ".1e"),
    "logits, noise of 0.1": lambda a: f"{a.noise[-2].logit_change:.1%}",
    "logits, FGSM of 0.1": lambda a: f"{a.adversary[-2].logit_change:.1%}",
}
"""The key numbers of two networks side by side."""


def summary(analyses: Sequence[Analysis], source: str) -> str:
    """Return the report for a terminal: 80 columns, no colour."""
    lines = [f"{' against '.join(a.name for a in analyses)}, {analyses[0].num_images} images ({source})", ""]
    for analysis in analyses:
        lines += [*textwrap.wrap(verdict(analysis), 79), ""]
    for subject, sentence in sentences(analyses[0]).items():
        lines += textwrap.wrap(sentence, 79, initial_indent=f"{subject + ':':<15}", subsequent_indent=" " * 15)
    if len(analyses) > 1:
        lines += ["", f"{'':<28}" + "".join(f"{a.name[:24]:>25}" for a in analyses)]
        lines += [f"{label:<28}" + "".join(f"{show(a):>25}" for a in analyses) for label, show in COMPARED.items()]
    return "\n".join(lines)


SECTIONS = {
    "Do perturbations grow?": ("perturbations", "signals", "eigenvalues", "energy"),
    "How large may a step be?": ("step size",),
    "Can it be reversed?": ("reversing",),
    "How sensitive are the class scores?": ("sensitivity",),
}
"""Heading of the page -> its subjects, each with its sentence and figure where the network has them."""


def write_page(analyses: Sequence[Analysis], folder: str | Path, source: str) -> Path:
    """Write page and numbers of one network, or of two to compare; return the page's path. `source` describes the images."""
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
    names = [analysis.name for analysis in analyses]
    schemes = ", ".join(dict.fromkeys(first.schemes))
    page = Page(f"Stability of {' against '.join(names)}", f"{first.num_images} images ({source}), {schemes}")
    for analysis in analyses:
        page.text(verdict(analysis))
    usage = "no bound" if first.tightest is None else f"{first.tightest.usage:.0%}"
    page.cards(
        [
            ("growth of perturbations", f"{first.lyapunov.growth:.3g}×", f"over {first.num_layers} layers"),
            ("step size", usage, "of its bound, tightest layer"),
            ("gradient", f"{first.propagation.gradient_growth:.3g}×", "growth on its way back"),
            ("largest real part", _number(first.max_real, ".1e"), "of the frozen ODE's eigenvalues"),
            ("reversing", _number(first.reconstruction_error, ".1e"), "relative error in float32"),
        ]
    )
    if len(analyses) > 1:
        rows = [[label, *map(show, analyses)] for label, show in COMPARED.items()]
        page.table(["", *names], rows, "Both networks on the same images.")
    for heading, subjects in SECTIONS.items():
        page.heading(heading)
        known = [subject for subject in subjects if subject in said]
        for subject in known:
            page.text(said[subject])
        for subject in known:
            markup = FIGURES[subject].markup(analyses)
            if markup is not None:
                page.figure(markup, FIGURES[subject].caption, said[subject])
        if heading == "Can it be reversed?":
            for analysis in analyses:
                if analysis.drifts:
                    _drift_table(page, analysis)
    _linear_revnet(page)
    page.heading("Numbers")
    for analysis in analyses:
        short = {name: value for name, value in analysis.to_dict().items() if not isinstance(value, list)}
        page.details(f"{analysis.name}, measured in {analysis.seconds:.0f} s", json.dumps(short, indent=1))
    calibrated = ", ".join(f"{a.num_calibrated} of {a.name}" for a in analyses if a.num_calibrated)
    if calibrated:
        page.text(f"Batch norms that had seen no data took the statistics of these images: {calibrated}.")
    return page


def _drift_table(page: Page, analysis: Analysis) -> None:
    """Add the errors by depth; a dash where the grid does not apply."""
    kinds = {"float32": ("float32", False), "float64": ("float64", False), "grid": ("float32", True)}
    errors = {
        (row.depth, row.dtype, row.exact): ", ".join(
            f"{e:.1e}" if e else "0" for e in (row.reconstruction, row.gradient)
        )
        for row in analysis.drifts
    }
    depths = sorted({row.depth for row in analysis.drifts})
    page.table(
        ["blocks", *kinds],
        [[depth, *(errors.get((depth, *kind), "–") for kind in kinds.values())] for depth in depths],
        f"The first blocks of the deepest unit of {analysis.name}: relative error of its input found back, and of its "
        "gradients to store's. Grid: float32 with exact=True.",
    )


def _linear_revnet(page: Page) -> None:
    """Add the growth of a linear RevNet over both factors."""
    page.heading("The linear RevNet")
    page.text(
        "With branches F(z) = βz and G(y) = αy, a RevNet multiplies its modes by the roots ξ of ξ² - (2 + αβ)ξ + 1 = 0 in "
        "every block. It is stable only where -4 ≤ αβ ≤ 0: opposite signs and small. Verlet's minus sign and an h within "
        "its bound put every mode of a Hamiltonian network there, at a frozen state."
    )
    page.figure(
        linear_revnet_map(),
        "Growth of the linear RevNet for each block. Inside the white lines |ξ| = 1.",
        "The stable region is where alpha and beta have opposite signs and their product is above -4.",
    )
