"""Eigenvalues: the two methods agree, and the paper's theorem holds where its conditions do."""

import pytest
import torch
from torch import nn

from revode import BDIA, AdditiveCoupling, AntisymmetricField, Leapfrog, MidPoint, SymmetricField, Verlet
from revode.networks.blocks import PreActivation
from revode_lab.stability import Jacobian, right_hand_side, similar_matrix, spectrum, step_map
from revode_lab.stability.spectra import frozen

INCREASING = ("tanh", "sigmoid", "softplus")


def pair(channels=4, edge=6, batch=1):
    return tuple(torch.randn(2, batch, channels, edge, edge, dtype=torch.float64))


def hamiltonian(channels=4, **options):
    return [SymmetricField(channels, **options).double() for _ in range(2)]


def axis_distance(matrix):
    values = torch.linalg.eigvals(matrix)
    return float(values.real.abs().max() / values.abs().max())


def test_jacobian_products_agree_with_the_dense_matrix():
    jacobian = Jacobian(right_hand_side(Verlet(0.1), hamiltonian(activation="tanh")), pair())
    matrix = jacobian.dense()
    v = torch.randn(matrix.shape[1], dtype=torch.float64)
    torch.testing.assert_close(jacobian.matvec(v), matrix @ v)
    torch.testing.assert_close(jacobian.rmatvec(v), matrix.t() @ v)


@pytest.mark.parametrize("branch", ["hamiltonian", "dense"])
def test_matrix_free_agrees_with_dense_on_500_dimensions(branch):
    if branch == "hamiltonian":
        function, state = right_hand_side(Verlet(0.1), hamiltonian(10, activation="tanh")), pair(10, 5)
    else:
        layer = nn.Sequential(nn.Linear(500, 500), nn.Tanh()).double()
        function, state = layer, torch.randn(1, 500, dtype=torch.float64)
    everything = spectrum(function, state)
    leading = spectrum(function, state, k=10)
    assert (everything.method, leading.method) == ("dense", "matrix-free")
    assert everything.size == leading.size == 500
    assert leading.radius == pytest.approx(everything.radius, rel=1e-6)
    assert leading.max_real == pytest.approx(everything.max_real, abs=1e-6 * everything.radius)
    for value in leading.eigenvalues[:10]:
        assert (everything.eigenvalues - value).abs().min() < 1e-6


@pytest.mark.parametrize("activation", INCREASING)
@pytest.mark.parametrize("seed", range(3))
def test_two_layer_hamiltonian_has_imaginary_eigenvalues(activation, seed):
    torch.manual_seed(seed)
    fields, state = hamiltonian(activation=activation, leading=True), pair()
    found = spectrum(right_hand_side(Verlet(0.1), fields), state)
    assert found.axis_distance <= 1e-10
    assert found.radius > 0.1
    assert axis_distance(similar_matrix(fields, state)) <= 1e-10


def test_relu_hamiltonian_has_imaginary_eigenvalues_on_the_similar_matrix():
    fields, state = hamiltonian(activation="relu"), pair()
    similar = similar_matrix(fields, state)
    torch.testing.assert_close(similar, -similar.t(), rtol=0, atol=0)
    assert axis_distance(similar) <= 1e-10
    found = spectrum(right_hand_side(Verlet(0.1), fields), state)
    assert found.axis_distance <= 1e-6
    assert found.radius == pytest.approx(float(torch.linalg.eigvals(similar).abs().max()), rel=1e-8)


def test_antisymmetric_field_has_imaginary_eigenvalues():
    field, y = AntisymmetricField(4, activation="tanh").double(), pair()[0]
    assert spectrum(right_hand_side(MidPoint(0.1), [field]), y).axis_distance <= 1e-10
    assert axis_distance(similar_matrix([field], y)) <= 1e-10


def test_leapfrog_has_imaginary_eigenvalues():
    field = SymmetricField(4, activation="tanh").double()
    assert spectrum(right_hand_side(Leapfrog(0.1), [field]), pair()).axis_distance <= 1e-7


def test_theorem_fails_for_a_decreasing_activation():
    fields = hamiltonian(activation="gelu")  # its slope is negative on part of the line
    assert spectrum(right_hand_side(Verlet(0.1), fields), pair()).axis_distance > 1e-3


def test_theorem_fails_for_revnet_branches():
    fields = [PreActivation(4, norm="batch", activation="relu").double().eval() for _ in range(2)]
    found = spectrum(right_hand_side(AdditiveCoupling(), fields), pair())
    assert found.axis_distance > 0.1
    assert found.max_real > 0.1


def test_theorem_fails_with_batch_statistics_and_holds_with_fixed_ones():
    state = pair(batch=4, edge=4)
    fields = hamiltonian(activation="tanh", norm="batch")
    training = right_hand_side(Verlet(0.1), [frozen(field) for field in fields])
    assert spectrum(training, state).axis_distance > 1e-4
    fixed = right_hand_side(Verlet(0.1), [frozen(field.eval()) for field in fields])
    assert spectrum(fixed, state).axis_distance <= 1e-10


def test_theorem_fails_with_a_leading_batch_norm_even_when_fixed():
    fields = hamiltonian(activation="tanh", norm="batch", leading=True)
    for field in fields:
        for norm in (field.lead, field.norm):
            norm.weight.data.uniform_(0.1, 3.0)
        field.eval()
    assert spectrum(right_hand_side(Verlet(0.1), fields), pair()).axis_distance > 1e-4


def test_verlet_step_within_its_bound_keeps_eigenvalues_on_the_unit_circle():
    found = spectrum(step_map(Verlet(0.1), hamiltonian(activation="tanh")), pair())
    torch.testing.assert_close(found.eigenvalues.abs(), torch.ones_like(found.eigenvalues.abs()), atol=1e-6, rtol=0)


def test_spectrum_leaves_a_training_module_as_it_was():
    field = SymmetricField(4, norm="batch")
    before = {name: value.clone() for name, value in field.state_dict().items()}
    random = torch.get_rng_state()
    spectrum(field, torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(0)))
    assert field.training
    assert torch.equal(random, torch.get_rng_state())
    for name, value in field.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.requires_grad and p.grad is None for p in field.parameters())


def test_a_field_that_is_not_square_is_refused_with_its_sizes():
    with pytest.raises(ValueError, match=r"maps 5 numbers to 3: eigenvalues need a square"):
        spectrum(nn.Linear(5, 3), torch.randn(1, 5))


def test_matrix_free_without_scipy_says_what_to_install(monkeypatch):
    import builtins

    original = builtins.__import__

    def without_scipy(name, *args, **kwargs):
        if name.startswith("scipy"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    with pytest.raises(ValueError, match=r"pip install 'revode\[lab\]'"):
        spectrum(nn.Linear(30, 30).double(), torch.randn(1, 30, dtype=torch.float64), k=3)


def test_a_wide_unit_has_all_its_eigenvalues_too():
    from revode import create_model
    from revode_lab.stability import unit_spectra

    torch.manual_seed(0)
    model = create_model("leapfrog-26", blocks=(2, 2), channels=(4, 32), image_size=8)
    sizes = [len(values) for values in unit_spectra(model, torch.randn(2, 3, 8, 8), max_size=100).values()]
    assert sizes[-1] == 2 * 32 * 2 * 2


@pytest.mark.parametrize(
    "scheme", [MidPoint(0.1), MidPoint(0.1, blend=0.5), MidPoint(0.1, blend=0.0), BDIA(0.1)], ids=repr
)
def test_every_first_order_scheme_discretises_the_ode_of_its_field(scheme):
    y = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(right_hand_side(scheme, [lambda y: -y])(y), -y)
