"""The paper's residual branches, built on operators with an adjoint.

| field | computes | stands in |
|---|---|---|
| ``SymmetricField`` | K' σ(N(K y)) | the two-layer Hamiltonian (eq. 10) and Leapfrog networks |
| ``AntisymmetricField`` | σ(N((K - K') y)) | the MidPoint network |
| ``OneLayerField`` | σ(K y + b), or σ(K' y + b) | Haber & Ruthotto's one-layer Hamiltonian (eq. 8) |

N is a bias (``norm="none"``, the paper's), or a norm of `NORMS`. Signs and step sizes belong to the scheme. Any other
``nn.Module`` that keeps its input's shape serves as a branch just as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from revode.operators import ACTIVATIONS as ACTIVATIONS
from revode.operators import (
    Activation,
    AntisymmetricConv,
    AntisymmetricDense,
    Bias,
    Conv,
    Dense,
    Edges,
    LinearOperator,
    adjoint_kernel,
    make_activation,
    make_norm,
)
from revode.operators import TVNorm as TVNorm
from revode.vjp import IN_PLACE, SLOPES, KnownField, Normalize, Record, convolution_vjp, norm_product


def convolved(operator: Conv, kernel: Tensor, norm: nn.Module, y: Tensor) -> Tensor:
    """Return N(K y) of a convolution with its kernel in hand, in the precision of y.

    >>> conv, y = Conv(2), torch.randn(1, 2, 8, 8)
    >>> torch.equal(convolved(conv, conv.kernel(), Bias(2), y), affine(conv, Bias(2), y))
    True
    """
    if isinstance(norm, Bias):
        return operator.convolve(y, kernel, norm.bias.to(y.dtype))
    return norm(operator.convolve(y, kernel))


def affine(operator: LinearOperator, norm: nn.Module, y: Tensor) -> Tensor:
    """Return N(K y), with a bias in the same call.

    >>> affine(Dense(2), Bias(2, channel_dim=-1), torch.zeros(1, 2)).tolist()
    [[0.0, 0.0]]
    """
    if isinstance(norm, Bias):
        return operator(y, norm.bias)
    return norm(operator(y))


class SymmetricField(KnownField):
    """The branch K' σ(N(K y)), or K' σ(N(K M(y))) with ``leading=True``.

    Its Jacobian K' diag(σ') K is symmetric and, for increasing σ, positive semi-definite: minus this field is the force of a
    convex potential. With ``norm="none"`` N and M are biases, which is the authors' field K'σ(K(y + a) + b).

    >>> SymmetricField(4, hidden_channels=8)(torch.randn(1, 4, 8, 8)).shape
    torch.Size([1, 4, 8, 8])

    Args:
        channels: channels of y.
        hidden_channels: channels of Ky; ``channels`` unless given.
        activation: σ, by name or as a callable.
        norm: a name of `NORMS`: the map N between K and σ.
        leading: whether a map M of the same kind stands before K.
        kernel_size: odd kernel size, or one for each dimension.
        ndim: spatial dimensions, 1 to 3; 0 for vectors in the last dimension.
    """

    ends_in_convolution = True

    def __init__(
        self,
        channels: int,
        hidden_channels: int | None = None,
        *,
        activation: Activation = "relu",
        norm: str = "none",
        leading: bool = False,
        kernel_size: Edges = 3,
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

    def value(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        kernel = self.operator.weight.to(dtype)
        shifted = (q if self.lead is None else self.lead(q)).to(dtype)
        hidden = IN_PLACE[self.activation](convolved(self.operator, kernel, self.norm, shifted))
        return self.operator.convolve_adjoint(hidden, kernel)

    def linearize(
        self, q: Tensor, dtype: torch.dtype, normalize: Normalize, needs_value: bool = True
    ) -> tuple[Tensor | None, Record]:
        kernel = self.operator.weight.to(dtype)
        shifted, lead = (q, ()) if self.lead is None else normalize(self.lead, q)
        record: Record = {"kernel": kernel, "shifted": shifted.to(dtype), "lead": lead}
        if isinstance(self.norm, Bias):
            hidden = convolved(self.operator, kernel, self.norm, record["shifted"])
        else:
            record["inner"] = self.operator.convolve(record["shifted"], kernel)
            hidden, record["norm"] = normalize(self.norm, record["inner"])
        record["hidden"] = IN_PLACE[self.activation](hidden)
        return self.operator.convolve_adjoint(record["hidden"], kernel) if needs_value else None, record

    def product(self, q: Tensor, g: Tensor, record: Record) -> tuple[Tensor, list[Tensor]]:
        kernel, hidden, padding = record["kernel"], record["hidden"], self.operator.padding
        g, g_weight, _ = convolution_vjp(g.to(kernel.dtype), hidden, kernel, padding, transposed=True)
        g, g_norm = SLOPES[self.activation](g, hidden), []
        if "inner" in record:
            g, g_norm = norm_product(self.norm, record["inner"], record["norm"], g)
        g, g_weight_inner, g_bias = convolution_vjp(
            g, record["shifted"], kernel, padding, bias=isinstance(self.norm, Bias)
        )
        g, g_norm = g.to(q.dtype), g_norm or [g_bias]
        g, g_lead = (g, []) if self.lead is None else norm_product(self.lead, q, record["lead"], g)
        g_weight = g_weight.to(self.operator.weight.dtype).add_(g_weight_inner)
        return g, [g_weight, *g_lead, *(grad.to(g_weight.dtype) for grad in g_norm)]


class AntisymmetricField(KnownField):
    """The branch σ(N((K - K') y)). With a bias for N its Jacobian diag(σ')(K - K') has imaginary eigenvalues only.

    >>> AntisymmetricField(4, norm="batch")(torch.randn(2, 4, 8, 8)).shape
    torch.Size([2, 4, 8, 8])

    The arguments are as for `SymmetricField`; N stands between K - K' and σ.
    """

    def __init__(
        self,
        channels: int,
        *,
        activation: Activation = "relu",
        norm: str = "none",
        kernel_size: Edges = 3,
        ndim: int = 2,
    ) -> None:
        super().__init__()
        self.operator: Any = AntisymmetricConv(channels, kernel_size, ndim) if ndim else AntisymmetricDense(channels)
        self.norm: Any = make_norm(norm, channels, ndim)
        self.activation = make_activation(activation)

    def forward(self, y: Tensor) -> Tensor:
        return self.activation(affine(self.operator, self.norm, y))

    def value(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        kernel = self.operator.kernel().to(dtype)
        return IN_PLACE[self.activation](convolved(self.operator, kernel, self.norm, q.to(dtype)))

    def linearize(
        self, q: Tensor, dtype: torch.dtype, normalize: Normalize, needs_value: bool = True
    ) -> tuple[Tensor | None, Record]:
        kernel, low = self.operator.kernel().to(dtype), q.to(dtype)
        record: Record = {"kernel": kernel, "shifted": low}
        if isinstance(self.norm, Bias):
            u = convolved(self.operator, kernel, self.norm, low)
        else:
            record["inner"] = self.operator.convolve(low, kernel)
            u, record["norm"] = normalize(self.norm, record["inner"])
        record["hidden"] = IN_PLACE[self.activation](u)
        return record["hidden"], record

    def product(self, q: Tensor, g: Tensor, record: Record) -> tuple[Tensor, list[Tensor]]:
        kernel, bias = record["kernel"], isinstance(self.norm, Bias)
        g, g_norm = SLOPES[self.activation](g.to(kernel.dtype, copy=True), record["hidden"]), []
        if not bias:
            g, g_norm = norm_product(self.norm, record["inner"], record["norm"], g)
        gq, g_kernel, g_bias = convolution_vjp(g, record["shifted"], kernel, self.operator.padding, bias=bias)
        g_kernel, g_norm = g_kernel.to(self.operator.weight.dtype), g_norm or [g_bias]
        return gq.to(q.dtype), [g_kernel - adjoint_kernel(g_kernel), *(grad.to(g_kernel.dtype) for grad in g_norm)]


class OneLayerField(nn.Module):
    """The branch σ(K y + b), or σ(K' y + b) with ``transposed=True``: one half of Haber & Ruthotto's Hamiltonian block.

    >>> ReversibleSequence(OneLayerField.pair(4), Verlet(h=0.1))(torch.randn(1, 8, 8, 8)).shape
    torch.Size([1, 8, 8, 8])

    The other arguments are as for `SymmetricField`.
    """

    def __init__(
        self,
        channels: int,
        *,
        activation: Activation = "relu",
        kernel_size: Edges = 3,
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
        cls, channels: int, *, activation: Activation = "relu", kernel_size: Edges = 3, ndim: int = 2
    ) -> tuple[OneLayerField, OneLayerField]:
        """Return the fields σ(K z + b) and σ(K' y + b) of one block, with the same K and b."""
        first = cls(channels, activation=activation, kernel_size=kernel_size, ndim=ndim)
        second = cls(channels, activation=activation, kernel_size=kernel_size, ndim=ndim, transposed=True)
        second.operator, second.norm = first.operator, first.norm
        return first, second

    def forward(self, y: Tensor) -> Tensor:
        if self.transposed:
            return self.activation(self.norm(self.operator.adjoint(y)))
        return self.activation(affine(self.operator, self.norm, y))
