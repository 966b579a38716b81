"""Reversing: errors that grow where theory says, zero on the grid, and the linear RevNet of the paper."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from revode import AdditiveCoupling, Leapfrog, MidPoint, Momentum, ReversibleSequence, SymmetricField, Verlet
from revode.schemes import SCHEMES, create_scheme
from revode_lab.stability import (
    amplification,
    drift,
    gradient_error,
    reconstruction_error,
    reconstruction_profile,
    step_map,
)


def sequence(depth=20, scheme=None, **options):
    return ReversibleSequence([SymmetricField(4) for _ in range(2 * depth)], scheme or Verlet(0.1), **options)


def state(channels=8):
    return torch.randn(2, channels, 5, 5, generator=torch.Generator().manual_seed(2))


def test_predicted_and_simulated_growth_agree_over_a_grid():
    """The linear RevNet Y+ = Y + βZ, Z+ = Z + αY+ is stable where -4 ≤ αβ ≤ 0."""
    alpha, beta = torch.meshgrid(*[torch.linspace(-3, 3, 13, dtype=torch.float64)] * 2, indexing="ij")
    predicted = amplification(AdditiveCoupling(), beta, alpha).abs().amax(-1)
    step = step_map(AdditiveCoupling(), (lambda z: beta * z, lambda y: alpha * y))
    y, z, logs, num_steps = torch.full_like(alpha, 0.6), torch.full_like(alpha, 0.8), torch.zeros_like(alpha), 20_000
    for index in range(num_steps):
        y, z = step((y, z))
        norm = torch.hypot(y, z)
        y, z = y / norm, z / norm
        logs += norm.log() * (index >= num_steps // 2)  # the first half turns the state into the direction that grows
    assert float(((2 * logs / num_steps).exp() - predicted).abs().max()) < 1e-3
    stable = (alpha * beta <= 0.0) & (alpha * beta >= -4.0)
    assert float((predicted[stable] - 1.0).abs().max()) < 1e-6
    assert bool((predicted[~stable] > 1.0).all())
    assert 0 < int(stable.sum()) < stable.numel()


def test_revnet_roots_are_the_papers():
    """ξ = a ± √(a² - 1) with a = 1 + αβ/2."""
    alpha, beta = 0.7, -0.9
    a = 1 + alpha * beta / 2
    expected = torch.tensor([complex(a, (1 - a * a) ** 0.5), complex(a, -((1 - a * a) ** 0.5))])
    torch.testing.assert_close(amplification(AdditiveCoupling(), beta, alpha), expected.to(torch.complex128))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(SCHEMES)), st.floats(-2, 2), st.floats(-2, 2), st.floats(0, 0.3))
def test_amplification_is_the_spectrum_of_one_step(name, mu, nu, damping):
    scheme = create_scheme(name, damping=damping)
    fields = [lambda q: mu * q, lambda q: nu * q][: scheme.fields_per_step]
    step = step_map(scheme, fields)
    one, zero = torch.eye(2, dtype=torch.float64)
    matrix = torch.stack(step((one, zero)))  # the images of both unit vectors at once
    roots = amplification(scheme, mu, nu if scheme.splits else None)
    assert complex(roots.sum()) == pytest.approx(complex(matrix.trace()), abs=1e-9)
    assert complex(roots.prod()) == pytest.approx(complex(torch.linalg.det(matrix)), abs=1e-9)


def test_a_splitting_scheme_needs_both_eigenvalues():
    with pytest.raises(ValueError, match="two branches"):
        amplification(Verlet(0.1), 1.0)


@pytest.mark.parametrize("scheme", [Verlet(0.1), Leapfrog(0.1), MidPoint(0.1)], ids=repr)
def test_grid_makes_reconstruction_and_gradient_exact(scheme):
    rows = drift(sequence(10, scheme), state(8 if scheme.splits else 4), exact=(True,))
    assert len(rows) == 2
    assert all(row.exact and row.reconstruction == 0.0 and row.gradient == 0.0 for row in rows)


def test_drift_covers_depth_dtype_and_step_size():
    rows = drift(
        sequence(), state(), depths=(2, 20), steps=(0.1, 0.2), dtypes=(torch.bfloat16, torch.float32, torch.float64)
    )
    plain = {(row.depth, row.dtype, row.h): row for row in rows if not row.exact}
    assert len(plain) == 12
    for depth in (2, 20):
        for h in (0.1, 0.2):
            bf16, fp32, fp64 = (plain[depth, name, h] for name in ("bfloat16", "float32", "float64"))
            assert fp64.reconstruction < 1e-13 < fp32.reconstruction < 1e-4 < bf16.reconstruction
            assert fp64.gradient < 1e-13 < fp32.gradient < 1e-4 < bf16.gradient


def test_a_step_beyond_its_bound_cannot_be_reversed():
    rows = drift(sequence(40), state(), steps=(0.1, 1.0), dtypes=(torch.float32,), exact=(False,))
    assert rows[0].reconstruction < 1e-5
    assert not rows[1].reconstruction < 1.0


def test_momentum_amplifies_rounding_and_says_so_in_its_profile():
    profile = reconstruction_profile(sequence(40, Momentum(0.8)), state(4))
    assert len(profile) == 81
    assert profile[-1] == 0.0
    assert profile[0] > 1e3 * profile[-5] > 0.0


def test_profile_starts_at_the_reconstruction_of_the_input():
    net = sequence(10)
    profile = reconstruction_profile(net, state())
    assert len(profile) == 11
    assert profile[-1] == 0.0
    assert profile[0] == pytest.approx(reconstruction_error(net, state()), rel=1e-6)


def test_profile_of_a_one_tensor_scheme_starts_at_its_input():
    net = sequence(5, Leapfrog(0.1))
    profile = reconstruction_profile(net, state(4))
    assert len(profile) == 11
    assert profile[0] == pytest.approx(reconstruction_error(net, state(4)), rel=1e-6)


def test_anchors_reset_the_drift_of_the_gradient():
    free = ReversibleSequence([SymmetricField(4) for _ in range(60)], Momentum(0.8), anchor_every=60)
    held = ReversibleSequence(list(free.fields), Momentum(0.8), anchor_every=5)
    assert gradient_error(held, state(4)) < 0.1 * gradient_error(free, state(4))


def test_drift_leaves_the_sequence_as_it_was():
    net = sequence(5)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    drift(net, state(), depths=(1, 5))
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="depth must lie between 1 and the 5 steps"):
        drift(sequence(5), state(), depths=(6,))
    with pytest.raises(ValueError, match="h must be a positive number"):
        drift(sequence(5), state(), steps=(-0.1,))


def test_measuring_leaves_running_statistics_alone():
    branches = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    sequence = ReversibleSequence(branches, MidPoint(h=0.1))
    before = {name: tensor.clone() for name, tensor in sequence.state_dict().items()}
    reconstruction_error(sequence, torch.randn(5, 4))
    reconstruction_profile(sequence, torch.randn(5, 4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in sequence.state_dict().items())
