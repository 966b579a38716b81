"""Networks with squeeze transitions give the image back from their last features."""

from __future__ import annotations

import pytest
import torch
from network_gradients import gradients, images, largest_difference, twin

import revode

NAMES = ["hamiltonian-26", "hamiltonian-1layer-26", "midpoint-26", "leapfrog-26"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_inverse_returns_the_image(name, training):
    model = revode.create_model(name, transition="squeeze").train(training)
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        assert (model.inverse(model.features(x)) - x).abs().max() < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_features_are_the_last_pair_and_the_head_sees_its_readout(name):
    model = revode.create_model(name, transition="squeeze").eval()
    x = torch.randn(2, 3, 16, 16)
    features = model.features(x)
    seen = model.readout(features.chunk(2, dim=1))
    assert torch.equal(model.head(seen), model(x))
    assert features.shape[1] == seen.shape[1] * (2 if name.startswith(("midpoint", "leapfrog")) else 1)
    assert "readout" in type(model).features.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_exact_inverse_returns_the_image_on_the_grid_bit_for_bit(name):
    model = revode.create_model(name, transition="squeeze", exact=True)
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(model.inverse(model.features(x)), torch.round(x * 2**14) / 2**14)


@pytest.mark.parametrize("name", ["hamiltonian-146", "leapfrog-146", "midpoint-146"])
def test_deep_exact_networks_invert_bit_for_bit(name):
    options = {"horizon": 1.0, "init": "smooth", "transition": "squeeze", "channels": (4, 16, 64)}
    model = revode.create_model(name, exact=True, **options)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(model.inverse(model.features(x)), torch.round(x * 2**14) / 2**14)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_through_carried_pairs_is_the_stored_one(name):
    model = revode.create_model(name, transition="squeeze").double()
    x = images(model)
    assert largest_difference(gradients(twin(model, backprop="store"), x), gradients(model, x)) < 1e-9
    exact = revode.create_model(name, transition="squeeze", exact=True)
    x = x.float()
    assert largest_difference(gradients(twin(exact, backprop="store"), x), gradients(exact, x)) == 0.0


def test_channels_follow_the_squeeze_and_stay_near_the_named_width():
    assert revode.create_model("hamiltonian-74", transition="squeeze").config.channels == (8, 32, 128)
    assert revode.create_model("hamiltonian-digits", transition="squeeze").config.channels == (16, 64)


def test_wrong_shapes_are_refused():
    model = revode.create_model("midpoint-26", transition="squeeze")
    with pytest.raises(ValueError, match="multiples of 4"):
        model(torch.zeros(1, 3, 18, 18))
    with pytest.raises(ValueError, match=r"features of shape \(batch, 256"):
        model.inverse(torch.zeros(1, 128, 4, 4))
