"""Depth is safe by construction: with h = T/N and kernels smooth in time, deeper is finer, not longer."""

from __future__ import annotations

import pytest
import torch

from revode import ReversibleSequence
from revode.networks import NetworkConfig
from revode.networks.classifier import make_body, smooth_in_time_
from revode.networks.zoo import HORIZON

NORM = {"hamiltonian": "none", "hamiltonian-1layer": "none", "midpoint": "batch", "leapfrog": "batch"}


def sequence_of_depth(num_blocks: int, family: str, **options: object) -> ReversibleSequence:
    """One unit of a network: 32 channels in fp64, as the notes tried it."""
    settings = {"horizon": HORIZON, "init": "smooth", "norm": NORM[family], "transition": "squeeze"} | options
    config = NetworkConfig(name="unit", family=family, blocks=(num_blocks,), channels=(32,), **settings)
    sequence = make_body(config, 0)
    assert isinstance(sequence, ReversibleSequence)
    if config.init == "smooth":
        smooth_in_time_(sequence, torch.Generator().manual_seed(2))
    return sequence.double()


def travel(sequence: ReversibleSequence) -> tuple[float, float, float]:
    """‖Y_N‖ / ‖Y_0‖, the same for a gradient on its way back, and ‖Y_N - Y_0‖ / ‖Y_0‖."""
    generator = torch.Generator().manual_seed(3)
    x, g = torch.randn(2, 1, 32, 8, 8, dtype=torch.float64, generator=generator)
    x.requires_grad_()
    y = sequence(x)
    (gx,) = torch.autograd.grad(y, x, g)
    return (y.norm() / x.norm()).item(), (gx.norm() / g.norm()).item(), ((y - x).norm() / x.norm()).item()


@pytest.mark.parametrize("activation", ["relu", pytest.param("tanh", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("family", "norm"),
    [("hamiltonian", "none"), ("midpoint", "none"), ("midpoint", "batch"), ("leapfrog", "none"), ("leapfrog", "batch")],
)
def test_signal_and_gradient_stay_within_a_factor_3_and_move_over_1000_blocks(family, norm, activation):
    shallow = travel(sequence_of_depth(100, family, norm=norm, activation=activation))
    deep = travel(sequence_of_depth(1000, family, norm=norm, activation=activation))
    for ratio, before in zip(deep, shallow, strict=True):
        assert abs(ratio / before - 1.0) < 0.1
    assert 1 / 3 < deep[0] < 3
    assert 1 / 3 < deep[1] < 3
    assert deep[2] > 0.3


@pytest.mark.parametrize("norm", ["none", "batch", "tv"])
@pytest.mark.parametrize("family", ["hamiltonian", "midpoint", "leapfrog"])
def test_every_norm_is_as_safe(family, norm):
    signal, gradient, moved = travel(sequence_of_depth(100, family, norm=norm))
    assert 1 / 3 < signal < 3
    assert 1 / 3 < gradient < 3
    assert moved > 0.3


@pytest.mark.parametrize("family", ["hamiltonian", "midpoint", "leapfrog"])
def test_the_state_stays_within_a_factor_3_all_the_way(family):
    sequence = sequence_of_depth(200, family)
    x = torch.randn(1, 32, 8, 8, dtype=torch.float64)
    norms = []
    for field in sequence.fields:
        field.register_forward_hook(lambda module, args, output: norms.append(args[0].square().mean().sqrt().item()))
    with torch.no_grad():
        sequence(x)
    assert 1 / 3 < min(norms) <= max(norms) < 3


def test_the_papers_setting_grows_with_depth_and_is_still_there_by_name():
    paper = {"horizon": None, "h": 0.1, "init": "independent", "norm": "none"}
    assert travel(sequence_of_depth(100, "midpoint", **paper))[0] > 100


@pytest.mark.parametrize("family", ["hamiltonian", "midpoint", "leapfrog"])
def test_smooth_kernels_have_the_papers_distribution_and_differ_little_from_their_neighbours(family):
    sequence = sequence_of_depth(50, family)
    kernels = torch.stack([field.operator.weight for field in sequence.fields[:: sequence.scheme.fields_per_step]])
    std = (2 / (9 * kernels.shape[1])) ** 0.5
    deviations = kernels.flatten(1).std(dim=1)
    assert (deviations / std - 1).abs().max() < 0.1
    assert (kernels[1:] - kernels[:-1]).flatten(1).std(dim=1).max() < 0.05 * std
    assert (kernels[-1] - kernels[0]).std() > std


def main() -> None:
    """Print the table of docs/networks.md."""
    for family in ("hamiltonian", "midpoint", "leapfrog"):
        for activation in ("relu", "tanh"):
            units = (sequence_of_depth(count, family, activation=activation) for count in (10, 100, 1000))
            cells = [", ".join(f"{ratio:.2f}" for ratio in travel(unit)) for unit in units]
            print("|", " | ".join([f"{family}, {activation}", *cells]), "|")


if __name__ == "__main__":
    main()
