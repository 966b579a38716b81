"""The paper's residual branches, built on operators with an adjoint.

| field | computes | stands in |
|---|---|---|
| ``SymmetricField`` | K' σ(N(K y)) | the two-layer Hamiltonian (eq. 10) and Leapfrog networks |
| ``AntisymmetricField`` | σ(N((K - K') y)) | the MidPoint network |
| ``OneLayerField`` | σ(K y + b), or σ(K' y + b) | Haber & Ruthotto's one-layer Hamiltonian (eq. 8) |

N is a bias (``norm="none"``, the paper's), batch normalisation (``"batch"``) or the batch-independent ``"tv"``. Signs and
step sizes belong to the scheme. Any other ``nn.Module`` that keeps its input's shape serves as a branch just as well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from revode.operators import AntisymmetricConv, AntisymmetricDense, Conv, Dense, LinearOperator

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
    """y / sqrt(Σ_channels y² + eps), then a scale and a shift per channel: Meganet's norm, independent of the batch."""

    def __init__(self, channels: int, channel_dim: int = 1, eps: float = 1e-3) -> None:
        super().__init__()
        self.channel_dim = channel_dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
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


def affine(operator: LinearOperator, norm: nn.Module, y: Tensor) -> Tensor:
    """N(K y); a bias rides along with the operator in one call."""
    if isinstance(norm, Bias):
        return operator(y, norm.bias)
    return norm(operator(y))


class SymmetricField(nn.Module):
    """K' σ(N(K y)), and K' σ(N(K M(y))) with ``leading=True``.

    Its Jacobian K' diag(σ') K is symmetric and, for increasing σ, positive semi-definite: minus this field is the force
    of a convex potential. With ``norm="none"`` N and M are biases, which is the authors' field K'σ(K(y + a) + b).

    Args:
        channels: channels of y.
        hidden_channels: channels of Ky; ``channels`` unless given.
        activation: σ, by name or as a callable.
        norm: ``"none"``, ``"batch"`` or ``"tv"``: the map N between K and σ.
        leading: whether a map M of the same kind stands before K.
        kernel_size: odd edge length of the kernel.
        ndim: spatial dimensions, 1 to 3; 0 for vectors in the last dimension.
    """

    def __init__(
        self,
        channels: int,
        hidden_channels: int | None = None,
        *,
        activation: Activation = "relu",
        norm: str = "none",
        leading: bool = False,
        kernel_size: int = 3,
        ndim: int = 2,
    ) -> None:
        super().__init__()
        self.operator: LinearOperator = (
            Conv(channels, hidden_channels, kernel_size, ndim) if ndim else Dense(channels, hidden_channels)
        )
        self.lead = make_norm(norm, channels, ndim) if leading else None
        self.norm = make_norm(norm, self.operator.out_channels, ndim)
        self.activation = make_activation(activation)

    def forward(self, y: Tensor) -> Tensor:
        if self.lead is not None:
            y = self.lead(y)
        return self.operator.adjoint(self.activation(affine(self.operator, self.norm, y)))


class AntisymmetricField(nn.Module):
    """σ(N((K - K') y)); with a bias for N its Jacobian diag(σ')(K - K') has imaginary eigenvalues only.

    Args:
        channels: channels of y.
        activation: σ, by name or as a callable.
        norm: ``"none"``, ``"batch"`` or ``"tv"``: the map N between K - K' and σ.
        kernel_size: odd edge length of the kernel.
        ndim: spatial dimensions, 1 to 3; 0 for vectors in the last dimension.
    """

    def __init__(
        self,
        channels: int,
        *,
        activation: Activation = "relu",
        norm: str = "none",
        kernel_size: int = 3,
        ndim: int = 2,
    ) -> None:
        super().__init__()
        self.operator: LinearOperator = (
            AntisymmetricConv(channels, kernel_size, ndim) if ndim else AntisymmetricDense(channels)
        )
        self.norm = make_norm(norm, channels, ndim)
        self.activation = make_activation(activation)

    def forward(self, y: Tensor) -> Tensor:
        return self.activation(affine(self.operator, self.norm, y))


class OneLayerField(nn.Module):
    """σ(K y + b), or σ(K' y + b) with ``transposed=True``: one half of Haber & Ruthotto's Hamiltonian block.

    ``OneLayerField.pair`` gives the two halves of a block, which share K and b.

    Args:
        channels: channels of y.
        activation: σ, by name or as a callable.
        kernel_size: odd edge length of the kernel.
        ndim: spatial dimensions, 1 to 3; 0 for vectors in the last dimension.
        transposed: whether K' stands in place of K.
    """

    def __init__(
        self,
        channels: int,
        *,
        activation: Activation = "relu",
        kernel_size: int = 3,
        ndim: int = 2,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.operator: LinearOperator = Conv(channels, kernel_size=kernel_size, ndim=ndim) if ndim else Dense(channels)
        self.norm = make_norm("none", channels, ndim)
        self.activation = make_activation(activation)
        self.transposed = transposed

    @classmethod
    def pair(
        cls, channels: int, *, activation: Activation = "relu", kernel_size: int = 3, ndim: int = 2
    ) -> tuple[OneLayerField, OneLayerField]:
        """The fields σ(K z + b) and σ(K' y + b) of one block, with the same K and b."""
        first = cls(channels, activation=activation, kernel_size=kernel_size, ndim=ndim)
        second = cls(channels, activation=activation, kernel_size=kernel_size, ndim=ndim, transposed=True)
        second.operator, second.norm = first.operator, first.norm
        return first, second

    def forward(self, y: Tensor) -> Tensor:
        if self.transposed:
            return self.activation(self.norm(self.operator.adjoint(y)))
        return self.activation(affine(self.operator, self.norm, y))
