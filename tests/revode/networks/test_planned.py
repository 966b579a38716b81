"""nnU-Net builds a reversible U-Net from its plans, and is told the truth about memory."""

from __future__ import annotations

import pydoc

import pytest
import torch
from network_gradients import largest_difference
from plans import NEEDS_IMPORT, OURS, PLANS, THEIRS, arguments, build
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import revode
from revode.networks import PlannedUNet
from revode.networks.cost import step_bytes
from revode.networks.planned import BYTES_PER_ELEMENT


def imported(plan, **changes):
    """The same with the classes, as nnU-Net's function hands them on."""
    found = arguments(plan) | changes
    return {
        key: pydoc.locate(value) if key in NEEDS_IMPORT and isinstance(value, str) else value
        for key, value in found.items()
    }


def built_by_nnunet(plan, deep_supervision=True, kind=OURS, blocks=None):
    reason = "nnunetv2 is absent (pip install --no-deps nnunetv2 dynamic-network-architectures batchgenerators)"
    pytest.importorskip("nnunetv2.utilities.get_network_from_plans", reason=reason)
    return build(kind, plan, deep_supervision, blocks)


@pytest.mark.parametrize("name", PLANS)
def test_nnunets_own_function_builds_it_and_it_learns_from_every_resolution(name):
    net = built_by_nnunet(PLANS[name])
    assert sum(net.config.stage_blocks) == 26 + 5
    crop = PLANS[name]["crop"]
    scores = net(torch.randn(1, 1, *crop))
    assert scores[0].shape == (1, 3, *crop)
    assert len(scores) == 5
    sum(score.square().mean() for score in scores).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in net.parameters())


def test_a_checkpoint_of_training_is_loaded_for_prediction():
    """nnU-Net builds the network without deep supervision there, and its weights must fit."""
    plan = {key: value[:3] if isinstance(value, list) else value for key, value in PLANS["anisotropic"].items()}
    trained, predictor = built_by_nnunet(plan, True), built_by_nnunet(plan, False)
    predictor.load_state_dict(trained.state_dict())
    x = torch.randn(1, 1, 4, 16, 16)
    trained.decoder.deep_supervision = False  # as nnU-Net's trainer switches it
    assert torch.equal(trained(x), predictor(x))
    trained.decoder.deep_supervision = True
    assert torch.equal(trained(x)[0], predictor(x))


def small_plan():
    return {key: value[:3] if isinstance(value, list) else value for key, value in PLANS["anisotropic"].items()}


def test_its_gradients_are_the_stored_ones():
    net = PlannedUNet(1, **imported(small_plan()), num_classes=3, deep_supervision=True, scheme="verlet").double()
    x = torch.randn(1, 1, 5, 18, 16, dtype=torch.float64)
    found = []
    for model in (net, net.with_strategy("store")):
        model.zero_grad()
        sum(score.square().mean() for score in model(x)).backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert largest_difference(*found) < 1e-9


def test_it_is_saved_and_loaded_as_a_network(tmp_path):
    net = PlannedUNet(1, **imported(small_plan()), num_classes=3)
    revode.save(net, tmp_path / "planned.safetensors")
    loaded = revode.load(tmp_path / "planned.safetensors")
    loaded.deep_supervision = False
    x = torch.randn(1, 1, 4, 16, 16)
    assert torch.equal(net(x), loaded(x))


@pytest.mark.parametrize("scheme", ["verlet", "additive", "midpoint"])
def test_the_planner_is_told_the_peak_of_a_real_step_however_many_blocks(scheme):
    blocks = {"n_blocks_per_stage": [5, 3, 4], "n_conv_per_stage_decoder": [3, 1]}
    options = imported(small_plan(), **blocks) | {"scheme": scheme, "exact": True, "deep_supervision": True}
    net = PlannedUNet(1, **options, num_classes=3)
    assert net.config.norm == "instance"
    edges = (8, 64, 64)
    told = BYTES_PER_ELEMENT * net.compute_conv_feature_map_size(edges)
    kept, peak = step_bytes(net, torch.randn(1, 1, *edges))
    assert told == pytest.approx(peak, rel=0.05)
    assert told > kept


def test_planning_leaves_random_numbers_alone():
    net = PlannedUNet(1, **imported(small_plan(), dropout_op=nn.Dropout, dropout_op_kwargs={"p": 0.2}), num_classes=3)
    before = torch.get_rng_state()
    net.compute_conv_feature_map_size((8, 32, 32))
    assert torch.equal(torch.get_rng_state(), before)


def counted_and_peak(plan, kind):
    """What the planner is told of a network, and the bytes at the peak of a step on the plan's patch, computing nothing."""
    net = built_by_nnunet(plan, kind=kind)
    with FakeTensorMode():
        _, peak = step_bytes(build(kind, plan), torch.zeros(1, 1, *plan["patch"]))
    return net.compute_conv_feature_map_size(plan["patch"]), peak


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_an_element_is_no_more_bytes_than_nnunets_own_network_takes_and_ours_is_told_to_take_less(name):
    count, peak = counted_and_peak(PLANS[name], THEIRS)
    assert BYTES_PER_ELEMENT <= peak / count < 6.5
    ours, our_peak = counted_and_peak(PLANS[name], OURS)
    assert ours == our_peak // BYTES_PER_ELEMENT
    assert ours < 0.75 * count


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_op": nn.Linear}, "conv_op must be nn.Conv1d, nn.Conv2d or nn.Conv3d"),
        ({"strides": [[2, 2, 2], [1, 2, 2], [2, 2, 2]]}, "the first of the strides must be 1"),
        ({"norm_op": nn.LayerNorm}, "or InstanceNorm3d.* got LayerNorm with"),
        ({"norm_op_kwargs": {"affine": False}}, "or InstanceNorm3d.* got InstanceNorm3d.*affine=False"),
        ({"norm_op": nn.InstanceNorm2d}, "got InstanceNorm2d"),
        ({"nonlin": nn.Hardswish}, "a plan may have ReLU"),
        ({"nonlin_kwargs": {"negative_slope": 0.2}}, "got LeakyReLU\\(negative_slope=0.2\\)"),
        ({"dropout_op": nn.Dropout3d}, "dropout_op must be None or nn.Dropout"),
        ({"features_per_stage": [30, 60, 90]}, "channels of planned-unet must be multiples"),
        ({"hidden": 3}, "unknown option of planned-unet 'hidden'"),
    ],
)
def test_what_it_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PlannedUNet(1, **imported(small_plan(), **changes), num_classes=3)


def test_the_planner_gives_edges():
    net = PlannedUNet(1, **imported(small_plan(), dropout_op=nn.Dropout, dropout_op_kwargs={"p": 0.2}), num_classes=3)
    assert net.config.dropout == 0.2
    with pytest.raises(ValueError, match="input_size is 3 edges"):
        net.compute_conv_feature_map_size((1, 8, 8, 8))
