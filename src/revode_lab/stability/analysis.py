"""`analyze`: everything the lab can say about one network, as numbers."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode_lab.stability.bounds import LayerBound, largest_usage, step_bounds
from revode_lab.stability.lyapunov import Lyapunov, lyapunov_exponents
from revode_lab.stability.propagation import (
    Energy,
    Propagation,
    Sensitivity,
    adversarial_sensitivity,
    hamiltonian_energy,
    noise_sensitivity,
    reconstruction_profile,
    signal_propagation,
)
from revode_lab.stability.reversibility import Drift, drift
from revode_lab.stability.spectra import Spectrum, unit_spectra
from revode_lab.stability.walk import (
    analysis_copy,
    calibrate_batch_norm,
    first_not_finite,
    steps_of,
    unit_inputs,
    walked_units,
)

CHUNK = 8
"""Images that are worked on at a time where memory grows with depth or with the number of tangents."""


@dataclass(frozen=True)
class Analysis:
    """One network's stability.

    Attributes:
        num_layers: layers as the paper counts them; steps where a model does not say.
        num_images: number of inputs.
        num_calibrated: batch norms that had seen no data and took the statistics of the inputs.
        schemes: the integrators of the units, as they print.
        lyapunov: growth of k perturbations in tangent space.
        bounds: the bound on h of every step; empty where the scheme has none.
        spectra: (unit, step) -> eigenvalues of the frozen ODE on a patch of the first image's state.
        propagation: norms of signal and gradient.
        energy: the Hamiltonian along depth, or None.
        profiles: reconstruction error of every step of every unit, in the model's dtype.
        drifts: reconstruction and gradient error of the deepest unit over depth, dtype and grid.
        noise: answers to random noise.
        adversary: answers to FGSM steps.
    """

    name: str
    num_layers: int
    num_images: int
    num_calibrated: int
    schemes: list[str]
    lyapunov: Lyapunov
    bounds: list[LayerBound]
    spectra: dict[tuple[int, int], Tensor]
    propagation: Propagation
    energy: Energy | None
    profiles: list[list[float]]
    drifts: list[Drift]
    noise: list[Sensitivity]
    adversary: list[Sensitivity]
    seconds: float

    @property
    def tightest(self) -> LayerBound | None:
        """The step that uses most of its bound."""
        return largest_usage(self.bounds)

    @property
    def max_real(self) -> float | None:
        """The largest real part of all spectra; None of a network without any, as the numbers below."""
        return max((float(values.real.max()) for values in self.spectra.values()), default=None)

    @property
    def radius(self) -> float | None:
        """The largest modulus of all spectra."""
        return max((float(values.abs().max()) for values in self.spectra.values()), default=None)

    @property
    def reconstruction_error(self) -> float | None:
        """The largest relative error of a state on the way back."""
        return max(map(max, self.profiles), default=None)

    @property
    def axis_distance(self) -> float | None:
        """The largest max |Re λ| / max |λ| of all spectra."""
        return max((Spectrum(v, len(v), "dense").axis_distance for v in self.spectra.values()), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, for JSON; what is not finite becomes None."""
        top = self.tightest
        return _plain(
            {
                "model": self.name,
                "layers": self.num_layers,
                "steps": self.lyapunov.places[-1].depth,
                "images": self.num_images,
                "time": self.lyapunov.time,
                "perturbation_growth": self.lyapunov.growth,
                "lyapunov_exponents": self.lyapunov.exponents.tolist(),
                "lyapunov_log_growth": self.lyapunov.log_growth.tolist(),
                "step_usage": None if top is None else top.usage,
                "step_margin": None if top is None else top.margin,
                "suggested_h": None if top is None else 0.9 * min(bound.sharp for bound in self.bounds),
                "bounds": [dataclasses.asdict(bound) | {"usage": bound.usage} for bound in self.bounds],
                "max_real_part": self.max_real,
                "spectral_radius": self.radius,
                "axis_distance": self.axis_distance,
                "signal_growth": self.propagation.signal_growth,
                "gradient_growth": self.propagation.gradient_growth,
                "signal_norms": self.propagation.signal.tolist(),
                "gradient_norms": self.propagation.gradient.tolist(),
                "energy_step_change": None if self.energy is None else self.energy.step_change.tolist(),
                "energy_jump": None if self.energy is None else self.energy.jump.tolist(),
                "reconstruction_errors": self.profiles,
                "drift": [dataclasses.asdict(row) for row in self.drifts],
                "noise": [dataclasses.asdict(row) for row in self.noise],
                "fgsm": [dataclasses.asdict(row) for row in self.adversary],
                "seconds": self.seconds,
            }
        )


def _plain(value: Any) -> Any:
    """Put None in the place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def analyze(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    name: str | None = None,
    k: int = 2,
    seed: int = 0,
    note: Callable[[str], None] = lambda line: None,
) -> Analysis:
    """Measure everything about a classifier, with `k` Lyapunov exponents; `note` is called with the present measurement."""
    began = time.perf_counter()
    if len(images) == 0:
        raise ValueError("the analysis needs at least one image")
    copied, images = analysis_copy(model, torch.float32), images.float()
    num_calibrated = calibrate_batch_norm(copied, images)
    if first_not_finite(copied) is not None:
        raise ValueError("states of this network overflow on these images: take a smaller h or horizon")
    few = images[:CHUNK]
    note("perturbations")
    lyapunov = lyapunov_exponents(copied, images, k=k, dtype=torch.float32, seed=seed, chunk=CHUNK)
    note("step bounds")
    bounds = step_bounds(copied, few, tolerance=0.02, dtype=torch.float32)
    note("spectra")
    spectra = unit_spectra(copied, few)
    note("signals, gradients, energy")
    signals = signal_propagation(copied, images, labels, chunk=CHUNK)
    energy = hamiltonian_energy(copied, few, dtype=torch.float32)
    note("reversing")
    entrances = unit_inputs(copied, few[:2])
    profiles, drifts = [reconstruction_profile(*entrance) for entrance in entrances], []
    if entrances:
        deepest, x = max(entrances, key=lambda entrance: len(entrance[0].fields))
        num_steps = len(steps_of(deepest))
        drifts = drift(deepest, x, depths=sorted({max(1, num_steps // 4), max(1, num_steps // 2), num_steps}))
    note("sensitivity")
    half, half_labels = images[: 2 * CHUNK], None if labels is None else labels[: 2 * CHUNK]
    return Analysis(
        name=name or str(getattr(getattr(model, "config", None), "name", type(model).__name__)),
        num_layers=int(getattr(model, "num_layers", 0)) or lyapunov.places[-1].depth,
        num_images=len(images),
        num_calibrated=num_calibrated,
        schemes=[
            repr(unit.scheme) if isinstance(unit, ReversibleSequence) else "plain blocks"
            for unit in walked_units(model)
        ],
        lyapunov=lyapunov,
        bounds=bounds,
        spectra=spectra,
        propagation=signals,
        energy=energy,
        profiles=profiles,
        drifts=drifts,
        noise=noise_sensitivity(copied, half, seed=seed),
        adversary=adversarial_sensitivity(copied, half, half_labels, chunk=CHUNK),
        seconds=time.perf_counter() - began,
    )
