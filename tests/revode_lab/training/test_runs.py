"""The run directory: one writer, nothing overwritten in silence, metrics cut back to the checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import FLAGS, command

import revode
from revode_lab.system import locked
from revode_lab.training.run import MetricsLog, check_vacant, load_run, read_metrics, remove_run, vacant_folders


def test_two_processes_cannot_write_one_run(tmp_path):
    busy = pytest.raises(ValueError, match=f"another process \\({os.getpid()}\\)")
    with locked(tmp_path / "run"), busy, locked(tmp_path / "run"):
        pass
    with locked(tmp_path / "run"):
        pass


def test_the_lock_of_a_killed_process_does_not_block(tmp_path):
    script = (
        "import os, signal, sys; from pathlib import Path\nfrom revode_lab.system import locked\n"
        "with locked(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=240)
    assert child.returncode == -9
    assert (tmp_path / ".lock").exists()
    with locked(tmp_path):
        pass


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write to"), locked(tmp_path / "file" / "run"):
        pass

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValueError, match="Permission denied"), locked(tmp_path / "run"):
        pass


def test_a_run_is_not_overwritten_and_foreign_files_never_are(tmp_path):
    check_vacant(tmp_path / "new")
    (tmp_path / "notes.txt").write_text("mine")
    check_vacant(tmp_path)
    (tmp_path / "last.ckpt").write_text("")
    with pytest.raises(ValueError, match=r"--resume auto.*--overwrite"):
        check_vacant(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        check_vacant(tmp_path / "notes.txt")
    remove_run(tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_new_run_gets_a_new_name(tmp_path):
    stem = tmp_path / "a"
    assert next(vacant_folders(stem)) == stem
    stem.mkdir()
    (stem / "config.yaml").write_text("")
    assert next(vacant_folders(stem)) == tmp_path / "a-2"


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(step=1, loss=0.5)
    offset = log.sync()
    log.write(step=2, loss=0.25)
    log.close()
    with open(tmp_path / "metrics.jsonl", "ab") as stream:
        stream.write(b'{"step": 3, "lo')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    log = MetricsLog(tmp_path / "metrics.jsonl", offset)
    log.write(step=2, loss=0.125)
    log.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.125}]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device that is always full")
def test_metrics_on_a_full_disk_are_one_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = MetricsLog.__new__(MetricsLog)
    log.path = tmp_path / "metrics.jsonl"
    log._board = None
    log._stream = open(log.path, "wb")  # noqa: SIM115 (closed below)
    with pytest.raises(ValueError, match="No space left"):
        log.write(step=1)
    log.close()


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no training run"):
        load_run(tmp_path)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that comes with weights of hamiltonian-digits for the digits."""
    monkeypatch.setattr("revode.networks.files.PRETRAINED", tmp_path)
    model = revode.create_model("hamiltonian-digits", blocks=(2, 2), channels=(4, 8), norm="batch")
    revode.save(model, tmp_path / "hamiltonian-digits-digits.safetensors")


def test_weights_of_the_package_are_scored_on_test_images(package, capsys):
    code, out, _ = command(
        "eval", "hamiltonian-digits", "--pretrained", "digits", "--json", "--threads=1", capsys=capsys
    )
    score = json.loads(out)
    assert code == 0
    assert (score["run"], score["dataset"], score["split"], score["images"]) == (
        "hamiltonian-digits",
        "digits",
        "test",
        360,
    )
    code, out, _ = command("eval", "hamiltonian-digits", "--pretrained", "digits", "--threads=1", capsys=capsys)
    assert f"test accuracy {score['accuracy']:.2%}" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hamiltonian-74", "--pretrained", "cifar10"], "there are: hamiltonian-digits-digits"),
        (["hamiltonian-digits", "--pretrained", "digits", "--split", "train"], "leave --split out"),
    ],
)
def test_what_the_package_does_not_have_is_one_sentence(words, message, package, capsys):
    code, _, err = command("eval", *words, capsys=capsys)
    assert code == 2
    assert message in err


def test_weights_of_the_package_are_analysed_on_their_own_images(package, capsys):
    words = ["hamiltonian-digits", "--pretrained", "digits", "--json", "--num-images", "2", "--threads=1"]
    code, out, _ = command("analyze", *words, capsys=capsys)
    assert code == 0
    assert json.loads(out)["model"] == "hamiltonian-digits (digits)"


def in_a_process(folder: Path, *flags: str, **environment: str) -> subprocess.Popen[str]:
    """A tiny training in a process of its own."""
    words = [sys.executable, "-m", "revode_lab.cli", "train", "--out", str(folder), *FLAGS, "--max-steps=2", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen(words, env={**os.environ, **environment}, **pipes)


def test_a_path_that_is_not_ascii_works_where_the_locale_is(tmp_path):
    folder = tmp_path / "r\u00fcn-\u00e9"
    process = in_a_process(
        folder,
        "--report",
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
        PYTHONIOENCODING="utf-8:surrogateescape",
    )
    out, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (0, "")
    assert f"  {folder / 'report.html'}" in out
    assert folder.name in (folder / "report.html").read_text(encoding="utf-8")


def test_a_reader_that_leaves_after_one_line_leaves_a_finished_run(tmp_path):
    """As ``revode train | head -1``."""
    process = in_a_process(tmp_path / "run")
    assert process.stdout is not None
    assert process.stderr is not None
    assert "training" in process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(timeout=240), err) == (0, "")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 2
    process.stderr.close()
