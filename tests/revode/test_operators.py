"""Linear operators: the adjoint is the adjoint, the antisymmetric one is antisymmetric, and bad input is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from revode import AntisymmetricConv, Conv, Dense
from revode.operators import AntisymmetricDense, LinearOperator, adjoint_kernel


def dense_matrix(map_: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    """The matrix of a linear map on tensors of `shape`, column by column."""
    basis = torch.eye(int(torch.tensor(shape).prod()), dtype=torch.float64)
    return torch.stack([map_(e.reshape(1, *shape)).flatten() for e in basis], dim=1)


def assert_adjoint(operator: LinearOperator, x: Tensor, y: Tensor) -> None:
    left, right = (operator(x) * y).sum(), (x * operator.adjoint(y)).sum()
    scale = operator(x).norm() * y.norm() + 1e-300
    assert abs(left - right) <= 1e-13 * scale


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Conv, tuple[int, ...]]:
    ndim = draw(st.integers(1, 3))
    kernel_size = draw(st.sampled_from([1, 3, 5]))
    channels = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes = tuple(draw(st.integers(1, 6)) for _ in range(ndim))
    return Conv(*channels, kernel_size=kernel_size, ndim=ndim).double(), sizes


@given(convolutions(), st.integers(0, 3))
def test_adjoint_of_a_convolution_is_its_adjoint(case: tuple[Conv, tuple[int, ...]], batch: int) -> None:
    operator, sizes = case
    x = torch.randn(batch, operator.in_channels, *sizes, dtype=torch.float64)
    y = torch.randn(batch, operator.out_channels, *sizes, dtype=torch.float64)
    assert operator(x).shape == y.shape
    assert operator.adjoint(y).shape == x.shape
    assert_adjoint(operator, x, y)


@given(st.integers(1, 6), st.integers(1, 6), st.lists(st.integers(0, 4), max_size=3))
def test_adjoint_of_a_matrix_is_its_transpose(in_channels: int, out_channels: int, leading: list[int]) -> None:
    operator = Dense(in_channels, out_channels).double()
    x = torch.randn(*leading, in_channels, dtype=torch.float64)
    y = torch.randn(*leading, out_channels, dtype=torch.float64)
    assert_adjoint(operator, x, y)
    torch.testing.assert_close(operator(x), x @ operator.weight.T)


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 3, 5]), st.integers(1, 5))
def test_antisymmetric_convolution_is_minus_its_adjoint(ndim: int, channels: int, kernel_size: int, size: int) -> None:
    operator = AntisymmetricConv(channels, kernel_size, ndim).double()
    x, y = torch.randn(2, 2, channels, *[size] * ndim, dtype=torch.float64)
    assert_adjoint(operator, x, y)
    assert abs((operator(x) * x).sum()) <= 1e-12 * (operator(x).norm() * x.norm() + 1.0)
    torch.testing.assert_close(operator.adjoint(y), -operator(y))


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_antisymmetric_convolution_is_k_minus_its_adjoint(ndim: int) -> None:
    shape = (2, *[3] * ndim)
    operator, plain = AntisymmetricConv(2, 3, ndim).double(), Conv(2, 2, 3, ndim).double()
    plain.load_state_dict(operator.state_dict())
    with torch.no_grad():
        K = dense_matrix(plain, shape)
        A = dense_matrix(operator, shape)
    torch.testing.assert_close(A, K - K.T)
    assert torch.linalg.eigvals(A).real.abs().max() < 1e-12


def test_antisymmetric_matrix_is_k_minus_its_transpose() -> None:
    operator = AntisymmetricDense(5).double()
    with torch.no_grad():
        A = dense_matrix(operator, (5,))
        torch.testing.assert_close(dense_matrix(operator.adjoint, (5,)), A.T)
        torch.testing.assert_close(A, operator.weight - operator.weight.T)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_adjoint_kernel_gives_the_transposed_matrix(ndim: int, kernel_size: int) -> None:
    operator, other = Conv(2, 3, kernel_size, ndim).double(), Conv(3, 2, kernel_size, ndim).double()
    sizes = (4, 3, 2)[:ndim]
    with torch.no_grad():
        other.weight.copy_(adjoint_kernel(operator.weight))
        K = dense_matrix(operator, (2, *sizes))
        torch.testing.assert_close(dense_matrix(other, (3, *sizes)), K.T)
        torch.testing.assert_close(dense_matrix(operator.adjoint, (3, *sizes)), K.T)


def test_the_check_catches_a_kernel_that_is_not_flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Conv(2, 2).double()
    monkeypatch.setattr(operator, "adjoint", lambda y: torch.conv2d(y, operator.weight.transpose(0, 1), padding=1))
    x, y = torch.randn(2, 1, 2, 4, 4, dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_adjoint(operator, x, y)


@pytest.mark.parametrize("operator", [Conv(2, 3), AntisymmetricConv(3), Dense(4, 2), AntisymmetricDense(4)], ids=repr)
def test_bias_is_added_to_each_output_channel(operator: LinearOperator) -> None:
    x = torch.randn(2, operator.in_channels, *([4, 5] if isinstance(operator, Conv) else []))
    bias = torch.randn(operator.out_channels)
    shape = [1] * x.dim()
    shape[operator.channel_dim] = -1
    torch.testing.assert_close(operator(x, bias), operator(x) + bias.view(shape))


@pytest.mark.parametrize("operator", [Conv(8, 16, 5), Conv(4, 8, 3, 3), Dense(64, 128)], ids=repr)
def test_kernels_have_the_authors_scale(operator: LinearOperator) -> None:
    volume = operator.weight[0, 0].numel()
    expected = (2.0 / (volume * operator.out_channels)) ** 0.5
    assert operator.weight.std().item() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Conv(2, ndim=4), r"ndim must be 1, 2 or 3, got 4"),
        (lambda: Conv(2, kernel_size=2), r"kernel_size must be odd.* got 2"),
        (lambda: Conv(2, kernel_size=-1), r"kernel_size must be odd.* got -1"),
        (lambda: Conv(0), r"in_channels must be a positive integer, got 0"),
        (lambda: Conv(2, -3), r"out_channels must be a positive integer, got -3"),
        (lambda: Conv(2.0), r"in_channels must be a positive integer, got 2\.0"),
        (lambda: AntisymmetricConv(True), r"in_channels must be a positive integer, got True"),
        (lambda: Dense(0), r"in_channels must be a positive integer, got 0"),
        (lambda: Dense(2, "3"), r"out_channels must be a positive integer, got '3'"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], LinearOperator], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kernel_size", ["3", 3.0, None])
def test_kernel_size_of_a_wrong_type_is_named(kernel_size: object) -> None:
    with pytest.raises(ValueError, match="kernel_size"):
        Conv(2, kernel_size=kernel_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Conv(3)(torch.zeros(1, 2, 4, 4)), r"Conv expects 3 channels in dimension 1.*\(1, 2, 4, 4\)"),
        (lambda: Conv(3, 2).adjoint(torch.zeros(1, 3, 4, 4)), r"Conv.adjoint expects 2 channels.*\(1, 3, 4, 4\)"),
        (lambda: Conv(3)(torch.zeros(3)), r"Conv expects 3 channels in dimension 1.*\(3,\)"),
        (lambda: AntisymmetricConv(3)(torch.zeros(1, 2, 4, 4)), r"AntisymmetricConv expects 3 channels"),
        (lambda: Dense(3)(torch.zeros(5, 2)), r"Dense expects 3 channels in dimension -1.*\(5, 2\)"),
        (lambda: Dense(3, 2).adjoint(torch.zeros(5, 3)), r"Dense.adjoint expects 2 channels.*\(5, 3\)"),
        (lambda: AntisymmetricDense(3)(torch.zeros(())), r"AntisymmetricDense expects 3 channels"),
    ],
)
def test_a_wrong_channel_count_is_named(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
