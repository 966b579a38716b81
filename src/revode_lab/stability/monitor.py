"""`StabilityMonitor`: follow a network's stability while it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revode_lab.stability.bounds import largest_usage, step_bounds
from revode_lab.stability.lyapunov import lyapunov_exponents
from revode_lab.stability.propagation import signal_propagation
from revode_lab.stability.reversibility import unit_reconstruction_errors
from revode_lab.stability.spectra import unit_spectra
from revode_lab.stability.walk import first_not_finite, unwrapped


def _step_usage(model: nn.Module, images: Tensor) -> float | None:
    top = largest_usage(step_bounds(model, images[:1], tolerance=0.05, dtype=torch.float32))
    return None if top is None else top.usage


QUANTITIES: dict[str, Callable[[nn.Module, Tensor], float | None]] = {
    "perturbation_growth": lambda model, x: lyapunov_exponents(model, x, k=1, dtype=torch.float32).growth,
    "step_usage": _step_usage,
    "reconstruction_error": lambda model, x: max(unit_reconstruction_errors(model, x)),
    "signal_growth": lambda model, x: signal_propagation(model, x).signal_growth,
    "gradient_growth": lambda model, x: signal_propagation(model, x).gradient_growth,
    "max_real_part": lambda model, x: max(float(values.real.max()) for values in unit_spectra(model, x).values()),
}
"""Quantities of a monitor: name -> the number, None where a network has none (a RevNet's step bound)."""

MEANINGS = {
    "perturbation_growth": "Growth of a small disturbance over the whole network: near 1 it stays small.",
    "step_usage": "The step h over the largest h that keeps the tightest block stable, at its present weights: above 1 a "
    "disturbance may grow.",
    "reconstruction_error": "Largest relative error of a state computed back from the end of its unit.",
    "signal_growth": "Growth of the signal inside the units.",
    "gradient_growth": "Growth of the gradient inside the units, on its way back.",
    "max_real_part": "Largest real part of the frozen ODE's eigenvalues: above 0 disturbances grow.",
}
"""The meaning of each quantity, in a sentence."""

DEFAULT_QUANTITIES = ("perturbation_growth", "step_usage", "reconstruction_error")


class StabilityMonitor:
    """Measures chosen quantities every N steps; the model, its gradients and the RNG state stay as they are.

    Args:
        images: standard normal images of the size in the model's config unless given; the first `num_images` are used.
        every: steps between measurements; other steps return nothing.
        quantities: names out of `QUANTITIES`.
    """

    def __init__(
        self,
        images: Tensor | None = None,
        *,
        every: int = 1,
        quantities: Sequence[str] = DEFAULT_QUANTITIES,
        num_images: int = 4,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a positive number of steps, got {every!r}")
        for name in quantities:
            if name not in QUANTITIES:
                raise ValueError(f"a monitor can follow {', '.join(QUANTITIES)}; got {name!r}")
        self.images = images
        self.every = every
        self.quantities = tuple(quantities)
        self.num_images = num_images

    def on_step(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return the quantities after `step`, by name; nothing between measurements, nor once the weights are NaN."""
        if step % self.every:
            return {}
        model = unwrapped(model)
        if first_not_finite(model) is not None:
            return {}
        images = self._images(model)
        found = {name: QUANTITIES[name](model, images) for name in self.quantities}
        return {name: float(value) for name, value in found.items() if value is not None}

    def _images(self, model: nn.Module) -> Tensor:
        if self.images is None:
            config: Any = getattr(model, "config", None)
            if config is None:
                raise ValueError(f"{type(model).__name__} does not say the size of its input: give the monitor images")
            shape = config.image_shape()
            self.images = torch.randn((self.num_images, *shape), generator=torch.Generator().manual_seed(0))
        return self.images[: self.num_images].to(next(model.parameters()).device)
