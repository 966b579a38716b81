"""The stability lab: why these networks can be deep, and where the argument ends, measured on any model.

| question | ask |
|---|---|
| do eigenvalues lie on the imaginary axis? | `spectrum`, `similar_matrix`, `unit_spectra` |
| do perturbations grow? | `lyapunov_exponents`, `lyapunov_of_maps` |
| how large may h be? | `step_bounds`, `suggest_h`, `operator_norm` |
| can it be reversed? | `drift`, `reconstruction_profile`, `linear_revnet` |
| what happens to signals, gradients and energy? | `signal_propagation`, `hamiltonian_energy` |
| how sensitive are the class scores? | `noise_sensitivity`, `adversarial_sensitivity` |
| and during training? | `StabilityMonitor` |
| all of it, on one page? | `analyze`, and `revode analyze` on the command line |

All of it works on copies in eval mode: the model's mode, gradients, buffers and the random stream stay as they are.
"""

from revode_lab.stability.analysis import Analysis as Analysis
from revode_lab.stability.analysis import analyze as analyze
from revode_lab.stability.bounds import LayerBound as LayerBound
from revode_lab.stability.bounds import Norm as Norm
from revode_lab.stability.bounds import operator_norm as operator_norm
from revode_lab.stability.bounds import step_bounds as step_bounds
from revode_lab.stability.bounds import suggest_h as suggest_h
from revode_lab.stability.dynamics import amplification as amplification
from revode_lab.stability.dynamics import ode_state as ode_state
from revode_lab.stability.dynamics import right_hand_side as right_hand_side
from revode_lab.stability.dynamics import step_limit as step_limit
from revode_lab.stability.dynamics import step_map as step_map
from revode_lab.stability.lyapunov import Lyapunov as Lyapunov
from revode_lab.stability.lyapunov import lyapunov_exponents as lyapunov_exponents
from revode_lab.stability.lyapunov import lyapunov_of_maps as lyapunov_of_maps
from revode_lab.stability.monitor import StabilityMonitor as StabilityMonitor
from revode_lab.stability.propagation import Energy as Energy
from revode_lab.stability.propagation import Propagation as Propagation
from revode_lab.stability.propagation import Sensitivity as Sensitivity
from revode_lab.stability.propagation import adversarial_sensitivity as adversarial_sensitivity
from revode_lab.stability.propagation import hamiltonian_energy as hamiltonian_energy
from revode_lab.stability.propagation import noise_sensitivity as noise_sensitivity
from revode_lab.stability.propagation import signal_propagation as signal_propagation
from revode_lab.stability.reversibility import Drift as Drift
from revode_lab.stability.reversibility import LinearRevNet as LinearRevNet
from revode_lab.stability.reversibility import drift as drift
from revode_lab.stability.reversibility import gradient_error as gradient_error
from revode_lab.stability.reversibility import linear_revnet as linear_revnet
from revode_lab.stability.reversibility import reconstruction_error as reconstruction_error
from revode_lab.stability.reversibility import reconstruction_profile as reconstruction_profile
from revode_lab.stability.reversibility import unit_reconstruction_errors as unit_reconstruction_errors
from revode_lab.stability.spectra import Jacobian as Jacobian
from revode_lab.stability.spectra import Spectrum as Spectrum
from revode_lab.stability.spectra import similar_matrix as similar_matrix
from revode_lab.stability.spectra import spectrum as spectrum
from revode_lab.stability.spectra import unit_spectra as unit_spectra
