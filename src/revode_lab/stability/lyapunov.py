"""Lyapunov exponents: how fast neighbouring states part, along depth and in total.

A tangent frame of k vectors is carried through the linearised network and orthonormalised at every depth (Benettin et al.
1980; Shimada & Nagashima 1979): with T_j Q_{j-1} = Q_j R_j, the exponents are λ_i = (1/t) Σ_j log (R_j)_ii. Each image has a
frame of its own. Where eigenvalues speak for frozen weights only, these count what changing weights and states really do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode_lab.stability.spectra import load_forward_mode
from revode_lab.stability.walk import Parts, Place, flatten_state, prepared, unflatten_state, walk


@dataclass(frozen=True)
class Lyapunov:
    """Logarithmic growth of k perturbations; natural logarithms, means over the images.

    Attributes:
        places: where growth was measured, in order.
        log_growth: growth between one place and the next, shape (places, k).
    """

    places: list[Place]
    log_growth: Tensor

    @property
    def time(self) -> float:
        """The sum of h over all steps."""
        return self.places[-1].time

    @property
    def cumulative(self) -> Tensor:
        """Growth from the input up to each place, shape (places, k)."""
        return self.log_growth.cumsum(0)

    @property
    def unit_log_growth(self) -> Tensor:
        """Growth inside the reversible units only, without stem, transitions and head, shape (k,)."""
        return self.log_growth[[place.inside for place in self.places]].sum(0)

    @property
    def exponents(self) -> Tensor:
        """λ_i: growth inside the units for each unit of time t = Σ h, shape (k,)."""
        return self.unit_log_growth / self.time

    @property
    def growth(self) -> float:
        """The factor by which a perturbation grows through the reversible units (a geometric mean over images)."""
        return float(self.unit_log_growth[0].exp())

    def over_depth(self) -> tuple[list[int], Tensor]:
        """Return depths, and the factors of growth inside the units up to there, shape (depths, k)."""
        inside = torch.tensor([place.inside for place in self.places])
        total = (self.log_growth * inside[:, None]).cumsum(0).exp()
        steps = [i for i, place in enumerate(self.places) if place.kind == "step"]
        return [0] + [self.places[i].depth for i in steps], torch.cat((torch.ones_like(total[:1]), total[steps]))


def orthonormalize(frame: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q and log |diag R| of the QR factorisation of each sample's frame, shapes (k, batch, n) and (k, batch)."""
    q, r = torch.linalg.qr(frame.permute(1, 2, 0))
    diagonal = r.diagonal(dim1=1, dim2=2)
    return (q * diagonal.sign()[:, None]).permute(2, 0, 1), diagonal.abs().log().t()


def random_frame(x: Tensor, k: int, seed: int) -> Tensor:
    """Return k orthonormal directions for each sample of x, shape (k, batch, n); the same for the same seed."""
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
    """Return k exponents of a composition of maps on states (batch, ...), such as an iterated map or an integrator.

    Args:
        maps: the maps in order; each keeps the shape.
        x: starting points; every sample is an orbit of its own.
        k: number of exponents.
        dt: time that one map advances.
        burn_in: maps at the start that turn the frame into its final directions and are not counted.
        seed: seed of the first frame.
    """
    places, logs = [], []
    with _tangents():
        x = _with_frame(x, k, seed)
        for counted, function in enumerate(maps, start=1 - burn_in):
            (x,), log = _renewed(None, (function(x),), k)
            if counted > 0:
                places.append(Place(0, counted, counted, counted * dt, "step"))
                logs.append(log)
    if not logs:
        raise ValueError(f"burn_in={burn_in} leaves no map to measure")
    return Lyapunov(places, torch.stack(logs).double().mean(2))


def lyapunov_exponents(
    model: nn.Module,
    images: Tensor,
    *,
    k: int = 3,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    chunk: int | None = None,
) -> Lyapunov:
    """Return the leading k exponents of a whole network on real inputs, per depth and in total.

    Each image has its own frame, started in random directions of the input space. float32 is about three times faster and
    enough for three digits. All images are worked on at a time unless `chunk` is given.
    """
    model, images = prepared(model, images, dtype)
    places: list[Place] = []
    logs: list[Tensor] = []

    def visit(place: Place, unit: ReversibleSequence | None, parts: Parts) -> Parts | None:
        if sum(part[0].numel() for part in parts) < k:  # fewer logits than tangents: nothing to orthonormalise
            return None
        parts, log = _renewed(unit, parts, k)
        places.append(place)
        logs.append(log)
        return parts

    growth = []
    chunk = chunk or len(images)
    for start in range(0, len(images), chunk):
        places, logs = [], []
        with _tangents():
            walk(model, _with_frame(images[start : start + chunk], k, seed + start), visit)
        growth.append(torch.stack(logs))
    return Lyapunov(places, torch.cat(growth, 2).double().mean(2))


@contextlib.contextmanager
def _tangents() -> Iterator[None]:
    """Allow tensors to carry tangents inside, where nothing is recorded for backward."""
    load_forward_mode()
    with torch.no_grad(), forward_ad.dual_level():
        yield


def _with_frame(x: Tensor, k: int, seed: int) -> Tensor:
    """Return k copies of x, each with one vector of a random frame as its tangent."""
    copies = x.repeat(k, *[1] * (x.dim() - 1))
    return forward_ad.make_dual(copies, random_frame(x, k, seed).reshape(copies.shape))


def _renewed(unit: ReversibleSequence | None, parts: Parts, k: int) -> tuple[Parts, Tensor]:
    """Return the state with its frame orthonormalised, and the logarithms of R's diagonal, shape (k, batch)."""
    values, tangents = zip(*map(forward_ad.unpack_dual, parts), strict=True)
    tangents = tuple(torch.zeros_like(v) if t is None else t for v, t in zip(values, tangents, strict=True))
    frame, log = orthonormalize(flatten_state(unit, tangents).unflatten(0, (k, -1)))
    renewed = unflatten_state(unit, frame.flatten(0, 1), values)
    return tuple(map(forward_ad.make_dual, values, renewed)), log
