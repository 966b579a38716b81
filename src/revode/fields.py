"""The paper's residual branches, built on operators with an adjoint, and their VJPs.

| field | computes | stands in |
|---|---|---|
| ``SymmetricField`` | K' σ(N(K y)) | the two-layer Hamiltonian (eq. 10) and Leapfrog networks |
| ``AntisymmetricField`` | σ(N((K - K') y)) | the MidPoint network |
| ``OneLayerField`` | σ(K y + b), or σ(K' y + b) | Haber & Ruthotto's one-layer Hamiltonian (eq. 8) |

N is a bias (``norm="none"``, the paper's), or a norm of `NORMS`. Signs and step sizes belong to the scheme. Any other
``nn.Module`` that keeps its input's shape serves as a branch just as well.

A `KnownField` gives its own VJP, by the kernels that autograd itself would call, without a graph. The engine then needs no
autograd for the field, and gets the same bits. Where possible the parts write over arguments that nobody else needs.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
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
    needs_float32,
)
from revode.operators import TVNorm as TVNorm

__all__ = ["ACTIVATIONS", "AntisymmetricField", "OneLayerField", "SymmetricField", "TVNorm", "affine", "convolved"]


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


def _relu_slope(g: Tensor, output: Tensor) -> Tensor:
    """Return g where output > 0, in the strides of output as autograd does; written over g only if g has these strides."""
    if g.stride() != output.stride():
        return torch.ops.aten.threshold_backward(g, output, 0)
    return torch.ops.aten.threshold_backward.grad_input(g, output, 0, grad_input=g)


SLOPES: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    torch.relu: _relu_slope,
    ACTIVATIONS["leaky_relu"]: lambda g, output: torch.ops.aten.leaky_relu_backward.grad_input(
        g, output, 0.01, True, grad_input=g
    ),
    torch.tanh: lambda g, output: torch.ops.aten.tanh_backward.grad_input(g, output, grad_input=g),
    torch.sigmoid: lambda g, output: torch.ops.aten.sigmoid_backward.grad_input(g, output, grad_input=g),
    ACTIVATIONS["identity"]: lambda g, output: g,
}
"""σ -> the map (g, σ(a)) -> g σ'(a), written over g where possible."""


IN_PLACE: dict[Any, Callable[[Tensor], Tensor]] = {
    torch.relu: torch.relu_,
    ACTIVATIONS["leaky_relu"]: functools.partial(nn.functional.leaky_relu, inplace=True),
    torch.tanh: torch.tanh_,
    torch.sigmoid: torch.sigmoid_,
    ACTIVATIONS["identity"]: ACTIVATIONS["identity"],
}


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def batch_norm(norm: nn.Module) -> Any:
    """Return the norm; fail if it is not batch norm."""
    if type(norm) not in _BATCH_NORMS:
        raise NotImplementedError(f"no product is written for the norm {type(norm).__name__}")
    return norm


Record = dict[str, Any]
"""Tensors by name, and the statistics of norms: their means and inverse deviations."""
Statistics = tuple[Tensor, ...]
Normalize = Callable[[nn.Module, Tensor], tuple[Tensor, Statistics]]
"""(N, x) -> N(x) in a fresh tensor, and the statistics that N has used."""


class KnownField(nn.Module, abc.ABC):
    """A field that can give its own VJP, which spares the engine an autograd graph.

    ``value``, ``linearize`` and ``product`` return the bits that ``forward`` and autograd would. ``dtype`` is the dtype of
    convolutions: the state's or autocast's. The product is known for convolutions with biases or batch norm and an activation
    whose slope follows from its value. Everything else (other norms, hooks, frozen or parametrised weights) goes through
    autograd.
    """

    operator: Any
    norm: Any
    activation: Callable[[Tensor], Tensor]
    ends_in_convolution = False
    """True if F(q) comes out of a convolution: compiling a coupling together with it leaves its bits alone."""

    @abc.abstractmethod
    def value(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """Return F(q) in `dtype` without a graph, as ``forward`` computes it, statistics included."""

    @abc.abstractmethod
    def linearize(
        self, q: Tensor, dtype: torch.dtype, normalize: Normalize, needs_value: bool = True
    ) -> tuple[Tensor | None, Record]:
        """Return u = F(q) in `dtype`, that of convolutions, and the record that ``product`` needs; `normalize` applies a norm.

        Without `needs_value` u may be None.
        """

    @abc.abstractmethod
    def product(self, q: Tensor, g: Tensor, record: Record) -> tuple[Tensor, list[Tensor]]:
        """Return the VJPs of g by q and by each of ``tensors()``, in their dtypes.

        g is a co-state of the dtype and strides of q. Some of `record`, from ``linearize`` at q, may be written over.
        """

    def vjp(
        self, q: Tensor, g: Tensor, dtype: torch.dtype, needs_value: bool
    ) -> tuple[Tensor | None, Tensor, list[Tensor]]:
        """Return u = F(q) again, and ``product`` there. Running statistics stay as they are."""
        u, record = self.linearize(q, dtype, normalized, needs_value)
        return u, *self.product(q, g, record)

    def norms(self) -> list[Any]:
        """Return the norms of this field in the order in which they act."""
        return [norm for norm in (self._modules.get("lead"), self.norm) if norm is not None]

    def tensors(self) -> list[Tensor]:
        """Return ``parameters()`` in the order of ``product``, without a pass over all modules."""
        return [parameters[name] for parameters, name in self.slots()]

    def slots(self) -> list[tuple[dict[str, Any], str]]:
        """Return where these tensors are held: the parameters of a part, and a name among them."""
        parts = [self._modules[name]._parameters for name in self._holders()]  # type: ignore[union-attr]
        return [(parameters, name) for parameters in parts for name, tensor in parameters.items() if tensor is not None]

    def _holders(self) -> list[str]:
        """Return the names of the parts that have parameters, in the order in which they were given to this field."""
        return [name for name, child in self._modules.items() if child is not None and child._parameters]

    def knows_vjp(self, dtype: torch.dtype) -> bool:
        """Return True if ``product`` applies to this field as it is now, to a state in `dtype`.

        The operations of ``forward`` decide about mixed dtypes: which one comes out, or an error.
        """
        children = [child for child in self._modules.values() if child is not None]
        tensors = self.tensors()
        return (
            self.activation in SLOPES
            and _gives_product_of_its_forward(type(self))
            and not self._parameters
            and self._holders() in _ORDERS
            and all(_is_known(child) for child in children)
            and not _is_altered(self)
            and not any(_is_altered(child) for child in children)
            and all(type(tensor) is nn.Parameter for tensor in tensors)
            and all(tensor.requires_grad and tensor.dtype == dtype for tensor in tensors)
            and len({id(tensor) for tensor in tensors}) == len(tensors)
        )


_ORDERS = (["operator", "norm"], ["operator", "lead", "norm"])
"""The order of a product's gradients, which must be that of ``parameters()``."""


@functools.cache
def _gives_product_of_its_forward(kind: type) -> bool:
    """Return True if one class gives `kind` both methods. A class that overrides ``forward`` alone has no product for it."""
    forward, product = (next(base for base in kind.__mro__ if name in vars(base)) for name in ("forward", "product"))
    return forward is product


def _is_known(module: nn.Module) -> bool:
    if module._modules:
        return False
    if type(module) in _BATCH_NORMS:
        return module.training and module.weight is not None
    return type(module) in (Conv, AntisymmetricConv, Bias, nn.Identity)


_METHODS = frozenset("forward adjoint kernel convolve convolve_adjoint value linearize product".split())
"""Names of the methods that a known field and its parts are called by."""


def _is_altered(module: nn.Module) -> bool:
    """Return True if hooks, or methods replaced on this instance, make a call differ from the class's own."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or not _METHODS.isdisjoint(vars(module))


def convolution_vjp(
    g: Tensor, x: Tensor, weight: Tensor, padding: tuple[int, ...], *, transposed: bool = False, bias: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the VJPs of a convolution by x, by its weight and (if asked) by its bias."""
    ndim, dtype = x.dim() - 2, x.dtype
    sizes = [weight.shape[0]] if bias else None
    if wide := needs_float32(x, weight, dtype):
        g, x, weight = g.float(), x.float(), weight.float()
    found = torch.ops.aten.convolution_backward(
        g, x, weight, sizes, [1] * ndim, padding, [1] * ndim, transposed, [0] * ndim, 1, [True, True, bias]
    )
    gx, g_weight, g_bias = found
    return (gx.to(dtype), g_weight.to(dtype), g_bias.to(dtype) if bias else g_bias) if wide else found


def normalized(norm: nn.Module, x: Tensor) -> tuple[Tensor, Statistics]:
    """Return N(x) of a bias or of batch norm in training mode, by autograd's own kernels. Running statistics stay."""
    if isinstance(norm, Bias):
        return norm(x), ()
    bn = batch_norm(norm)
    output, *statistics = torch.native_batch_norm(x, bn.weight, bn.bias, None, None, True, 0.0, bn.eps)
    return output, tuple(statistics)


def norm_product(norm: Any, x: Tensor, statistics: Statistics, g: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the VJPs of N by x and by its parameters."""
    if isinstance(norm, Bias):
        return g, [g.sum((0, *range(2, g.dim())))]
    weight, eps = batch_norm(norm).weight.to(statistics[0].dtype), norm.eps
    gx, g_weight, g_bias = torch.ops.aten.native_batch_norm_backward(
        g, x, weight, None, None, *statistics, True, eps, [True] * 3
    )
    return gx, [g_weight.to(norm.weight.dtype), g_bias.to(norm.weight.dtype)]


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
