"""The grid: additions on it are exact, rounding is to the nearest point, and what it cannot hold is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from revode.engine.call import with_strides
from revode.engine.grid import Grid

DTYPES = {torch.float32: 24, torch.float64: 53}


@given(st.integers(1, 23), st.integers(0, 2**32 - 1), st.sampled_from(list(DTYPES)))
def test_adding_and_subtracting_on_the_grid_is_exact(bits: int, seed: int, dtype: torch.dtype) -> None:
    grid = Grid(bits)
    generator = torch.Generator().manual_seed(seed)
    limit = grid.limit(dtype)
    p, phi = (torch.rand(2, 64, generator=generator, dtype=dtype) - 0.5) * min(limit, 2.0**20) * 0.99
    p, phi = grid.round(p), grid.round(phi)
    for sign in (1.0, -1.0):
        q = phi + sign * p
        assert torch.equal((q - phi) * sign, p)


@given(st.integers(1, 23), st.lists(st.floats(-0.875, 0.875, width=32), min_size=1, max_size=20))
def test_rounding_is_to_the_nearest_point(bits: int, values: list[float]) -> None:
    x = torch.tensor(values)
    rounded = Grid(bits).round(x)
    assert torch.equal(rounded * 2.0**bits, torch.round(rounded * 2.0**bits))
    assert (rounded.double() - x.double()).abs().max() <= 2.0 ** -(bits + 1)
    assert torch.equal(Grid(bits).round(rounded), rounded)
    assert torch.equal(Grid(bits).round_(x.clone()), rounded)


def test_rounding_lets_the_gradient_pass_unchanged() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    weights = torch.randn(3, 4)
    (Grid(3).round(x) * weights).sum().backward()
    assert torch.equal(x.grad, weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 14, 23])
def test_the_limit_is_where_additions_stop_being_exact(bits: int, dtype: torch.dtype) -> None:
    limit = Grid(bits).limit(dtype)
    assert limit == 2.0 ** (DTYPES[dtype] - bits)
    step = 2.0**-bits
    below = torch.tensor(limit - step, dtype=dtype)
    assert below + step == limit
    assert torch.tensor(limit, dtype=dtype) + step == limit


@pytest.mark.parametrize(("value", "found"), [(1024.0, "1024"), (-5000.0, "5000"), (float("-inf"), "inf")])
@pytest.mark.parametrize("place", [0, 5, -1])
def test_what_is_out_of_range_is_refused_wherever_it_is(value: float, found: str, place: int) -> None:
    state = torch.zeros(4, 3)
    state.view(-1)[place] = value
    with pytest.raises(ValueError, match=rf"exact=14 .*below 1024 .*magnitude {found} in the attic"):
        Grid(True).check(state, "in the attic")


@pytest.mark.parametrize("other", [0.0, 9999.0, -9999.0])
def test_nan_is_refused_whatever_else_there_is(other: float) -> None:
    state = torch.full((4, 3), other)
    state[2, 1] = float("nan")
    with pytest.raises(ValueError, match="found NaN"):
        Grid(True).check(state, "somewhere")


def test_what_is_in_range_or_empty_passes() -> None:
    Grid(True).check(torch.tensor([1023.99, -1023.99]), "")
    Grid(True).check(torch.empty(0, 3), "")


@pytest.mark.parametrize("bits", [0, 24, -3, 1.5, "14", None])
def test_bits_out_of_range_are_named(bits: Any) -> None:
    with pytest.raises(ValueError, match=f"got {bits!r}"):
        Grid(bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_no_grid(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=str(dtype)):
        Grid(True).limit(dtype)


def test_strides_are_given_without_a_copy_where_they_are_right() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert with_strides(x, x.stride()) is x
    strides = x.contiguous(memory_format=torch.channels_last).stride()
    moved = with_strides(x, strides)
    assert moved.stride() == strides
    assert torch.equal(moved, x)


def test_a_change_of_strides_is_differentiable() -> None:
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    weights = torch.randn(2, 3, 4, 5)
    (with_strides(x, x.contiguous(memory_format=torch.channels_last).stride()) * weights).sum().backward()
    assert torch.equal(x.grad, weights)
