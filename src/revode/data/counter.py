"""Counter-based randomness: a draw is a pure function of its key and its index.

There is no generator state, so a draw does not depend on how many were made before, on the order or grouping in which
images are visited, on the number of processes, on the device, or on the version of torch. The mixing function is the
output function of SplitMix64 (Steele, Lea, Flood 2014), in 64-bit integers that wrap around.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_MASK = (1 << 64) - 1

ORDER, AUGMENTATION, SELECTION = range(3)
"""Separate streams, so that one seed serves all purposes without their draws being correlated."""


def _mix(x: int) -> int:
    """SplitMix64's output function on one unsigned 64-bit number."""
    for shift, factor in _ROUNDS:
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> _LAST_SHIFT)


def stream_key(seed: int, stream: int, *counters: int) -> int:
    """One unsigned 64-bit key for a seed, a stream and further counters such as the epoch."""
    key = 0
    for word in (seed, stream, *counters):
        key = _mix((key + _GAMMA * (1 + (word & _MASK))) & _MASK)
    return key


def _signed(x: int) -> int:
    """The int64 with the same bits as the unsigned `x`."""
    return x - (1 << 64) if x >= 1 << 63 else x


def random_bits(key: int, indices: Tensor) -> Tensor:
    """64 random bits for every index, as int64 on the device of `indices`."""
    x = indices.to(torch.int64) * _signed(_GAMMA) + _signed(key)
    for shift, factor in _ROUNDS:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, _LAST_SHIFT)


def _shifted(x: Tensor, shift: int) -> Tensor:
    """Logical right shift; torch's own copies the sign bit."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def permutation(num_items: int, key: int) -> Tensor:
    """A random permutation of 0 … num_items - 1: the order of their random bits."""
    return torch.argsort(random_bits(key, torch.arange(num_items)), stable=True)
