"""Whole networks go through torch.export and torch.compile."""

from __future__ import annotations

import pytest
import torch
from network_gradients import gradients, images, largest_difference, twin

import revode

NETWORKS = [
    ("hamiltonian-14", {}),
    ("hamiltonian-14", {"transition": "squeeze"}),
    ("midpoint-14", {}),
    ("revnet-14", {}),
]


@pytest.mark.parametrize(("name", "options"), NETWORKS)
def test_the_exported_network_gives_the_same_scores(name, options):
    model = revode.create_model(name, **options).eval()
    x = images(model, dtype=torch.float32)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize(("name", "options"), NETWORKS)
def test_the_compiled_network_gives_the_same_gradient(name, options):
    model = revode.create_model(name, **options).double()
    x = images(model)
    expected = gradients(model, x)
    other = twin(model)
    other.forward = torch.compile(other.forward, backend="aot_eager")  # type: ignore[method-assign]
    assert largest_difference(expected, gradients(other, x)) < 1e-9
