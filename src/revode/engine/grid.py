"""The fixed-point grid on which reversing is exact.

On multiples of 2^-k, additions and subtractions of floating-point numbers with t mantissa bits are exact while the result
stays below 2^(t-k) in magnitude. So if a state lives on the grid and every increment is rounded to it before it is added,
q' = ±p + φ and p = ±(q' - φ) are exact inverses, bit for bit, at any depth. Half of a grid point is m of p = 2 m + b: m is
carried on, and the bit b is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from revode.engine.arrival import can_be_judged, elements, post

DEFAULT_BITS = 14
_MANTISSA_BITS = {torch.float32: 24, torch.float64: 53}


class OutOfRange(ValueError):
    """A state is not finite, or too large for the grid."""


class _RoundToGrid(torch.autograd.Function):
    """round(a x 2^k) / 2^k with the gradient of a x.

    Multiplying by 2^k is exact, so that a 2^k makes one factor without changing a bit.
    """

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


class _HalveOnGrid(torch.autograd.Function):
    """The largest grid point that is at most x / 2, with the gradient of x / 2."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return torch.mul(x, 0.5 * scale).floor_().mul_(1.0 / scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0] * 0.5, None


class _GradientInStrides(torch.autograd.Function):
    """x, whose gradient is laid out as x is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.ops.aten.alias(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.strides = inputs[0].stride()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return with_strides(grad_outputs[0], ctx.strides)


def gradient_in_strides(x: Tensor) -> Tensor:
    """x, whose gradient comes in the strides of x: what the engine gives a branch, for stored branches too."""
    return _GradientInStrides.apply(x)  # type: ignore[return-value]


def with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x itself if it is laid out so, else a copy that is: kernels may give other bits on another layout."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _magnitude(x: Tensor) -> Tensor:
    """The largest magnitude in x, or NaN. (In one row, minima and maxima are 25 times faster than a norm.)"""
    least, most = torch.aminmax(elements(x))
    return torch.maximum(-least, most)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, device=device, dtype=torch.uint8)


class Grid:
    """Multiples of 2^-bits.

    Args:
        exact: True for 14 bits, or the number of bits.
    """

    def __init__(self, exact: bool | int) -> None:
        bits = DEFAULT_BITS if exact is True else exact
        if not isinstance(bits, int) or not 1 <= bits <= 23:
            raise ValueError(f"exact must be False, True or the grid's bits from 1 to 23, got {exact!r}")
        self.bits = bits

    def limit(self, dtype: torch.dtype) -> float:
        """The magnitude below which a state of `dtype` is exact."""
        if dtype not in _MANTISSA_BITS:
            raise ValueError(f"exact needs states of dtype float32 or float64, got {dtype}: convert the input first")
        return 2.0 ** (_MANTISSA_BITS[dtype] - self.bits)

    def round(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """The grid points nearest to gain * x; the gradient is that of gain * x."""
        return _RoundToGrid.apply(x, gain, 2.0**self.bits)  # type: ignore[return-value]

    def round_(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """``round``, written over x; without a gradient."""
        return x.mul_(gain * 2.0**self.bits).round_().mul_(2.0**-self.bits)

    def halve(self, x: Tensor) -> Tensor:
        """m of x = 2 m + b, where b is 0 or one step of the grid; the gradient is that of x / 2."""
        return _HalveOnGrid.apply(x, 2.0**self.bits)  # type: ignore[return-value]

    def parity(self, x: Tensor) -> Tensor:
        """The bits b of x = 2 m + b, eight to a byte."""
        steps = torch.mul(x.detach().reshape(-1), 2.0**self.bits)
        odd = (steps - 2.0 * torch.floor(0.5 * steps)).to(torch.uint8)
        odd = torch.nn.functional.pad(odd, (0, -odd.numel() % 8)).view(-1, 8)
        return (odd << _shifts(x.device)).sum(1, dtype=torch.uint8)

    def double(self, m: Tensor, parity: Tensor) -> Tensor:
        """2 m + b: what ``halve`` and ``parity`` were made from."""
        odd = ((parity[:, None] >> _shifts(m.device)) & 1).view(-1)[: m.numel()].view(m.shape)
        return torch.add(2.0 * m, odd.to(m.dtype), alpha=2.0**-self.bits)

    def check_on_grid(self, state: Tensor, where: str) -> None:
        """``check``, and that every value is a grid point."""
        self.check(state, where)
        if not torch.compiler.is_compiling() and not torch.equal(self.round(state), state):
            raise ValueError(
                f"exact={self.bits} walks back from multiples of 2^-{self.bits} only, found other values {where}"
            )

    def check(self, state: Tensor, where: str) -> None:
        """Refuse a state that is not finite or out of range, at once.

        Args:
            state: the tensor to look at.
            where: its place, for the message.
        """
        flags = RangeFlags(self)
        flags.note(state, where)
        flags.close()


class RangeFlags:
    """The largest magnitude of each state of a walk, judged together at its end, so that no device has to wait in between."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._magnitudes: list[Tensor] = []
        self._places: list[str] = []
        self._limit = 0.0

    def note(self, state: Tensor, where: str) -> None:
        """Remember how large `state` is, which stands at this place."""
        self._limit = self.grid.limit(state.dtype)
        if state.numel() == 0 or torch.compiler.is_exporting() or not can_be_judged(state):
            return
        if torch.compiler.is_compiling():
            text = f"revode: exact state out of range {self._limit:g} or NaN {where}"
            torch.ops.aten._assert_async.msg(state.detach().abs().amax() < self._limit, text)
            return
        self.note_magnitude(_magnitude(state), state.dtype, where)

    def note_magnitude(self, magnitude: Tensor, dtype: torch.dtype, where: str) -> None:
        """Remember the largest magnitude in a state of `dtype` at this place."""
        self._limit = self.grid.limit(dtype)
        self._magnitudes.append(magnitude)
        self._places.append(where)

    def close(self) -> None:
        """Have what was noted judged."""
        magnitudes, places = self._magnitudes, self._places
        self._magnitudes, self._places = [], []
        if magnitudes:
            post(torch.stack(magnitudes), lambda found: self._judge(found, places))

    def _judge(self, magnitudes: list[float], places: list[str]) -> None:
        """Raise for the first state that is out of range."""
        for magnitude, where in zip(magnitudes, places, strict=True):
            if not magnitude < self._limit:
                found = "NaN" if magnitude != magnitude else f"magnitude {magnitude:.4g}"
                raise OutOfRange(
                    f"exact={self.grid.bits} holds states of magnitude below {self._limit:g} only, found {found} {where}: "
                    f"use fewer grid bits, a smaller h, or exact=False"
                )
