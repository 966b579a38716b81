"""Training from end to end on a tiny network: what is written, what is learned, and what stays the same to the bit."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest
import torch
from tiny_runs import FLAGS, assert_same_bits, command, read_rows, tiny

import revode
from revode.engine import DriftWarning, ReversalError
from revode_lab.training import Diverged, Interrupted, configure, load_run, run, train
from revode_lab.training.distributed import Group
from revode_lab.training.job import Job
from revode_lab.training.planning import make_plan

ALL_FEATURES = {"ema": 0.9, "schedule": "one-cycle", "label_smoothing": 0.1, "clip": 1.0, "nesterov": True}


class SignalAt:
    """A monitor that sends this process a signal after some updates."""

    def __init__(self, *steps: int, number: int = signal.SIGTERM) -> None:
        self.steps = set(steps)
        self.number = number

    def on_step(self, model, step):
        if step in self.steps:
            os.kill(os.getpid(), self.number)
        return {}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    torch.set_num_threads(1)
    train(tiny(**ALL_FEATURES, report=True), folder)
    return folder


def test_a_run_directory_holds_what_is_promised(finished):
    names = set(os.listdir(finished))
    assert {"config.yaml", "metrics.jsonl", "result.json", "last.ckpt", "model.safetensors", "report.html"} <= names
    assert "best.ckpt" not in names
    assert not [name for name in names if name.endswith(".part")]
    result = json.loads((finished / "result.json").read_text())
    assert {
        *("model", "dataset", "params", "test_accuracy", "steps", "seconds", "images_per_second"),
        *("peak_activation_bytes", "seed", "versions", "commit"),
    } <= result.keys()
    assert result["steps"] == 12
    assert 0 <= result["test_accuracy"] <= 1
    assert result["params"] == sum(p.numel() for p in load_run(finished).model.parameters())
    assert result["peak_activation_bytes"] > 0
    assert configure(str(finished / "config.yaml")) == tiny(**ALL_FEATURES, report=True)
    assert [row["step"] for row in read_rows(finished, "train")] == list(range(1, 13))
    assert [row["step"] for row in read_rows(finished, "evaluation")] == [8, 12]
    torch.load(finished / "last.ckpt", weights_only=True)


def test_weights_load_as_a_network_and_score_as_the_run_says(finished, capsys):
    accuracy = json.loads((finished / "result.json").read_text())["test_accuracy"]
    code, out, _ = command("eval", finished, "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["accuracy"] == accuracy
    code, out, _ = command("eval", finished, capsys=capsys)
    assert f"{accuracy:.2%}" in out
    network = revode.load(finished / "model.safetensors")  # pyright: ignore[reportAttributeAccessIssue]
    assert sum(p.numel() for p in network.parameters()) > 0


@pytest.mark.parametrize("step", [1, 5, 7, 8, 11, 12])
def test_a_run_stopped_by_a_signal_resumes_to_the_same_bits(step, finished, tmp_path):
    config = tiny(**ALL_FEATURES, monitor_every=1)
    with pytest.raises(Interrupted) as stopped:
        train(config, tmp_path / "run", monitors=[SignalAt(step)])
    assert stopped.value.exit_code == 143
    assert stopped.value.step == step
    train(config, tmp_path / "run", resume="auto")
    assert_same_bits(tmp_path / "run", finished)


def test_resuming_a_finished_run_changes_nothing(finished, capsys):
    before = {name: (finished / name).read_bytes() for name in os.listdir(finished)}
    code, out, _ = command("train", "--out", finished, "--resume", "auto", capsys=capsys)
    assert code == 0
    assert "is finished" in out
    after = {name: (finished / name).read_bytes() for name in os.listdir(finished)}
    assert {name for name in before if before[name] != after[name]} <= {".lock"}


def test_a_run_goes_on_elsewhere_from_a_checkpoint(finished, tmp_path):
    config = tiny(**ALL_FEATURES)
    train(config, tmp_path / "other", resume=str(finished / "previous.ckpt"), given=["report"])
    assert_same_bits(tmp_path / "other", finished)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(finished, tmp_path, capsys):
    config = tiny(**ALL_FEATURES, monitor_every=1)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", monitors=[SignalAt(11)])
    path = tmp_path / "run" / "last.ckpt"
    path.write_bytes(path.read_bytes()[:1000])
    train(config, tmp_path / "run", resume="auto")
    assert "going back to" in capsys.readouterr().out
    ours = torch.load(path, weights_only=True)["model"]
    theirs = torch.load(finished / "last.ckpt", weights_only=True)["model"]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_resumed_run_refuses_to_become_another(finished, capsys):
    code, _, err = command("train", "--out", finished, "--resume", "auto", "--lr", "3", capsys=capsys)
    assert code == 2
    assert "optimization.lr" in err
    code, _, err = command("train", "--resume", "auto", capsys=capsys)
    assert code == 2
    assert "needs --out" in err


def test_resuming_where_no_run_is_says_so_and_starts_one(tmp_path, capsys):
    train(tiny(max_steps=1), tmp_path / "new", resume="auto")
    assert f"there is no run in {tmp_path / 'new'} yet: this starts one" in capsys.readouterr().out


def test_a_longer_run_goes_on_from_a_shorter_one(tmp_path):
    settings = {"schedule": "constant"}
    train(tiny(**settings, max_steps=6), tmp_path / "a")
    unfinished = tmp_path / "a" / ".last.ckpt.999.part"  # of a process that was killed in a checkpoint
    unfinished.write_bytes(b"half")
    train(tiny(**settings, max_steps=12), tmp_path / "a", resume="auto", given=["max_steps"])
    assert not unfinished.exists()
    train(tiny(**settings), tmp_path / "b")
    ours, theirs = (torch.load(tmp_path / name / "last.ckpt", weights_only=True)["model"] for name in "ab")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_is_not_overwritten_silently(finished, tmp_path, capsys):
    before = (finished / "last.ckpt").read_bytes()
    code, _, err = command("train", "--out", finished, "--max-steps", "1", capsys=capsys)
    assert code == 2
    assert "--overwrite" in err
    assert (finished / "last.ckpt").read_bytes() == before


def test_bad_input_leaves_nothing_behind(tmp_path, capsys):
    for words in (["no-such-net"], ["--dataset", "mnist"], ["--batch-size", "100000"], ["--device", "gpu9"]):
        code, _, err = command("train", *words, "--out", tmp_path / "run", capsys=capsys)
        assert code == 2, words
        assert len(err.splitlines()) == 1, err
        assert not (tmp_path / "run").exists()


def test_missing_data_are_one_sentence(tmp_path, capsys):
    words = ["train", "hamiltonian-74", "--data-root", tmp_path / "empty", "--out", tmp_path / "run"]
    code, _, err = command(*words, capsys=capsys)
    assert code == 2
    assert "revode data get cifar10" in err
    assert not (tmp_path / "run").exists()


def test_the_best_weights_are_chosen_on_held_out_images(tmp_path):
    result = train(tiny(validation=0.3, max_steps=30, train_fraction=0.3), tmp_path / "run")
    rows = read_rows(tmp_path / "run", "evaluation")
    assert {row["split"] for row in rows} == {"validation"}
    assert result["validation_accuracy"] == max(row["accuracy"] for row in rows)
    best = torch.load(tmp_path / "run" / "best.ckpt", weights_only=True)
    assert best["step"] in [row["step"] for row in rows if row["accuracy"] == result["validation_accuracy"]]
    kept = load_run(tmp_path / "run").model.state_dict()
    expected = best["average"]["tensors"] if best["average"] else best["model"]
    assert all(torch.equal(kept[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"autocast": "bfloat16"},
        {"backprop": "store"},
        {"exact": 14},
        {"schedule": "one-cycle", "augment": False, "smoothness": 0.0},
        {"flips": "alternating", "cutout": 2},
        {"model": "resnet-8", "options": {"blocks": [1, 1], "channels": [4, 8]}},
    ],
    ids=str,
)
def test_it_learns_under_every_setting(settings, tmp_path):
    train(tiny(**{"max_steps": 25, "lr": 0.1, "schedule": "constant", **settings}), tmp_path / "run")
    rows = read_rows(tmp_path / "run", "train")
    assert sum(row["loss"] for row in rows[-5:]) < 0.95 * sum(row["loss"] for row in rows[:5])


@pytest.fixture
def peaks(monkeypatch):
    """The bytes that each step of the trainings in a test really kept."""
    from revode.memory import PeakActivations
    from revode_lab.training.loop import Training

    compute, found = Training.compute_gradient, []

    def watched(training, *batch):
        with PeakActivations(training.job.model.parameters()) as peak:
            result = compute(training, *batch)
        found.append(peak.num_bytes)
        return result

    monkeypatch.setattr(Training, "compute_gradient", watched)
    return found


def test_strategies_train_alike_and_reversible_keeps_less(tmp_path, peaks):
    results, losses = {}, {}
    for backprop in ("reversible", "store"):
        results[backprop] = train(tiny(backprop=backprop, max_steps=3), tmp_path / backprop)
        assert results[backprop]["peak_activation_bytes"] == pytest.approx(peaks[-1], rel=0.05)
        losses[backprop] = [row["loss"] for row in read_rows(tmp_path / backprop, "train")]
    assert losses["reversible"] == pytest.approx(losses["store"], rel=1e-4)
    assert results["reversible"]["peak_activation_bytes"] < results["store"]["peak_activation_bytes"]


def test_a_plan_knows_the_memory_budget(tmp_path, peaks):
    alone = train(tiny(max_steps=1, backprop="store"), tmp_path / "store")["plan"]["activation_bytes"]
    budget = (alone["reversible"] + alone["store"]) // 2
    result = train(tiny(max_steps=1, options={"memory_budget": budget}), tmp_path / "run")
    planned = result["plan"]["activation_bytes"]
    assert planned["reversible"] == pytest.approx(peaks[-1], rel=0.05)
    assert planned["reversible"] < planned["store"] == alone["store"]
    assert planned["checkpoint"] == alone["checkpoint"]


def test_a_plan_of_a_stored_run_does_not_mind_that_its_network_cannot_be_reversed():
    """Warnings are errors here, and a walk back that misses raises."""
    group, options = Group(0, 1, torch.device("cpu")), {"blocks": [8, 8], "channels": [16, 32], "h": 3.0}
    with pytest.raises((ReversalError, DriftWarning)):
        make_plan(Job(tiny(options=options, backprop="reversible"), group))
    assert make_plan(Job(tiny(options=options, backprop="store"), group))["activation_bytes"]["reversible"] > 0


def test_planning_changes_no_bit_of_the_weights(tmp_path):
    torch.manual_seed(5)
    job = Job(tiny(), Group(0, 1, torch.device("cpu")))
    train(tiny(max_steps=1, lr=0.0), tmp_path / "run")
    kept = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["model"]
    assert all(torch.equal(kept[name], tensor) for name, tensor in job.model.named_parameters())


@pytest.mark.parametrize(("clock", "seconds", "runs"), [((0, 2.5, 3, 3.5, 4, 4.9, 5, 5.8), 0.5, 4), ((0, 30), 30, 1)])
def test_the_time_foretold_is_the_shortest_without_the_first_run_unless_that_is_long(monkeypatch, clock, seconds, runs):
    from revode_lab.training import planning

    done = []
    monkeypatch.setattr(planning.time, "perf_counter", iter(clock).__next__)
    assert planning.fastest(lambda: done.append(1), torch.device("cpu")) == seconds
    assert len(done) == runs


def test_monitors_write_lines_of_metrics(tmp_path):
    class Norm:
        def on_step(self, model, step):
            return {"weight_norm": sum(float(p.detach().norm()) for p in model.parameters())}

    train(tiny(monitor_every=4), tmp_path / "run", monitors=[Norm()])
    rows = read_rows(tmp_path / "run", "monitor")
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert all(row["weight_norm"] > 0 for row in rows)


def test_the_stability_monitor_is_a_flag_away_and_changes_no_bit(tmp_path):
    settings = {"max_steps": 4, "monitor_every": 2}
    train(tiny(**settings, monitor=True), tmp_path / "watched")
    train(tiny(**settings), tmp_path / "alone")
    rows = read_rows(tmp_path / "watched", "monitor")
    assert [row["step"] for row in rows] == [2, 4]
    assert all(row["step_usage"] > 0 for row in rows)
    ours, theirs = (torch.load(tmp_path / n / "last.ckpt", weights_only=True)["model"] for n in ("watched", "alone"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_network_trains_alike_and_its_plan_leaves_compiling_out(tmp_path, monkeypatch):
    monkeypatch.setattr("revode_lab.training.planning._LONG", 0.0)  # a plan takes the first step that it times
    losses = []
    for compile in (False, True):
        result = train(tiny(max_steps=4, compile=compile), tmp_path / str(compile))
        losses.append([row["loss"] for row in read_rows(tmp_path / str(compile), "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert result["plan"]["seconds_per_step"] < 1.0


def test_divergence_is_diagnosed_and_the_last_good_checkpoint_kept(tmp_path, capsys):
    config = tiny(lr=1e6, schedule="constant", max_steps=40, checkpoint_every=1, weight_decay=0.0, smoothness=0.0)
    with pytest.raises(Diverged) as broken:
        train(config, tmp_path / "run")
    assert broken.value.diagnosis.startswith("first: ")
    assert "learning rate was 1e+06" in broken.value.diagnosis
    state = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert state["step"] == broken.value.step
    assert not (tmp_path / "run" / "result.json").exists()


def test_divergence_by_the_learning_rate_does_not_blame_h(tmp_path):
    """Weights that exploded make the bound on h small; at the initial weights h was within it."""
    with pytest.raises(Diverged) as broken:
        train(tiny(lr=1e6, schedule="constant", weight_decay=0.0, smoothness=0.0), tmp_path / "run")
    lines = broken.value.diagnosis.splitlines()
    (cause,) = [line for line in lines if line.startswith("likely cause: ")]
    assert cause.startswith("likely cause: the learning rate was 1e+06")
    assert "try lr=0.1" in cause
    assert "option h=" not in broken.value.diagnosis
    assert lines[-1].startswith("h = 0.1 was within its bound")


def test_divergence_by_h_names_h_and_its_bound(tmp_path, capsys):
    words = [word for word in FLAGS if "options" not in word]
    options = "blocks=[40,4],channels=[4,8],h=50"
    code, _, err = command("train", *words, "--options", options, "--out", tmp_path / "run", capsys=capsys)
    assert code == 3
    assert "diverged at step" in err
    assert "first: " in err
    assert "unit 1" in err
    assert "h = 50 is above its bound" in err


def test_tensorboard_events_are_written_on_request(tmp_path):
    pytest.importorskip("tensorboard")
    train(tiny(max_steps=2, tensorboard=True), tmp_path / "run")
    assert [name for name in os.listdir(tmp_path / "run") if "tfevents" in name]


def test_plain_output_has_no_colour_and_fits_80_columns(tmp_path, capsys):
    train(tiny(), tmp_path / "r")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "parameters" in out
    assert "MFLOP" in out
    paths = str(tmp_path)
    assert all(len(line) <= 80 for line in out.splitlines() if paths not in line)


def test_a_dry_run_says_the_plan_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, _ = command("train", "--dry-run", *FLAGS, "--validation=0.1", "--out", "run", capsys=capsys)
    assert code == 0
    assert "258 to train, 29 to validate, 360 to test" in out
    assert "10 classes, 1x8x8" in out
    assert "for 12 steps" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert not list(tmp_path.iterdir())


def test_the_report_is_rewritten_at_every_evaluation(tmp_path, monkeypatch):
    pages = []
    monkeypatch.setattr("revode_lab.training.report.Page.write", lambda page, path: pages.append((page.render(), path)))
    train(tiny(max_steps=20, report=True), tmp_path / "run")  # evaluated after steps 8, 16 and 20
    texts = [text for text, path in pages if path == tmp_path / "run" / "report.html"]
    assert [re.findall(r"step (\d+) of 20", text) for text in texts] == [["8"], ["16"], []]
    assert [text.count("<figure>") >= 5 for text in texts] == [True] * 3
    assert ['http-equiv="refresh"' in text for text in texts] == [True, True, False]


def test_a_page_that_fails_on_the_way_stops_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("revode_lab.training.report.write_course", lambda *_: 1 / 0)
    assert train(tiny(max_steps=9, report=True), tmp_path / "run")["steps"] == 9
    assert "no page yet: ZeroDivisionError" in capsys.readouterr().out


def test_progress_is_shown_at_every_step_with_the_loss_of_the_last_log_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("revode_lab.training.terminal._QUIET_SECONDS", 0.0)
    train(tiny(log_every=5, evaluation_batch_size=120), tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    trained = [line for line in lines if line.startswith("step ") and "images/s" in line]
    assert [int(line.split()[1].partition("/")[0]) for line in trained] == list(range(1, 13))
    assert all(re.search(r"left  (process|GPU) (peak )?[\d.]+ [MG]B$", line) for line in trained)
    logged = {row["step"]: f"loss {row['loss']:.3f}  accuracy" for row in read_rows(tmp_path / "run", "train")}
    assert not any("loss" in line for line in trained[:4])
    for step, line in enumerate(trained[4:], 5):
        assert logged[step if step == 12 else step // 5 * 5] in line
    assert [line.split()[-1] for line in lines if "scoring: " in line] == 2 * ["0%", "33%", "67%"]


def test_the_speed_of_a_run_is_that_of_its_updates(tmp_path, monkeypatch):
    from revode_lab.training import loop

    def slowly(*args, **kwargs):
        time.sleep(0.2)
        return run.evaluate(*args, **kwargs)

    monkeypatch.setattr(loop, "evaluate", slowly)
    result = train(tiny(max_steps=16), tmp_path / "run")
    assert result["seconds"] > 0.4
    assert 16 * 32 / result["images_per_second"] <= result["seconds"] - 0.4
