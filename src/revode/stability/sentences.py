"""What an analysis says in plain sentences, and as a summary for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from revode.stability.analysis import Analysis


def sentences(analysis: Analysis) -> dict[str, str]:
    """What the numbers say, by subject."""
    found = {
        "step size": _step_size(analysis),
        "perturbations": _perturbations(analysis),
        "signals": _signals(analysis),
        "eigenvalues": _eigenvalues(analysis),
        "energy": _energy(analysis),
        "reversing": _reversing(analysis),
        "sensitivity": _sensitivity(analysis),
    }
    return {subject: sentence for subject, sentence in found.items() if sentence}


CALM = 10.0
"""Growth of perturbations over a whole network from which on it is not called stable."""


def verdict(analysis: Analysis) -> str:
    """Whether the network is stable, and why, in one sentence."""
    growth, top = analysis.lyapunov.growth, analysis.tightest
    faults = []
    if not growth < CALM:
        faults.append(f"perturbations grow {_times(growth)} over its {analysis.num_layers} layers")
    if top is not None and top.usage > 1.0:
        faults.append(f"a step uses {top.usage:.0%} of its bound")
    if faults:
        return f"{analysis.name} is not stable on these images: {' and '.join(faults)}."
    bound = "" if top is None else f", every step is within its bound (at most {top.usage:.0%} of it)"
    error = max(map(max, analysis.profiles))
    return (
        f"{analysis.name} is stable on these images: perturbations grow {_times(growth)} over its {analysis.num_layers} "
        f"layers{bound}, and states are found back to {error:.0e}."
    )


def _step_size(analysis: Analysis) -> str:
    top = analysis.tightest
    if top is None:
        return (
            "This scheme has no step size and so no bound on one: nothing in it keeps perturbations from growing, "
            "only training can."
        )
    where = f"block {top.step + 1} of unit {top.unit + 1}"
    flipped = sum(bound.flipped for bound in analysis.bounds)
    caveat = (
        f" In {flipped} of {len(analysis.bounds)} layers batch norm has negative weights; there a step within its bound "
        "may grow all the same."
        if flipped
        else ""
    )
    if top.usage > 1.0:
        return (
            f"At h = {top.h:g} the tightest layer ({where}) uses {top.usage:.0%} of its bound: it is beyond what is "
            f"stable at a frozen state. h up to {top.sharp:.3g} would be within.{caveat}"
        )
    return (
        f"At h = {top.h:g} the tightest layer ({where}) uses {top.usage:.0%} of its bound: "
        f"h could be up to {top.sharp:.3g}.{caveat}"
    )


def _perturbations(analysis: Analysis) -> str:
    found = analysis.lyapunov
    return (
        f"Perturbations grow {_times(found.growth)} over {analysis.num_layers} layers "
        f"(leading Lyapunov exponent {float(found.exponents[0]):+.3g} in T = {found.time:g}); two trajectories a "
        f"small distance apart give {_times(analysis.finite_size.growth)}."
    )


def _signals(analysis: Analysis) -> str:
    found = analysis.propagation
    return (
        f"Inside the units the signal grows {_times(found.signal_growth)} and the gradient, on its way back, "
        f"{_times(found.gradient_growth)}."
    )


def _eigenvalues(analysis: Analysis) -> str:
    radius = max(float(values.abs().max()) for values in analysis.spectra.values())
    if analysis.axis_distance < 1e-6:
        return (
            f"With weights and state frozen, all eigenvalues lie on the imaginary axis "
            f"(real parts below {analysis.axis_distance:.0e} of the largest modulus, {radius:.3g})."
        )
    return (
        f"Even with weights and state frozen, eigenvalues leave the imaginary axis: real parts reach "
        f"{analysis.max_real:+.3g} at a largest modulus of {radius:.3g}."
    )


def _energy(analysis: Analysis) -> str:
    if analysis.energy is None:
        return ""
    step = float(analysis.energy.step_change.abs().median())
    jump = analysis.energy.jump.abs()
    if not len(jump):
        return f"The Hamiltonian changes by {step:.2g} of itself in a typical step."
    return (
        f"A typical step changes the Hamiltonian by {step:.2%}; going over to the next block's weights changes it by "
        f"{float(jump.median()):.2%}, which no bound on h forbids."
    )


def _reversing(analysis: Analysis) -> str:
    worst = max(max(profile) for profile in analysis.profiles)
    exact = [row for row in analysis.drifts if row.exact]
    text = f"Walking back in float32 finds the states of a unit to a relative error of {worst:.1e}"
    if exact and all(row.reconstruction == 0.0 and row.gradient == 0.0 for row in exact):
        return f"{text}; on the grid (exact=True) states and gradients come back bit for bit."
    return f"{text}."


def _sensitivity(analysis: Analysis) -> str:
    noise, adversary = analysis.noise[-2], analysis.adversary[-2]
    return (
        f"Noise of {noise.size:g} standard deviations of the input moves the logits by {noise.logit_change:.1%}, an "
        f"adversary (FGSM) of the same size by {adversary.logit_change:.1%}, and changes {adversary.flipped:.0%} of the "
        "predicted classes."
    )


def _times(factor: float) -> str:
    return f"{factor:.3g} times"


def comparison(analyses: Sequence[Analysis]) -> list[list[str]]:
    """Rows of key numbers, one column for each network."""
    rows: list[tuple[str, list[str]]] = [
        ("layers", [f"{a.num_layers}" for a in analyses]),
        ("h in use, of its bound", ["–" if a.tightest is None else f"{a.tightest.usage:.0%}" for a in analyses]),
        ("growth of perturbations", [f"{a.lyapunov.growth:.3g}" for a in analyses]),
        ("leading Lyapunov exponent", [f"{float(a.lyapunov.exponents[0]):+.3g}" for a in analyses]),
        ("growth of the signal", [f"{a.propagation.signal_growth:.3g}" for a in analyses]),
        ("growth of the gradient", [f"{a.propagation.gradient_growth:.3g}" for a in analyses]),
        ("largest real part", [f"{a.max_real:.2g}" for a in analyses]),
        ("reconstruction error", [f"{max(map(max, a.profiles)):.1e}" for a in analyses]),
        ("logits, noise of 0.1", [f"{a.noise[-2].logit_change:.1%}" for a in analyses]),
        ("logits, FGSM of 0.1", [f"{a.adversary[-2].logit_change:.1%}" for a in analyses]),
    ]
    return [[label, *values] for label, values in rows]


def summary(analyses: Sequence[Analysis], source: str) -> str:
    """The report for a terminal: 80 columns, no colour."""
    lines = [f"{' against '.join(a.name for a in analyses)}, {analyses[0].num_images} images ({source})", ""]
    for analysis in analyses:
        lines += [*textwrap.wrap(verdict(analysis), 79), ""]
    for subject, sentence in sentences(analyses[0]).items():
        lines += textwrap.wrap(sentence, 79, initial_indent=f"{subject + ':':<15}", subsequent_indent=" " * 15)
    if len(analyses) > 1:
        lines += ["", f"{'':<28}" + "".join(f"{a.name[:24]:>25}" for a in analyses)]
        lines += [f"{row[0]:<28}" + "".join(f"{value:>25}" for value in row[1:]) for row in comparison(analyses)]
    return "\n".join(lines)
