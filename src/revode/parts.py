"""The parts of a field besides its operator: activations σ, and the per-channel maps N that stand before them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Activation = str | Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": nn.functional.softplus,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "identity": nn.Identity(),
}


class Bias(nn.Module):
    """y + b, one b per channel, zero at first."""

    def __init__(self, channels: int, channel_dim: int = 1) -> None:
        super().__init__()
        self.channel_dim = channel_dim
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, y: Tensor) -> Tensor:
        return y + along_channels(self.bias, y, self.channel_dim)


class TVNorm(nn.Module):
    """y / sqrt(Σ_channels y² + eps), then a scale and a shift per channel: Meganet's norm, independent of the batch.

    The scale starts at sqrt(channels), so that the output has unit variance whatever the width; from 1 on a wide field hardly
    moves its state (tried on the digits: leapfrog-26 reaches 21 % in 4 epochs from 1, 55 % from sqrt(channels)).
    """

    def __init__(self, channels: int, channel_dim: int = 1, eps: float = 1e-3) -> None:
        super().__init__()
        self.channel_dim = channel_dim
        self.eps = eps
        self.weight = nn.Parameter(torch.full((channels,), math.sqrt(channels)))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, y: Tensor) -> Tensor:
        scale = torch.rsqrt(y.square().sum(self.channel_dim, keepdim=True) + self.eps)
        weight = along_channels(self.weight, y, self.channel_dim)
        return y * scale * weight + along_channels(self.bias, y, self.channel_dim)


def along_channels(vector: Tensor, y: Tensor, channel_dim: int) -> Tensor:
    """The per-channel `vector`, shaped to broadcast against `y`."""
    shape = [1] * y.dim()
    shape[channel_dim] = vector.shape[0]
    return vector.view(shape)


_BATCH_NORM = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def make_norm(norm: str, channels: int, ndim: int = 2) -> nn.Module:
    """The per-channel map N between K and σ.

    Args:
        norm: ``"none"`` (a bias), ``"batch"`` or ``"tv"``.
        channels: how many channels it acts on.
        ndim: spatial dimensions; 0 for vectors in the last dimension.
    """
    channel_dim = 1 if ndim else -1
    if norm == "none":
        return Bias(channels, channel_dim)
    if norm == "tv":
        return TVNorm(channels, channel_dim)
    if norm == "batch":
        return _BATCH_NORM[ndim](channels)
    raise ValueError(f"norm must be 'none', 'batch' or 'tv', got {norm!r}")


def make_activation(activation: Activation) -> Callable[[Tensor], Tensor]:
    """σ by name, or any callable on tensors as it is."""
    if callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be a callable or one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return ACTIVATIONS[activation]
