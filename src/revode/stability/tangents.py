"""Forward-mode differentiation, loaded without the deprecation warnings that torch's own decompositions raise."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor


@functools.cache
def load_forward_mode() -> None:
    """Let torch load its forward-mode decompositions, which it does on first use, in silence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


@contextlib.contextmanager
def dual_level() -> Iterator[None]:
    """Inside, `with_tangent` and `split_tangent` may be used; nothing is recorded for backward."""
    load_forward_mode()
    with torch.no_grad(), forward_ad.dual_level():
        yield


def with_tangent(x: Tensor, tangent: Tensor) -> Tensor:
    """The dual number x + ε tangent."""
    return forward_ad.make_dual(x, tangent)


def split_tangent(x: Tensor) -> tuple[Tensor, Tensor]:
    """Value and tangent of a dual number; the tangent is zero where nothing depends on the input."""
    value, tangent = forward_ad.unpack_dual(x)
    return value, torch.zeros_like(value) if tangent is None else tangent


def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The derivative of an elementwise function at x."""
    with dual_level():
        return split_tangent(function(with_tangent(x, torch.ones_like(x))))[1]
