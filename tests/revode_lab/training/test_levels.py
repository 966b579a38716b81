"""Levels: shallow networks and small images first, the named network last; stopped anywhere, the same bits."""

from __future__ import annotations

import json

import pytest
import torch
from test_loop import SignalAt
from tiny_runs import assert_same_bits, command, read_rows, tiny

import revode
from revode_lab import data
from revode_lab.training import Interrupted, configure, load_run, train
from revode_lab.training.config import Level, mean_cost, num_epochs, parse_levels
from revode_lab.training.distributed import Group, train_in_processes
from revode_lab.training.job import Job
from revode_lab.training.run import score_run

LEVELS = "26@4:1,26@8:1,38@8:1"
SETTINGS = {
    "name": "hamiltonian-38",
    "options": {"blocks": [3, 3, 3], "channels": [4, 8, 8], "norm": "batch", "h": 0.5},
    "levels": LEVELS,
    "epochs": 3,
    "max_steps": None,
    "ema": 0.9,
    "nesterov": True,
}
"""8 steps to a level."""


def levelled(**settings):
    return tiny(**{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    torch.set_num_threads(1)
    train(levelled(report=True), folder)
    return folder


def test_levels_are_read_and_counted():
    levels = parse_levels("38@16:8, 74@32:14")
    assert levels == (Level(38, 16, 8), Level(74, 32, 14))
    assert num_epochs(levels) == 22
    assert parse_levels("") == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"levels": "38@16"}, "expected layers@edge:epochs"),
        ({"levels": "38:8@16"}, "expected layers@edge:epochs"),
        ({"levels": "74@16:1,38@32:1"}, "may fall from level to level"),
        ({"levels": "38@32:1,74@16:1"}, "may fall from level to level"),
        ({"levels": "38@16:0,74@32:1"}, "at least 1"),
        ({"levels": "38@16:8,74@32:14", "epochs": 5}, "have 22 in all; leave epochs out"),
    ],
)
def test_levels_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        configure(model="hamiltonian-74", dataset="cifar10", recipe="quick", **settings)


def test_the_levels_say_how_many_epochs_there_are(tmp_path):
    config = configure(model="hamiltonian-74", recipe="quick", levels="38@16:8,74@32:14")
    assert config.optimization.epochs == 22
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert configure(str(tmp_path / "c.yaml")) == config


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        ("26@8:3", "expected hamiltonian-38's 38 layers"),
        ("26@4:1,38@4:2", "the data set's edge 8"),
        ("27@4:1,38@8:2", "12n"),
    ],
)
def test_the_last_level_is_the_named_network_on_whole_images(levels, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        train(levelled(levels=levels), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_network_that_takes_no_steps_in_time_has_no_levels_in_depth(tmp_path):
    with pytest.raises(ValueError, match="takes no steps in time"):
        train(
            tiny(
                name="resnet-14", options={"blocks": [2, 2, 2], "channels": [4, 8, 8]}, levels="8@8:1,14@8:1", epochs=2
            )
        )


def test_a_run_with_levels_ends_with_the_named_network(finished):
    assert (finished / "report.html").exists()
    result = json.loads((finished / "result.json").read_text())
    network = revode.load(finished / "model.safetensors")
    assert network.num_layers == 38
    assert network.config.h == 0.5
    assert result["params"] == sum(p.numel() for p in network.parameters())
    assert result["steps"] == 24
    rows = read_rows(finished, "level")
    assert [(row["step"], row["layers"], row["edge"]) for row in rows] == [(8, 26, 8), (16, 38, 8)]
    assert all(0 <= row["accuracy"] <= 1 for row in rows)


@pytest.mark.parametrize("step", [8, 9, 16, 17, 24])
def test_stopped_at_any_step_it_resumes_to_the_same_bits(step, finished, tmp_path):
    config = levelled(monitor_every=1)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", monitors=[SignalAt(step)])
    assert load_run(tmp_path / "run").model.num_layers == (26 if step <= 16 else 38)
    train(config, tmp_path / "run", resume="auto")
    assert_same_bits(tmp_path / "run", finished)


def test_cut_short_it_is_the_network_and_the_images_of_its_last_level(tmp_path, capsys):
    result = train(levelled(max_steps=5), tmp_path / "run")
    assert "ends before its last level: these are hamiltonian-26's on images of edge 4" in capsys.readouterr().out
    network = revode.load(tmp_path / "run" / "model.safetensors")
    assert result["model"] == "hamiltonian-26"
    assert result["params"] == sum(p.numel() for p in network.parameters())
    assert network.config.image_size == 4
    assert score_run(load_run(tmp_path / "run")).accuracy == result["test_accuracy"]


def test_the_steps_of_a_recipe_do_not_cut_levels():
    config = configure(model="hamiltonian-1202", dataset="cifar10", levels="602@16:60,1202@32:30")
    assert (config.optimization.epochs, config.optimization.max_steps) == (90, None)


def test_an_edge_that_a_network_cannot_take_is_refused_before_anything_is_trained(tmp_path):
    options = {"blocks": [2, 2], "channels": [2, 8], "transition": "squeeze"}
    config = levelled(name="hamiltonian-digits", options=options, levels="18@4:1,18@5:1,18@8:1")
    with pytest.raises(ValueError, match="image_size must be a multiple of 2, got 5"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_time_left_knows_that_later_levels_cost_more():
    job = Job(levelled(), Group(0, 1, torch.device("cpu")))
    costs = [26 * 16] * 8 + [26 * 64] * 8 + [38 * 64] * 8
    assert [job.work(step) for step in (0, 8, 13, 24)] == [sum(costs[:step]) for step in (0, 8, 13, 24)]


def test_the_best_weights_are_of_the_last_level(tmp_path):
    result = train(levelled(validation=0.3, epochs=3, train_fraction=0.3), tmp_path / "run")
    steps = int(result["weights_of"].split()[1].rstrip(","))
    assert steps > 2 * result["steps"] // 3
    assert load_run(tmp_path / "run").model.num_layers == 38


def test_a_new_level_takes_over_weights_momenta_and_averages():
    torch.set_num_threads(1)
    job = Job(levelled(), Group(0, 1, torch.device("cpu")))
    for parameter in job.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    job.optimizer.step()
    job.average.update(job.model)
    old, before = job.model, job.level_networks[0]
    assert old.config == before
    job.enter_level(2, epoch=2)
    assert job.model.num_layers == 38
    assert torch.equal(job.model.stem.conv.weight, old.stem.conv.weight)
    gains = {0: 3 / 4, 1: 2 / 3, 2: 1 / 2}  # stages of 3, 2, 1 blocks become 4, 3, 2
    for name, parameter in job.model.named_parameters():
        momentum = job.optimizer.state[parameter]["momentum_buffer"]
        gain = next((gain for unit, gain in gains.items() if name.startswith(f"stages.{unit}.body")), 1.0)
        assert torch.allclose(momentum / gain, torch.ones_like(momentum), atol=1e-2), name  # ones, and a little decay
    assert job.average.num_updates == 1
    assert job.average.tensors.keys() == dict([*job.model.named_parameters(), *job.model.named_buffers()]).keys()
    assert torch.isfinite(torch.stack([t.float().norm() for t in job.average.tensors.values()])).all()


def test_statistics_are_those_of_the_new_level():
    job = Job(levelled(ema=0.0), Group(0, 1, torch.device("cpu")))
    job.enter_level(1, epoch=1)
    indices = torch.cat(list(data.batches(len(job.train_split), 32, seed=0, epoch=1)))
    x, _ = job.images(indices, 1)
    assert x.shape[-1] == 8
    with torch.no_grad():
        mean = job.model.stem.conv(x).mean((0, 2, 3))
    assert torch.allclose(job.model.stem.norm.running_mean, mean, atol=1e-5)


def test_an_update_belongs_to_a_level_and_those_behind_the_end_to_the_last():
    job = Job(levelled(), Group(0, 1, torch.device("cpu")))
    assert [job.level_at(step) for step in (0, 7, 8, 15, 16, 23, 99)] == [0, 0, 1, 1, 2, 2, 2]


def test_the_rate_has_one_course_or_one_for_each_level():
    group = Group(0, 1, torch.device("cpu"))
    one, each = Job(levelled(), group), Job(levelled(rate_per_level=True), group)
    assert [each.learning_rate(step) for step in range(8)] == [each.learning_rate(step + 8) for step in range(8)]
    rates = [one.learning_rate(step) for step in range(24)]
    assert rates.index(max(rates)) in (7, 8)
    assert min(rates[8:], default=0) == rates[-1]


def test_two_processes_go_through_levels_together(tmp_path, warm_processes):
    result = train_in_processes(levelled(), tmp_path / "run", 2)
    assert result["steps"] == 24
    assert revode.load(tmp_path / "run" / "model.safetensors").num_layers == 38
    assert [row["layers"] for row in read_rows(tmp_path / "run", "level")] == [26, 38]


def test_levels_are_a_flag(tmp_path, capsys):
    flags = ["--levels=26@4:1,38@8:1", "--dataset=digits", "--train-fraction=0.1", "--batch-size=32", "--no-report"]
    options = "--options=channels=[4,8,8]"
    code, out, _ = command(
        "train", "hamiltonian-38", *flags, options, "--threads=1", "--out", tmp_path / "run", capsys=capsys
    )
    assert code == 0
    assert "level 2: 38 layers, images of edge 8" in out


def test_an_epoch_of_small_images_and_few_layers_costs_less():
    assert mean_cost(()) == mean_cost(parse_levels("74@32:5")) == 1.0
    assert mean_cost(parse_levels("74@16:10,74@32:10")) == pytest.approx((0.25 + 1.0) / 2)
    assert mean_cost(parse_levels("37@16:10,74@32:30")) == pytest.approx((10 * 0.125 + 30) / 40)


def test_the_monitor_sees_images_of_the_level(tmp_path, monkeypatch):
    from revode_lab.stability import StabilityMonitor

    edges = []

    def on_step(self, model, step):
        edges.append((step, self.images.shape[-1]))
        return {}

    monkeypatch.setattr(StabilityMonitor, "on_step", on_step)
    train(levelled(monitor=True, monitor_every=4), tmp_path / "run")
    assert edges == [(4, 4), (8, 4), (12, 8), (16, 8), (20, 8), (24, 8)]
