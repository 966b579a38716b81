"""Tasks are found again by what they are, stopped ones go on, and nothing is done twice."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from revode_lab.cli import main
from revode_lab.reproduce import BUDGETS, ITEMS
from revode_lab.reproduce.accuracy import spread
from revode_lab.reproduce.depth import OverDepth, StepCost
from revode_lab.reproduce.item import Budget, Findings, Item, Table, find_item, reproduce
from revode_lab.reproduce.task import Setup, Task, TrainingRun, listing
from revode_lab.system import locked
from revode_lab.training.distributed import Group
from revode_lab.training.job import Job
from revode_lab.training.loop import train
from revode_lab.training.terminal import Interrupted

SETTINGS = {"epochs": None, "max_steps": 6, "batch_size": 16, "evaluate_every": 0, "log_every": 1, "report": False}


def tiny_run(**changes) -> TrainingRun:
    values = {"model": "hamiltonian-digits", "dataset": "digits", "recipe": "digits", "settings": SETTINGS}
    return TrainingRun(**{**values, "options": {"blocks": [1, 1], "channels": [4, 8]}, **changes})


def tiny_item(*runs: Task) -> Item:
    return Item("levels-74", "tiny", {"smoke": Budget("A note.", "a few steps", runs)}, plain_findings)


def plain_findings(budget, outcomes):
    return Findings(
        [Table([{"run": o.task.title, "accuracy": f"{o.task.accuracy(o.result):.2f}"} for o in outcomes])], []
    )


def test_killed_between_runs_it_goes_on_with_the_next(tmp_path, monkeypatch):
    place = Setup(tmp_path / "runs", num_seeds=3)
    runs = [tiny_run(seed=seed) for seed in range(3)]
    execute = TrainingRun.execute
    done: list[int] = []

    def dies_at_the_second(self, place):
        if self.seed == 1:
            raise KeyboardInterrupt
        done.append(self.seed)
        return execute(self, place)

    monkeypatch.setattr(TrainingRun, "execute", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        reproduce(tiny_item(tiny_run()), place, tmp_path / "out")
    page = (tmp_path / "out" / "levels-74.md").read_text()
    assert "Incomplete: 1 of 3 tasks are finished." in page
    first = (place.folder(runs[0]) / "result.json").read_bytes()

    def counts(self, place):
        done.append(self.seed)
        return execute(self, place)

    monkeypatch.setattr(TrainingRun, "execute", counts)
    found = reproduce(tiny_item(tiny_run()), place, tmp_path / "out")
    assert done == [0, 1, 2]
    assert (place.folder(runs[0]) / "result.json").read_bytes() == first
    assert "3 of 3 finished" in found.files[0].read_text()


def test_an_interrupted_training_goes_on_from_its_checkpoint(tmp_path):
    run = tiny_run()
    whole, parts = Setup(tmp_path / "whole"), Setup(tmp_path / "parts")
    run.execute(whole)

    class Stop:
        def on_step(self, model, step):
            if step == 3:
                signal.raise_signal(signal.SIGTERM)
            return {}

    config = run.config(parts)
    config = replace(config, record=replace(config.record, monitor_every=1))
    with pytest.raises(Interrupted):
        train(config, parts.folder(run), monitors=[Stop()])
    assert parts.finished(run) is None
    found = run.execute(parts)
    assert found["steps"] == 6
    metrics = [(place.folder(run) / "metrics.jsonl").read_text() for place in (whole, parts)]
    assert metrics[0] == metrics[1]


def test_a_signal_gives_its_exit_code_and_the_same_command_finishes(tmp_path, monkeypatch, capsys):
    words = ["reproduce", "levels-74", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    execute = TrainingRun.execute

    def interrupted(self, place):
        raise Interrupted(signal.SIGTERM, 2, place.folder(self))

    monkeypatch.setattr(TrainingRun, "execute", interrupted)
    assert main(words) == 143
    assert "the same command goes on" in capsys.readouterr().out
    monkeypatch.setattr(TrainingRun, "execute", execute)
    assert main(words) == 0


def test_a_run_with_other_settings_has_another_directory():
    place = Setup(Path("runs"))
    assert place.folder(tiny_run()) == place.folder(tiny_run())
    others = [tiny_run(seed=1), tiny_run(fraction=0.5), tiny_run(settings={**SETTINGS, "lr": 0.3})]
    assert len({place.folder(run).name[-8:] for run in [tiny_run(), *others]}) == 4
    quiet = tiny_run(settings={**SETTINGS, "log_every": 5})
    assert quiet.digest == tiny_run().digest  # what is written down does not change what is found


def test_two_experiments_do_not_write_one_directory(tmp_path, capsys):
    place = Setup(tmp_path)
    with locked(tmp_path / "levels-74-smoke"), pytest.raises(ValueError, match="another process"):
        reproduce(tiny_item(tiny_run()), place, tmp_path / "out")
    with locked(place.folder(tiny_run())), pytest.raises(ValueError, match="another process"):
        reproduce(tiny_item(tiny_run()), place, tmp_path / "out")


def test_a_diverged_training_is_reported_and_the_others_are_done(tmp_path):
    runs = [tiny_run(model="resnet-32", settings={**SETTINGS, "lr": 1e30}), tiny_run()]
    found = reproduce(tiny_item(*runs), Setup(tmp_path), tmp_path / "out")
    assert list(found.problems) == [runs[0].title]
    assert "diverged" in found.files[0].read_text()
    assert json.loads(found.files[1].read_text())["finished"] == 1


def test_a_failed_measurement_is_reported(tmp_path, monkeypatch):
    failing = StepCost(model="hamiltonian-14", strategy="reversible", batch_size=2)

    def killed(*_: object, **__: object) -> None:
        raise RuntimeError("measuring failed: the process died")

    monkeypatch.setattr("revode_lab.fresh.in_fresh_process", killed)
    found = reproduce(tiny_item(failing, tiny_run()), Setup(tmp_path), tmp_path / "out")
    assert "the process died" in found.problems[failing.title]
    assert Setup(tmp_path).finished(failing) is None


def test_held_out_images_are_apart_and_stratified_at_every_share(tmp_path):
    for fraction in (1.0, 0.3):
        run = tiny_run(hold_out=200, fraction=fraction)
        job = Job(run.config(Setup()), Group(0, 1, torch.device("cpu")))
        assert job.validation_split is not None
        assert len(job.train_split) == run.num_images
        assert len(job.validation_split) == run.num_scored == 200
        counts = torch.bincount(job.validation_split.labels)
        assert int(counts.max() - counts.min()) <= 3
        assert run.num_steps == job.num_steps


def test_spread_names_mean_deviation_and_number():
    assert spread([64.0, 65.0, 66.0]) == "65.00 ± 1.00 % (n = 3)"
    assert spread([64.0]) == "64.00 % (n = 1)"
    assert spread([1.0, 3.0], "points", signed=True) == "+2.00 ± 1.41 points (n = 2)"
    assert spread([]) == "–"


def test_dry_run_lists_tasks_with_estimates_and_does_nothing(tmp_path, capsys):
    words = ["reproduce", "table-1", "--budget", "cpu", "--dry-run", "--runs", str(tmp_path / "runs")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "CPU budget: 32 epochs" in printed
    assert printed.count("  to do  ") == 5
    assert "TFLOP" in printed
    assert re.search(r"left to do: .* TFLOP, [\d.]+ (s|min|h) to [\d.]+ (s|min|h) at", printed.replace("\n", " "))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_tasks_of_every_item_are_listed_in_80_columns(budget, monkeypatch):
    monkeypatch.setattr("revode_lab.reproduce.task.measured_rate", lambda: 1e10)
    monkeypatch.setattr("revode_lab.reproduce.task.NetworkTask.forward_flops", lambda self: 10**9)
    for item in ITEMS:
        setup = Setup(budget=budget, data_root="no-such-folder")
        assert [line for line in listing(find_item(item).plan(setup).tasks, setup) if len(line) > 80] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tabel-1"], "nearest: table-1"),
        (["table-1", "--seeds", "0"], "--seeds is 0"),
        (["table-1", "--threads", "-1"], "--threads is -1"),
    ],
)
def test_bad_input_is_one_sentence(words, sentence, capsys):
    assert main(["reproduce", *words]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1


def test_missing_data_is_one_sentence_and_writes_nothing(tmp_path, capsys):
    words = ["reproduce", "table-1", "--budget", "cpu", "--data-root", str(tmp_path / "none")]
    assert main([*words, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2
    assert "revode data get cifar10" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_stl_test_split_is_looked_for_where_data_lie(tmp_path):
    place = Setup(budget="cpu", data_root=str(tmp_path))
    plan = find_item("table-2").plan(place)
    assert {task.hold_out for task in plan.tasks} == {1_000}
    assert "on 4,000 images" in plan.note
    (tmp_path / "stl10_binary").mkdir()
    (tmp_path / "stl10_binary" / "test_X.bin").touch()
    plan = find_item("table-2").plan(place)
    assert {task.hold_out for task in plan.tasks} == {0}
    assert "on 5,000 images" in plan.note


def test_trainings_in_processes_have_directories_and_a_command_of_their_own(tmp_path, warm_processes):
    run, cost = tiny_run(), StepCost(model="hamiltonian-26", strategy="store", dataset="cifar10", batch_size=1)
    one, two = Setup(tmp_path), Setup(tmp_path, processes=2)
    assert one.folder(run) != two.folder(run)
    assert one.folder(cost) == two.folder(cost)
    assert one.folder(OverDepth(run=run)) != two.folder(OverDepth(run=run))
    found = reproduce(tiny_item(run), two, tmp_path / "out")
    assert not found.problems
    assert (
        "`revode reproduce levels-74 --budget smoke --processes 2`" in (tmp_path / "out" / "levels-74.md").read_text()
    )
    assert two.finished(run) is not None
    assert one.finished(run) is None


def test_trainings_in_lower_precision_have_directories_and_a_command_of_their_own(tmp_path):
    run, place = tiny_run(), Setup(tmp_path, autocast="bfloat16")
    assert run.config(place).execution.autocast == "bfloat16"
    assert place.folder(run) != Setup(tmp_path).folder(run)
    found = reproduce(tiny_item(run), place, tmp_path / "out")
    assert not found.problems
    assert (
        "`revode reproduce levels-74 --budget smoke --autocast bfloat16`"
        in (tmp_path / "out" / "levels-74.md").read_text()
    )
    assert "autocast: bfloat16" in (place.folder(run) / "config.yaml").read_text()


def test_in_lower_precision_reversing_adds_no_error():
    """Batch norm turns a state's last bit into a fifth of the gradient (docs/grid.md), so such states lie on the grid."""
    lower = Setup(autocast="bfloat16")
    for model in ("hamiltonian-74", "midpoint-26", "revnet-38", "resnet-32"):
        run = TrainingRun(model=model, dataset="cifar10", recipe="quick")
        assert run.config(Setup()).model.exact == 0
        assert run.config(lower).model.exact == (0 if model == "resnet-32" else 14)
    chosen = TrainingRun(model="hamiltonian-74", dataset="cifar10", recipe="quick", settings={"exact": 10})
    assert chosen.config(lower).model.exact == 10
    damped = TrainingRun(model="hamiltonian-74", dataset="cifar10", recipe="quick", options={"damping": 0.01})
    assert damped.config(lower).model.exact == 0  # the grid has no place for it


def test_a_process_that_fails_is_a_task_that_failed(tmp_path, warm_processes):
    run = tiny_run(settings={**SETTINGS, "lr": 1e30, "schedule": "constant"})
    found = reproduce(tiny_item(run), Setup(tmp_path, processes=2), tmp_path / "out")
    assert "failed in one of 2 processes" in found.problems[run.title]


def test_bad_input_of_a_process_stops_the_item(tmp_path, warm_processes):
    run = tiny_run(settings={**SETTINGS, "batch_size": 1})  # two processes cannot share one image
    with pytest.raises(ValueError, match="was refused"):
        reproduce(tiny_item(run), Setup(tmp_path, processes=2), tmp_path / "out")
