"""The command as a process: signals, full disks, and two processes that train as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_runs import FLAGS, read_rows, tiny, without_batch_statistics
from warm import COMMAND, WarmProcess

from revode_lab.system import locked, read_json
from revode_lab.training import train
from revode_lab.training.distributed import ProcessFailed, train_in_processes
from revode_lab.training.run import load_run, score_run
from revode_lab.training.terminal import Interrupted

HERE = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_prints_how_to_go_on(number, code, tmp_path):
    words = [word for word in FLAGS if "max-steps" not in word]
    words += ["--max-steps=100000", "--evaluate-every=0", "--out", tmp_path / "run"]
    process = WarmProcess([*COMMAND, "train", *words], env=ENVIRONMENT, stdout=subprocess.PIPE)
    wait_for_metrics(tmp_path / "run", lambda: process.poll() is None)
    process.send_signal(number)
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, err
    assert f"revode train --out {tmp_path / 'run'} --resume auto" in out
    assert (
        torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["step"] == read_rows(tmp_path / "run")[-1]["step"]
    )
    assert "Traceback" not in err


def test_a_full_disk_ends_in_one_sentence_with_the_last_checkpoint_whole(tmp_path):
    """A limit on the size of files stands for the disk: checkpoints fit at first, and then one grows beyond it."""
    script = (
        "import resource, sys; from pathlib import Path; from tiny_runs import FLAGS\n"
        "from revode_lab.cli import main; from revode_lab.training import checkpoint\n"
        "write = checkpoint.write_atomically\n"
        "def limited(path, data, *rest, **more):\n"
        "    if path.name == 'last.ckpt' and path.exists():\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))\n"
        "    return write(path, data, *rest, **more)\n"
        "checkpoint.write_atomically = limited\n"
        "sys.exit(main(['train', *FLAGS, '--out', sys.argv[1]]))"
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": HERE}
    words = [sys.executable, "-c", script, str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 2, done.stderr
    assert "File too large" in done.stderr
    assert "make room" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["step"] == 5
    assert not [name for name in os.listdir(tmp_path / "run") if name.endswith(".part")]


def torchrun(script: Path, folder: Path, *words: str, expect: int = 0) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**ENVIRONMENT, "PYTHONPATH": HERE, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*command, str(folder), *words], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == expect, done.stderr[-3000:]
    return done.stdout


TWO = Path(__file__).with_name("train_in_group.py")


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_rows(folder, "train")]


def test_two_processes_train_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr("revode_lab.training.job.build", without_batch_statistics)
    settings = {"max_steps": 20, "lr": 0.1, "ema": 0.9}
    train(tiny(**settings), tmp_path / "one")
    out = torchrun(TWO, tmp_path / "two", "max_steps=20", "lr=0.1", "ema=0.9")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert [row["accuracy"] for row in read_rows(tmp_path / "two", "evaluation")] == pytest.approx(
        [row["accuracy"] for row in read_rows(tmp_path / "one", "evaluation")], abs=0.01
    )
    assert out.count("done: ") == 1


def test_two_processes_see_the_images_of_each_level_as_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr("revode_lab.training.job.build", without_batch_statistics)
    levels = "18@4:1,18@8:1"
    train(tiny(levels=levels, epochs=2, max_steps=None, lr=0.1), tmp_path / "one")
    torchrun(TWO, tmp_path / "two", f"levels={levels}", "epochs=2", "max_steps=none", "lr=0.1")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert len(read_rows(tmp_path / "two", "level")) == 1


@pytest.mark.slow
def test_two_processes_stop_together_and_resume(tmp_path, monkeypatch):
    monkeypatch.setattr("revode_lab.training.job.build", without_batch_statistics)
    settings = ["max_steps=12", "lr=0.1", "ema=0.9"]
    torchrun(TWO, tmp_path / "whole", *settings)
    torchrun(TWO, tmp_path / "stopped", *settings, "stop_at=7", expect=1)
    assert torch.load(tmp_path / "stopped" / "last.ckpt", weights_only=True)["step"] in (7, 8)
    torchrun(TWO, tmp_path / "stopped", *settings)
    assert losses(tmp_path / "stopped") == pytest.approx(losses(tmp_path / "whole"), abs=1e-6)
    train(tiny(max_steps=12, lr=0.1, ema=0.9), tmp_path / "one")
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


def test_a_function_trains_in_processes_and_finds_the_run_again(tmp_path, capfd, request):
    config = tiny(evaluate_every=0)
    result = train_in_processes(config, tmp_path / "run", 2)
    assert result == read_json(tmp_path / "run" / "result.json")
    assert result["steps"] == config.optimization.max_steps
    assert "12" in capfd.readouterr().out
    request.getfixturevalue("warm_processes")
    assert train_in_processes(config, tmp_path / "run", 2) == result
    assert "nothing is left to do" in capfd.readouterr().out


def test_a_process_that_fails_ends_the_others(tmp_path, capfd, warm_processes):
    config = tiny(lr=1e30, schedule="constant", evaluate_every=0)
    with pytest.raises(ProcessFailed, match=r"failed in one of 2 processes \(exit codes \[3, 3\]\)"):
        train_in_processes(config, tmp_path / "run", 2)
    assert "diverged at step" in capfd.readouterr().err


def test_bad_input_is_bad_input_of_the_caller_too(tmp_path, capfd, warm_processes):
    config = tiny(dataset="cifar10", data_root=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="was refused, as said above"):
        train_in_processes(config, tmp_path / "run", 2)
    assert "nowhere" in capfd.readouterr().err


def test_processes_are_scored_with_the_statistics_that_are_kept(tmp_path, warm_processes):
    result = train_in_processes(tiny(options={"norm": "batch"}, lr=0.5), tmp_path / "run", 2)
    score = score_run(load_run(tmp_path / "run"))
    assert score.loss == pytest.approx(result["test_loss"], rel=1e-5)
    assert score.accuracy == result["test_accuracy"]


def test_bad_input_that_only_the_leader_finds_is_one_sentence(tmp_path, capfd, warm_processes):
    with pytest.raises(ValueError, match="was refused"):
        train_in_processes(tiny(exact=23, options={"h": 5.0}), tmp_path / "run", 2)
    (line,) = capfd.readouterr().err.splitlines()
    assert "exact=23 holds states of magnitude below 2 only" in line


def test_a_directory_in_use_is_one_sentence(tmp_path, capfd, warm_processes):
    with locked(tmp_path / "run"), pytest.raises(ValueError, match="was refused"):
        train_in_processes(tiny(), tmp_path / "run", 2)
    (line,) = capfd.readouterr().err.splitlines()
    assert "is working in" in line


def test_a_signal_reaches_all_processes_and_the_run_goes_on(tmp_path, warm_processes):
    folder, before = tmp_path / "run", signal.getsignal(signal.SIGTERM)

    def listening() -> bool:
        return signal.getsignal(signal.SIGTERM) is not before

    def interrupt() -> None:
        wait_for_metrics(folder, lambda: True)
        if listening():
            os.kill(os.getpid(), signal.SIGTERM)

    settings = {"evaluate_every": 0, "schedule": "constant"}
    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(Interrupted, match="the run is saved") as stopped:
        train_in_processes(tiny(max_steps=100000, **settings), folder, 2)
    sender.join()
    assert stopped.value.exit_code == 143
    step = read_rows(folder)[-1]["step"]
    assert torch.load(folder / "last.ckpt", weights_only=True)["step"] == step
    train_in_processes(tiny(max_steps=step + 2, **settings), folder, 2)
    assert [row["step"] for row in read_rows(folder, "train")] == list(range(1, step + 3))  # none twice, none left out


def wait_for_metrics(folder: Path, going: Callable[[], bool]) -> None:
    """Until the run has written its first line, while it is `going`."""
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 240
    while going() and time.monotonic() < deadline:
        if metrics.exists() and metrics.stat().st_size:
            return
        time.sleep(0.02)
