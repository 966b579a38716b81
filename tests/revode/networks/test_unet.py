"""U-Nets are reversible as a whole, in every dimension: gradients, the input back, and memory that depth does not change."""

from __future__ import annotations

import pytest
import torch
from network_gradients import gradients, largest_difference, twin

import revode
from revode.engine.grid import Grid
from revode.memory import SavedTensors
from revode.networks import NetworkConfig, describe, model_config
from revode.networks.blocks import haar, unhaar

SCHEMES = ["verlet", "leapfrog", "additive"]
ODD = {1: (21,), 2: (13, 9), 3: (9, 6, 11)}
EVEN = {1: (16,), 2: (8, 12), 3: (8, 4, 8)}
CHANNELS = {1: (8, 12, 16), 2: (8, 16, 32), 3: (8, 16, 32)}


def small_unet(ndim, **options):
    return revode.create_model(
        f"unet-{ndim}d",
        **{"num_classes": 3, "channels": CHANNELS[ndim], "blocks": 2, "in_channels": 2, "scheme": "verlet"} | options,
    )


def signal(edges, batch=1, dtype=torch.float32):
    return torch.randn(batch, 2, *edges, generator=torch.Generator().manual_seed(3), dtype=dtype)


def on_grid(x, bits=14):
    return torch.round(x * 2**bits) / 2**bits


def kept_bytes(model, x):
    with SavedTensors(model.parameters()) as saved:
        model(x)
    return saved.num_bytes


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ndim", [1, 2, 3])
class TestEveryDimensionAndScheme:
    @pytest.mark.parametrize("edges", [EVEN, ODD])
    def test_gradients_are_the_stored_ones(self, ndim, scheme, edges):
        model = small_unet(ndim, scheme=scheme).double()
        x = signal(edges[ndim], dtype=torch.float64)
        stored = gradients(twin(model, backprop="store"), x)
        assert largest_difference(stored, gradients(twin(model, backprop="checkpoint"), x)) < 1e-9
        assert largest_difference(stored, gradients(model, x)) < 1e-9

    @pytest.mark.parametrize("transition", ["haar", "squeeze"])
    def test_exact_gradients_are_the_stored_ones_bit_for_bit(self, ndim, scheme, transition):
        model = small_unet(ndim, scheme=scheme, exact=True, transition=transition)
        x = signal(ODD[ndim])
        assert largest_difference(gradients(twin(model, backprop="store"), x), gradients(model, x)) == 0.0

    @pytest.mark.parametrize("transition", ["haar", "squeeze"])
    @pytest.mark.parametrize("batch", [1, 3])
    def test_inverse_returns_the_input(self, ndim, scheme, transition, batch):
        x = signal(ODD[ndim], batch)
        with torch.no_grad():
            model = small_unet(ndim, scheme=scheme, transition=transition)
            assert (model.inverse(model.features(x), ODD[ndim]) - x).abs().max() < 1e-4
            model = small_unet(ndim, scheme=scheme, transition=transition, exact=True)
            assert torch.equal(model.inverse(model.features(x), ODD[ndim]), on_grid(x))

    def test_scores_have_the_size_of_the_input(self, ndim, scheme):
        model = small_unet(ndim, scheme=scheme)
        for edges in (ODD[ndim], EVEN[ndim], (1,) * ndim):
            assert model.eval()(signal(edges)).shape == (1, 3, *edges)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_haar_is_orthonormal_and_its_lifting_form_stays_on_the_grid(ndim):
    x = signal(EVEN[ndim], dtype=torch.float64)
    y = haar(x)
    assert y.shape == (1, 2 * 2**ndim, *(edge // 2 for edge in EVEN[ndim]))
    torch.testing.assert_close(y.norm(), x.norm())
    torch.testing.assert_close(unhaar(y), x)
    constant = haar(torch.ones_like(x))
    assert constant[:, 1 :: 2**ndim].abs().max() == 0.0  # differences
    torch.testing.assert_close(constant[:, :: 2**ndim], torch.full_like(constant[:, :: 2**ndim], 2 ** (ndim / 2)))

    grid, x = Grid(14), on_grid(x.float())
    lifted = haar(x, grid)
    assert torch.equal(lifted, on_grid(lifted))
    assert torch.equal(unhaar(lifted, grid), x)


def test_the_gradient_of_the_lifting_form_is_that_of_means_and_differences():
    x = on_grid(signal((4,), dtype=torch.float64)).requires_grad_()
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64).view(1, 4, 1)
    (haar(x, Grid(14)) * weights).sum().backward()
    assert x.grad[0, :, :2].tolist() == [[-9.5, 10.5], [-950.0, 1050.0]]


@pytest.mark.parametrize("transition", ["haar", "squeeze"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kept_bytes_do_not_grow_with_the_blocks_and_are_the_predicted_ones(scheme, exact, transition):
    x = signal((12, 16, 12))
    kept = []
    for blocks in (2, 12):
        model = small_unet(3, scheme=scheme, exact=exact, transition=transition, blocks=blocks)
        kept.append(kept_bytes(model, x))
        predicted = describe(model, image_size=(12, 16, 12)).bytes_kept("reversible")
        assert predicted == pytest.approx(kept[-1], rel=0.1)
    assert kept[1] <= 1.05 * kept[0]


def test_nothing_is_kept_but_the_last_pairs_of_the_units():
    model = small_unet(3)
    pairs = sum(c * 4 * 12 * 16 * 12 // 8**level for c, level in zip((8, 16, 32, 16, 8), (0, 1, 2, 1, 0), strict=True))
    assert kept_bytes(model, signal((12, 16, 12))) == pytest.approx(pairs, rel=0.02)


@pytest.mark.parametrize("strategy", ["reversible", "checkpoint", "store"])
@pytest.mark.parametrize(("ndim", "edges"), [(1, (401,)), (2, (18, 27)), (3, (12, 9, 18))])
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_predicted_bytes_are_the_measured_ones(strategy, ndim, edges, norm):
    model = small_unet(ndim, backprop=strategy, norm=norm)
    bill = describe(model, image_size=edges, batch_size=2)
    assert bill.bytes_kept(strategy) == pytest.approx(kept_bytes(model, signal(edges, 2)), rel=0.05)
    assert bill.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_memory_budget_is_kept():
    model = small_unet(2).double()
    x = signal((24, 24), dtype=torch.float64)
    stored = twin(model, backprop="store")
    budget = int(0.6 * kept_bytes(stored, x))
    limited = twin(model, memory_budget=budget)
    assert kept_bytes(model, x) < kept_bytes(limited, x) <= budget
    assert largest_difference(gradients(stored, x), gradients(limited, x)) < 1e-9


def test_the_skip_connections_carry_what_does_not_go_down():
    model = small_unet(3)
    y = model.stem(signal((8, 8, 8)))
    shapes = []
    for stage in model.stages:
        y = stage(y)
        shapes.append([tuple(member.shape[1:3]) for member in y[::2]])
    assert shapes == [[(8, 4), (3, 8)], [(16, 2), (6, 4), (3, 8)], [(8, 4), (3, 8)], [(4, 8)], [(4, 8)]]


def test_a_network_whose_channels_all_go_down_has_empty_skips():
    model = small_unet(1, channels=(8, 16, 32), exact=True)
    x = signal((16,))
    with torch.no_grad():
        assert torch.equal(model.inverse(model.features(x)), on_grid(x))
    gradients(model, x)


def test_one_resolution_needs_no_transition():
    model = small_unet(2, channels=(8,))
    x = signal((5, 7))
    with torch.no_grad():
        assert (model.inverse(model.features(x)) - x).abs().max() < 1e-5


def test_every_point_learns_its_label():
    torch.manual_seed(0)
    model = small_unet(2, norm="batch", h=0.3)
    x = signal((15, 18), 4)
    labels = (x[:, 0] > 0).long() + ((x[:, 0] > 0) & (x[:, 1] > 0)).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
    assert (model(x).argmax(1) == labels).float().mean() > 0.95


def test_a_saved_unet_is_loaded(tmp_path):
    model = small_unet(3, scheme="leapfrog", exact=12)
    revode.save(model, tmp_path / "unet.safetensors")
    loaded = revode.load(tmp_path / "unet.safetensors", backprop="store")
    x = signal((8, 8, 8))
    assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_options_follow_the_scheme_and_the_channels():
    config = model_config("unet-3d")
    assert (config.scheme, config.norm, config.h) == ("verlet", "none", 0.3)
    config = model_config("unet-3d", scheme="additive", blocks=3)
    assert (config.norm, config.h, config.blocks) == ("group", None, (3, 3, 3))
    assert config.with_options(scheme="leapfrog").h == 0.1
    assert config.with_options(scheme="verlet").norm == "none"
    assert config.with_options(scheme="verlet").with_options(scheme="midpoint").norm == "group"
    assert model_config("unet-3d", channels=(16, 32), scheme="verlet", h=0.2).blocks == (4, 4)
    assert config.num_layers == 4 * 15 + 1
    assert NetworkConfig.from_dict(config.to_dict()) == config
    smooth = revode.create_model("unet-1d", scheme="verlet", horizon=1.0, init="smooth", blocks=8)
    kernels = [field.operator.weight for field in smooth.sequences()[-1].sequence.fields[::2]]
    assert (kernels[0] - kernels[1]).norm() < 0.5 * kernels[0].norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "resnet"}, "scheme must be 'verlet' or"),
        ({"scheme": "additive", "h": 0.1}, "take no steps in time: leave out h"),
        ({"scheme": "additive", "init": "smooth"}, "take no steps in time"),
        (
            {"scheme": "leapfrog", "horizon": 1.0, "blocks": (2, 3, 4)},
            "transition='haar' carries two successive states",
        ),
        ({"channels": (16, 40, 80)}, r"behind the first of 16, .* got \(16, 40, 80\)"),
        ({"channels": (2, 32, 64)}, "at most 8 times those before"),
        ({"channels": (15, 32, 64)}, "multiples of 2"),
        ({"in_channels": 20}, "repeats the 20 channels of its input"),
        ({"blocks": (2, 2)}, "same number of units"),
        ({"transition": "pool_pad"}, "transition must be 'haar' or 'squeeze'"),
        ({"ndim": 2}, "unknown option of unet-3d 'ndim'"),
        ({"exact": True, "damping": 0.1}, "exact"),
    ],
)
def test_contradictions_are_refused_in_one_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        revode.create_model("unet-3d", **options)


def test_wrong_shapes_are_refused():
    model = small_unet(2)
    with pytest.raises(ValueError, match=r"unet-2d takes inputs of shape \(batch, 2, height, width\), got \(1, 2, 8\)"):
        model(torch.zeros(1, 2, 8))
    with pytest.raises(ValueError, match="unet-2d takes inputs"):
        model(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"features of shape \(batch, 8, …\)"):
        model.inverse(torch.zeros(1, 4, 8, 8))


class Friction(revode.schemes.Scheme):
    """A scheme of a user's own, with an option of its own and no start or damping."""

    def __init__(self, h: float = 0.1, friction: float = 0.1) -> None:
        super().__init__(h)
        self.friction = friction

    @property
    def carry(self):
        return -(1.0 - self.friction * self.h)

    def coupling(self, index):
        return revode.schemes.Coupling(self.carry, 1.0 - self.carry, -(self.h**2))

    def starting(self):
        return revode.schemes.Coupling(0.0, 1.0, -0.5 * self.h**2)


@pytest.mark.parametrize("scheme", [*revode.schemes.SCHEMES, "friction"])
def test_any_registered_scheme_runs_by_its_name(scheme, monkeypatch):
    monkeypatch.setitem(revode.schemes.SCHEMES, "friction", Friction)
    model = small_unet(2, scheme=scheme, h=0.2 if scheme not in ("additive", "momentum") else None).double()
    names = {type(sequence.scheme) for _, sequence, _ in model.sequences()}
    assert names == {revode.schemes.SCHEMES[scheme]}
    stored, x = (
        small_unet(2, scheme=scheme, h=model.config.h, backprop="store").double(),
        signal(EVEN[2], dtype=torch.float64),
    )
    stored.load_state_dict(model.state_dict())
    for network in (model, stored):
        torch.manual_seed(5)  # of a scheme that draws
        network(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), stored.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    gpt = revode.create_model("gpt-mini", scheme=scheme, depth=2, width=16, heads=2)
    assert type(gpt.body.scheme) is revode.schemes.SCHEMES[scheme]
