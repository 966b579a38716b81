"""Every registered network: the paper's parameter counts, forward, backward, and the same gradient reversed as stored."""

from __future__ import annotations

import pytest
import torch
from network_gradients import gradients, images, largest_difference, twin

import revode
from revode.networks import model_config
from revode.networks.zoo import PAPER_PARAMETERS, count_parameters

COUNTS = {
    "resnet-32": (464_154, 470_004),
    "revnet-38": (464_890, 475_060),
    "hamiltonian-74": (429_690, 439_860),
    "midpoint-26": (502_570, 512_740),
    "leapfrog-26": (502_570, 512_740),
    "resnet-110": (1_727_962, 1_733_812),
    "revnet-110": (1_729_194, 1_740_804),
    "hamiltonian-218": (1_683_034, 1_694_644),
    "midpoint-62": (1_775_338, 1_786_948),
    "leapfrog-62": (1_775_338, 1_786_948),
    "resnet-1202": (19_421_274, None),
    "hamiltonian-1202": (9_699_338, None),
}
LAYOUTS = {
    "resnet-32": ((5, 5, 5), (16, 32, 64)),
    "revnet-38": ((3, 3, 3), (32, 64, 112)),
    "hamiltonian-74": ((6, 6, 6), (32, 64, 112)),
    "midpoint-26": ((4, 4, 4), (32, 64, 112)),
    "leapfrog-26": ((4, 4, 4), (32, 64, 112)),
    "resnet-110": ((18, 18, 18), (16, 32, 64)),
    "revnet-110": ((9, 9, 9), (32, 64, 128)),
    "hamiltonian-218": ((18, 18, 18), (32, 64, 128)),
    "midpoint-62": ((10, 10, 10), (32, 64, 128)),
    "leapfrog-62": ((10, 10, 10), (32, 64, 128)),
    "resnet-1202": ((200, 200, 200), (16, 32, 64)),
    "hamiltonian-1202": ((100, 100, 100), (32, 64, 128)),
}
DEEP = {"hamiltonian-1202", "resnet-1202"}
ON_IMAGES = [name for name in revode.list_models() if not name.startswith("gpt")]
REVERSIBLE = [name for name in ON_IMAGES if not name.startswith("resnet")]


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_equal_the_notes_and_the_papers_printed_figures(name):
    for num_classes, count, paper in zip((10, 100), COUNTS[name], PAPER_PARAMETERS[name], strict=True):
        if count is not None:
            assert paper is not None
            assert count_parameters(model_config(name, num_classes=num_classes)) == count
            assert round(count / 1e6, 1 if paper > 10 else 2) == paper


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_the_papers(name):
    config = model_config(name)
    assert (config.blocks, config.channels) == LAYOUTS[name]
    assert config.num_layers == int(name.rpartition("-")[2])


def assert_runs(model, found):
    assert all(gradient is not None and gradient.isfinite().all() for gradient in found.values())
    assert model(images(model, dtype=torch.float32)).shape[:2] == (2, model.config.num_classes)


@pytest.mark.parametrize("name", [name for name in ON_IMAGES if name not in {*REVERSIBLE, *DEEP}])
def test_every_baseline_runs_forward_and_backward(name):
    model = revode.create_model(name)
    assert_runs(model, gradients(model, images(model, dtype=torch.float32)))


@pytest.mark.parametrize("name", REVERSIBLE)
def test_reversible_gradient_equals_the_stored_one(name):
    model = revode.create_model(name).double()
    stored = twin(model, backprop="store")
    x = images(model)
    assert largest_difference(gradients(stored, x), gradients(model, x)) < 1e-9
    for first, second in zip(stored.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", REVERSIBLE)
def test_exact_reversible_gradient_is_the_stored_one_bit_for_bit(name):
    model = revode.create_model(name, exact=True)
    stored = twin(model, backprop="store")
    x = images(model, dtype=torch.float32)
    found = gradients(model, x)
    assert_runs(model, found)
    assert largest_difference(gradients(stored, x), found) == 0.0


@pytest.mark.parametrize("name", ["hamiltonian-26", "midpoint-14", "leapfrog-14", "revnet-14", "hamiltonian-1layer-14"])
@pytest.mark.parametrize("norm", ["none", "batch", "tv"])
def test_checkpoint_and_every_norm_give_the_stored_gradient(name, norm):
    if norm not in model_config(name).row.norms:
        pytest.skip("this family has no such norm")
    model = revode.create_model(name, norm=norm).double()
    x = images(model)
    stored = gradients(twin(model, backprop="store"), x)
    assert largest_difference(stored, gradients(twin(model, backprop="checkpoint"), x)) < 1e-9
    assert largest_difference(stored, gradients(model, x)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_hamiltonian_1202_at_full_size_has_the_stored_gradient(exact):
    dtype = torch.float32 if exact else torch.float64
    model = revode.create_model("hamiltonian-1202", exact=exact).to(dtype)
    x = images(model, size=32, dtype=dtype)
    difference = largest_difference(gradients(twin(model, backprop="store"), x), gradients(model, x))
    assert difference == 0.0 if exact else difference < 1e-9


@pytest.mark.slow
def test_resnet_1202_runs_forward_and_backward():
    model = revode.create_model("resnet-1202")
    assert all(gradient.isfinite().all() for gradient in gradients(model, images(model, dtype=torch.float32)).values())


def test_deep_networks_that_the_paper_does_not_name_take_a_fixed_horizon():
    assert model_config("hamiltonian-218").h == model_config("hamiltonian-1202").h == 0.1
    assert model_config("hamiltonian-1202").init == "independent"
    deep = model_config("midpoint-1202")
    assert (deep.h, deep.horizon, deep.init) == (None, 1.0, "smooth")
    assert deep.with_options(h=0.1).horizon is None
