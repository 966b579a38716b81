"""Residual branches of the kinds that people put into a reversible sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revode import BDIA, AdditiveCoupling, AntisymmetricField, Leapfrog, MidPoint, Momentum, SymmetricField, Verlet
from revode.schemes import Scheme

SCHEMES: dict[str, Callable[[], Scheme]] = {
    "verlet": lambda: Verlet(h=0.3),
    "additive": AdditiveCoupling,
    "additive-duplicate": lambda: AdditiveCoupling(start="duplicate"),
    "midpoint": lambda: MidPoint(h=0.15),
    "midpoint-paper": lambda: MidPoint(h=0.15, start="paper"),
    "leapfrog": lambda: Leapfrog(h=0.4),
    "leapfrog-meganet": lambda: Leapfrog(h=0.4, start="meganet"),
    "leapfrog-paper": lambda: Leapfrog(h=0.05, start="paper"),
}
"""Every scheme that carries the old state on as it is, with every start."""

HALVING: dict[str, Callable[[], Scheme]] = {
    "midpoint-half": lambda: MidPoint(h=0.15, blend=0.5),
    "midpoint-minus-half": lambda: MidPoint(h=0.15, blend=-0.5),
    "midpoint-half-paper": lambda: MidPoint(h=0.15, blend=0.5, start="paper"),
    "bdia": lambda: BDIA(h=0.15),
}
"""Schemes that carry half of it on: exact with a bit kept of each element and step."""

EXACT = SCHEMES | HALVING

DISSIPATIVE: dict[str, Callable[[], Scheme]] = {
    "midpoint-blend": lambda: MidPoint(h=0.15, blend=0.9),
    "midpoint-minus-blend": lambda: MidPoint(h=0.15, blend=-0.9),
    "momentum": lambda: Momentum(0.9),
    "momentum-damped": lambda: Momentum(0.95, damping=0.02),
    "verlet-damped": lambda: Verlet(h=0.3, damping=0.05),
    "additive-damped": lambda: AdditiveCoupling(damping=0.1),
    "midpoint-damped": lambda: MidPoint(h=0.15, damping=0.1),
    "leapfrog-damped": lambda: Leapfrog(h=0.4, damping=0.1),
}
"""Schemes that lose information: |s| >= 0.9."""

ALL_SCHEMES = EXACT | DISSIPATIVE


class Recurrent(nn.Module):
    """The outputs of recurrent cells; an LSTM takes other kernels with gradients than without."""

    def __init__(self, cells: nn.RNNBase) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, q: Tensor) -> Tensor:
        return self.cells(q)[0]


def conv_norm_relu(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())


def small_conv(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.Tanh())


def gelu_conv(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GELU(), nn.Conv2d(channels, channels, 1))


def sigmoid_conv(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.Sigmoid())


def pooled_gate(channels: int) -> nn.Module:
    return Gate(channels)


def symmetric(channels: int) -> nn.Module:
    return SymmetricField(channels)


def symmetric_lead_tanh(channels: int) -> nn.Module:
    return SymmetricField(channels, 2 * channels, activation="tanh", leading=True)


def symmetric_batch(channels: int) -> nn.Module:
    return SymmetricField(channels, norm="batch")


def symmetric_tv(channels: int) -> nn.Module:
    return SymmetricField(channels, norm="tv", activation="gelu")


def antisymmetric(channels: int) -> nn.Module:
    return AntisymmetricField(channels)


def antisymmetric_sigmoid(channels: int) -> nn.Module:
    return AntisymmetricField(channels, activation="sigmoid")


IMAGE_BRANCHES: dict[str, Callable[[int], nn.Module]] = {
    make.__name__: make
    for make in (
        conv_norm_relu,
        small_conv,
        gelu_conv,
        sigmoid_conv,
        pooled_gate,
        symmetric,
        symmetric_lead_tanh,
        symmetric_batch,
        symmetric_tv,
        antisymmetric,
        antisymmetric_sigmoid,
    )
}
"""Branches on images; the last six are revode's own fields, some of which know their own gradient."""


class Gate(nn.Module):
    """q sigmoid(W mean(q)): uses q twice."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.Linear(channels, channels)

    def forward(self, q: Tensor) -> Tensor:
        return q * torch.sigmoid(self.mix(q.mean((2, 3))))[:, :, None, None]


class Attention(nn.Module):
    """Pre-norm self-attention with dropout and an optional mask."""

    def __init__(self, features: int, heads: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.attend = nn.MultiheadAttention(features, heads, dropout=dropout, batch_first=True)
        self.drop = nn.Dropout(dropout)

    def forward(self, q: Tensor, mask: Tensor | None = None) -> Tensor:
        normed = self.norm(q)
        mixed, _ = self.attend(normed, normed, normed, key_padding_mask=mask, need_weights=False)
        return self.drop(mixed)


class Perceptron(nn.Module):
    """Pre-norm two-layer perceptron with dropout; ignores the mask."""

    def __init__(self, features: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(features),
            nn.Linear(features, 2 * features),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(2 * features, features),
        )

    def forward(self, q: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layers(q)


class Conditioned(nn.Module):
    """tanh(W q + scale * condition): takes a keyword argument that may require a gradient."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.mix = nn.Linear(features, features)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, q: Tensor, condition: Tensor) -> Tensor:
        return torch.tanh(self.mix(q) + self.scale * condition)


def tanh_layer(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, features), nn.Tanh())


def width(scheme: Scheme, channels: int) -> int:
    """Channels that a branch sees when the input has `channels`."""
    return scheme.init(torch.empty(1, channels))[1].shape[1]


class Checkpointed(nn.Module):
    """A layer under torch's checkpoint, with another module inside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(4, 4), module, nn.Tanh())

    def forward(self, q: Tensor) -> Tensor:
        return checkpoint(self.inside, q, use_reentrant=False)
