"""Predicted bytes are those that autograd keeps; a memory budget is kept and well spent."""

from __future__ import annotations

import pytest
import torch
from allocations import Allocations, storages
from network_gradients import gradients, images, largest_difference, twin
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import revode
from revode.memory import SavedTensors
from revode.networks.cost import LiveTensors, PartCost, share, step_bytes
from revode.networks.zoo import describe

BATCH = 3
NETWORKS = [
    ("hamiltonian-26", {}),
    ("hamiltonian-26", {"norm": "batch"}),
    ("hamiltonian-26", {"transition": "connector"}),
    ("hamiltonian-26", {"transition": "squeeze"}),
    ("hamiltonian-14", {"activation": "tanh"}),
    ("hamiltonian-26", {"exact": True}),
    ("hamiltonian-1layer-26", {}),
    ("midpoint-26", {}),
    ("midpoint-26", {"transition": "squeeze", "norm": "tv"}),
    ("midpoint-26", {"transition": "pool_pad", "norm": "none"}),
    ("leapfrog-26", {}),
    ("leapfrog-26", {"damping": 0.5}),
    ("revnet-38", {}),
    ("hamiltonian-subset", {}),
    ("hamiltonian-digits", {}),
]


def kept_bytes(model, x):
    with SavedTensors(model.parameters()) as saved:
        model(x)
    return saved.num_bytes


@pytest.mark.parametrize(("name", "options"), NETWORKS)
def test_predicted_bytes_are_the_measured_ones(name, options):
    model = revode.create_model(name, **options)
    bill = describe(model, image_size=16, batch_size=BATCH)
    x = images(model, BATCH, 16, torch.float32)
    for strategy in ("reversible", "checkpoint", "store"):
        kept = kept_bytes(twin(model, backprop=strategy), x)
        assert bill.bytes_kept(strategy) == pytest.approx(kept, rel=0.02), strategy


def test_predicted_bytes_of_a_resnet_are_the_measured_ones():
    model = revode.create_model("resnet-32")
    predicted = describe(model, image_size=16, batch_size=BATCH).bytes_kept("store")
    assert predicted == pytest.approx(kept_bytes(model, images(model, BATCH, 16, torch.float32)), rel=0.02)


def test_describing_leaves_the_network_and_the_random_stream_alone():
    model = revode.create_model("hamiltonian-26", norm="batch")
    before, stream = {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()
    describe(model, image_size=8)
    describe("hamiltonian-26", image_size=8)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(stream, torch.get_rng_state())


def test_flops_are_those_of_a_forward_pass():
    model = revode.create_model("leapfrog-26")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images(model, 1, 16, torch.float32))
    assert describe(model, image_size=16).flops == counter.get_total_flops()


def test_parameters_of_the_parts_add_up():
    for name in ("hamiltonian-26", "hamiltonian-1layer-26", "midpoint-14", "revnet-14", "resnet-14"):
        model = revode.create_model(name)
        assert describe(model, image_size=8).num_parameters == sum(p.numel() for p in model.parameters())


def test_kept_bytes_do_not_grow_with_depth():
    x = torch.randn(2, 3, 32, 32)
    deep = revode.create_model("hamiltonian-1202")
    few = kept_bytes(revode.create_model("hamiltonian-74", channels=(32, 64, 128)), x)
    many = kept_bytes(deep, x)
    assert many <= 1.1 * few
    assert describe(deep, batch_size=2).bytes_kept("reversible") == pytest.approx(many, rel=1e-3)


@pytest.mark.parametrize("name", ["hamiltonian-26", "midpoint-26", "revnet-38"])
def test_a_network_stays_within_its_memory_budget_and_keeps_its_gradient(name):
    model = revode.create_model(name).double()
    x = images(model, BATCH, 8)
    bill = describe(model, image_size=8, batch_size=BATCH)
    everything = bill.bytes_kept("store")
    stored = gradients(twin(model, backprop="store"), x)
    previous = 0
    for budget in (int(0.75 * everything), int(0.9 * everything), 2 * everything):
        limited = twin(model, memory_budget=budget)
        kept = kept_bytes(limited, x)
        assert previous <= kept <= budget
        previous = kept
        assert largest_difference(stored, gradients(twin(model, memory_budget=budget), x)) < 1e-9
    assert previous == everything


def test_too_small_a_budget_says_what_is_needed_and_that_much_is_enough():
    model = revode.create_model("hamiltonian-26", memory_budget=1000)
    x = images(model, 2, 8, torch.float32)
    with pytest.raises(
        ValueError, match=r"memory_budget=1000 is too small for a batch of 2: .* need \d+ bytes"
    ) as error:
        model(x)
    minimum = int(str(error.value).rsplit(" ", 2)[1])
    assert kept_bytes(twin(model, memory_budget=minimum), x) <= minimum
    with pytest.raises(ValueError, match="too small"):
        twin(model, memory_budget=minimum - 1)(x)
    with torch.no_grad():
        model(x)


def test_the_budget_goes_where_a_byte_spares_most():
    def unit(flops: int) -> PartCost:
        return PartCost("unit", 3, (1,), 0, flops, {"reversible": 8}, (20, 20, 20))

    parts = [unit(100), unit(300), unit(200)]
    assert share(84, parts, 2) == [28, 28, 28]
    assert share(84 + 50, parts, 2) == [28, 68, 38]
    assert share(10_000, parts, 2) == [68, 68, 68]


@pytest.mark.parametrize("lower_precision", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["hamiltonian-26", "hamiltonian-1layer-26", "midpoint-26", "leapfrog-26", "revnet-38"])
def test_nothing_but_gradients_outlives_a_training_step(name, exact, lower_precision):
    model = revode.create_model(name, blocks=(2, 2, 2), channels=(4, 8, 12), exact=exact)
    x = images(model, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=lower_precision):
        model(x).square().mean().backward()  # the signs of fingerprints are made once and kept
    model.zero_grad()
    with Allocations([x, *model.parameters(), *model.buffers()]) as allocations:
        with torch.autocast("cpu", torch.bfloat16, enabled=lower_precision):
            loss = model(x).square().mean()
        loss.backward()
        del loss
    assert allocations.made
    assert allocations.alive() <= storages(p.grad for p in model.parameters())


@pytest.mark.parametrize("strategy", ["reversible", "checkpoint", "store"])
def test_bytes_of_a_step_on_fake_tensors_are_those_of_a_real_one(strategy):
    def bytes_of_step():
        model = revode.create_model("unet-3d", channels=(8, 16), blocks=2, num_classes=2, backprop=strategy)
        return step_bytes(model, torch.zeros(1, 1, 24, 32, 32))

    with FakeTensorMode():
        predicted = bytes_of_step()
    kept, peak = bytes_of_step()
    assert predicted == pytest.approx((kept, peak), rel=0.03)
    state = 4 * 4 * 24 * 32 * 32  # 4 channels of float32
    assert peak > kept + 2 * state  # a rebuilt pair, its gradient and a branch come on top of what is kept


def test_live_tensors_come_and_go():
    with LiveTensors() as live:
        x = torch.zeros(1000)
        y = x[:10] + 1.0
        del x
        assert (live.alive, live.peak) == (40, 4040)
        y.mul_(2.0)
    assert live.peak == 4040
