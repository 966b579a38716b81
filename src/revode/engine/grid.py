"""The fixed-point grid on which reversing is exact.

On multiples of 2^-k, additions and subtractions of floating-point numbers with t mantissa bits are exact while the result stays
below 2^(t-k) in magnitude. So let a state live on the grid, and round every increment to the grid before it is added. Then q' =
±p + φ and p = ±(q' - φ) are exact inverses, bit for bit, at any depth.

With s = 2^-n write p = 2^n m + r. The grid point m nearest to p / 2^n is carried on. The remainder r is kept, in n bits of each
element.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from revode.engine.arrival import can_be_judged, elements, post

DEFAULT_BITS = 14
_MANTISSA_BITS = {torch.float32: 24, torch.float64: 53}


class OutOfRange(ValueError):
    """A state is not finite, or too large for the grid."""


class _RoundToGrid(torch.autograd.Function):
    """round(a x 2^k) / 2^k with the gradient of a x. (Multiplying by 2^k is exact, so that a 2^k may be one factor.)"""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, gain: float, scale: float) -> Tensor:
        return torch.mul(x, gain * scale).round_().mul_(1.0 / scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.gain = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        g = grad_outputs[0]
        return g if ctx.gain == 1.0 else g * ctx.gain, None, None


class _ShrinkOnGrid(torch.autograd.Function):
    """The grid point nearest to x / 2^n, with the gradient of x / 2^n."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float, offset: float, factor: float) -> Tensor:
        return torch.mul(x, scale).add_(offset).mul_(factor).floor_().mul_(1.0 / scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0] * ctx.factor, None, None, None


def magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude in x, or NaN. (In one row, minima and maxima are 25 times faster than a norm.)"""
    least, most = torch.aminmax(elements(x))
    return torch.maximum(-least, most)


def bits_kept(shift: int) -> int:
    """Return the bits kept of each element where s = 2^-shift: n bits, rounded up to fit a byte evenly.

    >>> [bits_kept(n) for n in (0, 1, 2, 3, 4, 5, 6)]
    [0, 1, 2, 4, 4, 8, 8]
    """
    return 0 if shift == 0 else 1 << (shift - 1).bit_length()


def bytes_kept(shift: int, num_elements: int) -> int:
    """Return the bytes kept of a state of so many elements where s = 2^-shift."""
    return -(-num_elements * bits_kept(shift) // 8)


def _places(shift: int, device: torch.device) -> Tensor:
    width = bits_kept(shift)
    return torch.arange(0, 8, width, device=device, dtype=torch.uint8)


def _offset(shift: int, up: bool) -> float:
    """Return the offset before rounding down, so that the nearest grid point is found; a tie goes up or down."""
    return 2.0 ** (shift - 1) - (not up)


class Grid:
    """Multiples of 2^-bits; 14 bits if `exact` is True."""

    def __init__(self, exact: bool | int) -> None:
        bits = DEFAULT_BITS if exact is True else exact
        if not isinstance(bits, int) or not 1 <= bits <= 23:
            raise ValueError(f"exact must be False, True or the grid's bits from 1 to 23, got {exact!r}")
        self.bits = bits

    def limit(self, dtype: torch.dtype) -> float:
        """Return the magnitude below which a state of `dtype` is exact."""
        if dtype not in _MANTISSA_BITS:
            raise ValueError(f"exact needs states of dtype float32 or float64, got {dtype}: convert the input first")
        return 2.0 ** (_MANTISSA_BITS[dtype] - self.bits)

    def round(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """Return the grid points nearest to gain * x; the gradient is that of gain * x."""
        return _RoundToGrid.apply(x, gain, 2.0**self.bits)  # type: ignore[return-value]

    def round_(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """Run ``round`` written over x, without a gradient."""
        return x.mul_(gain * 2.0**self.bits).round_().mul_(2.0**-self.bits)

    def shrink(self, x: Tensor, shift: int, up: bool) -> Tensor:
        """Return m of x = 2^shift m + r, the grid point nearest to x / 2^shift; the gradient is that of x / 2^shift.

        `up` rounds ties up. Walks alternate, so that ties do not add up to a drift.
        """
        return _ShrinkOnGrid.apply(x, 2.0**self.bits, _offset(shift, up), 2.0**-shift)  # type: ignore[return-value]

    def remainder(self, x: Tensor, shift: int, up: bool) -> Tensor:
        """Return the remainders r of x = 2^shift m + r, packed into bytes."""
        steps = torch.mul(x.detach().reshape(-1), 2.0**self.bits).add_(_offset(shift, up))
        whole = torch.mul(steps, 2.0**-shift).floor_()
        digits = torch.sub(steps, whole, alpha=2.0**shift, out=steps).to(torch.uint8)
        places = _places(shift, x.device)
        if len(places) == 1:
            return digits
        digits = torch.nn.functional.pad(digits, (0, -digits.numel() % len(places))).view(-1, len(places))
        if len(places) == 2:
            return digits[:, 0] | (digits[:, 1] << 4)
        return (digits << places).sum(1, dtype=torch.uint8)

    def grow(self, m: Tensor, packed: Tensor, shift: int, up: bool) -> Tensor:
        """Return 2^shift m + r, the x that ``shrink`` and ``remainder`` were given."""
        places, mask = _places(shift, m.device), (1 << bits_kept(shift)) - 1
        digits = packed if len(places) == 1 else ((packed[:, None] >> places) & mask).view(-1)
        digits = digits[: m.numel()].to(m.dtype).sub_(_offset(shift, up)).view(m.shape)
        return torch.add(2.0**shift * m, digits, alpha=2.0**-self.bits)

    def check_on_grid(self, state: Tensor, where: str) -> None:
        """Run ``check``, and raise if a value is not a grid point."""
        self.check(state, where)
        if not torch.compiler.is_compiling() and not torch.equal(self.round(state), state):
            raise ValueError(
                f"exact={self.bits} walks back from multiples of 2^-{self.bits} only, found other values {where}"
            )

    def check(self, state: Tensor, where: str) -> None:
        """Raise at once if a state is not finite or out of range; `where` names its place in the message."""
        flags = RangeFlags(self)
        flags.note(state, where)
        flags.close()


class RangeFlags:
    """The largest magnitude of each state of a walk. All are judged at its end, so that no device waits in between."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._magnitudes: list[Tensor] = []
        self._places: list[str] = []
        self._limit = 0.0

    def note(self, state: Tensor, where: str) -> None:
        """Note the largest magnitude in `state` at this place."""
        self._limit = self.grid.limit(state.dtype)
        if state.numel() == 0 or torch.compiler.is_exporting() or not can_be_judged(state):
            return
        if torch.compiler.is_compiling():
            text = f"revode: exact state out of range {self._limit:g} or NaN {where}"
            torch.ops.aten._assert_async.msg(state.detach().abs().amax() < self._limit, text)
            return
        self.note_magnitude(magnitude(state), state.dtype, where)

    def note_magnitude(self, magnitude: Tensor, dtype: torch.dtype, where: str) -> None:
        self._limit = self.grid.limit(dtype)
        self._magnitudes.append(magnitude)
        self._places.append(where)

    def close(self) -> None:
        """Judge all that was noted."""
        magnitudes, places = self._magnitudes, self._places
        self._magnitudes, self._places = [], []
        if magnitudes:
            post(torch.stack(magnitudes), lambda found: self._judge(found, places))

    def _judge(self, magnitudes: list[float], places: list[str]) -> None:
        for magnitude, where in zip(magnitudes, places, strict=True):
            if not magnitude < self._limit:
                found = "NaN" if magnitude != magnitude else f"magnitude {magnitude:.4g}"
                fewer = (
                    self.grid.bits - math.ceil(math.log2(magnitude / self._limit)) - 1 if magnitude < math.inf else 0
                )
                hint = f" (exact={fewer})" if fewer > 0 else ""
                raise OutOfRange(
                    f"exact={self.grid.bits} holds states of magnitude below {self._limit:g} only, found {found} {where}: "
                    f"use fewer grid bits{hint}, a smaller h, or exact=False"
                )
