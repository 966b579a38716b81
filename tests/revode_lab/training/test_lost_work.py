"""What a reading of the training by strangers brought to light: work that was lost, numbers that were wrong, tracebacks."""

from __future__ import annotations

import signal

import pytest
import torch
from test_loop import SignalAt
from tiny_runs import FLAGS, command, read_rows, tiny

from revode_lab.data import load
from revode_lab.reproduce.task import Setup, TaskFailed
from revode_lab.system import locked, read_json
from revode_lab.training import Diverged, configure, load_run, train
from revode_lab.training.checkpoint import read_checkpoint
from revode_lab.training.distributed import Group
from revode_lab.training.run import evaluate, score_run
from revode_lab.training.terminal import Interrupted, Interruption


class TestDivergence:
    def test_found_by_an_evaluation_exits_with_3(self, tmp_path, capsys):
        words = [*FLAGS, "--max-steps=1", "--lr=1e30", "--schedule=constant", "--epochs=none"]
        code, _, err = command("train", *words, "--out", tmp_path / "run", capsys=capsys)
        assert code == 3
        assert "diverged at step 1: evaluation found a loss of" in err
        assert not (tmp_path / "run" / "result.json").exists()

    def test_out_of_the_grids_range_is_divergence_once_training_has_begun(self, tmp_path, capsys):
        words = [*FLAGS, "--exact=14", "--schedule=constant", "--evaluate-every=0"]
        code, _, err = command("train", *words, "--lr=1e5", "--out", tmp_path / "late", capsys=capsys)
        assert code == 3
        assert "exact=14 holds states of magnitude below 1024 only" in err
        words = [word.replace("channels=[4,8]", "channels=[4,8],h=1e9") for word in words]
        code, _, err = command("train", *words, "--out", tmp_path / "at once", capsys=capsys)
        assert code == 2, err

    def test_an_evaluation_out_of_range_does_not_end_a_sound_training(self, tmp_path, capsys, monkeypatch):
        from revode.engine.grid import OutOfRange
        from revode_lab.training import loop

        calls, evaluate = [], loop.evaluate

        def at_first_out_of_range(*args, **options):
            calls.append(1)
            if len(calls) == 1:
                raise OutOfRange("exact=14 holds less")
            return evaluate(*args, **options)

        monkeypatch.setattr(loop, "evaluate", at_first_out_of_range)
        result = train(tiny(), tmp_path / "run")
        assert result["steps"] == 12
        assert "not evaluated after step 8: exact=14 holds less" in capsys.readouterr().out
        monkeypatch.setattr(loop, "evaluate", lambda *args, **options: at_first_out_of_range(calls.clear()))
        with pytest.raises(Diverged, match="its evaluation failed: exact=14"):
            train(tiny(evaluate_every=0), tmp_path / "other")
        assert torch.load(tmp_path / "other" / "last.ckpt", weights_only=True)["step"] == 12

    @pytest.mark.parametrize("here", [True, False])
    def test_processes_agree_that_an_evaluation_is_out_of_range(self, here):
        from revode.engine.grid import OutOfRange

        images = load("digits").split("test")
        calls, answers = [], []

        class OneOfTwo(Group):
            def largest(self, value):
                answers.append(value)
                return 1 if len(answers) == 3 else value  # after the number of batches and whether to stop

            def sum(self, tensor):
                raise AssertionError("the other process has left")

            def share_buffers(self, model):
                pass

        class Network(torch.nn.Module):
            def forward(self, x):
                calls.append(len(x))
                if here and len(calls) == 1:
                    raise OutOfRange("too large here")
                return torch.zeros(len(x), 10)

        size = -(-len(images) // 10)
        with pytest.raises(OutOfRange, match="too large here" if here else "in another process"):
            evaluate(Network(), images, load("digits"), OneOfTwo(0, 2, torch.device("cpu")), batch_size=size)
        assert len(calls) == 1
        assert answers == [5, 0, int(here)]

    def test_a_gradient_that_is_skipped_is_written_as_none(self, tmp_path, monkeypatch):
        from revode_lab.training.loop import Training

        monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda gradients: torch.tensor(float("inf")))
        monkeypatch.setattr(Training, "_require_finite", lambda *args: None)
        train(tiny(max_steps=2, report=True), tmp_path / "run")
        assert [row["gradient_norm"] for row in read_rows(tmp_path / "run", "train")] == [None, None]
        assert (tmp_path / "run" / "report.html").exists()


class TestRunsOfOthers:
    @pytest.fixture
    def halved(self, tmp_path):
        """A run of one epoch with a validation split; its best is its first epoch."""
        train(tiny(validation=0.3, max_steps=None, epochs=1), tmp_path / "first")
        return tmp_path / "first"

    def test_going_on_elsewhere_takes_the_best_weights_along(self, halved, tmp_path):
        longer = tiny(validation=0.3, max_steps=None, epochs=2, lr=0.0)
        result = train(longer, tmp_path / "second", resume=str(halved), given=("epochs",))
        assert "best on the validation split" in result["weights_of"]
        assert (tmp_path / "second" / "best.ckpt").exists()

    def test_a_best_of_a_later_time_is_not_taken_for_ours(self, halved, tmp_path, capsys):
        early = halved / "early.ckpt"
        early.write_bytes((halved / "last.ckpt").read_bytes())
        state = torch.load(halved / "best.ckpt", weights_only=True)
        torch.save({**state, "step": state["step"] + 1}, halved / "best.ckpt")
        capsys.readouterr()
        result = train(tiny(), tmp_path / "second", resume=str(early))
        assert result["weights_of"] == "last step"
        assert "are lost" in capsys.readouterr().out
        kept = score_run(load_run(tmp_path / "second"), "validation").accuracy
        assert result["validation_accuracy"] in (None, kept)

    def test_a_damaged_best_does_not_keep_a_run_from_its_end(self, halved, capsys):
        (halved / "best.ckpt").write_bytes(b"damaged")
        state = torch.load(halved / "last.ckpt", weights_only=True)
        state["processes"][0]["position"]["best_accuracy"] = 2.0  # so that nothing later is better
        torch.save(state, halved / "last.ckpt")
        result = train(tiny(epochs=2), halved, resume="auto", given=("epochs",))
        assert result["weights_of"] == "last step"
        assert "best.ckpt is damaged" in capsys.readouterr().out
        assert result["validation_accuracy"] == score_run(load_run(halved), "validation").accuracy

    def test_a_run_that_is_made_longer_is_read_as_it_stands(self, halved):
        before = read_json(halved / "result.json")
        longer, given = tiny(epochs=3, monitor_every=1), ("epochs", "monitor_every")
        with pytest.raises(Interrupted):
            train(longer, halved, resume="auto", given=given, monitors=[SignalAt(before["steps"] + 2)])
        found = load_run(halved)
        assert found.weights_of == f"checkpoint at step {before['steps'] + 2}"
        assert not (halved / "result.json").exists()

    def test_a_damaged_checkpoint_does_not_take_the_place_of_the_one_before(self, tmp_path):
        folder = tmp_path / "run"
        with pytest.raises(Interrupted):
            train(tiny(monitor_every=1), folder, monitors=[SignalAt(7)])
        (folder / "last.ckpt").write_bytes((folder / "last.ckpt").read_bytes()[:-10])
        with pytest.raises(Interrupted):
            train(tiny(monitor_every=1), folder, resume="auto", monitors=[SignalAt(6)])
        assert [read_checkpoint(folder / name)["step"] for name in ("last.ckpt", "previous.ckpt")] == [6, 5]

    def test_a_foreign_result_gets_one_sentence(self, tmp_path):
        (tmp_path / "result.json").write_text('{"a": 1}')
        with pytest.raises(ValueError, match="was not written by"):
            train(tiny(), tmp_path, resume="auto")

    def test_another_run_is_not_written_over(self, halved, tmp_path):
        other = tmp_path / "other"
        train(tiny(max_steps=1, seed=7), other)
        before = {path.name: path.read_bytes() for path in other.iterdir()}
        with pytest.raises(ValueError, match="holds a run already"):
            train(tiny(), other, resume=str(halved))
        assert {path.name: path.read_bytes() for path in other.iterdir()} == before

    def test_a_finished_run_without_its_checkpoint_stays(self, halved, capsys):
        for name in ("last.ckpt", "previous.ckpt", "best.ckpt"):
            (halved / name).unlink(missing_ok=True)
        before = (halved / "metrics.jsonl").read_bytes()
        train(tiny(), halved, resume="auto")
        assert "is finished" in capsys.readouterr().out
        with pytest.raises(ValueError, match="no checkpoint to go on from"):
            train(tiny(epochs=5), halved, resume="auto", given=("epochs",))
        assert (halved / "metrics.jsonl").read_bytes() == before

    def test_what_is_refused_overwrites_nothing(self, halved):
        before = {path.name for path in halved.iterdir()}
        with pytest.raises(ValueError, match="too small"):
            train(tiny(options={"memory_budget": 10}), halved, overwrite=True)
        assert {path.name for path in halved.iterdir()} == before

    def test_a_network_that_cannot_be_monitored_overwrites_nothing(self, halved):
        before = {path.name: path.read_bytes() for path in halved.iterdir() if path.name != ".lock"}
        with pytest.raises(ValueError, match="no reversible units"):
            train(tiny(name="resnet-14", monitor=True), halved, overwrite=True)
        assert {path.name: path.read_bytes() for path in halved.iterdir() if path.name != ".lock"} == before

    def test_overwriting_takes_what_was_made_of_the_run(self, halved):
        for name in ("model.onnx", "stability.html", "events.out.tfevents.1", "notes.txt"):
            (halved / name).write_text("old")
        train(tiny(max_steps=1), halved, overwrite=True)
        names = {path.name for path in halved.iterdir()}
        assert "notes.txt" in names
        assert names.isdisjoint({"model.onnx", "stability.html", "events.out.tfevents.1"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", str(2**64)], "seed is"),
        (["--options", "num_classes=5"], "num_classes=5, but digits has 10"),
        (["--options", "name=x"], "options has name"),
        (["--backprop=store", "--options", "backprop=reversible"], "backprop is store, but options has"),
        (["--exact=14", "--options", "exact=10"], "exact is 14, but options has exact=10"),
        (["--cutout=8"], "cutout is 8, but the images of digits have an edge of 8"),
        (["--cutout=2", "--no-augment"], "cutout is 2, but nothing is augmented"),
        (["--rate-per-level"], "rate_per_level needs levels"),
        (["--schedule=step", "--milestones=-3"], "milestones are -3; expected numbers of at least 1"),
    ],
)
def test_odd_settings_get_one_sentence(words, message, tmp_path, capsys):
    code, _, err = command("train", *words, "--out", tmp_path / "run", capsys=capsys)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("[a-z]*"))


def test_a_run_without_a_name_leaves_a_directory_to_whoever_has_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with locked(tmp_path / "runs" / "hamiltonian-digits-digits-seed0"):
        code, out, err = command("train", *FLAGS, "--max-steps=1", capsys=capsys)
    assert code == 0, err
    assert "runs/hamiltonian-digits-digits-seed0-2" in out


@pytest.mark.parametrize("name", ["eval", "analyze"])
def test_a_negative_number_of_threads_gets_one_sentence(name, capsys):
    code, _, err = command(name, "hamiltonian-digits", "--threads", "-1", capsys=capsys)
    assert (code, err.strip()) == (2, f"revode {name}: --threads is -1; expected 0 to 1024")


def test_an_empty_options_in_a_file_gets_one_sentence(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  options:\n")
    code, _, err = command("train", "--config", file, "--out", tmp_path / "run", capsys=capsys)
    assert code == 2
    assert "expected settings, as h=0.05" in err


def test_an_endless_run_is_refused():
    with pytest.raises(ValueError, match="epochs is 'inf'; expected a whole number"):
        configure(epochs="inf")


def test_large_seeds_and_small_numbers_stay_what_they_are(tmp_path):
    assert configure(seed=1700000000123456789).execution.seed == 1700000000123456789
    assert configure(options={"h": "1e-3"}).model.options == {"h": 0.001}


def test_networks_for_stl_are_trained_on_stl():
    config = configure(model="hamiltonian-stl")
    assert (config.data.dataset, config.recipe) == ("stl10", "stl")


def be_stopped():
    with Interruption():
        signal.raise_signal(signal.SIGTERM)
        raise Interrupted(signal.SIGTERM, 0, None)


def test_a_signal_that_comes_too_late_to_stop_a_run_still_acts():
    seen = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGTERM)
            assert interruption.signal_number == signal.SIGTERM
            assert not seen
        assert seen == [signal.SIGTERM]
        with pytest.raises(Interrupted):
            be_stopped()
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)


class TestReproduction:
    def run_of(self, tmp_path):
        from revode_lab.reproduce.task import TrainingRun

        options = {"blocks": [1, 1], "channels": [4, 8]}
        settings = {"epochs": None, "max_steps": 4, "batch_size": 16, "checkpoint_every": 1, "report": False}
        run = TrainingRun(
            model="hamiltonian-digits", dataset="digits", recipe="digits", options=options, settings=settings
        )
        return run, Setup(tmp_path, threads=1)

    def test_what_is_measured_on_a_training_waits_for_its_end(self, tmp_path):
        from revode_lab.reproduce.depth import OverDepth

        run, place = self.run_of(tmp_path)
        with pytest.raises(TaskFailed, match="no result"):
            OverDepth(run=run, num_images=2).measure(place)
        run.execute(place)
        assert OverDepth(run=run, num_images=2).measure(place)["trained"]["gradient"]

    def test_a_stopped_training_goes_on_with_the_data_where_they_are_now(self, tmp_path, monkeypatch):
        run, place = self.run_of(tmp_path)
        config = run.config(Setup(tmp_path, data_root="/old/place", threads=1))

        class Stop(Exception):
            pass

        class StopAt:
            def on_step(self, model, step):
                if step == 2:
                    raise Stop

        configure_with_monitor = configure(**{**config.leaves(), "monitor_every": 1})
        with pytest.raises(Stop):
            train(configure_with_monitor, place.folder(run), monitors=[StopAt()])
        assert load("digits")
        result = run.execute(Setup(tmp_path, data_root="/new/place", threads=1))
        assert result["steps"] == 4
        assert "data_root: /new/place" in (place.folder(run) / "config.yaml").read_text()
