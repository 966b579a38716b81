"""Schemes: reversing inverts, measured orders are the stated ones, starts and damping are their formulas."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import problems
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import revode
from revode import AdditiveCoupling, Leapfrog, MidPoint, Momentum, Verlet
from revode.schemes import SCHEMES, Scheme

DAMPINGS = (0.0, 0.02)


def variants(name: str) -> list[Scheme]:
    """The scheme of this name with every start and with and without damping."""
    kind = SCHEMES[name]
    starts = [{"start": start} for start in kind.starts] or [{}]
    dampings = [{"damping": damping} for damping in DAMPINGS] if takes(name, "damping") else [{}]
    return [kind(**start, **damping) for start in starts for damping in dampings]


def takes(name: str, parameter: str) -> bool:
    """Return True if the scheme of this name has this parameter."""
    return parameter in inspect.signature(SCHEMES[name]).parameters


BLENDS = [MidPoint(0.1, blend=a, start=start) for a in (-1.0, -0.5, 0.5, 0.8) for start in ("euler", "paper")]
VARIANTS = [*(scheme for name in SCHEMES for scheme in variants(name)), *BLENDS]
DESIGNED = [s for s in VARIANTS if isinstance(s, Verlet | AdditiveCoupling | MidPoint | Leapfrog | Momentum)]
"""Schemes whose formulas `reference_steps` has."""


def width(scheme: Scheme, channels: int) -> int:
    """Channels that a branch sees when the input has `channels`."""
    return scheme.init(torch.empty(1, channels))[1].shape[1]


def branches(number: int, channels: int) -> list[Callable[[Tensor], Tensor]]:
    weights = torch.randn(number, channels, channels, dtype=torch.float64)
    return [lambda y, K=K: torch.tanh(y @ K) for K in weights]


def walk(scheme: Scheme, fields: list[Callable[[Tensor], Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
    state = scheme.init(x)
    for index, field in enumerate(fields):
        state = scheme.step(state, field, index)
    return state


@pytest.mark.parametrize("scheme", VARIANTS, ids=repr)
@given(st.integers(2, 12), st.integers(1, 3), st.integers(1, 3))
def test_reverse_inverts_step(scheme: Scheme, steps: int, batch: int, half: int) -> None:
    num_fields = 2 * steps if abs(scheme.carry) > 0.5 else steps  # each step back doubles the rounding
    fields = branches(num_fields, width(scheme, 2 * half))
    states = [scheme.init(torch.randn(batch, 2 * half, dtype=torch.float64))]
    for index, field in enumerate(fields):
        states.append(scheme.step(states[-1], field, index))
    state = states[-1]
    for index in reversed(range(0 if scheme.splits else 1, len(fields))):
        state = scheme.reverse(state, fields[index], index)
        for ours, original in zip(state, states[index], strict=True):
            torch.testing.assert_close(ours, original, rtol=1e-9, atol=1e-9)


def reference_steps(scheme: Scheme, fields: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """The formulas of the design page, term by term."""
    d = scheme.damping
    if scheme.splits:
        duplicate = scheme.start == "duplicate"
        y, z = (x, x) if duplicate else x.chunk(2, dim=1)
        h, sign = (scheme.h, -1.0) if isinstance(scheme, Verlet) else (1.0, 1.0)
        for F, G in zip(fields[::2], fields[1::2], strict=True):
            y = (1 - d) * y + h * F(z)
            z = (1 - d) * z + sign * h * G(y)
        return (y + z) / 2 if duplicate else torch.cat((y, z), dim=1)
    F = fields[0]
    h = scheme.h
    if isinstance(scheme, MidPoint):
        a = scheme.blend
        new = {"euler": lambda: x + h * F(x), "paper": lambda: (1 - a) * x + (1 + a) * h * F(x)}[scheme.start]()
    elif isinstance(scheme, Leapfrog):
        new = {
            "taylor": lambda: x - h**2 / 2 * F(x),
            "meganet": lambda: (2 - d) * x - (1 - d) * x - h**2 * F(x),
            "paper": lambda: (2 - d) * x - h**2 * F(x),
        }[scheme.start]()
    else:
        gamma = scheme.gamma * (1 - d)
        new = (1 + gamma) * x - gamma * x + (1 - scheme.gamma) * F(x)
    old, Y = x, new
    for F in fields[1:]:
        if isinstance(scheme, MidPoint):
            new = (1 - d) * a * old + (1 - a) * Y + (1 + a) * h * F(Y)
        elif isinstance(scheme, Leapfrog):
            new = (2 - d) * Y - (1 - d) * old - h**2 * F(Y)
        else:
            gamma = scheme.gamma * (1 - d)
            new = (1 + gamma) * Y - gamma * old + (1 - scheme.gamma) * F(Y)
        old, Y = Y, new
    return Y


@pytest.mark.parametrize("scheme", DESIGNED, ids=repr)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_steps_are_the_formulas_of_the_design(scheme: Scheme, steps: int) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    fields = branches(steps * scheme.fields_per_step, width(scheme, 4))
    y = scheme.readout(walk(scheme, fields, x))
    torch.testing.assert_close(y, reference_steps(scheme, fields, x), rtol=1e-13, atol=1e-13)


def error_at(scheme: Scheme, problem: problems.Problem) -> float:
    num_steps = round(problem.time / scheme.h)
    # The start of a one-tensor scheme is a step too, so N fields reach N h under every scheme.
    y = scheme.readout(walk(scheme, list(problem.fields) * num_steps, problem.initial))
    return float((y - problem.solution(problem.time)).norm())


def measured_order(make: Callable[[float], Scheme], problem: problems.Problem) -> float:
    """The slope of log error over log h, by least squares."""
    hs = [2.0**-k for k in range(5, 10)]
    logs = torch.tensor([[math.log(h), math.log(error_at(make(h), problem))] for h in hs], dtype=torch.float64)
    centred = logs - logs.mean(0)
    return float((centred[:, 0] * centred[:, 1]).sum() / centred[:, 0].square().sum())


ORDERS = [
    (lambda h: Verlet(h), problems.rotation),
    (lambda h: MidPoint(h), problems.logistic),
    (lambda h: MidPoint(h, blend=0.8), problems.logistic),
    (lambda h: MidPoint(h, blend=0.5), problems.logistic),
    (lambda h: MidPoint(h, blend=-0.5), problems.logistic),
    (lambda h: Leapfrog(h), problems.oscillator),
    (lambda h: Leapfrog(h), problems.soliton),
    (lambda h: Leapfrog(h, start="meganet"), problems.oscillator),
    (lambda h: Leapfrog(h, start="meganet"), problems.soliton),
]


@pytest.mark.parametrize(("make", "problem"), ORDERS)
def test_measured_order_is_the_stated_order(
    make: Callable[[float], Scheme], problem: Callable[[], problems.Problem]
) -> None:
    assert measured_order(make, problem()) == pytest.approx(make(0.1).order, abs=0.1)


@pytest.mark.parametrize("scheme", VARIANTS, ids=repr)
def test_an_order_is_stated_only_where_it_was_measured(scheme: Scheme) -> None:
    measured = {repr(make(scheme.h)) for make, _ in ORDERS}
    assert (scheme.order is not None) == (repr(scheme) in measured)


def test_the_check_catches_a_wrong_order() -> None:
    class Euler(MidPoint):
        def coupling(self, index: int):
            return self.starting()

    with pytest.raises(AssertionError):
        test_measured_order_is_the_stated_order(Euler, problems.logistic)


@pytest.mark.parametrize("scheme", VARIANTS, ids=repr)
def test_exact_invertibility_is_a_carry_of_magnitude_two_to_the_minus_n(scheme: Scheme) -> None:
    assert scheme.invertible_exactly is (abs(scheme.carry) in [2.0**-n for n in range(7)])
    if scheme in DESIGNED:
        expected = scheme.damping == 0.0 and not isinstance(scheme, Momentum) and "0.8" not in repr(scheme)
        assert scheme.invertible_exactly is expected


@pytest.mark.parametrize("blend", [-1.1, 2, float("nan"), "0.5", None, True])
def test_a_blend_out_of_range_is_named(blend: object) -> None:
    with pytest.raises(ValueError, match=rf"blend must lie in \[-1, 1\], got {blend!r}"):
        MidPoint(blend=blend)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", [s for s in VARIANTS if not isinstance(s, AdditiveCoupling)], ids=repr)
def test_repr_builds_the_scheme_again(scheme: Scheme) -> None:
    name = type(scheme).__name__  # public names are loaded when they are asked for
    again = eval(repr(scheme), {name: getattr(revode, name)})
    assert repr(again) == repr(scheme)
    assert vars(again) == vars(scheme)


@pytest.mark.parametrize("readout", [None, "join", "mean"])
@pytest.mark.parametrize("start", ["split", "duplicate"])
@pytest.mark.parametrize("damping", DAMPINGS)
def test_repr_builds_an_additive_coupling_again(damping: float, start: str, readout: str | None) -> None:
    scheme = AdditiveCoupling(start=start, readout=readout, damping=damping)
    assert vars(eval(repr(scheme))) == vars(scheme)


def test_start_and_readout_of_an_additive_coupling_are_chosen_apart() -> None:
    x = torch.randn(2, 4)
    shapes = {}
    for start in ("split", "duplicate"):
        for readout in ("join", "mean"):
            scheme = AdditiveCoupling(start=start, readout=readout)
            state = scheme.init(x)
            shapes[start, readout] = scheme.readout(state).shape[1]
            assert torch.equal(scheme.undo_init(state), x)
    assert shapes == {
        ("split", "join"): 4,
        ("split", "mean"): 2,
        ("duplicate", "join"): 8,
        ("duplicate", "mean"): 4,
    }
    with pytest.raises(ValueError, match="readout of AdditiveCoupling must be 'join' or 'mean', got 'sum'"):
        AdditiveCoupling(readout="sum")


def test_readout_does_not_alias_the_state() -> None:
    for scheme in VARIANTS:
        state = torch.randn(2, 4), torch.randn(2, 4)
        before = [t.clone() for t in state]
        scheme.readout(state).zero_()
        assert all(torch.equal(t, b) for t, b in zip(state, before, strict=True))


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_splitting_schemes_halve_any_dimension(dim: int) -> None:
    x = torch.randn(2, 4, 6)
    for kind in (Verlet, AdditiveCoupling):
        state = kind().init(x, dim)
        assert torch.equal(kind().readout(state, dim), x)
        assert state[0].shape[dim] == x.shape[dim] // 2


@pytest.mark.parametrize("name", [name for name in SCHEMES if takes(name, "h")])
@pytest.mark.parametrize("h", [0.0, -0.1, float("nan"), float("inf"), "0.1", None])
def test_a_step_size_that_is_not_positive_is_named(name: str, h: object) -> None:
    with pytest.raises(ValueError, match=f"h must be a positive number, got {h!r}"):
        SCHEMES[name](h)


@pytest.mark.parametrize("name", [name for name in SCHEMES if takes(name, "damping")])
@pytest.mark.parametrize("damping", [1.0, -0.1, 2.0, float("nan"), "0", None])
def test_damping_out_of_range_is_named(name: str, damping: object) -> None:
    with pytest.raises(ValueError, match=rf"damping must lie in \[0, 1\), got {damping!r}"):
        SCHEMES[name](damping=damping)


@pytest.mark.parametrize("gamma", [0.0, 1.0, -0.5, 1.5, float("nan"), "0.9", None])
def test_gamma_out_of_range_is_named(gamma: object) -> None:
    with pytest.raises(ValueError, match=rf"gamma must lie in \(0, 1\), got {gamma!r}"):
        Momentum(gamma)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [MidPoint, Leapfrog])
def test_an_unknown_start_lists_the_choices(kind: type[Scheme]) -> None:
    with pytest.raises(ValueError, match=rf"start of {kind.__name__} must be .*got 'verlet'") as caught:
        kind(start="verlet")
    assert all(repr(start) in str(caught.value) for start in kind.starts)


def test_a_start_that_a_scheme_does_not_need_is_refused() -> None:
    with pytest.raises(ValueError, match=r"start of Verlet must be left out.* got 'euler'"):
        Verlet(start="euler")
    with pytest.raises(ValueError, match="Verlet has no start"):
        Verlet().starting()


@pytest.mark.parametrize("kind", [Verlet, AdditiveCoupling])
def test_an_odd_split_is_named(kind: type[Scheme]) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__} splits dimension 1.*size is 3.*\(2, 3, 4, 4\)"):
        kind().init(torch.zeros(2, 3, 4, 4))
    with pytest.raises(ValueError, match=r"split_dim=-1 for \(batch, time, width\) or split_dim=1"):
        kind().init(torch.zeros(2, 4, 4))
    with pytest.raises(ValueError, match=r"splits dimension -1.*size is 5"):
        kind().init(torch.zeros(2, 4, 5), -1)
