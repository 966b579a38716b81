"""The stability lab: the theory's claims about any model, measured.

| question | ask |
|---|---|
| do eigenvalues lie on the imaginary axis? | `spectrum`, `similar_matrix`, `unit_spectra` |
| do perturbations grow? | `lyapunov_exponents`, `lyapunov_of_maps` |
| how large may h be? | `step_bounds`, `suggest_h`, `operator_norm` |
| can it be reversed? | `drift`, `reconstruction_profile`, `amplification` |
| what happens to signals, gradients and energy? | `signal_propagation`, `hamiltonian_energy` |
| how sensitive are the class scores? | `noise_sensitivity`, `adversarial_sensitivity` |
| and during training? | `StabilityMonitor` |
| all of it, on one page? | `analyze`, and `revode analyze` on the command line |

Everywhere `model` is a network with reversible units (or a ResNet of revode, where no inverse is needed), `images` are its
inputs, standardised as for training, `labels` their classes (the model's own predictions unless given), `dtype` is that of the
computation, `chunk` the number of images at a time, and `seed` that of random directions. All functions work on copies in eval
mode: the model's mode, gradients and buffers and the RNG state stay as they are. Batch norms that have seen no data take the
statistics of `images`.
"""

from revode_lab.stability.analysis import Analysis, analyze
from revode_lab.stability.bounds import LayerBound, Norm, operator_norm, step_bounds, suggest_h
from revode_lab.stability.dynamics import amplification, ode_state, right_hand_side, step_limit, step_map
from revode_lab.stability.lyapunov import Lyapunov, lyapunov_exponents, lyapunov_of_maps
from revode_lab.stability.monitor import StabilityMonitor
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
from revode_lab.stability.reversibility import (
    Drift,
    drift,
    gradient_error,
    reconstruction_error,
)
from revode_lab.stability.spectra import Jacobian, Spectrum, similar_matrix, spectrum, unit_spectra

__all__ = [
    "Analysis", "Drift", "Energy", "Jacobian", "LayerBound", "Lyapunov", "Norm", "Propagation", "Sensitivity", "Spectrum",
    "StabilityMonitor", "adversarial_sensitivity", "amplification", "analyze", "drift", "gradient_error", "hamiltonian_energy",
    "lyapunov_exponents", "lyapunov_of_maps", "noise_sensitivity", "ode_state", "operator_norm", "reconstruction_error",
    "reconstruction_profile", "right_hand_side", "signal_propagation", "similar_matrix", "spectrum", "step_bounds",
    "step_limit", "step_map", "suggest_h", "unit_spectra",
]  # fmt: skip
