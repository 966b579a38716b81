"""Check that the walk back ends where forward began, by a few numbers kept of a state.

Forward keeps a fingerprint of the state that enters a segment: 32 sums of its elements with pseudo-random signs. The walk back
arrives at that state again. The distance of the two fingerprints estimates the distance of the states, in the L2 norm. On the
grid the sums are exact: there the fingerprints are equal, or the walk was wrong.

On a CPU the numbers are judged at once. Elsewhere they are copied to the host without waiting, and judged by the next call of a
sequence, or by `check`.
"""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

WIDTH = 32
"""Numbers in a fingerprint."""
_ROW = 4096
WARN_ABOVE = 1e-3
RAISE_ABOVE = {torch.float64: 1e-6}
RAISE_ABOVE_OTHERWISE = 1e-1


class ReversalError(RuntimeError):
    """The walk back did not arrive where forward began, so gradients would be wrong."""


class DriftWarning(UserWarning):
    """States were rebuilt with an error that gradients may show."""


def _signs(number: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    i = (torch.arange(1, number + 1, device=device) * 0x9E3779B1) & 0xFFFFFFFF
    i = ((i ^ (i >> 15)) * 0x85EBCA77) & 0xFFFFFFFF
    return (1 - 2 * ((i ^ (i >> 13)) & 1)).to(dtype)


_signs_again = functools.lru_cache(maxsize=64)(_signs)


def fingerprint(x: Tensor, exactly: bool) -> Tensor:
    """Return 32 sums of the elements of x with fixed signs. The distance of two fingerprints is that of the tensors, in
    expectation.

    `exactly` sums without rounding, for states on the grid.
    """
    signs = _signs if torch.compiler.is_compiling() else _signs_again
    flat = elements(x)
    if exactly:
        flat = flat.double()
    elif flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    for width in (_ROW, WIDTH):
        rows = flat.numel() // width
        if rows > 1:
            rest = flat[rows * width :]
            flat = torch.mv(flat[: rows * width].view(rows, width).t(), signs(rows, flat.device, flat.dtype))
            if rest.numel():
                flat = torch.cat((flat[: rest.numel()] + rest, flat[rest.numel() :]))
    return flat.clone()  # never a view of x


def elements(x: Tensor) -> Tensor:
    """Return the elements of x that this process holds in one row; in the order of memory if they lie there without gaps."""
    x = own_part(x.detach())
    dense = not torch.compiler.is_compiling() and torch.ops.aten.is_non_overlapping_and_dense(x)
    return x.as_strided((x.numel(),), (1,)) if dense else x.reshape(-1)


def own_part(x: Tensor) -> Tensor:
    """Return the part of a distributed tensor that this process holds, or any other tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[attr-defined]


def size(x: Tensor) -> Tensor:
    """Estimate ‖x‖ from every n-th element. A fingerprint can be far smaller, where equal parts of x have opposite signs."""
    flat = elements(x)
    every = 1 if torch.compiler.is_compiling() else max(1, flat.numel() // _ROW)
    return torch.linalg.vector_norm(flat[::every].float() if flat.dtype.itemsize < 4 else flat[::every]) * every**0.5


def distance(now: Tensor, then: Tensor, arrived: Tensor, floor: Tensor) -> Tensor:
    """Return ‖now - then‖ of two fingerprints, relative to the tensor, or to `floor` if the tensor is smaller."""
    scale = torch.maximum(torch.linalg.vector_norm(then), size(arrived).to(then.dtype)) + floor.to(then.dtype)
    return torch.linalg.vector_norm(now - then) / scale


def rounding(dtype: torch.dtype, num_branches: int) -> float:
    """Return the size of a state, relative to later ones, below which rounding alone could look like a wrong walk."""
    threshold = min(WARN_ABOVE, largest_distance(dtype, exactly=False))
    return min(0.01, num_branches * torch.finfo(dtype).eps / threshold)


def largest_distance(dtype: torch.dtype, exactly: bool) -> float:
    return 0.0 if exactly else RAISE_ABOVE.get(dtype, RAISE_ABOVE_OTHERWISE)


_CAUSES = (
    "A branch may depend on something that changed between forward and backward: a counter, a cache, a plain tensor "
    "attribute, an option such as Dropout.p, random numbers of a generator that the engine does not know. "
    "revode.check_branch(branch, x) looks for it."
)


def judge(distances: list[float], dtype: torch.dtype, exactly: bool, where: str, warned: Callable[[], bool]) -> None:
    """Raise or warn if the distances of a segment's first state and of its first branch's value are too large.

    Args:
        distances: relative distances; NaN is ignored (states were not finite).
        exactly: whether states were on the grid.
        where: the segment, for the message.
        warned: called before a warning; returns True if the sequence has warned before.
    """
    found = max((d for d in distances if d == d), default=0.0)
    if found > largest_distance(dtype, exactly):
        way_out = (
            "Mend the branch, or use backprop='store'."
            if exactly
            else "If no branch does so, rounding has grown over depth: use exact=True, or set anchor_every."
        )
        raise ReversalError(
            f"the walk back through {where} missed the state that forward had seen, by {found:.2g} of its norm: gradients "
            f"would be wrong. {_CAUSES} {way_out}"
        )
    if not exactly and found > WARN_ABOVE and not warned():
        warnings.warn(
            f"the walk back through {where} missed the state that forward had seen by {found:.2g} of its norm, and gradients "
            "suffer from it: use exact=True, or set anchor_every",
            DriftWarning,
            stacklevel=2,
        )


def can_be_judged(x: Tensor) -> bool:
    """Return True if x has numbers to look at: not on the meta device, fake, or inside a transform of ``torch.func``."""
    if torch.compiler.is_compiling():
        return True
    return not (x.is_meta or isinstance(x, FakeTensor) or torch._C._are_functorch_transforms_active())


_pending: deque[tuple[Tensor, Any, Callable[[list[float]], None]]] = deque()


def post(numbers: Tensor, verdict: Callable[[list[float]], None]) -> None:
    """Let `verdict` judge these numbers: at once on a CPU, elsewhere when they have reached the host."""
    numbers = numbers.detach()
    if numbers.device.type == "cpu":
        verdict(numbers.tolist())
        return
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.device.type == "cuda")
    host.copy_(numbers, non_blocking=True)
    module: Any = getattr(torch, numbers.device.type, None)
    event = module.Event() if hasattr(module, "Event") else None
    if event is not None:
        event.record()
    _pending.append((host, event, verdict))


def check_arrived() -> None:
    """Judge the numbers that have reached the host by now, without waiting."""
    while _pending and (_pending[0][1] is None or _pending[0][1].query()):
        host, _, verdict = _pending.popleft()
        verdict(host.tolist())


def check() -> None:
    """Wait for the device, and raise the errors that the checks of all calls so far have found.

    On a CPU the calls themselves raise. Elsewhere the next call of a sequence raises if a walk back went wrong, or if a state
    left the range of the grid. Call this before you save a model.

    >>> check()
    """
    while _pending:
        host, event, verdict = _pending.popleft()
        if event is not None:
            event.synchronize()
        verdict(host.tolist())
