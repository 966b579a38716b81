"""Eigenvalues of Jacobians: of a branch, of a whole step on the pair, or of the ODE behind it, at a given state.

The paper's argument for stability: the two-layer Hamiltonian's Jacobian

    J = [K1' 0; 0 -K2'] diag(σ') [0 K1; K2 0]

has the non-zero eigenvalues of D M, with D = diag(σ') and M antisymmetric, and so of the antisymmetric D^½ M D^½: all of
them lie on the imaginary axis. It holds for frozen weights and state. `similar_matrix` builds D^½ M D^½, whose eigenvalues
stay on the axis to round-off even where σ' = 0 makes the zero eigenvalue of J defective.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revode.fields import AntisymmetricField, SymmetricField
from revode.operators import Bias
from revode_lab.stability.dynamics import ode_state, right_hand_side
from revode_lab.stability.walk import Parts, prepared, steps_of, unit_states

DENSE_LIMIT = 1200
"""Largest dimension for which `spectrum` computes every eigenvalue (a second or two); above, the leading ones only."""


@functools.cache
def load_forward_mode() -> None:
    """Let torch load its forward-mode decompositions, which it does on first use, without its deprecation warnings."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the derivative of an elementwise function at x."""
    load_forward_mode()
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


class Jacobian:
    """The Jacobian of `function` at `state`, as products: ``matvec`` is J v, ``rmatvec`` is J' v, ``dense`` is J itself.

    Args:
        function: a map from a tensor to a tensor, or from a tuple of tensors to a tuple; modules are analysed as a copy.
        state: where to linearise.
    """

    def __init__(self, function: Callable[[Any], Any], state: Tensor | Sequence[Tensor]) -> None:
        load_forward_mode()
        self.pair = not isinstance(state, Tensor)
        self.parts = tuple(part.detach() for part in ((state,) if isinstance(state, Tensor) else state))
        self.function = frozen(function) if isinstance(function, nn.Module) else function
        self.x = torch.cat([part.flatten() for part in self.parts])
        with torch.no_grad():
            self.value = self._flat(self.x)
        self.shape = (self.value.numel(), self.x.numel())

    def _flat(self, x: Tensor) -> Tensor:
        pieces = x.split([part.numel() for part in self.parts])
        parts = tuple(piece.reshape(part.shape) for piece, part in zip(pieces, self.parts, strict=True))
        out = self.function(parts if self.pair else parts[0])
        return torch.cat([part.flatten() for part in out]) if isinstance(out, tuple | list) else out.flatten()

    def matvec(self, v: Tensor) -> Tensor:
        """Return J v."""
        with torch.no_grad():
            return self._product(v.to(self.x).reshape(self.x.shape))

    def rmatvec(self, v: Tensor) -> Tensor:
        """Return J' v."""
        with torch.no_grad():
            return self._adjoint_product(v.to(self.x).reshape(self.value.shape))[0]

    @functools.cached_property
    def _product(self) -> Callable[[Tensor], Tensor]:
        # Linearising once and replaying the linear part is about eight times faster than a jvp for each product.
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's constant folding warns about its own graph
            return torch.func.linearize(self._flat, self.x)[1]

    @functools.cached_property
    def _adjoint_product(self) -> Callable[[Tensor], tuple[Tensor]]:
        return torch.func.vjp(self._flat, self.x)[1]

    def dense(self) -> Tensor:
        """Return J, computed 64 columns at a time."""
        identity = torch.eye(self.shape[1], dtype=self.x.dtype, device=self.x.device)
        with torch.no_grad():
            return torch.func.vmap(self._product, chunk_size=64)(identity).t()


def frozen(module: nn.Module) -> nn.Module:
    """Return a copy without gradients whose batch norms in training mode use batch statistics and record none."""
    module = copy.deepcopy(module).requires_grad_(False)
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.training:
            part.running_mean = part.running_var = part.num_batches_tracked = None
            part.track_running_stats = False
    return module


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues, largest modulus first.

    Attributes:
        eigenvalues: complex tensor: all of them (``method="dense"``) or those asked for (``"matrix-free"``).
        size: dimension of the state.
        method: ``"dense"`` or ``"matrix-free"``.
    """

    eigenvalues: Tensor
    size: int
    method: str

    @property
    def max_real(self) -> float:
        """The largest real part: the growth rate that the paper's condition asks to be at most 0."""
        return float(self.eigenvalues.real.max())

    @property
    def radius(self) -> float:
        """The largest modulus."""
        return float(self.eigenvalues.abs().max())

    @property
    def axis_distance(self) -> float:
        """max |Re λ| / max |λ|: 0 when every eigenvalue is imaginary."""
        return float(self.eigenvalues.real.abs().max()) / self.radius if self.radius > 0 else 0.0


def spectrum(
    function: Callable[[Any], Any],
    state: Tensor | Sequence[Tensor],
    *,
    k: int | None = None,
    dense_limit: int = DENSE_LIMIT,
) -> Spectrum:
    """Return eigenvalues of the Jacobian of `function` at `state`.

    Up to `dense_limit` dimensions every eigenvalue is computed from the dense Jacobian. Above, or when `k` is given, ARPACK's
    implicitly restarted Arnoldi method finds the k of largest modulus, and the few of largest real part where these stand
    out, from products J v.

    Args:
        function: a map as for `Jacobian`.
        state: where to linearise; use float64 for results to round-off.
        k: number of eigenvalues to compute matrix-free; 20 when the state is large and none is given.
        dense_limit: largest dimension for the dense method.
    """
    jacobian = Jacobian(function, state)
    size, inputs = jacobian.shape
    if size != inputs:
        raise ValueError(f"the field maps {inputs} numbers to {size}: eigenvalues need a square Jacobian")
    if k is None and size <= dense_limit:
        values, method = torch.linalg.eigvals(jacobian.dense()), "dense"
    else:
        k = 20 if k is None else k
        if not 1 <= k < size - 1:
            raise ValueError(f"k must lie between 1 and {size - 2} for a state of {size} numbers, got {k!r}")
        largest = _arnoldi(jacobian, k, "LM", restarts=60)
        rightmost = _arnoldi(jacobian, min(k, 4), "LR", restarts=10)
        values, method = torch.cat([largest, rightmost]), "matrix-free"
    return Spectrum(values[torch.argsort(values.abs(), descending=True)], size, method)


def _arnoldi(jacobian: Jacobian, k: int, which: str, restarts: int) -> Tensor:
    """Return the k eigenvalues that `which` asks for, or those of them that converged.

    On a spectrum along the imaginary axis no real part is the largest, and the search for it ends without one.
    """
    try:
        from scipy.sparse import linalg
    except ImportError as error:
        raise ValueError("matrix-free spectra need scipy: pip install 'revode[lab]'") from error

    def product(v: Any) -> Any:
        return jacobian.matvec(torch.as_tensor(v)).double().numpy()

    size = jacobian.shape[0]
    start = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    operator: Any = linalg.LinearOperator(jacobian.shape, matvec=product, dtype="float64")  # pyright: ignore
    basis = min(size, max(4 * k + 1, 40))
    tolerance: Any = 1e-10 if jacobian.x.dtype == torch.float64 else 1e-5
    try:
        values = linalg.eigs(
            operator, k, which=which, v0=start, ncv=basis, tol=tolerance, maxiter=restarts, return_eigenvectors=False
        )
    except linalg.ArpackNoConvergence as partial:
        values = partial.eigenvalues
    return torch.as_tensor(values).to(torch.complex128)


def similar_matrix(fields: Sequence[nn.Module], state: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the antisymmetric matrix D^½ M D^½ that has the non-zero eigenvalues of the paper's Jacobians.

    It takes two `SymmetricField` [F, G] of a Hamiltonian block and (y, z) of one sample, or one `AntisymmetricField` and y.
    """
    parts = (state,) if isinstance(state, Tensor) else tuple(state)
    if len(fields) == 2 and len(parts) == 2:
        (K1, d1), (K2, d2) = _matrix_and_slope(fields[0], parts[1]), _matrix_and_slope(fields[1], parts[0])
        coupling = d1.sqrt()[:, None] * (K1 @ K2.t()) * d2.sqrt()
        n, size = len(d1), len(d1) + len(d2)
        matrix = coupling.new_zeros(size, size)
        matrix[:n, n:] = -coupling
        matrix[n:, :n] = coupling.t()
        return matrix
    if len(fields) == 1 and isinstance(fields[0], AntisymmetricField):
        A, d = _matrix_and_slope(fields[0], parts[0])
        return d.sqrt()[:, None] * A * d.sqrt()
    raise ValueError("similar_matrix takes two SymmetricField and (y, z), or one AntisymmetricField and y")


def _matrix_and_slope(field: nn.Module, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and the diagonal of D = σ'(K y + b) of a field with a bias for its norm."""
    if not isinstance(field, SymmetricField | AntisymmetricField) or not isinstance(field.norm, Bias):
        raise ValueError(
            f"the similar matrix exists for the paper's fields with norm='none', got {type(field).__name__}: {field}"
        )
    lead = field.lead if isinstance(field, SymmetricField) else None
    with torch.no_grad():
        before = field.norm(field.operator(y if lead is None else lead(y)))
        return Jacobian(field.operator, y).dense(), slope(field.activation, before).flatten()


def unit_spectra(model: nn.Module, images: Tensor, *, max_size: int = 500) -> dict[tuple[int, int], Tensor]:
    """Return (unit, step) -> all eigenvalues of the ODE's Jacobian in the middle block of each unit.

    The first image's state is cropped to a square patch at its centre, of at most `max_size` dimensions where a patch of 2x2
    allows it, so that the dense spectrum stays affordable: a convolution on the patch, with its zero padding, is a field of the
    same kind with the same weights.
    """
    copied, images = prepared(model, images)
    found = {}
    for number, (unit, states) in enumerate(unit_states(copied, images[:1])):
        steps = steps_of(unit)
        index = len(steps) // 2
        pair = _patch(states[index], max_size)
        pair = (pair[0], pair[0]) if len(pair) == 1 else pair
        rhs = right_hand_side(unit.scheme, steps[index])
        # Wide units exceed the size on the smallest patch; only a dense spectrum has all eigenvalues.
        limit = max(2 * max_size, 2 * pair[0].numel())
        found[number, index] = spectrum(rhs, ode_state(unit.scheme, pair), dense_limit=limit).eigenvalues  # type: ignore[arg-type]
    return found


def _patch(parts: Parts, max_size: int) -> Parts:
    """Return the centre of a state, so small that its two members have at most `max_size` numbers together."""
    if parts[0].dim() != 4:
        return parts
    _, channels, height, width = parts[0].shape
    edge = max(2, int((max_size / (2 * channels)) ** 0.5))
    top, left = max(0, (height - edge) // 2), max(0, (width - edge) // 2)
    return tuple(part[:, :, top : top + edge, left : left + edge] for part in parts)
