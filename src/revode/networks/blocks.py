"""Stems, transitions and heads of networks, and the blocks of the baselines.

Everything here works in one, two or three dimensions. A module with layers of its own takes ``ndim``; others read the
dimensions off their input. A transition takes the output of the unit before: a tensor, or the pair of a scheme. `PoolPad` and
`Squeeze` act on each member of a pair alike. So nothing is joined, and only the pair is kept, which the unit saves anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revode.engine.grid import Grid
from revode.fields import make_activation, make_norm
from revode.operators import CONVOLUTIONS, Activation, Conv3d, Edges
from revode.schemes import State

Features = Tensor | tuple[Tensor, ...]
"""The value between parts: a tensor, or a pair, behind which a U-Net carries the channels it has set aside."""

_CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: Conv3d}
_POOLS: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def convolution(
    in_channels: int, out_channels: int, kernel_size: Edges = 3, stride: int = 1, ndim: int = 2
) -> nn.Module:
    """Return a convolution without bias, drawn normal with std sqrt(2 / (kernel volume * out_channels)) as the authors did."""
    edges = (kernel_size,) * ndim if isinstance(kernel_size, int) else tuple(kernel_size)
    padding = tuple(edge // 2 for edge in edges)
    conv = _CONVOLUTIONS[ndim](in_channels, out_channels, edges, stride, padding, bias=False)
    if not conv.weight.is_meta:  # where only shapes are wanted, drawing nothing takes most of the time
        nn.init.normal_(conv.weight, std=math.sqrt(2.0 / (math.prod(edges) * out_channels)))
    return conv


def join(x: Features) -> Tensor:
    """Return the halves of a pair joined along the channels, or the tensor itself."""
    return x if isinstance(x, Tensor) else torch.cat(x, dim=1)


def pool(x: Tensor) -> Tensor:
    """Average over neighbours, two in each dimension; an odd image size is rounded up, as by a convolution of stride 2."""
    odd = any(edge % 2 for edge in x.shape[2:])
    return _POOLS[x.dim() - 2](x, 2, ceil_mode=odd)


def pad_channels(x: Tensor, channels: int) -> Tensor:
    """Add zero channels on both sides, equally many up to one."""
    missing = channels - x.shape[1]
    return F.pad(x, (0, 0) * (x.dim() - 2) + (missing // 2, missing - missing // 2)) if missing else x


def squeeze(x: Tensor, strides: Sequence[int] = ()) -> Tensor:
    """Make neighbours channels (space to depth), as many in each dimension as `strides` says, 2 unless given."""
    ndim = x.dim() - 2
    strides = strides or [2] * ndim
    if ndim == 2 and strides[0] == strides[1]:
        return F.pixel_unshuffle(x, strides[0])  # keeps channels_last
    split = x.reshape(
        *x.shape[:2], *(size for edge, n in zip(x.shape[2:], strides, strict=True) for size in (edge // n, n))
    )
    order = (0, 1, *range(3, 2 * ndim + 2, 2), *range(2, 2 * ndim + 2, 2))
    return split.permute(order).flatten(1, 1 + ndim)


def unsqueeze(x: Tensor, strides: Sequence[int] = ()) -> Tensor:
    """Undo `squeeze` (depth to space)."""
    ndim = x.dim() - 2
    strides = strides or [2] * ndim
    if ndim == 2 and strides[0] == strides[1]:
        return F.pixel_shuffle(x, strides[0])
    split = x.unflatten(1, (-1, *strides))
    order = (0, 1, *(place for i in range(ndim) for place in (2 + ndim + i, 2 + i)))
    return split.permute(order).reshape(
        *split.shape[:2], *(edge * n for edge, n in zip(x.shape[2:], strides, strict=True))
    )


def haar(x: Tensor, grid: Grid | None = None, strides: Sequence[int] = ()) -> Tensor:
    """Apply the Haar transform: sums and differences of two neighbours, in each dimension of stride 2, become channels.

    The transform is orthonormal. With a grid it has its integer lifting form, means and differences that stay on the grid,
    which `unhaar` undoes bit for bit. It saves nothing for backward.
    """
    strides = strides or [2] * (x.dim() - 2)
    y = squeeze(x, strides).unflatten(1, (-1, *strides))
    for dim in (2 + axis for axis, stride in enumerate(strides) if stride == 2):
        a, b = y.unbind(dim)
        if grid is None:
            pair = (a + b) * math.sqrt(0.5), (b - a) * math.sqrt(0.5)
        else:
            difference = b - a
            pair = a + grid.round(difference, 0.5), difference
        y = torch.stack(pair, dim)
    return y.flatten(1, 1 + len(strides))


def unhaar(x: Tensor, grid: Grid | None = None, strides: Sequence[int] = ()) -> Tensor:
    """Undo `haar`."""
    strides = strides or [2] * (x.dim() - 2)
    y = x.unflatten(1, (-1, *strides))
    for dim in (2 + axis for axis, stride in reversed(list(enumerate(strides))) if stride == 2):
        s, d = y.unbind(dim)
        if grid is None:
            pair = (s - d) * math.sqrt(0.5), (s + d) * math.sqrt(0.5)
        else:
            a = s - grid.round(d, 0.5)
            pair = a, d + a
        y = torch.stack(pair, dim)
    return unsqueeze(y.flatten(1, 1 + len(strides)), strides)


class ConvStem(nn.Module):
    """A 3x3 convolution, batch norm and ReLU."""

    def __init__(self, in_channels: int, channels: int, ndim: int = 2) -> None:
        super().__init__()
        self.conv = convolution(in_channels, channels, ndim=ndim)
        self.norm = make_norm("batch", channels, ndim)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class PadStem(nn.Module):
    """The image's channels over and over until the first unit has enough: injective, so it can be undone.

    Zeros would put every ReLU of the first branch on its kink, where a state recomputed to round-off has another derivative
    than the stored one. `strides` are those of a space to depth before everything else, if any.
    """

    def __init__(self, in_channels: int, channels: int, strides: Sequence[int] = ()) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.channels = channels
        self.strides = strides

    def forward(self, x: Tensor) -> Tensor:
        x = squeeze(x, self.strides) if self.strides else x
        times = math.ceil(self.channels / self.in_channels)
        return torch.cat([x] * times, dim=1)[:, : self.channels]

    def inverse(self, y: Tensor) -> Tensor:
        """Return the image, without its repetitions."""
        y = y[:, : self.in_channels]
        return unsqueeze(y, self.strides) if self.strides else y

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.channels}"


class LinearHead(nn.Module):
    """A global average pool and a linear map, uniform ±sqrt(3 / fan_in) at first with bias 0."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, num_classes)
        bound = math.sqrt(3.0 / channels)
        nn.init.uniform_(self.linear.weight, -bound, bound)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(dim=tuple(range(2, x.dim()))))


class NormHead(LinearHead):
    """Batch norm, ReLU, global average pool and a linear map."""

    def __init__(self, channels: int, num_classes: int, ndim: int = 2) -> None:
        super().__init__(channels, num_classes)
        self.norm = make_norm("batch", channels, ndim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.relu(self.norm(x)))


class PointHead(nn.Module):
    """Scores at every point: a convolution with kernel 1 on both members of a pair, which are not joined to save memory."""

    def __init__(self, channels: int, num_classes: int, ndim: int = 2) -> None:
        super().__init__()
        self.ndim = ndim
        bound = math.sqrt(3.0 / channels)
        self.weight = nn.Parameter(torch.empty(num_classes, channels, *[1] * ndim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(num_classes))

    def forward(self, x: State) -> Tensor:
        convolve, (first, second) = CONVOLUTIONS[self.ndim], self.weight.chunk(2, dim=1)
        return convolve(x[0], first, self.bias) + convolve(x[1], second)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, ndim={self.ndim}"


class DeepHead(PointHead):
    """Scores at each of several resolutions: a `PointHead` for the last pair, and for each coarser pair before it."""

    def __init__(self, channels: Sequence[int], num_classes: int, ndim: int = 2) -> None:
        super().__init__(channels[0], num_classes, ndim)
        self.coarse = nn.ModuleList(PointHead(coarse, num_classes, ndim) for coarse in channels[1:])

    def forward(self, x: Any) -> Any:
        """Return the scores of a single pair, or a list of the scores of each pair."""
        if isinstance(x, tuple):
            return super().forward(x)
        return [super().forward(x[0]), *(head(pair) for head, pair in zip(self.coarse, x[1:], strict=True))]


class PoolPad(nn.Module):
    """An average pool of size 2 and zero channels on both sides, for each half of a pair by itself (the authors' code)."""

    def __init__(self, out_channels: int) -> None:
        super().__init__()
        self.out_channels = out_channels

    def forward(self, x: Features) -> Features:
        if isinstance(x, Tensor):
            return pad_channels(pool(x), self.out_channels)
        half = self.out_channels // 2
        return pad_channels(pool(x[0]), half), pad_channels(pool(x[1]), half)

    def extra_repr(self) -> str:
        return f"{self.out_channels}"


class Connector(nn.Module):
    """A 1x1 convolution, norm, activation, average pool (rule M; the last one leaves pooling to the head)."""

    def __init__(
        self, in_channels: int, out_channels: int, norm: str, activation: str, *, pools: bool = True, ndim: int = 2
    ) -> None:
        super().__init__()
        self.conv = convolution(in_channels, out_channels, kernel_size=1, ndim=ndim)
        self.norm = make_norm(norm, out_channels, ndim)
        self.activation = make_activation(activation)
        self.pools = pools

    def forward(self, x: Features) -> Features:
        y = self.activation(self.norm(self.conv(join(x))))
        return pool(y) if self.pools else y


class Squeeze(nn.Module):
    """Space to depth: each 2x2 square of pixels becomes four times the channels. A permutation, so it can be undone."""

    def forward(self, x: Features) -> Features:
        return squeeze(x) if isinstance(x, Tensor) else (squeeze(x[0]), squeeze(x[1]))

    def inverse(self, x: State) -> State:
        """Undo the permutation (depth to space)."""
        return unsqueeze(x[0]), unsqueeze(x[1])


class PreActivation(nn.Module):
    """The residual branch of both baselines (He et al. 2016): norm, σ, conv, norm, σ, conv; without `leading` only the last
    four.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        *,
        stride: int = 1,
        leading: bool = True,
        norm: str = "batch",
        activation: Activation = "relu",
        kernel_size: Edges = 3,
        ndim: int = 2,
    ) -> None:
        super().__init__()
        out_channels = in_channels if out_channels is None else out_channels
        self.norm1 = make_norm(norm, in_channels, ndim) if leading else None
        self.conv1 = convolution(in_channels, out_channels, kernel_size, stride, ndim)
        self.norm2 = make_norm(norm, out_channels, ndim)
        self.conv2 = convolution(out_channels, out_channels, kernel_size, ndim=ndim)
        self.activation = make_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm1 is not None:
            x = self.activation(self.norm1(x))
        return self.conv2(self.activation(self.norm2(self.conv1(x))))


class ResidualBlock(nn.Module):
    """The block shortcut(x) + branch(x); the shortcut of a strided block averages 2x2 pixels and pads channels with zeros."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1, **branch: Any) -> None:
        super().__init__()
        self.branch = PreActivation(in_channels, out_channels, stride=stride, **branch)
        self.out_channels = out_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.stride == 1 else pool(x)
        return pad_channels(shortcut, self.out_channels) + self.branch(x)


class StridedBlock(nn.Module):
    """RevNet's first block of a later unit: y' = s(y) + F(z), z' = s(z) + G(y'), where s pools and pads. Not reversible."""

    def __init__(self, in_channels: int, out_channels: int, norm: str, activation: str, *, ndim: int = 2) -> None:
        super().__init__()
        options: dict[str, Any] = {"norm": norm, "activation": activation, "ndim": ndim}
        self.half_channels = out_channels // 2
        self.first = PreActivation(in_channels // 2, self.half_channels, stride=2, **options)
        self.second = PreActivation(self.half_channels, **options)

    def forward(self, x: Features) -> Features:
        y, z = x.chunk(2, dim=1) if isinstance(x, Tensor) else x
        y = pad_channels(pool(y), self.half_channels) + self.first(z)
        z = pad_channels(pool(z), self.half_channels) + self.second(y)
        return y, z
