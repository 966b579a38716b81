"""Exponents: known systems come out right, and growth is that of two trajectories in every family."""

import math

import pytest
import torch
from small_networks import FAMILIES, finite_growth, images, small_network

from revode import ReversibleSequence, SymmetricField, Verlet
from revode_lab.stability import lyapunov_exponents, lyapunov_of_maps


def henon(state):
    x, y = state.unbind(1)
    return torch.stack((1.0 - 1.4 * x.square() + y, 0.3 * x), 1)


def lorenz(state):
    x, y, z = state.unbind(1)
    return torch.stack((10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z), 1)


def runge_kutta(function, dt):
    def step(state):
        a = function(state)
        b = function(state + dt / 2 * a)
        c = function(state + dt / 2 * b)
        d = function(state + dt * c)
        return state + dt / 6 * (a + 2 * b + 2 * c + d)

    return step


def test_linear_system_has_the_real_parts_of_its_eigenvalues():
    rates = torch.tensor([0.5, -0.1, -1.0], dtype=torch.float64)
    mix = torch.randn(3, 3, dtype=torch.float64)
    step = torch.linalg.matrix_exp(0.1 * mix @ torch.diag(rates) @ torch.linalg.inv(mix))
    found = lyapunov_of_maps(
        [lambda s: s @ step.t()] * 400, torch.randn(2, 3, dtype=torch.float64), k=3, dt=0.1, burn_in=300
    )
    torch.testing.assert_close(found.exponents, rates, atol=1e-3, rtol=0)


def test_rotation_has_exponent_zero():
    c, s = math.cos(0.3), math.sin(0.3)
    turn = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    found = lyapunov_of_maps([lambda x: x @ turn.t()] * 50, torch.randn(2, 2, dtype=torch.float64), k=2)
    torch.testing.assert_close(found.exponents, torch.zeros(2, dtype=torch.float64), atol=1e-3, rtol=0)


def test_henon_map_has_its_published_exponents():
    """λ1 = 0.4192 and λ2 = ln 0.3 - λ1 = -1.6232 (Sprott, Chaos and Time-Series Analysis, 2003; a = 1.4, b = 0.3)."""
    x = 0.1 * torch.rand(512, 2, dtype=torch.float64)
    found = lyapunov_of_maps([henon] * 200, x, k=2, burn_in=50)
    assert found.exponents.tolist() == pytest.approx([0.4192, -1.6232], rel=0.02)
    assert float(found.exponents.sum()) == pytest.approx(math.log(0.3), rel=1e-9)


@pytest.mark.slow
def test_lorenz_flow_has_its_published_exponents():
    """0.9056, 0, -14.5723 (Sprott, Chaos and Time-Series Analysis, 2003)."""
    x = torch.tensor([1.0, 1.0, 20.0], dtype=torch.float64) + torch.rand(400, 3, dtype=torch.float64)
    found = lyapunov_of_maps([runge_kutta(lorenz, 0.01)] * 4000, x, k=3, dt=0.01, burn_in=2000)
    assert float(found.exponents[0]) == pytest.approx(0.9056, rel=0.02)
    assert abs(float(found.exponents[1])) < 0.01
    assert float(found.exponents[2]) == pytest.approx(-14.5723, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_growth_is_that_of_two_trajectories_in_every_family(family, activation):
    model = small_network(family, activation=activation)
    tangent = lyapunov_exponents(model, images(), k=2)
    finite = finite_growth(model, images())
    assert [place.kind for place in tangent.places] == [place.kind for place in finite.places]
    assert finite.growth == pytest.approx(tangent.growth, rel=0.1)
    difference = (finite.cumulative[:, 0] - tangent.cumulative[:, 0]).abs().max()
    assert float(difference) < math.log(1.1)


def test_growth_is_counted_per_depth_and_in_total():
    model = small_network("hamiltonian")
    found = lyapunov_exponents(model, images(), k=3)
    steps = [place for place in found.places if place.kind == "step"]
    assert [place.depth for place in steps] == list(range(1, 7))
    assert found.time == pytest.approx(0.6)
    torch.testing.assert_close(found.exponents * found.time, found.unit_log_growth)
    assert found.growth == pytest.approx(float(found.unit_log_growth[0].exp()))


def test_chunks_of_images_are_measured_as_each_by_itself_and_averaged():
    model = ReversibleSequence([SymmetricField(4) for _ in range(6)], Verlet(0.1))  # without batch norms to calibrate
    x = torch.randn(5, 8, 5, 5)
    whole = lyapunov_exponents(model, x, k=2, chunk=3)
    parts = [lyapunov_exponents(model, x[:3], k=2), lyapunov_exponents(model, x[3:], k=2, seed=3)]
    assert [place.kind for place in whole.places] == [place.kind for place in parts[0].places]
    torch.testing.assert_close(whole.log_growth, 0.6 * parts[0].log_growth + 0.4 * parts[1].log_growth)


def test_exponents_are_ordered_once_the_frame_has_turned():
    found = lyapunov_exponents(small_network("revnet"), images(), k=3)
    totals = found.cumulative[-1].tolist()
    assert totals == sorted(totals, reverse=True)


def test_analysis_leaves_the_model_and_the_random_stream_alone():
    model = small_network("revnet").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(images()).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    lyapunov_exponents(model, images(), k=1)
    assert before.keys() == state.keys()
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    assert all(module.backprop == "reversible" for module in model.modules() if hasattr(module, "backprop"))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


def test_bad_input_is_refused():
    model = small_network("hamiltonian")
    with pytest.raises(ValueError, match="k must lie between 1 and the 192 dimensions"):
        lyapunov_exponents(model, images(), k=0)
    with pytest.raises(ValueError, match="no reversible units"):
        lyapunov_exponents(torch.nn.Linear(2, 2), torch.randn(1, 2))
    next(model.parameters()).data[0] = math.nan
    with pytest.raises(ValueError, match="NaN or infinity, first in"):
        lyapunov_exponents(model, images())
