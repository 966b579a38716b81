"""Lyapunov exponents: how fast neighbouring states part, along depth and in total.

A tangent frame of k vectors is carried through the linearised network and orthonormalised at every depth (Benettin et al.
1980; Shimada & Nagashima 1979): with T_j Q_{j-1} = Q_j R_j, the exponents are λ_i = (1/t) Σ_j log (R_j)_ii. Each image has a
frame of its own. Where eigenvalues speak for frozen weights only, these count what changing weights and states really do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode.stability.tangents import dual_level, split_tangent, with_tangent
from revode.stability.walk import Parts, Place, flatten_state, prepared, unflatten_state, walk


@dataclass(frozen=True)
class Lyapunov:
    """Logarithmic growth of k perturbations; natural logarithms, means over the images.

    Attributes:
        places: where growth was measured, in order.
        log_growth: growth between one place and the next, shape (places, k).
        totals: growth over all places of each image, shape (images, k).
        time: the sum of h over all steps.
    """

    places: list[Place]
    log_growth: Tensor
    totals: Tensor
    time: float

    @property
    def cumulative(self) -> Tensor:
        """Growth from the input up to each place, shape (places, k)."""
        return self.log_growth.cumsum(0)

    @property
    def unit_log_growth(self) -> Tensor:
        """Growth inside the reversible units only, without stem, transitions and head, shape (k,)."""
        inside = torch.tensor([place.kind in ("step", "leave") for place in self.places])
        return self.log_growth[inside].sum(0)

    @property
    def exponents(self) -> Tensor:
        """λ_i: growth inside the units for each unit of time t = Σ h, shape (k,)."""
        return self.unit_log_growth / self.time

    @property
    def growth(self) -> float:
        """The factor by which a perturbation grows through the reversible units (a geometric mean over images)."""
        return float(self.unit_log_growth[0].exp())


def orthonormalize(frame: Tensor) -> tuple[Tensor, Tensor]:
    """Q and log diag R of the QR factorisation of each sample's frame, by Gram-Schmidt done twice.

    Args:
        frame: shape (k, batch, n).

    Returns:
        The orthonormal frame, and the logarithms, shape (k, batch).
    """
    basis: list[Tensor] = []
    logs = []
    for v in frame:
        for _ in range(2):
            for q in basis:
                v = v - (q * v).sum(1, keepdim=True) * q
        norm = torch.linalg.vector_norm(v, dim=1)
        logs.append(norm.log())
        basis.append(v / norm.clamp_min(torch.finfo(norm.dtype).tiny)[:, None])
    return torch.stack(basis), torch.stack(logs)


def random_frame(x: Tensor, k: int, seed: int) -> Tensor:
    """k orthonormal directions for each sample of x, shape (k, batch, n); the same for the same seed."""
    size = x[0].numel()
    if not 1 <= k <= size:
        raise ValueError(f"k must lie between 1 and the {size} dimensions of the state, got {k!r}")
    generator = torch.Generator().manual_seed(seed)
    frame = torch.randn(k, x.shape[0], size, generator=generator, dtype=torch.float64)
    return orthonormalize(frame.to(x))[0]


def lyapunov_of_maps(
    maps: Iterable[Callable[[Tensor], Tensor]],
    x: Tensor,
    *,
    k: int = 1,
    dt: float = 1.0,
    burn_in: int = 0,
    seed: int = 0,
) -> Lyapunov:
    """Exponents of a composition of maps on batched states (batch, ...), such as an iterated map or an integrator.

    Args:
        maps: the maps in order; each keeps the shape.
        x: starting points; every sample is an orbit of its own.
        k: how many exponents.
        dt: time that one map advances.
        burn_in: maps at the start that turn the frame into its final directions and are not counted.
        seed: of the first frame.
    """
    frame = random_frame(x, k, seed)
    places, logs = [], []
    for depth, function in enumerate(maps, start=1):
        with torch.no_grad():
            x, frame = _push_forward(function, x, frame)
            frame, log = orthonormalize(frame)
        if depth > burn_in:
            counted = depth - burn_in
            places.append(Place(0, counted, counted, counted * dt, "step"))
            logs.append(log)
    if not logs:
        raise ValueError(f"burn_in={burn_in} leaves no map to measure")
    return _collect(places, logs)


def _push_forward(function: Callable[[Tensor], Tensor], x: Tensor, frame: Tensor) -> tuple[Tensor, Tensor]:
    """f(x) and the frame's image under the Jacobian of f."""
    k = len(frame)
    copies = x.repeat(k, *[1] * (x.dim() - 1))
    with dual_level():
        y, tangents = split_tangent(function(with_tangent(copies, frame.reshape(copies.shape))))
    return y[: len(x)], tangents.reshape(k, len(x), -1)


def _collect(places: list[Place], logs: list[Tensor]) -> Lyapunov:
    growth = torch.stack(logs).double()
    return Lyapunov(places, growth.mean(2), growth.sum(0).t(), places[-1].time)


def joined(parts: list[Lyapunov]) -> Lyapunov:
    """The same network measured on several batches, as one."""
    sizes = torch.tensor([len(part.totals) for part in parts], dtype=torch.float64)
    weights = (sizes / sizes.sum())[:, None, None]
    mean = (torch.stack([part.log_growth for part in parts]) * weights).sum(0)
    return Lyapunov(parts[0].places, mean, torch.cat([part.totals for part in parts]), parts[0].time)


def lyapunov_exponents(
    model: nn.Module, images: Tensor, *, k: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Lyapunov:
    """The leading k exponents of a whole network on real inputs, per depth and in total.

    The network is walked on a copy in eval mode; batch norms that have seen no data take the statistics of `images`.

    Args:
        model: a network with reversible units.
        images: its inputs; each has its own frame, started in random directions of the input space.
        k: how many exponents.
        dtype: of the computation; float32 is about three times faster and enough for three digits.
        seed: of the frames.
    """
    model, images = prepared(model, images, dtype)
    frame = random_frame(images, k, seed)
    copies = images.repeat(k, *[1] * (images.dim() - 1))
    places: list[Place] = []
    logs: list[Tensor] = []

    def visit(place: Place, unit: ReversibleSequence | None, parts: Parts) -> Parts | None:
        primal, tangent = zip(*(split_tangent(part) for part in parts), strict=True)
        vectors = flatten_state(unit, tangent)
        n = vectors.shape[1]
        if n < k:  # fewer logits than tangents: nothing to orthonormalise
            return None
        frame, log = orthonormalize(vectors.reshape(k, -1, n))
        places.append(place)
        logs.append(log)
        renewed = unflatten_state(unit, frame.reshape(-1, n), primal)
        return tuple(with_tangent(part, new) for part, new in zip(primal, renewed, strict=True))

    with dual_level():
        walk(model, with_tangent(copies, frame.reshape(copies.shape)), visit)
    return _collect(places, logs)


def finite_size_growth(
    model: nn.Module, images: Tensor, *, size: float = 1e-4, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Lyapunov:
    """The growth of a perturbation of finite size: two trajectories, no derivatives; a check on `lyapunov_exponents`.

    Args:
        model: a network with reversible units.
        images: its inputs.
        size: norm of the perturbation as a fraction of each image's norm.
        dtype: of the computation.
        seed: of the direction, which is the first of `lyapunov_exponents`'s for the same seed.
    """
    if not size > 0.0:
        raise ValueError(f"size must be a positive fraction of the input's norm, got {size!r}")
    model, images = prepared(model, images, dtype)
    scale = size * torch.linalg.vector_norm(images.flatten(1), dim=1)
    step = random_frame(images, 1, seed)[0] * scale[:, None]
    both = torch.cat((images, images + step.reshape(images.shape)))
    places: list[Place] = []
    logs: list[Tensor] = []
    previous = scale.log()

    def visit(place: Place, unit: ReversibleSequence | None, parts: Parts) -> None:
        nonlocal previous
        plain, moved = flatten_state(unit, parts).chunk(2)
        distance = torch.linalg.vector_norm(moved - plain, dim=1).log()
        places.append(place)
        logs.append((distance - previous)[None])
        previous = distance

    with torch.no_grad():
        walk(model, both, visit)
    return _collect(places, logs)
