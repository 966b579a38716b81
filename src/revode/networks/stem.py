"""From the image to the first unit."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convolution(in_channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias, drawn normal with std sqrt(2 / (kernel area * out_channels)) as the authors did."""
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=False)
    if not conv.weight.is_meta:  # where only shapes are wanted, drawing nothing takes most of the time
        nn.init.normal_(conv.weight, std=math.sqrt(2.0 / (kernel_size**2 * out_channels)))
    return conv


class ConvStem(nn.Module):
    """3x3 convolution, batch norm, ReLU."""

    keeps_output = True
    """Autograd keeps the output of the ReLU, so whoever keeps it too costs nothing more."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv = convolution(in_channels, channels)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class PadStem(nn.Module):
    """The image's channels over and over until the first unit has enough: injective, so it can be undone.

    Zeros would do as well, but a half of zeros puts every ReLU of the first branch on its kink, where a state recomputed to
    round-off has another derivative than the stored one.
    """

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        times = math.ceil(self.channels / self.in_channels)
        return torch.cat([x] * times, dim=1)[:, : self.channels]

    def inverse(self, y: Tensor) -> Tensor:
        """The image: the repetitions are dropped."""
        return y[:, : self.in_channels]

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.channels}"
