"""Refined networks: the same time in more steps, close where kernels are smooth in time, for every family that integrates."""

from __future__ import annotations

import pytest
import torch
from network_gradients import images

import revode
from revode.networks import FAMILIES, Resampling, build, config_at_depth, model_config

LAYERS_PER_BLOCK = {name: row.layers_per_block for name, row in FAMILIES.items() if row.integrates}
KINDS = [(family, norm) for family in LAYERS_PER_BLOCK for norm in FAMILIES[family].norms]
TINY = {"channels": (4, 8, 8), "image_size": 8, "num_classes": 4}


def name_of(family: str, blocks: int) -> str:
    return f"{family}-{3 * LAYERS_PER_BLOCK[family] * blocks + 2}"


def smooth(family: str, blocks: int, norm: str, **options: object) -> revode.networks.StagedClassifier:
    """A network whose kernels, norms and biases are one curve in time, whatever its number of blocks."""
    torch.manual_seed(0)
    options = {"horizon": 1.0, "init": "smooth", **TINY, **options}
    model = build(model_config(name_of(family, blocks), norm=norm, **options)).double()
    for _, sequence, num_blocks in model.sequences():
        for index, field in enumerate(sequence.fields):
            time = (index // sequence.scheme.fields_per_step + 0.5) / num_blocks
            for key, parameter in field.named_parameters():
                if not key.startswith("operator"):
                    wave = torch.arange(len(parameter), dtype=torch.float64).add(3 * time).sin()
                    parameter.data.add_(0.2 * wave)
    return model


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).norm() / second.norm())


@pytest.mark.parametrize(("family", "norm"), KINDS)
def test_time_at_each_width_stays_and_everything_else_too(family, norm):
    model = smooth(family, 3, norm).eval()
    deep = revode.refine(model, name_of(family, 6))
    assert deep.config.num_layers == 2 * model.config.num_layers - 2
    assert not deep.training
    for (_, old, num_old), (_, new, num_new) in zip(model.sequences(), deep.sequences(), strict=True):
        assert num_new > num_old
        assert num_new * new.scheme.h == pytest.approx(num_old * old.scheme.h)
    kept = {"channels", "norm", "family", "activation", "transition", "num_classes", "image_size", "start"}
    assert all(getattr(deep.config, name) == getattr(model.config, name) for name in kept)
    own = {name: tensor for name, tensor in model.state_dict().items() if ".body." not in name}
    assert all(torch.equal(deep.state_dict()[name], tensor) for name, tensor in own.items())


@pytest.mark.parametrize(("family", "norm"), KINDS)
def test_the_smoother_the_kernels_the_closer_the_refined_network(family, norm):
    distances = []
    for blocks in (3, 24):
        model = smooth(family, blocks, norm)
        x = images(model, batch=16, dtype=torch.float64)
        with torch.no_grad():
            distances.append(distance(revode.refine(model, name_of(family, 2 * blocks)).features(x), model.features(x)))
    assert distances[1] < 0.5 * distances[0]
    assert distances[1] < 0.11


@pytest.mark.parametrize(("family", "norm"), [kind for kind in KINDS if kind[0] != "hamiltonian-1layer"])
def test_interpolating_comes_closer_than_copying(family, norm):
    model = smooth(family, 12, norm)
    x = images(model, batch=16, dtype=torch.float64)
    deep = revode.refine(model, name_of(family, 24))
    copied = build(deep.config).double()
    copied.load_state_dict(deep.state_dict())
    for (_, old, num_old), (_, new, num_new) in zip(model.sequences(), copied.sequences(), strict=True):
        per_block = new.scheme.fields_per_step
        for index, field in enumerate(new.fields):
            block, position = divmod(index, per_block)
            field.load_state_dict(
                old.fields[block * num_old // num_new * per_block + position].state_dict(), strict=False
            )
    with torch.no_grad():
        y = model.features(x)
        assert distance(deep.features(x), y) < distance(copied.features(x), y)


@pytest.mark.parametrize(("family", "norm"), KINDS)
def test_gradients_are_mapped_as_weights_are(family, norm):
    # Behind `pool_pad` half of the channels are zero, and a leading norm of zeros has no gradient to speak of.
    model = smooth(family, 24, norm, transition="squeeze", channels=(4, 16, 64))
    deep = revode.refine(model, name_of(family, 48))
    x = images(model, batch=16, dtype=torch.float64)
    gradients = []
    for network in (model, deep):
        network(x).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in network.named_parameters()})
    expected = Resampling(model, deep).gradients(gradients[0])
    assert expected.keys() == gradients[1].keys()
    norms = [float(torch.stack([g.norm() for g in found.values()]).norm()) for found in (expected, gradients[1])]
    gap = torch.stack([(expected[name] - gradients[1][name]).norm() for name in expected]).norm()
    assert norms[0] == pytest.approx(norms[1], rel=0.1)
    assert float(gap) < 0.35 * norms[1]


@pytest.mark.parametrize(("family", "norm"), KINDS)
def test_weights_constant_in_time_stay_as_they_are_and_coarsening_gives_them_back(family, norm):
    model = smooth(family, 3, norm)
    for _, sequence, _ in model.sequences():
        per_block = sequence.scheme.fields_per_step
        for index in range(len(sequence.fields)):
            state = sequence.fields[len(sequence.fields) - per_block + index % per_block].state_dict()
            sequence.fields[index].load_state_dict(state, strict=False)
    deep = revode.refine(model, name_of(family, 5))
    for (_, old, _), (_, new, _) in zip(model.sequences(), deep.sequences(), strict=True):
        per_block = new.scheme.fields_per_step
        for index, field in enumerate(new.fields):
            last = old.fields[len(old.fields) - per_block + index % per_block].state_dict()
            assert all(torch.allclose(last[key], tensor) for key, tensor in field.state_dict().items())
    back = revode.coarsen(deep, name_of(family, 3))
    assert [n.sequence.scheme.h for n in back.sequences()] == pytest.approx(
        [n.sequence.scheme.h for n in model.sequences()]
    )
    for key, tensor in model.state_dict().items():
        assert torch.allclose(back.state_dict()[key], tensor), key


@pytest.mark.parametrize("family", [family for family, norm in KINDS if norm == "batch"])
def test_batch_statistics_are_those_of_the_given_images(family):
    model = smooth(family, 3, "batch")
    x = images(model, batch=16, dtype=torch.float64)
    deep = revode.refine(model, name_of(family, 6), [x])
    unmeasured = revode.refine(model, name_of(family, 6)).eval()
    with torch.no_grad():
        in_training = deep.train().features(x)
        assert distance(deep.eval().features(x), in_training) < 0.1  # the unbiased variance is a little larger
        assert distance(unmeasured.features(x), in_training) > 0.1


def test_a_network_refined_unevenly_is_saved_and_loaded_with_its_step_sizes(tmp_path):
    deep = revode.refine(smooth("hamiltonian", 3, "none"), "hamiltonian-74")
    assert len(set(deep.config.h)) == 3
    revode.save(deep, tmp_path / "deep")
    loaded = revode.load(tmp_path / "deep")
    assert loaded.config == deep.config
    x = images(deep, dtype=torch.float64)
    assert torch.equal(loaded.eval()(x), deep.eval()(x))


def test_step_sizes_come_back_when_a_config_changes_depth_twice():
    config = model_config("hamiltonian-74", h=0.5, norm="batch")
    shallow = config_at_depth(config, "hamiltonian-38")
    assert shallow.h == (0.5 * 7 / 4, 0.5 * 6 / 3, 0.5 * 5 / 2)
    again = config_at_depth(shallow, "hamiltonian-74")
    assert [again.step_size(unit) for unit in range(3)] == pytest.approx([0.5] * 3)


def test_the_random_stream_and_the_shallow_network_are_left_alone():
    model = smooth("hamiltonian", 3, "batch")
    before, stream = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    revode.refine(model, "hamiltonian-74", [images(model, dtype=torch.float64)])
    assert torch.equal(stream, torch.get_rng_state())
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_a_branch_without_a_leading_norm_gets_the_nearest():
    model = smooth("hamiltonian", 1, "batch", transition="squeeze", channels=(4, 16, 64))
    deep = revode.refine(model, "hamiltonian-26")
    first, nearest = deep.sequences()[0].sequence.fields, model.sequences()[0].sequence.fields[1]
    assert first[0].lead is None
    assert torch.equal(first[2].lead.weight, nearest.lead.weight)


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("revnet-14", "revnet-26", "takes no steps in time"),
        ("resnet-8", "resnet-14", "takes no steps in time"),
        ("hamiltonian-26", "midpoint-26", "keeps its family"),
        ("hamiltonian-26", "hamiltonian-subset", "its 3 units"),
        ("hamiltonian-38", "hamiltonian-26", "use coarsen"),
        ("hamiltonian-14", "hamiltonian-26", "at least 2 blocks"),
        ("hamiltonian-subset", "hamiltonian-26", "its 4 units"),
        ("hamiltonian-26", "hamiltonian-27", "12n"),
    ],
)
def test_what_cannot_be_refined_is_refused(name, target, words):
    with pytest.raises(ValueError, match=words):
        revode.refine(revode.create_model(name), target)


def test_step_sizes_are_one_or_one_for_each_unit():
    assert revode.create_model("hamiltonian-26", h=[0.2, 0.2, 0.2]).config.h == 0.2
    with pytest.raises(ValueError, match="one for each of the 3 units"):
        revode.create_model("hamiltonian-26", h=[0.2, 0.1])
    with pytest.raises(ValueError, match="positive number"):
        revode.create_model("hamiltonian-26", h=[0.2, 0.1, 0.0])
    with pytest.raises(ValueError, match="the same everywhere"):
        revode.create_model("midpoint-26", transition="squeeze", h=[0.1, 0.2, 0.1])


@pytest.mark.parametrize("model", ["hamiltonian-38", torch.nn.Linear(2, 2)])
def test_only_networks_are_refined(model):
    with pytest.raises(ValueError, match=r"take a network of revode\.create_model for images"):
        revode.refine(model, "hamiltonian-74")


@torch.no_grad()
def test_damping_over_the_same_time_stays():
    model = revode.create_model(
        "hamiltonian-146", channels=(4, 8, 8), norm="none", horizon=1.0, init="smooth", damping=0.05
    ).eval()
    deep = revode.refine(model, "hamiltonian-290")
    assert (1 - deep.config.damping) ** 2 == pytest.approx(0.95)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert distance(deep.features(x), model.features(x)) < 0.1


def test_a_u_net_is_refined_on_its_way_down_and_up():
    model = revode.create_model("unet-2d", scheme="leapfrog", blocks=(2, 2, 2), channels=(4, 16, 16), num_classes=2)
    deep = revode.refine(model, "unet-2d")
    assert deep.config.blocks == (4, 4, 4)
    assert deep.config.h == pytest.approx(model.config.h / 2)


def test_damping_of_a_network_with_connectors_is_that_of_its_steps():
    net = revode.create_model("leapfrog-14", damping=0.1)
    deep = config_at_depth(net.config, "leapfrog-38")
    kept = [(1 - config.damping) ** sum(config.stage_blocks) for config in (net.config, deep)]
    assert kept[0] == pytest.approx(kept[1])
