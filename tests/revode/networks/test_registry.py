"""Names and options: what exists is found, what does not is explained in one sentence."""

from __future__ import annotations

import pytest
import torch

import revode
from revode.networks import NetworkConfig, model_config
from revode.networks.zoo import _RECIPES
from revode.operators import NORMS

FAMILIES = ["hamiltonian", "hamiltonian-1layer", "midpoint", "leapfrog", "revnet", "resnet"]


@pytest.fixture
def registry():
    before = dict(_RECIPES)
    yield
    _RECIPES.clear()
    _RECIPES.update(before)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [14, 26, 38, 110])
def test_any_valid_depth_has_that_many_layers(family, layers):
    with torch.device("meta"):
        model = revode.create_model(f"{family}-{layers}")
    assert model.num_layers == layers
    wide = (32, 64, 112) if layers < 100 else (32, 64, 128)
    assert model.config.channels == ((16, 32, 64) if family == "resnet" else wide)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_depth_names_valid_ones(family):
    with pytest.raises(
        ValueError, match=rf"{family} networks have (6|12)n \+ 2 layers .* the nearest are {family}-74 and"
    ):
        revode.create_model(f"{family}-75")


def test_unknown_name_lists_the_nearest():
    with pytest.raises(ValueError, match=r"unknown network 'hamiltonain-74'; nearest: hamiltonian-74"):
        revode.create_model("hamiltonain-74")


def test_family_without_depth_is_explained():
    with pytest.raises(ValueError, match="hamiltonian is a family: say how many layers, as in hamiltonian-74"):
        revode.create_model("hamiltonian")


def test_stl_suffix_makes_images_of_96_pixels():
    config = model_config("hamiltonian-26-stl")
    assert (config.name, config.image_size, config.blocks) == ("hamiltonian-26-stl", 96, (2, 2, 2))


def test_models_can_be_registered_once(registry):
    @revode.register_model("tiny")
    def tiny() -> NetworkConfig:
        return NetworkConfig(name="tiny", family="leapfrog", blocks=(2, 2), channels=(4, 8), h=0.5)

    assert "tiny" in revode.list_models()
    assert revode.create_model("tiny", num_classes=3)(torch.randn(2, 3, 8, 8)).shape == (2, 3)
    with pytest.raises(ValueError, match="'tiny' is registered already"):
        revode.register_model("tiny")(tiny)


def test_a_registered_function_must_return_a_config(registry):
    revode.register_model("broken")(lambda: torch.nn.Linear(1, 1))  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="must return a config, got Linear"):
        revode.create_model("broken")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hamiltonian-74", {"chanels": (1, 2, 3)}, "unknown option of hamiltonian-74 'chanels'; nearest: channels"),
        ("hamiltonian-74", {"h": 0.1, "horizon": 1.0}, "either h .* or horizon"),
        ("hamiltonian-74", {"h": None}, "either h .* or horizon"),
        ("hamiltonian-74", {"h": -1.0}, "h must be a positive number"),
        ("hamiltonian-74", {"channels": (32, 64, 113)}, r"all must be even, got \(32, 64, 113\)"),
        ("hamiltonian-74", {"channels": (64, 32, 16)}, "must not decrease"),
        ("hamiltonian-74", {"blocks": (2, 2)}, "same number of units"),
        ("hamiltonian-74", {"blocks": (2, 0, 2)}, "blocks must be positive integers"),
        ("hamiltonian-74", {"image_size": 3}, "image_size=3 is too small: .* at least 4"),
        ("hamiltonian-74", {"num_classes": 0}, "num_classes must be a positive integer"),
        ("hamiltonian-74", {"start": "euler"}, "start of Verlet must be left out"),
        ("hamiltonian-74", {"transition": "pool"}, "transition must be 'pool_pad' or 'connector' or 'squeeze'"),
        ("hamiltonian-74", {"init": "zero"}, "init must be 'independent' or 'smooth'"),
        ("hamiltonian-74", {"norm": "no-norm"}, f"norm must be {' or '.join(map(repr, NORMS))}"),
        ("hamiltonian-74", {"activation": "rellu"}, "activation must be"),
        ("hamiltonian-74", {"memory_budget": 10**9, "backprop": "store"}, "memory_budget says itself what is kept"),
        ("hamiltonian-74", {"exact": True, "damping": 0.1}, "exact"),
        ("hamiltonian-1layer-14", {"norm": "batch"}, "norm must be 'none'"),
        ("hamiltonian-26", {"transition": "squeeze", "channels": (8, 16, 32)}, r"\(8, 32, 128\), got \(8, 16, 32\)"),
        ("hamiltonian-26", {"transition": "squeeze", "image_size": 30}, "multiple of 4, got 30"),
        ("midpoint-26", {"transition": "squeeze", "channels": (2, 8, 32)}, "repeats the image's 3 channels"),
        ("midpoint-26", {"transition": "squeeze", "horizon": 1.0, "blocks": (2, 3, 4)}, "as many blocks"),
        ("midpoint-26", {"blocks": (1, 4, 4)}, "at least 2 blocks"),
        ("resnet-32", {"backprop": "reversible"}, "backprop must be 'store' for resnet-32"),
        ("resnet-32", {"h": 0.1}, "unknown option of resnet-32 'h'"),
    ],
)
def test_contradictions_are_refused_in_one_sentence(name, options, message):
    with pytest.raises(ValueError, match=message):
        revode.create_model(name, **options)


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 1, 32, 32), (2, 3, 2, 32)])
def test_wrong_images_are_refused(shape):
    with pytest.raises(ValueError, match=r"hamiltonian-26 takes images of shape \(batch, 3, height, width\)"):
        revode.create_model("hamiltonian-26")(torch.zeros(shape))


@pytest.mark.parametrize("name", [name for name in revode.list_models() if not name.startswith("gpt")])
def test_config_survives_plain_values(name):
    config = model_config(name)
    assert NetworkConfig.from_dict(config.to_dict()) == config
