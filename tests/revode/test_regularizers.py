"""Weight smoothness equals the paper's formula and its own gradient; decay touches kernels only."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

import revode
from revode import AntisymmetricField, Leapfrog, MidPoint, ReversibleSequence, SymmetricField
from revode.memory import SavedTensors
from revode.regularizers import decay_groups, kernel_chains, smoothness, smoothness_gradient_

NAMES = ["hamiltonian-26", "hamiltonian-1layer-26", "midpoint-26", "leapfrog-26", "revnet-38"]


def hamiltonian_formula(model):
    """R_h written out for rule H over all blocks of the network: each has a kernel of F and one of G."""
    blocks = [
        [f.operator.weight for f in unit.fields[i : i + 2]]
        for unit in model.units()
        for i in range(0, len(unit.fields), 2)
    ]
    h = model.config.step_size(0)
    total = 0.0
    for one, next_one in itertools.pairwise(blocks):  # widths differ from one unit of the network to the next
        for first, second in zip(one, next_one, strict=True):
            if first.shape == second.shape:
                total = total + h * (((first - second) / h) ** 2).sum()
    return total


@pytest.mark.parametrize("name", ["hamiltonian-26", "hamiltonian-38", "hamiltonian-74"])
def test_value_and_gradient_equal_the_formula(name):
    model = revode.create_model(name).double()
    expected = hamiltonian_formula(model)
    kernels = [parameter for parameter in model.parameters() if parameter.dim() == 4]
    expected_grads = torch.autograd.grad(expected, kernels, allow_unused=True)
    value = smoothness(model)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0.0)
    for found, grad in zip(torch.autograd.grad(value, kernels, allow_unused=True), expected_grads, strict=True):
        assert (found is None) == (grad is None)
        if found is not None:
            torch.testing.assert_close(found, grad, rtol=1e-10, atol=1e-12)


def test_every_pair_of_blocks_in_a_row_at_one_width_counts():
    """Rule H: the first block of units 2 and 3 runs at the width before, right behind the unit before."""
    chains = kernel_chains(revode.create_model("hamiltonian-26"))  # 2-2-2 blocks: three, two and one in a row
    assert [len(chain.kernels) for chain in chains] == [3, 3, 2, 2]
    chains = kernel_chains(revode.create_model("hamiltonian-74"))
    assert [len(chain.kernels) for chain in chains] == [7, 7, 6, 6, 5, 5]
    chains = kernel_chains(revode.create_model("hamiltonian-1layer-26"))
    assert [len(chain.kernels) for chain in chains] == [5, 4, 3]


def test_transitions_end_the_chains():
    equal = revode.create_model("hamiltonian-26", channels=(32, 32, 32))
    assert [len(chain.kernels) for chain in kernel_chains(equal)] == [3, 3, 2, 2]
    assert [len(chain.kernels) for chain in kernel_chains(revode.create_model("midpoint-26"))] == [3, 3, 3]
    assert kernel_chains(revode.create_model("resnet-14")) == []


def test_a_wrapped_network_counts_its_units_as_before():
    model = revode.create_model("hamiltonian-74")
    assert smoothness(torch.nn.Sequential(model)).item() == smoothness(model).item()


def test_h_is_that_of_the_unit():
    model = revode.create_model("leapfrog-26", horizon=2.0)
    assert {chain.h for chain in kernel_chains(model)} == {0.5}
    torch.testing.assert_close(smoothness(model) * 0.5, smoothness_with_unit_step(model))


def smoothness_with_unit_step(model):
    return sum(
        (second - first).square().sum()
        for chain in kernel_chains(model)
        for first, second in itertools.pairwise(chain.kernels)
    )


@pytest.mark.parametrize("name", NAMES)
def test_gradient_in_place_equals_backward(name):
    model = revode.create_model(name).double()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    (0.3 * smoothness(model)).backward()
    expected = {n: parameter.grad.clone() for n, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    value = smoothness_gradient_(model, 0.3)
    torch.testing.assert_close(value, smoothness(model).detach())
    for n, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[n], rtol=1e-10, atol=1e-12)


def test_gradient_is_the_slope_and_can_be_differentiated_again():
    fields = [SymmetricField(2, kernel_size=1) for _ in range(3)]
    sequence = ReversibleSequence(fields, Leapfrog(0.5)).double()
    kernels = [field.operator.weight for field in fields]
    loss = smoothness(sequence)
    grads = torch.autograd.grad(loss, kernels)
    step = 1e-6
    with torch.no_grad():
        kernels[1][0, 0] += step
        up = smoothness(sequence)
        kernels[1][0, 0] -= 2 * step
        down = smoothness(sequence)
    assert ((up - down) / (2 * step)).item() == pytest.approx(grads[1][0, 0].item(), rel=1e-6)
    first = torch.autograd.grad(smoothness(sequence), kernels, create_graph=True)
    (second,) = torch.autograd.grad(first[1][0, 0].sum(), kernels[1])
    assert second[0, 0].item() == pytest.approx(2 * 2 / 0.5)  # two neighbours, each with 2 / h


def test_gradient_in_place_starts_from_nothing_and_skips_frozen_kernels():
    sequence = ReversibleSequence([AntisymmetricField(2) for _ in range(3)], MidPoint(0.1))
    frozen = sequence.fields[0].operator.weight.requires_grad_(False)
    smoothness_gradient_(sequence, 1.0)
    assert frozen.grad is None
    assert sequence.fields[1].operator.weight.grad is not None


@pytest.mark.parametrize("weight", [-1.0, float("nan"), "2e-4"])
def test_a_senseless_weight_is_refused(weight):
    with pytest.raises(ValueError, match="weight must be a number that is not negative"):
        smoothness_gradient_(revode.create_model("midpoint-14"), weight)


def test_modules_without_sequences_have_no_roughness():
    assert smoothness(torch.nn.Linear(2, 2)).item() == 0.0
    assert smoothness_gradient_(torch.nn.Linear(2, 2), 1.0).item() == 0.0


def test_nothing_is_kept_for_backward():
    for name in ("hamiltonian-26", "hamiltonian-218"):
        model = revode.create_model(name)
        with SavedTensors(model.parameters()) as saved:
            smoothness(model)
        assert saved.num_bytes == 0


def test_it_costs_little_of_a_training_step():
    """At batch 10 a step is a tenth of the paper's batch 100, so 2 % of that is 20 % here. In seconds of the processor: a busy
    machine is no fault."""
    model = revode.create_model("hamiltonian-74")
    x = torch.randn(10, 3, 32, 32)

    def seconds(call):
        call()
        times = []
        for _ in range(3):
            start = time.thread_time()
            call()
            times.append(time.thread_time() - start)
        return min(times)

    step = seconds(lambda: model(x).sum().backward())
    assert seconds(lambda: smoothness_gradient_(model, 2e-4)) < 0.2 * step


@pytest.mark.parametrize("name", [*NAMES, "resnet-14"])
def test_only_kernels_and_linear_weights_decay(name):
    model = revode.create_model(name)
    decayed, spared = decay_groups(model, 2e-4)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (2e-4, 0.0)
    names = {id(parameter): n for n, parameter in model.named_parameters()}
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    for parameter in decayed["params"]:
        assert names[id(parameter)].endswith(
            ("operator.weight", "linear.weight", "conv.weight", "conv1.weight", "conv2.weight")
        )
    for parameter in spared["params"]:
        assert parameter.dim() == 1
    torch.optim.SGD(decay_groups(model, 2e-4), lr=0.1)
