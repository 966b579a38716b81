"""What fields are made of: linear maps K with an exact adjoint, per-channel maps N, activations σ.

``forward`` of a linear map applies K, ``adjoint`` applies K' with the same parameters. Convolutions have stride 1, odd kernels
and zero ("same") padding, so that K and K' map between tensors of one spatial size and ⟨Kx, y⟩ = ⟨x, K'y⟩ holds to round-off.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def adjoint_kernel(weight: Tensor) -> Tensor:
    """The kernel whose convolution is the adjoint: channels transposed *and* every spatial axis flipped."""
    return weight.transpose(0, 1).flip(tuple(range(2, weight.dim())))


def _require_positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def _require_size(kind: str, x: Tensor, dim: int, size: int) -> None:
    if x.dim() <= (dim if dim >= 0 else -dim - 1) or x.shape[dim] != size:
        raise ValueError(f"{kind} expects {size} channels in dimension {dim}, got a tensor of shape {tuple(x.shape)}")


class LinearOperator(nn.Module, abc.ABC):
    """A linear map K with one parameter ``weight``; ``forward(x, b)`` is Kx + b and ``adjoint(y)`` is K'y."""

    weight: nn.Parameter
    channel_dim: int
    """The dimension that K acts on as a matrix; biases and norms broadcast along it."""
    in_channels: int
    out_channels: int

    @abc.abstractmethod
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Kx, plus the bias of each output channel if one is given."""

    @abc.abstractmethod
    def adjoint(self, y: Tensor) -> Tensor:
        """K'y."""

    def reset_parameters(self) -> None:
        """Draw the kernel as the paper's authors did: normal with std sqrt(2 / (kernel volume * out_channels))."""
        if not self.weight.is_meta:  # where only shapes are wanted, drawing takes most of the time
            with torch.no_grad():
                self.weight.copy_(self.draw())

    def draw(self, generator: torch.Generator | None = None) -> Tensor:
        """A kernel from the paper's distribution."""
        std = math.sqrt(2.0 / (math.prod(self.weight.shape[2:]) * self.out_channels))
        return torch.empty_like(self.weight, requires_grad=False).normal_(std=std, generator=generator)


class Conv(LinearOperator):
    """Convolution in ``ndim`` = 1, 2 or 3 dimensions, without bias, and its transpose.

    Args:
        in_channels: channels of x.
        out_channels: channels of Kx; ``in_channels`` unless given.
        kernel_size: odd edge length of the kernel.
        ndim: number of spatial dimensions.
    """

    channel_dim = 1

    def __init__(self, in_channels: int, out_channels: int | None = None, kernel_size: int = 3, ndim: int = 2) -> None:
        super().__init__()
        if ndim not in CONVOLUTIONS:
            raise ValueError(f"ndim must be 1, 2 or 3, got {ndim!r}")
        if not isinstance(kernel_size, int) or kernel_size % 2 != 1 or kernel_size < 1:
            raise ValueError(f"kernel_size must be odd, so that the adjoint has the same padding, got {kernel_size!r}")
        self.in_channels = _require_positive("in_channels", in_channels)
        self.out_channels = _require_positive("out_channels", in_channels if out_channels is None else out_channels)
        self.ndim = ndim
        self.padding = kernel_size // 2
        self.weight = nn.Parameter(torch.empty(self.out_channels, self.in_channels, *[kernel_size] * ndim))
        self.reset_parameters()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.convolve(x, self.kernel(), bias)

    def adjoint(self, y: Tensor) -> Tensor:
        return self.convolve_adjoint(y, self.kernel())

    def kernel(self) -> Tensor:
        """The kernel that ``forward`` convolves with."""
        return self.weight

    def convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
        """``forward`` with ``kernel()`` in hand, perhaps in another precision."""
        _require_size(type(self).__name__, x, 1, self.in_channels)
        return CONVOLUTIONS[self.ndim](x, kernel, bias, padding=self.padding)

    def convolve_adjoint(self, y: Tensor, kernel: Tensor) -> Tensor:
        """``adjoint`` with ``kernel()`` in hand."""
        _require_size(f"{type(self).__name__}.adjoint", y, 1, self.out_channels)
        return _CONV_TRANSPOSE[self.ndim](y, kernel, padding=self.padding)

    def extra_repr(self) -> str:
        size = self.weight.shape[-1]
        return f"{self.in_channels}, {self.out_channels}, kernel_size={size}, ndim={self.ndim}"


class AntisymmetricConv(Conv):
    """The convolution A = K - K', as one convolution with the kernel W - adjoint_kernel(W); its adjoint is -A."""

    def __init__(self, channels: int, kernel_size: int = 3, ndim: int = 2) -> None:
        super().__init__(channels, channels, kernel_size, ndim)

    def kernel(self) -> Tensor:
        return self.weight - adjoint_kernel(self.weight)

    def adjoint(self, y: Tensor) -> Tensor:
        return -self(y)


class Dense(LinearOperator):
    """A matrix on the last dimension, without bias, and its transpose."""

    channel_dim = -1

    def __init__(self, in_channels: int, out_channels: int | None = None) -> None:
        super().__init__()
        self.in_channels = _require_positive("in_channels", in_channels)
        self.out_channels = _require_positive("out_channels", in_channels if out_channels is None else out_channels)
        self.weight = nn.Parameter(torch.empty(self.out_channels, self.in_channels))
        self.reset_parameters()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        _require_size(type(self).__name__, x, -1, self.in_channels)
        return F.linear(x, self.weight, bias)

    def adjoint(self, y: Tensor) -> Tensor:
        _require_size("Dense.adjoint", y, -1, self.out_channels)
        return F.linear(y, self.weight.t())

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


class AntisymmetricDense(Dense):
    """The matrix A = K - K' on the last dimension; its adjoint is -A."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        _require_size("AntisymmetricDense", x, -1, self.in_channels)
        return F.linear(x, self.weight - self.weight.t(), bias)

    def adjoint(self, y: Tensor) -> Tensor:
        return -self(y)


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


class NormKind(NamedTuple):
    """A norm that blocks can have: what it is in words, and how it is made of a number of channels and of dimensions."""

    words: str
    make: Callable[[int, int], nn.Module]


NORMS = {
    "none": NormKind("biases", lambda channels, ndim: Bias(channels, 1 if ndim else -1)),
    "batch": NormKind("batch norm", lambda channels, ndim: _BATCH_NORM[ndim](channels)),
    "tv": NormKind("batch-independent norm", lambda channels, ndim: TVNorm(channels, 1 if ndim else -1)),
}
"""The maps N between K and σ by name."""


def make_norm(norm: str, channels: int, ndim: int = 2) -> nn.Module:
    """The per-channel map N between K and σ.

    Args:
        norm: a name of `NORMS`.
        channels: how many channels it acts on.
        ndim: spatial dimensions; 0 for vectors in the last dimension.
    """
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(map(repr, NORMS))}, got {norm!r}")
    return NORMS[norm].make(channels, ndim)


def make_activation(activation: Activation) -> Callable[[Tensor], Tensor]:
    """σ by name, or any callable on tensors as it is."""
    if callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be a callable or one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return ACTIVATIONS[activation]
