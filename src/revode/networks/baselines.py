"""The blocks of the paper's baselines: pre-activation ResNet (He et al. 2016) and RevNet (Gomez et al. 2017)."""

from __future__ import annotations

from torch import Tensor, nn

from revode.fields import make_activation, make_norm
from revode.networks.stem import convolution
from revode.networks.transitions import Features, pad_channels, pool


class PreActivation(nn.Module):
    """norm, σ, conv, norm, σ, conv: the residual branch of both baselines.

    Args:
        in_channels: channels of its input.
        out_channels: channels of its output; ``in_channels`` unless given.
        stride: of the first convolution.
        leading: whether the first norm and σ are there; the very first branch of a network has neither.
        norm: ``"batch"`` or ``"tv"``.
        activation: σ by name.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        *,
        stride: int = 1,
        leading: bool = True,
        norm: str = "batch",
        activation: str = "relu",
    ) -> None:
        super().__init__()
        out_channels = in_channels if out_channels is None else out_channels
        self.norm1 = make_norm(norm, in_channels) if leading else None
        self.conv1 = convolution(in_channels, out_channels, stride=stride)
        self.norm2 = make_norm(norm, out_channels)
        self.conv2 = convolution(out_channels, out_channels)
        self.activation = make_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm1 is not None:
            x = self.activation(self.norm1(x))
        return self.conv2(self.activation(self.norm2(self.conv1(x))))


class ResidualBlock(nn.Module):
    """shortcut(x) + branch(x); the shortcut of a strided block averages 2x2 pixels and pads channels with zeros."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1, **branch: bool | str) -> None:
        super().__init__()
        self.branch = PreActivation(in_channels, out_channels, stride=stride, **branch)  # type: ignore[arg-type]
        self.out_channels = out_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.stride == 1 else pool(x)
        return pad_channels(shortcut, self.out_channels) + self.branch(x)


class StridedBlock(nn.Module):
    """RevNet's first block of a later unit: y' = s(y) + F(z), z' = s(z) + G(y') with s = pool and pad; not reversible."""

    def __init__(self, in_channels: int, out_channels: int, norm: str, activation: str) -> None:
        super().__init__()
        self.half_channels = out_channels // 2
        self.first = PreActivation(in_channels // 2, self.half_channels, stride=2, norm=norm, activation=activation)
        self.second = PreActivation(self.half_channels, norm=norm, activation=activation)

    def forward(self, x: Features) -> Features:
        y, z = x.chunk(2, dim=1) if isinstance(x, Tensor) else x
        y = pad_channels(pool(y), self.half_channels) + self.first(z)
        z = pad_channels(pool(z), self.half_channels) + self.second(y)
        return y, z


def residual_unit(
    in_channels: int, channels: int, num_blocks: int, *, first: bool, norm: str, activation: str
) -> nn.Sequential:
    """One unit of a ResNet; `first` says whether it is the network's first, which neither strides nor pre-activates."""
    blocks = [
        ResidualBlock(
            in_channels, channels, stride=1 if first else 2, leading=not first, norm=norm, activation=activation
        )
    ]
    for _ in range(num_blocks - 1):
        blocks.append(ResidualBlock(channels, channels, norm=norm, activation=activation))
    return nn.Sequential(*blocks)
