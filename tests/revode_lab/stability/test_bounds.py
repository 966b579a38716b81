"""Step bounds: norms within their tolerance, growth that sets in where the sharp bound says."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_networks import FAMILIES, images, small_network

from revode import AntisymmetricField, Leapfrog, MidPoint, OneLayerField, ReversibleSequence, SymmetricField, Verlet
from revode.operators import NORMS, AntisymmetricConv, AntisymmetricDense, Conv, Dense
from revode_lab.stability import Jacobian, operator_norm, spectrum, step_bounds, step_limit, step_map, suggest_h
from revode_lab.stability.bounds import lanczos_steps, largest_singular_value, largest_slope

OPERATORS = {
    "conv": (lambda: Conv(4), (4, 7, 7)),
    "conv1d": (lambda: Conv(4, 6, 5, 1), (4, 20)),
    "antisymmetric": (lambda: AntisymmetricConv(4), (4, 7, 7)),
    "dense": (lambda: Dense(40, 60), (40,)),
    "antisymmetric dense": (lambda: AntisymmetricDense(30), (30,)),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("tolerance", [0.1, 0.01])
def test_operator_norm_lies_in_its_interval(name, tolerance):
    make, shape = OPERATORS[name]
    operator = make().double()
    true = float(torch.linalg.matrix_norm(Jacobian(operator, torch.zeros(1, *shape).double()).dense(), 2))
    found = operator_norm(operator, shape, tolerance=tolerance)
    assert found.lower <= true * (1 + 1e-9)
    assert true <= found.upper * (1 + 1e-9)
    assert found.upper <= found.lower / (1 - tolerance) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 60), st.floats(0.0, 1.0), st.integers(0, 10**6))
def test_norm_is_found_without_a_gap_in_the_spectrum(size, gap, seed):
    """Even when the second eigenvalue equals the first, or the largest stands alone."""
    values = torch.linspace(gap, 1.0, size, dtype=torch.float64)
    found = largest_singular_value(lambda x: values * x, lambda y: values * y, values, tolerance=0.05, seed=seed)
    assert found.lower <= 1.0 + 1e-9
    assert found.upper >= 1.0 - 1e-9


def test_a_tighter_tolerance_takes_more_steps():
    assert lanczos_steps(10**5, 0.1) < lanczos_steps(10**5, 0.01) < lanczos_steps(10**5, 0.001) <= 10**5


def case(kind, activation="identity"):
    """(scheme class, branches of one step) with constant coefficients."""
    if kind == "verlet":
        return Verlet, [SymmetricField(6, ndim=0, activation=activation).double() for _ in range(2)]
    if kind == "leapfrog":
        return Leapfrog, [SymmetricField(6, ndim=0, activation=activation).double()]
    return MidPoint, [AntisymmetricField(6, ndim=0, activation=activation).double()]


def bound_of(scheme, fields, num_steps=1):
    sequence = ReversibleSequence(fields * num_steps, scheme, split_dim=-1)
    width = 12 if scheme.splits else 6
    return step_bounds(sequence, torch.randn(1, width), tolerance=0.001)[0]


def growth_rate(scheme, fields, num_steps=2000):
    """The mean logarithmic growth per step in a simulation, the state rescaled as it goes."""
    step = step_map(scheme, fields)
    state = tuple(torch.randn(2, 1, 6, dtype=torch.float64))
    total = 0.0
    with torch.no_grad():
        for index in range(num_steps):
            state = step(state)
            norm = torch.sqrt(state[0].square().sum() + state[1].square().sum())
            state = (state[0] / norm, state[1] / norm)
            if index >= num_steps // 2:
                total += float(norm.log())
    return total / (num_steps - num_steps // 2)


@pytest.mark.parametrize("kind", ["verlet", "leapfrog", "midpoint"])
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_growth_turns_on_within_5_percent_of_the_sharp_bound(kind, damping):
    scheme, fields = case(kind)
    sharp = bound_of(scheme(0.1, damping=damping), fields).sharp
    below, above = scheme(0.95 * sharp, damping=damping), scheme(1.05 * sharp, damping=damping)
    assert growth_rate(below, fields) < 5e-3
    assert growth_rate(above, fields) > 1e-2


@pytest.mark.parametrize("kind", ["verlet", "leapfrog", "midpoint"])
def test_sharp_bound_is_where_the_step_leaves_the_unit_circle(kind):
    scheme, fields = case(kind)
    sharp = bound_of(scheme(0.1), fields).sharp
    state = tuple(torch.randn(2, 1, 6, dtype=torch.float64))
    assert spectrum(step_map(scheme(0.99 * sharp), fields), state).radius < 1 + 1e-6
    assert spectrum(step_map(scheme(1.01 * sharp), fields), state).radius > 1 + 1e-3


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "softplus"])
@pytest.mark.parametrize("kind", ["verlet", "leapfrog", "midpoint"])
def test_a_nonlinear_step_within_its_bound_is_stable_at_any_state(kind, activation):
    scheme, fields = case(kind, activation)
    bound = bound_of(scheme(0.1), fields)
    for _ in range(3):
        state = tuple(torch.randn(2, 1, 6, dtype=torch.float64))
        assert spectrum(step_map(scheme(0.98 * bound.sharp), fields), state).radius < 1 + 1e-6


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "revnet"])
def test_usage_and_margin_are_shares_of_the_bound(family):
    bounds = step_bounds(small_network(family), images())
    assert bounds
    for bound in bounds:
        assert bound.sharp > 0.0
        assert bound.usage == pytest.approx(bound.h / bound.sharp)
        assert bound.margin == pytest.approx(1 / bound.usage)


def test_revnet_has_no_bound():
    model = small_network("revnet")
    assert step_bounds(model, images()) == []
    with pytest.raises(ValueError, match="no step size with a bound"):
        suggest_h(model, images())


@pytest.mark.parametrize("norm", [*NORMS])
def test_batch_norm_becomes_part_of_the_weights_and_other_norms_are_taken_at_the_state(norm):
    bounds = step_bounds(small_network("leapfrog", norm=norm, blocks=(2, 2)), images())
    assert {bound.basis for bound in bounds} == {"weights" if norm in ("none", "batch") else "state"}


def test_batch_norm_scale_enters_the_bound():
    field = SymmetricField(4, norm="batch").eval()
    sequence = ReversibleSequence([field], Leapfrog(0.1))
    field.norm.num_batches_tracked += 1
    plain = step_bounds(sequence, torch.randn(1, 4, 6, 6))[0]
    field.norm.running_var.fill_(4.0)
    assert step_bounds(sequence, torch.randn(1, 4, 6, 6))[0].sharp == pytest.approx(
        plain.sharp * math.sqrt(2), rel=1e-3
    )


def test_negative_batch_norm_weights_are_marked_since_no_bound_excludes_growth():
    field = SymmetricField(4, norm="batch").eval()
    sequence = ReversibleSequence([field], Leapfrog(0.1))
    field.norm.num_batches_tracked += 1
    x = torch.randn(1, 4, 6, 6)
    plain = step_bounds(sequence, x)[0]
    with torch.no_grad():
        field.norm.weight.neg_()
    flipped = step_bounds(sequence, x)[0]
    assert (plain.flipped, flipped.flipped) == (False, True)
    assert flipped.sharp == pytest.approx(plain.sharp)
    pair = (torch.randn(1, 4, 6, 6), torch.randn(1, 4, 6, 6))
    assert float(spectrum(step_map(Leapfrog(0.1), [field]), pair).eigenvalues.abs().max()) > 1.01


def test_one_layer_hamiltonian_is_bounded_by_its_one_kernel():
    fields = OneLayerField.pair(6, ndim=0)
    norm = float(torch.linalg.matrix_norm(fields[0].operator.weight.detach(), 2))
    bound = step_bounds(ReversibleSequence(fields, Verlet(0.1), split_dim=-1), torch.randn(1, 12))[0]
    assert bound.sharp == pytest.approx(2.0 / norm, rel=0.02)


def test_suggested_h_keeps_every_layer_within_its_safety():
    model = small_network("hamiltonian")
    h = suggest_h(model, images(), safety=0.8)
    again = small_network("hamiltonian", h=h)
    assert max(bound.usage for bound in step_bounds(again, images())) == pytest.approx(0.8, rel=1e-6)


def test_limits_follow_from_the_coefficients():
    assert step_limit(Verlet(0.3)) == 2.0
    assert step_limit(MidPoint(0.3)) == 1.0
    assert step_limit(Leapfrog(0.3)) == pytest.approx(2.0)
    assert step_limit(Verlet(0.3, damping=0.5)) == 1.5


def test_slopes_of_activations():
    assert largest_slope(torch.relu) == 1.0
    assert largest_slope(torch.sigmoid) == pytest.approx(0.25)
    assert largest_slope(torch.nn.functional.gelu) == pytest.approx(1.129, abs=1e-3)


def test_bad_input_is_refused():
    model = small_network("hamiltonian")
    with pytest.raises(ValueError, match=r"safety must lie in \(0, 1\], got 2"):
        suggest_h(model, images(), safety=2)
    with pytest.raises(ValueError, match="tolerance must lie"):
        step_bounds(model, images(), tolerance=0)


@pytest.mark.parametrize(("activation", "falls"), [("tanh", False), ("relu", False), ("gelu", True), ("silu", True)])
def test_a_bound_that_is_no_guarantee_says_so(activation, falls):
    bounds = step_bounds(small_network("leapfrog", activation=activation, norm="none"), images())
    assert all(bound.flipped == falls for bound in bounds)
