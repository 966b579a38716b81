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

import abc
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from revode.operators import (
    CONVOLUTIONS,
    AntisymmetricConv,
    AntisymmetricDense,
    Conv,
    Dense,
    LinearOperator,
    adjoint_kernel,
)

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


def affine(operator: LinearOperator, norm: nn.Module, y: Tensor) -> Tensor:
    """N(K y); a bias rides along with the operator in one call."""
    if isinstance(norm, Bias):
        return operator(y, norm.bias)
    return norm(operator(y))


SLOPES: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    torch.relu: lambda g, output: torch.ops.aten.threshold_backward.grad_input(g, output, 0, grad_input=g),
    torch.tanh: lambda g, output: torch.ops.aten.tanh_backward.grad_input(g, output, grad_input=g),
    torch.sigmoid: lambda g, output: torch.ops.aten.sigmoid_backward.grad_input(g, output, grad_input=g),
    ACTIVATIONS["identity"]: lambda g, output: g,
}
"""σ -> the map (g, σ(a)) -> g σ'(a), written over g, by the kernels that autograd itself would call."""


IN_PLACE: dict[Any, Callable[[Tensor], Tensor]] = {
    torch.relu: torch.relu_,
    torch.tanh: torch.tanh_,
    torch.sigmoid: torch.sigmoid_,
    ACTIVATIONS["identity"]: ACTIVATIONS["identity"],
}


class KnownField(nn.Module, abc.ABC):
    """A field that can give its own vector-Jacobian product, which spares the engine an autograd graph.

    ``value`` and ``vjp`` return the bits that ``forward`` and autograd would, in fresh tensors. The product is known for
    convolutions with biases and an activation whose slope follows from its value; everything else (norms, hooks, frozen
    or parametrised weights) goes through autograd.
    """

    operator: LinearOperator
    norm: nn.Module
    activation: Callable[[Tensor], Tensor]

    @abc.abstractmethod
    def value(self, q: Tensor) -> Tensor:
        """F(q), without a graph."""

    @abc.abstractmethod
    def vjp(self, q: Tensor, g: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """u = F(q), then the products of g with the Jacobians by q and by each of ``parameters()``."""

    def knows_vjp(self) -> bool:
        """Whether ``vjp`` applies to this field as it is now."""
        modules = list(self.modules())
        return (
            self.activation in SLOPES
            and type(modules[0]) in (SymmetricField, AntisymmetricField)
            and all(type(module) in (Conv, AntisymmetricConv, Bias, nn.Identity) for module in modules[1:])
            and not any(_is_altered(module) for module in modules)
            and all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in self.parameters())
        )


def _is_altered(module: nn.Module) -> bool:
    """Whether hooks, or methods replaced on this instance, make a call differ from the class's own."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or not {"forward", "adjoint", "value", "vjp"}.isdisjoint(vars(module))


def _convolution_vjp(
    g: Tensor, x: Tensor, weight: Tensor, padding: int, *, transposed: bool = False, bias: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The products of g with the Jacobians of a convolution by x, by its weight and (if asked) by its bias."""
    ndim = x.dim() - 2
    sizes = [weight.shape[0]] if bias else None
    return torch.ops.aten.convolution_backward(
        g, x, weight, sizes, [1] * ndim, [padding] * ndim, [1] * ndim, transposed, [0] * ndim, 1, [True, True, bias]
    )


class SymmetricField(KnownField):
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
        self.operator: Any = (
            Conv(channels, hidden_channels, kernel_size, ndim) if ndim else Dense(channels, hidden_channels)
        )
        self.lead = make_norm(norm, channels, ndim) if leading else None
        self.norm: Any = make_norm(norm, self.operator.out_channels, ndim)
        self.activation = make_activation(activation)

    def forward(self, y: Tensor) -> Tensor:
        if self.lead is not None:
            y = self.lead(y)
        return self.operator.adjoint(self.activation(affine(self.operator, self.norm, y)))

    def _hidden(self, shifted: Tensor) -> Tensor:
        return IN_PLACE[self.activation](affine(self.operator, self.norm, shifted))

    def value(self, q: Tensor) -> Tensor:
        return self.operator.adjoint(self._hidden(q if self.lead is None else self.lead(q)))

    def vjp(self, q: Tensor, g: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        weight, padding = self.operator.weight, self.operator.padding
        shifted = q if self.lead is None else self.lead(q)
        hidden = self._hidden(shifted)
        u = self.operator.adjoint(hidden)
        g_hidden, g_weight, _ = _convolution_vjp(g, hidden, weight, padding, transposed=True)
        g_hidden = SLOPES[self.activation](g_hidden, hidden)
        gq, g_weight_first, g_bias = _convolution_vjp(g_hidden, shifted, weight, padding, bias=True)
        g_lead = [] if self.lead is None else [_over_channels(gq)]
        return u, gq, [g_weight.add_(g_weight_first), *g_lead, g_bias]


def _over_channels(g: Tensor) -> Tensor:
    """The sum of g over everything but its channels."""
    return g.sum((0, *range(2, g.dim())))


class AntisymmetricField(KnownField):
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
        self.operator: Any = AntisymmetricConv(channels, kernel_size, ndim) if ndim else AntisymmetricDense(channels)
        self.norm: Any = make_norm(norm, channels, ndim)
        self.activation = make_activation(activation)

    def forward(self, y: Tensor) -> Tensor:
        return self.activation(affine(self.operator, self.norm, y))

    def value(self, q: Tensor) -> Tensor:
        return IN_PLACE[self.activation](affine(self.operator, self.norm, q))

    def vjp(self, q: Tensor, g: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        kernel = self.operator.weight - adjoint_kernel(self.operator.weight)
        u = IN_PLACE[self.activation](
            CONVOLUTIONS[q.dim() - 2](q, kernel, self.norm.bias, padding=self.operator.padding)
        )
        g = SLOPES[self.activation](g.clone(), u)
        gq, g_kernel, g_bias = _convolution_vjp(g, q, kernel, self.operator.padding, bias=True)
        return u, gq, [g_kernel - adjoint_kernel(g_kernel), g_bias]


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
