"""Signals, gradients, energy and scores along depth."""

import pytest
import torch
from small_networks import FAMILIES, finite_growth, images, small_network

import revode
from revode import Leapfrog, ReversibleSequence, SymmetricField, Verlet
from revode_lab.stability import (
    adversarial_sensitivity,
    hamiltonian_energy,
    lyapunov_exponents,
    noise_sensitivity,
    signal_propagation,
)
from revode_lab.stability.propagation import antiderivative
from revode_lab.stability.walk import analysis_copy, walk


@pytest.mark.parametrize("family", FAMILIES)
def test_walking_computes_what_the_network_computes(family):
    model = small_network(family).eval()
    walked = walk(analysis_copy(model, None), images(), lambda place, unit, parts: None)
    torch.testing.assert_close(walked, model(images()))


@pytest.mark.parametrize("family", ["hamiltonian", "leapfrog", "midpoint"])
def test_a_pair_that_goes_on_through_squeezing_is_walked_and_measured(family):
    model = small_network(family, transition="squeeze", blocks=(2, 2), channels=(4, 16)).eval()
    walked = walk(analysis_copy(model, None), images(), lambda place, unit, parts: None)
    torch.testing.assert_close(walked, model(images()))
    tangent, finite = lyapunov_exponents(model, images(), k=1), finite_growth(model, images())
    assert finite.growth == pytest.approx(tangent.growth, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_norm_at_the_entrance_is_autograds(family):
    model = small_network(family).eval().double()
    labels = torch.zeros(4, dtype=torch.long)
    for module in model.modules():  # so that nothing is calibrated
        if getattr(module, "num_batches_tracked", None) is not None:
            module.num_batches_tracked += 1
    found = signal_propagation(model, images(), labels, chunk=3)
    seen = {}
    hooked = next(module for module in model.modules() if isinstance(module, ReversibleSequence))

    def keep(module, args, kwargs):
        x = args[0]
        seen["x"] = x.detach().requires_grad_()
        return (seen["x"], *args[1:]), kwargs

    handle = hooked.register_forward_pre_hook(keep, with_kwargs=True)
    loss = torch.nn.functional.cross_entropy(model(images().double()), labels, reduction="sum")
    handle.remove()
    grad = torch.autograd.grad(loss, seen["x"])[0]
    assert found.places[0].kind == "enter"
    expected = torch.linalg.vector_norm(grad.flatten(1), dim=1).log().mean().exp()
    assert float(found.gradient[0]) == pytest.approx(float(expected), rel=1e-6)
    signal = torch.linalg.vector_norm(seen["x"].detach().flatten(1), dim=1).log().mean().exp()
    assert float(found.signal[0]) == pytest.approx(float(signal), rel=1e-6)


def test_signal_of_a_hamiltonian_network_stays_and_beyond_its_bound_explodes():
    calm = signal_propagation(small_network("hamiltonian"), images())
    wild = signal_propagation(small_network("hamiltonian", h=2.0), images())
    assert 0.8 < calm.signal_growth < 1.5
    assert 0.8 < calm.gradient_growth < 1.5
    assert wild.signal_growth > 50
    assert wild.gradient_growth > 50


def test_constant_weights_keep_the_energy_and_jumping_ones_do_not():
    x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(4))
    pair = [SymmetricField(4, activation="tanh") for _ in range(2)]
    constant = hamiltonian_energy(ReversibleSequence(pair * 100, Verlet(0.02)), x)
    jumping = hamiltonian_energy(
        ReversibleSequence([SymmetricField(4, activation="tanh") for _ in range(200)], Verlet(0.02)), x
    )
    assert constant is not None
    assert jumping is not None
    assert float(constant.jump.abs().max()) < 1e-12
    assert float((constant.after / constant.before[0] - 1).abs().max()) < 0.02
    assert float(jumping.jump.abs().max()) > 0.05


def test_energy_error_of_verlet_is_first_order_and_of_leapfrog_second():
    def error(scheme, fields, x, num_steps):
        found = hamiltonian_energy(ReversibleSequence(fields * num_steps, scheme), x)
        assert found is not None
        return float((found.after / found.before[0] - 1).abs().max())

    pair = [SymmetricField(4, activation="tanh") for _ in range(2)]
    x = torch.randn(1, 8, 6, 6)
    assert error(Verlet(0.1), pair, x, 10) / error(Verlet(0.05), pair, x, 20) == pytest.approx(2, rel=0.3)
    single = pair[:1]
    assert error(Leapfrog(0.1), single, x[:, :4], 10) / error(Leapfrog(0.05), single, x[:, :4], 20) > 3


@pytest.mark.parametrize("family", ["midpoint", "revnet", "hamiltonian-1layer"])
def test_networks_without_a_hamiltonian_have_no_energy(family):
    assert hamiltonian_energy(small_network(family), images()) is None


@pytest.mark.parametrize("activation", [torch.relu, torch.tanh, torch.sigmoid, torch.nn.functional.silu])
def test_antiderivative_differentiates_to_the_activation(activation):
    x = torch.linspace(-4, 4, 41, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(antiderivative(activation, x).sum(), x)
    torch.testing.assert_close(slope, activation(x.detach()), atol=1e-6, rtol=1e-6)


def test_scores_answer_to_noise_and_more_to_an_adversary():
    model = small_network("hamiltonian")
    noise = noise_sensitivity(model, images(8), sizes=(0.01, 0.1))
    adversary = adversarial_sensitivity(model, images(8), sizes=(0.01, 0.1), chunk=3)
    assert [row.kind for row in noise + adversary] == ["noise", "noise", "fgsm", "fgsm"]
    assert noise[0].logit_change < noise[1].logit_change
    for random, chosen in zip(noise, adversary, strict=True):
        assert 0.0 < random.logit_change < chosen.logit_change
        assert 0.0 <= random.flipped <= 1.0


@pytest.mark.parametrize("transition", ["pool_pad", "squeeze"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_grows_in_units_that_do_nothing(family, transition):
    if transition == "squeeze" and family not in ("hamiltonian", "leapfrog", "midpoint"):
        pytest.skip("this family does not squeeze")
    options = {"transition": "squeeze", "blocks": (2, 2), "channels": (4, 16)} if transition == "squeeze" else {}
    model = small_network(family, **options).eval().double()
    for unit in (module for module in model.modules() if isinstance(module, ReversibleSequence)):
        for parameter in unit.parameters():
            torch.nn.init.zeros_(parameter)
    found = signal_propagation(model, images())
    assert found.signal_growth == pytest.approx(1.0)
    assert found.gradient_growth == pytest.approx(1.0)


def test_a_resnet_is_walked_block_by_block():
    """Norms of states and gradients are those that hooks on its blocks see; blocks that change the shape are transitions."""
    model = revode.create_model("resnet-14", num_classes=3, channels=(4, 8, 8), in_channels=3).double()
    x, labels = torch.randn(3, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2])
    model(x)  # batch norms that have seen no data would take the statistics of the images
    model.eval()
    blocks = [block for stage in model.stages for block in stage.body]
    seen = []
    hooks = [block.register_forward_hook(lambda block, given, y: seen.append((given[0].shape, y))) for block in blocks]
    loss = torch.nn.functional.cross_entropy(model(x), labels, reduction="sum")
    gradients = torch.autograd.grad(loss, [y for _, y in seen])
    for hook in hooks:
        hook.remove()
    kept = [(y, g) for (shape, y), g in zip(seen, gradients, strict=True) if y.shape == shape]
    found = signal_propagation(model, x, labels)
    steps = [i for i, place in enumerate(found.places) if place.kind == "step"]
    norms = [[t.flatten(1).norm(dim=1).log().mean().exp() for t in pair] for pair in kept]
    torch.testing.assert_close(found.signal[steps], torch.stack([signal for signal, _ in norms]).detach())
    torch.testing.assert_close(found.gradient[steps], torch.stack([gradient for _, gradient in norms]))
    tangents = lyapunov_exponents(model, x, k=1)
    assert float(finite_growth(model, x, size=1e-6).unit_log_growth) == pytest.approx(
        float(tangents.unit_log_growth), rel=1e-3
    )
