"""From one unit to the next: half the resolution, more channels.

A transition takes what the unit hands over: a tensor, or the pair of a scheme that splits its channels (and, for `Squeeze`, of
every scheme). `PoolPad` and `Squeeze` act on each member alike, so nothing is joined and the pair that the unit has saved
anyway is all that is kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revode.fields import make_activation, make_norm
from revode.networks.stem import convolution
from revode.schemes import State

Features = Tensor | State


def join(x: Features) -> Tensor:
    """The halves of a pair joined along the channels; a tensor as it is."""
    return x if isinstance(x, Tensor) else torch.cat(x, dim=1)


def pool(x: Tensor) -> Tensor:
    """Means over 2x2 pixels; an odd edge is rounded up, as a convolution of stride 2 does."""
    odd = bool(x.shape[-1] % 2 or x.shape[-2] % 2)
    return F.avg_pool2d(x, 2, ceil_mode=odd)


def pad_channels(x: Tensor, channels: int) -> Tensor:
    """Zero channels on both sides, equally many up to one."""
    missing = channels - x.shape[1]
    return F.pad(x, (0, 0, 0, 0, missing // 2, missing - missing // 2)) if missing else x


class PoolPad(nn.Module):
    """Average pool 2 and zero channels on both sides, for each half of a pair by itself (the authors' code)."""

    def __init__(self, out_channels: int) -> None:
        super().__init__()
        self.out_channels = out_channels

    def forward(self, x: Features) -> Features:
        if isinstance(x, Tensor):
            return pad_channels(pool(x), self.out_channels)
        y, z = x
        half = self.out_channels // 2
        return pad_channels(pool(y), half), pad_channels(pool(z), half)

    def extra_repr(self) -> str:
        return f"{self.out_channels}"


class Connector(nn.Module):
    """1x1 convolution, norm, activation, average pool (rule M; the last one leaves pooling to the head)."""

    def __init__(self, in_channels: int, out_channels: int, norm: str, activation: str, *, pools: bool) -> None:
        super().__init__()
        self.conv = convolution(in_channels, out_channels, kernel_size=1)
        self.norm = make_norm(norm, out_channels)
        self.activation = make_activation(activation)
        self.pools = pools

    def forward(self, x: Features) -> Features:
        y = self.activation(self.norm(self.conv(join(x))))
        return pool(y) if self.pools else y


class Squeeze(nn.Module):
    """Space to depth: each 2x2 square of pixels becomes four times the channels. A permutation, so it can be undone."""

    def forward(self, x: Features) -> Features:
        if isinstance(x, Tensor):
            return F.pixel_unshuffle(x, 2)
        return F.pixel_unshuffle(x[0], 2), F.pixel_unshuffle(x[1], 2)

    def inverse(self, x: State) -> State:
        """Depth back to space."""
        return F.pixel_shuffle(x[0], 2), F.pixel_shuffle(x[1], 2)
