"""The networks are built as the notes say: where blocks run, how channels are padded, what the baselines do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import revode
from revode.networks.blocks import (
    Connector,
    ConvStem,
    NormHead,
    PoolPad,
    PreActivation,
    ResidualBlock,
    StridedBlock,
    pad_channels,
    pool,
    squeeze,
    unsqueeze,
)
from revode.networks.families import FAMILIES, register_family


def widths(model):
    return [[field.operator.in_channels for field in sequence.fields] for _, sequence, _ in model.sequences()]


def test_hamiltonian_runs_the_first_block_of_a_unit_at_the_width_it_comes_from():
    model = revode.create_model("hamiltonian-74")
    assert [sequence.num_blocks for sequence in model.sequences()] == [7, 6, 5]
    assert widths(model) == [[16] * 14, [32] * 12, [56] * 10]
    assert [len(unit.fields) for unit in model.units()] == [12, 12, 12]
    assert [field.operator.in_channels for field in model.units()[1].fields] == [16] * 2 + [32] * 10


def test_only_the_very_first_half_step_lacks_its_leading_map():
    fields = [field for unit in revode.create_model("hamiltonian-26").units() for field in unit.fields]
    assert [field.lead is None for field in fields] == [True] + [False] * (len(fields) - 1)


@pytest.mark.parametrize("name", ["midpoint-26", "leapfrog-26"])
def test_rule_m_has_steps_and_a_connector_in_each_unit(name):
    model = revode.create_model(name)
    assert widths(model) == [[32] * 3, [64] * 3, [112] * 3]
    connectors = [stage.transition for stage in model.stages]
    assert all(isinstance(connector, Connector) for connector in connectors)
    assert [tuple(connector.conv.weight.shape[:2]) for connector in connectors] == [(64, 32), (112, 64), (112, 112)]
    assert [connector.pools for connector in connectors] == [True, True, False]


def test_each_half_is_padded_by_itself_and_equally_on_both_sides():
    y, z = torch.ones(1, 2, 4, 4), 2 * torch.ones(1, 2, 4, 4)
    joined = torch.cat(PoolPad(12)((y, z)), dim=1)
    assert joined.shape == (1, 12, 2, 2)
    assert joined[0, :, 0, 0].tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 2, 2, 0, 0]


def test_resnet_shortcut_pools_and_pads_and_its_branch_is_pre_activation():
    torch.manual_seed(0)
    block = ResidualBlock(4, 8, stride=2).eval()
    x = torch.randn(2, 4, 7, 7)
    branch = block.branch
    hidden = branch.conv1(F.relu(branch.norm1(x)))
    expected = pad_channels(pool(x), 8) + branch.conv2(F.relu(branch.norm2(hidden)))
    torch.testing.assert_close(block(x), expected)
    assert pad_channels(pool(x), 8)[:, :2].abs().max() == pad_channels(pool(x), 8)[:, 6:].abs().max() == 0
    assert isinstance(PreActivation(4, leading=False).norm1, type(None))


def test_resnet_convolutions_have_no_bias_and_the_first_branch_no_leading_norm():
    model = revode.create_model("resnet-32")
    assert all(m.bias is None for m in model.modules() if isinstance(m, torch.nn.Conv2d))
    leading = [block.branch.norm1 is not None for stage in model.stages for block in stage.body]
    assert leading == [False] + [True] * 14
    assert model.sequences() == model.units() == []


def test_a_resnet_can_have_biases_in_place_of_its_blocks_norms():
    model = revode.create_model("resnet-8", norm="none")
    kinds = {type(part).__name__ for part in model.stages.modules()}
    assert "Bias" in kinds
    assert "BatchNorm2d" not in kinds
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_revnet_strided_block_maps_the_halves():
    torch.manual_seed(0)
    block = StridedBlock(8, 12, "batch", "relu").eval()
    y, z = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6)
    y_next, z_next = block((y, z))
    torch.testing.assert_close(y_next, pad_channels(pool(y), 6) + block.first(z))
    torch.testing.assert_close(z_next, pad_channels(pool(z), 6) + block.second(y_next))
    assert block.first.conv1.stride == (2, 2)
    assert [s.num_blocks for s in revode.create_model("revnet-38").sequences()] == [3, 2, 2]


def test_kernels_and_linear_map_are_drawn_as_the_authors_did():
    model = revode.create_model("hamiltonian-74")
    kernel = model.units()[2].fields[-1].operator.weight
    assert kernel.std().item() == pytest.approx((2 / (9 * 56)) ** 0.5, rel=0.05)
    assert model.head.linear.weight.abs().max().item() == pytest.approx((3 / 112) ** 0.5, rel=0.05)
    assert model.head.linear.bias.abs().max() == 0
    assert model.stem.conv.weight.std().item() == pytest.approx((2 / (9 * 32)) ** 0.5, rel=0.15)


@pytest.mark.parametrize("name", ["hamiltonian-26", "midpoint-14", "leapfrog-14", "revnet-14", "resnet-14"])
def test_channels_last_is_kept_through_the_network_and_gives_the_same_scores(name):
    model = revode.create_model(name).eval()
    x = torch.randn(2, 3, 16, 16)
    expected = model(x)
    model = model.to(memory_format=torch.channels_last)
    y = model.stem(x.to(memory_format=torch.channels_last))
    for stage in model.stages:
        y = stage(y)
        for member in (y,) if isinstance(y, torch.Tensor) else y:
            assert member.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-4)


def test_squeeze_keeps_channels_last():
    model = revode.create_model("hamiltonian-26", transition="squeeze").to(memory_format=torch.channels_last)
    features = model.features(torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last))
    assert features.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["hamiltonian-26", "midpoint-14", "revnet-14", "resnet-14"])
def test_odd_images_and_other_sizes_work(name):
    model = revode.create_model(name, num_classes=7, in_channels=1)
    assert model(torch.randn(2, 1, 13, 21)).shape == (2, 7)


@pytest.mark.parametrize("family", ["hamiltonian", "midpoint", "leapfrog"])
@pytest.mark.parametrize("transition", ["pool_pad", "connector", "squeeze"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_every_family_takes_every_transition(family, transition, activation):
    model = revode.create_model(f"{family}-26", transition=transition, activation=activation, damping=0.05)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_half_precision_method_is_not_shadowed():
    assert next(revode.create_model("revnet-14").half().parameters()).dtype == torch.float16


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_blocks_work_in_every_dimension(ndim):
    x = torch.randn(2, 4, *[6] * ndim)
    halved = [3] * ndim
    assert ConvStem(4, 8, ndim=ndim)(x).shape == (2, 8, *[6] * ndim)
    assert PoolPad(8)(x).shape == Connector(4, 8, "batch", "relu", ndim=ndim)(x).shape == (2, 8, *halved)
    assert ResidualBlock(4, 8, stride=2, ndim=ndim)(x).shape == (2, 8, *halved)
    assert StridedBlock(4, 8, "batch", "relu", ndim=ndim)(x)[0].shape == (2, 4, *halved)
    assert NormHead(4, 5, ndim=ndim)(x).shape == (2, 5)
    squeezed = squeeze(x)
    assert squeezed.shape == (2, 4 * 2**ndim, *halved)
    assert torch.equal(unsqueeze(squeezed), x)
    neighbours = x[:, 0, *[slice(0, 2)] * ndim].flatten(1)
    assert torch.equal(squeezed[:, : 2**ndim, *[0] * ndim], neighbours)


def test_a_new_family_is_one_row(monkeypatch):
    row = dataclasses.replace(FAMILIES["leapfrog"], name="frog", norms=("tv",), defaults={"norm": "tv"})
    monkeypatch.setitem(FAMILIES, row.name, row)
    model = revode.create_model("frog-26", num_classes=3)
    assert (model.config.norm, model.num_layers) == ("tv", 26)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 3)
    with pytest.raises(ValueError, match="'frog' is registered already"):
        register_family(row)
