"""Fields: the explicit formulas with dense matrices, the spectra that stability rests on, and shared parameters."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

from revode import AntisymmetricField, OneLayerField, ReversibleSequence, SymmetricField, Verlet
from revode.fields import ACTIVATIONS, Bias, TVNorm, make_norm
from revode.operators import NORMS

SIZES = {0: (), 1: (4,), 2: (3, 4), 3: (2, 3, 2)}
CASES = [(ndim, norm) for ndim, norm in itertools.product(SIZES, NORMS) if ndim or norm != "instance"]


def randomize(module: nn.Module) -> nn.Module:
    """Parameters and running statistics that hide no term: nonzero biases, scales that are not one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer) if "var" in name else torch.randn_like(buffer), alpha=0.3)
    return module


def matrix_of(map_: Callable[[Tensor], Tensor], channels: int, ndim: int) -> Tensor:
    """The dense matrix of a linear map on one sample of `channels` channels."""
    shape = (channels, *SIZES[ndim])
    basis = torch.eye(int(torch.tensor(shape).prod()), dtype=torch.float64)
    with torch.no_grad():
        return torch.stack([map_(e.view(1, *shape)).flatten() for e in basis], dim=1)


def plain_norm(norm: nn.Module, y: Tensor, ndim: int) -> Tensor:
    """The formula of each norm, written out; `y` has its channels first among the non-batch dimensions."""
    shape = (1, -1, *[1] * ndim)
    if isinstance(norm, Bias):
        return y + norm.bias.view(shape)
    if isinstance(norm, TVNorm):
        unit = y / (y.pow(2).sum(1, keepdim=True) + norm.eps) ** 0.5
        return unit * norm.weight.view(shape) + norm.bias.view(shape)
    if isinstance(norm, nn.GroupNorm):
        parts = y.unflatten(1, (norm.num_groups, -1))
        over = list(range(2, parts.dim()))
        mean, var = parts.mean(over, keepdim=True), parts.var(over, correction=0, keepdim=True)
        return ((parts - mean) / (var + norm.eps) ** 0.5).flatten(1, 2) * norm.weight.view(shape) + norm.bias.view(
            shape
        )
    is_batch_norm = isinstance(norm, nn.modules.batchnorm._BatchNorm)
    over = [d for d in range(y.dim()) if d != 1 and (d or is_batch_norm)]
    if norm.training or not is_batch_norm:
        mean, var = y.mean(over, keepdim=True), y.var(over, correction=0, keepdim=True)
    else:
        mean, var = norm.running_mean.view(shape), norm.running_var.view(shape)
    return (y - mean) / (var + norm.eps) ** 0.5 * norm.weight.view(shape) + norm.bias.view(shape)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("leading", [True, False])
@pytest.mark.parametrize(("ndim", "norm"), CASES)
def test_symmetric_field_is_its_formula(ndim: int, norm: str, leading: bool, training: bool) -> None:
    field = SymmetricField(2, 3, activation="tanh", norm=norm, leading=leading, ndim=ndim).double()
    randomize(field).train(training)
    y = torch.randn(5, 2, *SIZES[ndim], dtype=torch.float64)
    K = matrix_of(field.operator, 2, ndim)
    inner = plain_norm(field.lead, y, ndim) if leading else y
    hidden = (inner.flatten(1) @ K.T).view(5, 3, *SIZES[ndim])
    expected = torch.tanh(plain_norm(field.norm, hidden, ndim)).flatten(1) @ K
    torch.testing.assert_close(field(y).flatten(1), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("ndim", "norm"), CASES)
def test_antisymmetric_field_is_its_formula(ndim: int, norm: str, training: bool) -> None:
    field = AntisymmetricField(3, activation="tanh", norm=norm, ndim=ndim).double()
    randomize(field).train(training)
    y = torch.randn(5, 3, *SIZES[ndim], dtype=torch.float64)
    A = matrix_of(field.operator, 3, ndim)
    torch.testing.assert_close(A, -A.T)
    hidden = (y.flatten(1) @ A.T).view_as(y)
    torch.testing.assert_close(field(y), torch.tanh(plain_norm(field.norm, hidden, ndim)))


@pytest.mark.parametrize("ndim", SIZES)
def test_one_layer_pair_is_its_formula_and_shares_k_and_b(ndim: int) -> None:
    first, second = OneLayerField.pair(3, activation="tanh", ndim=ndim)
    randomize(first.double())
    y = torch.randn(5, 3, *SIZES[ndim], dtype=torch.float64)
    K, b = matrix_of(first.operator, 3, ndim), first.norm.bias.view(-1, *[1] * ndim)
    torch.testing.assert_close(first(y), torch.tanh((y.flatten(1) @ K.T).view_as(y) + b))
    torch.testing.assert_close(second(y), torch.tanh((y.flatten(1) @ K).view_as(y) + b))
    assert [id(p) for p in first.parameters()] == [id(p) for p in second.parameters()]
    assert len(list(nn.ModuleList([first, second]).parameters())) == 2


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_by_name_is_torchs(name: str) -> None:
    torchs = nn.Identity() if name == "identity" else getattr(nn.functional, name)
    y = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    for make in (SymmetricField, AntisymmetricField, OneLayerField):
        by_name, by_callable = make(3, activation=name).double(), make(3, activation=torchs).double()
        by_callable.load_state_dict(by_name.state_dict())
        torch.testing.assert_close(by_name(y), by_callable(y), rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "softplus"])
@pytest.mark.parametrize("ndim", [0, 1, 2])
def test_symmetric_field_has_a_symmetric_positive_jacobian(ndim: int, activation: str) -> None:
    field = SymmetricField(2, 3, activation=activation, ndim=ndim).double()
    randomize(field)
    y = torch.randn(2, *SIZES[ndim], dtype=torch.float64)
    J = jacrev(lambda v: field(v[None])[0])(y).reshape(y.numel(), y.numel()).detach()
    torch.testing.assert_close(J, J.T)
    assert torch.linalg.eigvalsh(J).min() > -1e-10
    assert torch.linalg.eigvalsh(J).max() > 1e-3


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
@pytest.mark.parametrize("ndim", [0, 1, 2])
def test_antisymmetric_field_has_an_imaginary_spectrum(ndim: int, activation: str) -> None:
    field = AntisymmetricField(6, activation=activation, ndim=ndim).double()
    randomize(field)
    y = torch.randn(6, *SIZES[ndim], dtype=torch.float64)
    J = jacrev(lambda v: field(v[None])[0])(y).reshape(y.numel(), y.numel()).detach()
    eigenvalues = torch.linalg.eigvals(J)
    assert eigenvalues.imag.abs().max() > 1e-2
    # A singular diag(σ') (ReLU) makes defective zero eigenvalues, which rounding moves by its square root.
    assert eigenvalues.real.abs().max() < (1e-5 if activation == "relu" else 1e-9)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("make", [SymmetricField, AntisymmetricField], ids=lambda make: make.__name__)
def test_gradients_of_a_field_pass_gradcheck(make: type[nn.Module], norm: str) -> None:
    field = make(2, activation="tanh", norm=norm, ndim=1).double()
    randomize(field)
    parameters = list(field.parameters())
    y = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    # BatchNorm moves its statistics at each call, which changes no output in training.
    assert torch.autograd.gradcheck(lambda y, *_: field(y), (y, *parameters))


def test_tv_norm_is_independent_of_the_batch() -> None:
    norm = TVNorm(3)
    y = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(norm(y)[:1], norm(y[:1]))


def test_default_field_is_the_papers_with_a_zero_bias() -> None:
    field = SymmetricField(2)
    assert {name for name, _ in field.named_parameters()} == {"operator.weight", "norm.bias"}
    assert not field.norm.bias.any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SymmetricField(2, norm="no-norm"),
            rf"norm must be one of {', '.join(map(repr, NORMS))}, got 'no-norm'",
        ),
        (lambda: make_norm("", 3), r"norm must be .* got ''"),
        (lambda: AntisymmetricField(2, activation="rlu"), r"activation must be .*relu.* got 'rlu'"),
        (lambda: OneLayerField(2, ndim=5), r"ndim must be 1, 2 or 3, got 5"),
        (lambda: SymmetricField(2, kernel_size=4), r"kernel_size must be odd.* got 4"),
        (lambda: SymmetricField(-2), r"in_channels must be a positive integer, got -2"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_part_that_is_put_in_later_gets_its_own_gradient():
    """Its parameter comes last among the field's, but not among those of the product."""
    field = SymmetricField(4)
    field.lead = Bias(4)
    x = torch.randn(2, 8, 5, 5)
    found = []
    for backprop in ("reversible", "store"):
        sequence = ReversibleSequence([copy.deepcopy(field), copy.deepcopy(field)], Verlet(0.3), backprop=backprop)
        sequence(x).square().sum().backward()
        found.append([parameter.grad for parameter in sequence.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*found, strict=True))
