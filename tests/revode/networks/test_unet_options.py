"""Every option of a U-Net's layout: gradients, equal bits, the input back, memory, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from network_gradients import gradients, largest_difference, twin
from torch import nn

import revode
from revode.memory import SavedTensors
from revode.networks import NetworkConfig, describe, model_config
from revode.operators import NORMS

ACTIVATIONS = ["relu", "leaky_relu", "gelu", "silu"]
ANISOTROPIC = {
    1: {"strides": (1, 2), "kernels": (3, 5, 1), "channels": (8, 8, 16), "stem_stride": 2},
    2: {"strides": ((1, 2), 2), "kernels": ((1, 3), 3, (5, 3)), "channels": (16, 16, 32), "stem_stride": (2, 1)},
    3: {
        "strides": ((1, 2, 2), (2, 2, 2)),
        "kernels": ((1, 3, 3), 3, 3),
        "channels": (16, 16, 32),
        "stem_stride": (1, 2, 2),
    },
}
EDGES = {1: (21,), 2: (13, 18), 3: (5, 12, 17)}
DEEP_SHAPES = {1: [(21,), (21,)], 2: [(13, 18), (13, 9)], 3: [(5, 12, 17), (5, 6, 9)]}


def small(ndim=3, **options):
    usual = {"scheme": "verlet", "norm": "instance", "num_classes": 3, "in_channels": 2, "blocks": 2}
    return revode.create_model(f"unet-{ndim}d", **ANISOTROPIC[ndim] | usual | options)


def signal(ndim=3, batch=1, dtype=torch.float32):
    return torch.randn(batch, 2, *EDGES[ndim], generator=torch.Generator().manual_seed(3), dtype=dtype)


def deep_gradients(model, x):
    """Gradients of a loss on every output of deep supervision."""
    model.zero_grad()
    scores = model(x)
    loss = sum(score.square().mean() / 2**level for level, score in enumerate(scores))
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach()} | found


@pytest.mark.parametrize("norm", [*NORMS])
@pytest.mark.parametrize("scheme", ["verlet", "leapfrog", "midpoint", "additive"])
def test_gradients_with_every_norm_are_the_stored_ones(norm, scheme):
    if scheme == "additive" and norm == "none":
        pytest.skip("a RevNet's branches have a norm")
    model = small(2, norm=norm, scheme=scheme).double()
    x = signal(2, batch=2, dtype=torch.float64)
    assert largest_difference(gradients(twin(model, backprop="store"), x), gradients(model, x)) < 1e-9


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_gradients_with_every_activation_in_every_dimension_are_the_stored_ones(activation, ndim):
    model = small(ndim, activation=activation).double()
    x = signal(ndim, dtype=torch.float64)
    assert largest_difference(gradients(twin(model, backprop="store"), x), gradients(model, x)) < 1e-9


@pytest.mark.parametrize("transition", ["haar", "squeeze"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize(("scheme", "norm"), [("verlet", "instance"), ("leapfrog", "group"), ("additive", "batch")])
class TestEveryStrideAndKernel:
    def test_exact_gradients_are_the_stored_ones_bit_for_bit(self, scheme, norm, ndim, transition):
        model = small(ndim, scheme=scheme, norm=norm, transition=transition, exact=True)
        x = signal(ndim)
        assert largest_difference(gradients(twin(model, backprop="store"), x), gradients(model, x)) == 0.0

    def test_inverse_returns_the_input(self, scheme, norm, ndim, transition):
        x = signal(ndim)
        with torch.no_grad():
            model = small(ndim, scheme=scheme, norm=norm, transition=transition)
            assert (model.inverse(model.features(x), EDGES[ndim]) - x).abs().max() < 1e-4
            model = small(ndim, scheme=scheme, norm=norm, transition=transition, exact=True)
            assert torch.equal(model.inverse(model.features(x), EDGES[ndim]), torch.round(x * 2**14) / 2**14)


@pytest.mark.parametrize("activation", ["leaky_relu", "gelu"])
@pytest.mark.parametrize("norm", [*NORMS])
def test_exact_gradients_with_every_norm_are_the_stored_ones_bit_for_bit(norm, activation):
    model = small(3, norm=norm, activation=activation, exact=True)
    x = signal(3)
    assert largest_difference(gradients(twin(model, backprop="store"), x), gradients(model, x)) == 0.0


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("scheme", ["verlet", "leapfrog"])
def test_deep_supervision_gives_scores_and_gradients_at_every_resolution(ndim, scheme):
    model = small(ndim, scheme=scheme, deep_supervision=True).double()
    x = signal(ndim, dtype=torch.float64)
    assert [tuple(scores.shape[2:]) for scores in model(x)] == DEEP_SHAPES[ndim]
    found = deep_gradients(model, x)
    assert all(grad is not None for grad in found.values())
    assert largest_difference(deep_gradients(twin(model, backprop="store"), x), found) < 1e-9
    exact = small(ndim, scheme=scheme, deep_supervision=True, exact=True)
    bits = deep_gradients(twin(exact, backprop="store"), x.float())
    assert largest_difference(bits, deep_gradients(exact, x.float())) == 0.0


def test_deep_supervision_is_switched_by_an_attribute():
    deep, plain = small(deep_supervision=True), small()
    plain.load_state_dict(deep.state_dict(), strict=False)
    x = signal()
    deep.deep_supervision = False
    assert torch.equal(deep(x), plain(x))
    assert deep.with_strategy("store")(x).shape == (1, 3, 5, 12, 17)
    deep.deep_supervision = True
    assert torch.equal(deep(x)[0], plain(x))
    with torch.no_grad():
        assert (deep.inverse(deep.features(x), EDGES[3]) - x).abs().max() < 1e-4
    with pytest.raises(ValueError, match="has no coarse heads: create it with deep_supervision=True"):
        plain.deep_supervision = True


@pytest.mark.parametrize(
    ("ndim", "scheme"), [(2, "verlet"), (2, "midpoint"), (2, "additive"), (1, "leapfrog"), (3, "verlet")]
)
def test_dropout_in_the_branches_is_replayed(ndim, scheme):
    model = small(ndim, dropout=0.3, scheme=scheme).double()
    x = signal(ndim, dtype=torch.float64)
    found = []
    for network in (model, twin(model, backprop="store")):
        torch.manual_seed(7)
        found.append(gradients(network, x))
    assert largest_difference(*found) < 1e-9
    torch.manual_seed(8)
    assert largest_difference(gradients(model, x), found[0]) > 1e-3  # it does drop
    plain = small(ndim, scheme=scheme).double()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), plain.eval()(x))


@pytest.mark.parametrize(("norm", "deep"), [("instance", True), ("group", False), ("none", False)])
def test_kept_bytes_do_not_grow_with_the_blocks_and_are_the_predicted_ones(norm, deep):
    x, kept = torch.randn(1, 2, 8, 16, 16), []
    for blocks in (1, 6):
        model = small(blocks=blocks, norm=norm, deep_supervision=deep)
        with SavedTensors(model.parameters()) as saved:
            model(x)
        kept.append(saved.num_bytes)
        predicted = describe(model, image_size=(8, 16, 16)).bytes_kept("reversible")
        assert predicted == pytest.approx(kept[-1], rel=0.1)
    assert kept[1] <= 1.05 * kept[0]


def test_a_strided_stem_keeps_a_fraction():
    x, kept = torch.randn(1, 1, 16, 16, 16), []
    for stem in (1, 2):
        model = revode.create_model("unet-3d", num_classes=2, channels=(16, 32), blocks=1, stem_stride=stem)
        assert model(x).shape == (1, 2, 16, 16, 16)
        with SavedTensors(model.parameters()) as saved:
            model(x)
        kept.append(saved.num_bytes)
    assert kept[0] == pytest.approx(8 * kept[1], rel=0.1)


def test_blocks_on_the_way_up_may_be_others():
    model = small(blocks=(1, 2, 3), up_blocks=(2, 1), scheme="additive")
    assert [count for _, _, count in model.sequences()] == [1, 2, 3, 2, 1]
    assert model.config.num_layers == 4 * 9 + 1
    assert small(blocks=2, up_blocks=1, horizon=1.0).config.step_size(4) == 1.0
    with pytest.raises(ValueError, match="cannot be refined"):
        revode.refine(small(blocks=2, up_blocks=1, strides=2, channels=(16, 32, 64)), "unet-3d")


def test_a_file_remembers_the_layout(tmp_path):
    model = small(deep_supervision=True, dropout=0.1, up_blocks=(1, 2))
    revode.save(model, tmp_path / "unet.safetensors")
    loaded = revode.load(tmp_path / "unet.safetensors")
    assert loaded.config == model.config
    assert NetworkConfig.from_dict(model.config.to_dict()) == model.config
    x = signal()
    for first, second in zip(loaded.eval()(x), model.eval()(x), strict=True):
        assert torch.equal(first, second)


def test_a_config_from_before_these_options_builds_the_network_of_then():
    options = {"norm": "none", "activation": "relu", "h": 0.1, "scheme": "verlet"}
    values = model_config("unet-3d", **options).to_dict()
    for name in ("kernels", "strides", "stem_stride", "up_blocks", "deep_supervision", "dropout"):
        del values[name]
    assert NetworkConfig.from_dict(values) == model_config("unet-3d", **options)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_out_channels_are_the_classes(ndim):
    assert model_config(f"unet-{ndim}d", out_channels=7).num_classes == 7
    with pytest.raises(ValueError, match="give one of them"):
        model_config(f"unet-{ndim}d", out_channels=7, num_classes=7)


def test_a_copy_of_a_network_is_a_network():
    model = small(deep_supervision=True)
    x = signal()
    assert torch.equal(copy.deepcopy(model)(x)[1], model(x)[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"strides": (2, 2, 2)},
            r"strides of unet-3d are 1 or 2: one for all, or 2 for 3 resolutions.*got \(2, 2, 2\)",
        ),
        ({"strides": ((1, 2), 2)}, r"each a number, or one for each axis \(3\)"),
        ({"strides": 3}, "strides of unet-3d are 1 or 2"),
        ({"kernels": 4}, "kernels of unet-3d are odd numbers: one for all, or 3"),
        ({"kernels": (3, 3)}, "kernels of unet-3d are odd numbers"),
        ({"stem_stride": (2, 2)}, r"stem_stride of unet-3d are positive integers: or one for each axis"),
        ({"stem_stride": 4}, "the first unit repeats the 64 channels of its input"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"up_blocks": (1,)}, r"up_blocks must be a positive integer or 2 of them, got \(1,\)"),
        ({"strides": ((1, 2, 2), 2), "channels": (16, 30, 64)}, "behind the first of 8 and 16"),
        ({"norm": "no-norm"}, f"norm must be {' or '.join(map(repr, NORMS))} for unet-3d, got 'no-norm'"),
        (
            {"scheme": "additive", "norm": "none"},
            f"norm must be {' or '.join(repr(n) for n in NORMS if n != 'none')} for unet-3d",
        ),
    ],
)
def test_contradictions_are_refused_in_one_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        revode.create_model("unet-3d", **options)


def test_means_over_a_single_point_are_refused():
    with pytest.raises(
        ValueError, match=r"norm='instance' needs more than one point.*larger than \(2, 8, 8\), got \(2, 8, 8\)"
    ):
        small()(torch.randn(1, 2, 2, 8, 8))
    assert small(norm="group")(torch.randn(1, 2, 2, 8, 8)).shape == (1, 3, 2, 8, 8)
    with pytest.raises(ValueError, match="vectors have none: use 'group'"):
        revode.SymmetricField(4, norm="instance", ndim=0)


def on_the_processor(x, function):
    """Gradients of a function by its input and parameters, with its convolutions in bfloat16."""
    function.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = function(x)
    (y.float() * torch.linspace(-1, 1, y[0].numel()).view(y[0].shape)).sum().backward()
    return {"image": x.grad} | {name: parameter.grad for name, parameter in function.named_parameters()}


@pytest.mark.parametrize(
    ("edges", "kernel"), [((2, 2, 2), 3), ((2, 5, 6), 3), ((3, 4, 4), 5), ((4, 1, 3), (1, 5, 5)), ((4, 4, 4), 7)]
)
@pytest.mark.parametrize("kind", [revode.SymmetricField, revode.AntisymmetricField])
def test_bfloat16_gradients_are_right_where_torchs_are_wild(kind, edges, kernel):
    """torch 2.13 with bfloat16 instructions: off by 1e30 or so, or a crash, with 16 channels and more."""
    field = kind(16, ndim=3, kernel_size=kernel, activation="silu")
    sequence = revode.ReversibleSequence([field, copy.deepcopy(field)], revode.Leapfrog(0.1), exact=True)
    x = torch.randn(2, 16, *edges)
    found = on_the_processor(x, sequence)
    assert largest_difference(on_the_processor(x, sequence.with_strategy(backprop="store")), found) == 0.0
    with torch.autocast("cpu", enabled=False):
        x2, plain = x.clone().requires_grad_(), sequence.with_strategy(backprop="store")
        plain.zero_grad()
        (plain(x2) * torch.linspace(-1, 1, x[0].numel()).view(x[0].shape)).sum().backward()
    expected = {"image": x2.grad} | {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert largest_difference(expected, found) < 0.1


@pytest.mark.parametrize("scheme", ["verlet", "midpoint", "additive"])
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_a_bfloat16_unet_whose_coarsest_images_are_2_points_deep_is_right(scheme, norm):
    model = revode.create_model(
        "unet-3d", num_classes=2, channels=(32, 64), blocks=1, scheme=scheme, norm=norm, exact=True
    )
    x = torch.randn(1, 1, 4, 8, 8)
    found = on_the_processor(x, model)
    assert largest_difference(on_the_processor(x, twin(model, backprop="store")), found) == 0.0
    assert all(grad.isfinite().all() and grad.abs().max() < 1e4 for grad in found.values())


def test_a_branch_of_16_channels_is_known_field_or_module_alike():
    module = revode.operators.Conv3d(16, 16, 3, stride=2, padding=1)
    plain = nn.Conv3d(16, 16, 3, stride=2, padding=1)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(1, 16, 2, 5, 5)
    torch.testing.assert_close(module(x), plain(x))
