"""Parts of fields: linear maps K with an exact adjoint, per-channel maps N, activations σ.

``forward`` of a linear map applies K, ``adjoint`` applies K' with the same parameters. Convolutions have stride 1, odd kernels
and zero ("same") padding. So K and K' map between tensors of one spatial size, and ⟨Kx, y⟩ = ⟨x, K'y⟩ holds to round-off.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Edges = int | Sequence[int]
"""One number for all dimensions, or one for each."""

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def needs_float32(x: Tensor, kernel: Tensor, dtype: torch.dtype) -> bool:
    """Return True if torch's 3-d convolution of x in `dtype` may write wild gradients, and has to run in float32.

    This is so on CPUs with bfloat16 instructions where an axis of the image is shorter than the kernel. There torch 2.13 gets
    the weight's gradient wrong, and writes past its end.

    >>> needs_float32(torch.ones(1, 1, 2, 8, 8), torch.ones(1, 1, 3, 3, 3), torch.bfloat16)
    True
    """
    return (
        kernel.dim() == 5
        and dtype == torch.bfloat16
        and x.device.type == "cpu"
        and any(edge < size for edge, size in zip(x.shape[2:], kernel.shape[2:], strict=True))
    )


def convolve(
    function: Callable[..., Tensor], x: Tensor, kernel: Tensor, bias: Tensor | None, padding: Sequence[int]
) -> Tensor:
    """Return the (transposed) convolution; in float32, on numbers rounded to bfloat16, where `needs_float32` says so.

    >>> convolve(nn.functional.conv1d, torch.ones(1, 1, 3), torch.ones(1, 1, 3), None, [1])
    tensor([[[2., 3., 2.]]])
    """
    if kernel.dim() == 5:  # the others need not ask for autocast
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        if needs_float32(x, kernel, dtype):
            with torch.autocast(x.device.type, enabled=False):
                wide = [None if tensor is None else tensor.to(dtype).float() for tensor in (x, kernel, bias)]
                return function(*wide, padding=padding).to(dtype)
    return function(x, kernel, bias, padding=padding)


class Conv3d(nn.Conv3d):
    """torch's ``nn.Conv3d``, run by `convolve`.

    >>> Conv3d(1, 2, 3, padding=1)(torch.randn(1, 1, 4, 8, 8)).shape
    torch.Size([1, 2, 4, 8, 8])
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        strided = functools.partial(F.conv3d, stride=self.stride, dilation=self.dilation, groups=self.groups)
        return convolve(strided, input, weight, bias, self.padding)  # type: ignore[arg-type]


def adjoint_kernel(weight: Tensor) -> Tensor:
    """Return the kernel whose convolution is the adjoint: channels transposed *and* every spatial axis flipped.

    >>> adjoint_kernel(torch.tensor([[[1.0, 2.0, 3.0]]]))
    tensor([[[3., 2., 1.]]])
    """
    return weight.transpose(0, 1).flip(tuple(range(2, weight.dim())))


def _require_positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def _require_size(kind: str, x: Tensor, dim: int, size: int) -> None:
    if x.dim() <= (dim if dim >= 0 else -dim - 1) or x.shape[dim] != size:
        raise ValueError(f"{kind} expects {size} channels in dimension {dim}, got a tensor of shape {tuple(x.shape)}")


class LinearOperator(nn.Module, abc.ABC):
    """A linear map K with one parameter ``weight``; ``forward(x, b)`` is Kx + b and ``adjoint(y)`` is K'y.

    >>> K, x, y = Dense(2, 3), torch.randn(2), torch.randn(3)
    >>> torch.allclose(K(x) @ y, x @ K.adjoint(y))
    True
    """

    weight: nn.Parameter
    channel_dim: int
    """The dimension that K acts on as a matrix; biases and norms broadcast along it."""
    in_channels: int
    out_channels: int

    @abc.abstractmethod
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return Kx, plus the bias of each output channel if one is given."""

    @abc.abstractmethod
    def adjoint(self, y: Tensor) -> Tensor:
        """Return K'y."""

    def reset_parameters(self) -> None:
        """Draw the kernel as the paper's authors did: normal with std sqrt(2 / (kernel volume * out_channels))."""
        if not self.weight.is_meta:  # where only shapes are wanted, drawing takes most of the time
            with torch.no_grad():
                self.weight.copy_(self.draw())

    def draw(self, generator: torch.Generator | None = None) -> Tensor:
        """Return a kernel from the paper's distribution."""
        std = math.sqrt(2.0 / (math.prod(self.weight.shape[2:]) * self.out_channels))
        return torch.empty_like(self.weight, requires_grad=False).normal_(std=std, generator=generator)


class Conv(LinearOperator):
    """A convolution in ``ndim`` = 1, 2 or 3 dimensions, without bias, and its adjoint.

    >>> Conv(2, 4).adjoint(torch.randn(1, 4, 8, 8)).shape
    torch.Size([1, 2, 8, 8])

    Args:
        in_channels: channels of x.
        out_channels: channels of Kx; ``in_channels`` unless given.
        kernel_size: odd kernel size, or one for each dimension.
    """

    channel_dim = 1

    def __init__(
        self, in_channels: int, out_channels: int | None = None, kernel_size: Edges = 3, ndim: int = 2
    ) -> None:
        super().__init__()
        if ndim not in CONVOLUTIONS:
            raise ValueError(f"ndim must be 1, 2 or 3, got {ndim!r}")
        edges: Any = tuple(kernel_size) if isinstance(kernel_size, list | tuple) else (kernel_size,) * ndim
        if len(edges) != ndim or not all(isinstance(edge, int) and edge % 2 == 1 and edge > 0 for edge in edges):
            raise ValueError(
                f"kernel_size must be odd, so that the adjoint has the same padding, one number or {ndim} of them, "
                f"got {kernel_size!r}"
            )
        self.in_channels = _require_positive("in_channels", in_channels)
        self.out_channels = _require_positive("out_channels", in_channels if out_channels is None else out_channels)
        self.ndim = ndim
        self.padding = tuple(edge // 2 for edge in edges)
        self.weight = nn.Parameter(torch.empty(self.out_channels, self.in_channels, *edges))
        self.reset_parameters()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.convolve(x, self.kernel(), bias)

    def adjoint(self, y: Tensor) -> Tensor:
        return self.convolve_adjoint(y, self.kernel())

    def kernel(self) -> Tensor:
        """Return the kernel that ``forward`` convolves with."""
        return self.weight

    def convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run ``forward`` with ``kernel()`` in hand, perhaps in another precision."""
        _require_size(type(self).__name__, x, 1, self.in_channels)
        return convolve(CONVOLUTIONS[self.ndim], x, kernel, bias, self.padding)

    def convolve_adjoint(self, y: Tensor, kernel: Tensor) -> Tensor:
        """Run ``adjoint`` with ``kernel()`` in hand."""
        _require_size(f"{type(self).__name__}.adjoint", y, 1, self.out_channels)
        return convolve(_CONV_TRANSPOSE[self.ndim], y, kernel, None, self.padding)

    def extra_repr(self) -> str:
        edges = tuple(self.weight.shape[2:])
        size = edges[0] if len(set(edges)) == 1 else edges
        return f"{self.in_channels}, {self.out_channels}, kernel_size={size}, ndim={self.ndim}"


class AntisymmetricConv(Conv):
    """The convolution A = K - K', as one convolution with the kernel W - adjoint_kernel(W); its adjoint is -A.

    >>> conv, x = AntisymmetricConv(2), torch.randn(1, 2, 8, 8)
    >>> torch.equal(conv.adjoint(x), -conv(x))
    True
    """

    def __init__(self, channels: int, kernel_size: Edges = 3, ndim: int = 2) -> None:
        super().__init__(channels, channels, kernel_size, ndim)

    def kernel(self) -> Tensor:
        return self.weight - adjoint_kernel(self.weight)

    def adjoint(self, y: Tensor) -> Tensor:
        return -self(y)


class Dense(LinearOperator):
    """A matrix on the last dimension, without bias, and its transpose.

    >>> Dense(2, 4).adjoint(torch.randn(3, 4)).shape
    torch.Size([3, 2])
    """

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
    """The matrix A = K - K' on the last dimension; its adjoint is -A.

    >>> dense, x = AntisymmetricDense(2), torch.randn(3, 2)
    >>> torch.equal(dense.adjoint(x), -dense(x))
    True
    """

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
    "leaky_relu": nn.functional.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": nn.functional.softplus,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "identity": nn.Identity(),
}


class DroppedActivation(nn.Dropout):
    """An activation σ, by name or as a callable, followed by dropout of the share `p`.

    >>> DroppedActivation("relu", 0.5).eval()(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def __init__(self, activation: Activation, p: float) -> None:
        super().__init__(p)
        self.activation = make_activation(activation)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.activation(input))


class Bias(nn.Module):
    """The map y + b, one b per channel, zero at first.

    >>> Bias(2, channel_dim=-1)(torch.ones(2)).tolist()
    [1.0, 1.0]
    """

    def __init__(self, channels: int, channel_dim: int = 1) -> None:
        super().__init__()
        self.channel_dim = channel_dim
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, y: Tensor) -> Tensor:
        return y + along_channels(self.bias, y, self.channel_dim)


class TVNorm(nn.Module):
    """Meganet's norm y / sqrt(Σ_channels y² + eps), then a scale and a shift per channel; independent of the batch.

    The scale starts at sqrt(channels), for unit variance of the output at any width. From 1 on a wide field hardly moves its
    state: leapfrog-26 reaches 21 % on the digits in 4 epochs, and 55 % from sqrt(channels).

    >>> TVNorm(8)(torch.randn(2, 8, 4, 4)).square().mean().item()  # doctest: +ELLIPSIS
    0.99...
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
    """Return the per-channel `vector` in a shape that broadcasts against `y`.

    >>> along_channels(torch.ones(3), torch.ones(2, 3, 8, 8), channel_dim=1).shape
    torch.Size([1, 3, 1, 1])
    """
    shape = [1] * y.dim()
    shape[channel_dim] = vector.shape[0]
    return vector.view(shape)


_BATCH_NORM = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_INSTANCE_NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


def _instance_norm(channels: int, ndim: int) -> nn.Module:
    if ndim not in _INSTANCE_NORM:
        raise ValueError("norm='instance' takes means over the points of an image, and vectors have none: use 'group'")
    return _INSTANCE_NORM[ndim](channels, affine=True)


class NormKind(NamedTuple):
    """A norm that blocks can have: its name in words, and a function from channels and dimensions to the norm.

    >>> NORMS["group"].words, NORMS["group"].make(8, 2).num_groups
    ('group norm', 4)
    """

    words: str
    make: Callable[[int, int], nn.Module]


NORMS = {
    "none": NormKind("biases", lambda channels, ndim: Bias(channels, 1 if ndim else -1)),
    "batch": NormKind("batch norm", lambda channels, ndim: _BATCH_NORM[ndim](channels)),
    "instance": NormKind("instance norm", _instance_norm),
    "group": NormKind("group norm", lambda channels, ndim: nn.GroupNorm(math.gcd(channels, 4), channels)),
    "tv": NormKind("batch-independent norm", lambda channels, ndim: TVNorm(channels, 1 if ndim else -1)),
}
"""Names of the maps N between K and σ."""


def make_norm(norm: str, channels: int, ndim: int = 2) -> nn.Module:
    """Return the per-channel map N between K and σ; `norm` is a name of `NORMS`, and `ndim` 0 for vectors.

    >>> make_norm("group", channels=8)(torch.randn(2, 8, 4, 4)).shape
    torch.Size([2, 8, 4, 4])
    """
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(map(repr, NORMS))}, got {norm!r}")
    return NORMS[norm].make(channels, ndim)


def make_activation(activation: Activation) -> Callable[[Tensor], Tensor]:
    """Return σ by its name, or the callable itself.

    >>> make_activation("relu")(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    if callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be a callable or one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return ACTIVATIONS[activation]
