"""Checkpoints under fire: cut, altered, foreign, and disks that fill up."""

from __future__ import annotations

import errno
import os
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from revode.files import write_atomically
from revode_lab.training import checkpoint
from revode_lab.training.checkpoint import LAST, PREVIOUS, read_checkpoint, read_newest, write_checkpoint

STATE = {"step": 7, "model": {"w": torch.arange(40.0)}, "rng": torch.get_rng_state(), "list": [1, None, "x"]}


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / LAST
    write_checkpoint(path, STATE)
    return path.read_bytes()


def test_a_checkpoint_reads_back_and_loads_with_weights_only(tmp_path):
    path = tmp_path / LAST
    write_checkpoint(path, STATE)
    for state in (read_checkpoint(path), torch.load(path, weights_only=True)):
        assert torch.equal(state["model"]["w"], STATE["model"]["w"])
        assert (state["step"], state["list"]) == (7, [1, None, "x"])
    assert os.listdir(tmp_path) == [LAST]


@given(st.data())
def test_a_file_cut_at_any_byte_is_refused(content, tmp_path, data):
    length = data.draw(st.integers(0, len(content) - 1))
    path = tmp_path / LAST
    path.write_bytes(content[:length])
    with pytest.raises(ValueError, match="damaged"):
        read_checkpoint(path)


def test_a_file_cut_at_its_last_bytes_is_refused(content, tmp_path):
    path = tmp_path / LAST
    for length in range(len(content) - 64, len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="damaged"):
            read_checkpoint(path)


def test_a_changed_weight_is_noticed(content, tmp_path):
    place = content.index(torch.arange(40.0).numpy().tobytes()) + 17
    altered = bytearray(content)
    altered[place] ^= 4
    path = tmp_path / LAST
    path.write_bytes(altered)
    with pytest.raises(ValueError, match="damaged"):
        read_checkpoint(path)


class Attack:
    def __reduce__(self):
        return os.mkdir, ("owned",)


def test_a_foreign_pickle_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"format": checkpoint.FORMAT, "step": Attack()}, LAST)
    with pytest.raises(ValueError, match="more than tensors"):
        read_checkpoint(tmp_path / LAST)
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ValueError, match="damaged"):
        read_checkpoint(tmp_path / "plain.ckpt")
    assert not (tmp_path / "owned").exists()


def test_another_programs_checkpoint_is_refused(tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / LAST)
    with pytest.raises(ValueError, match="not a checkpoint of"):
        read_checkpoint(tmp_path / LAST)
    with pytest.raises(ValueError, match="cannot read"):
        read_checkpoint(tmp_path / "absent.ckpt")


def test_the_previous_checkpoint_steps_in_for_a_damaged_one(tmp_path):
    notes: list[str] = []
    assert read_newest(tmp_path, notes.append) is None
    for step in (1, 2):
        write_checkpoint(tmp_path / LAST, {**STATE, "step": step}, tmp_path / PREVIOUS)
    assert read_newest(tmp_path, notes.append)["step"] == 2
    assert notes == []
    (tmp_path / LAST).write_bytes((tmp_path / LAST).read_bytes()[:-3])
    assert read_newest(tmp_path, notes.append)["step"] == 1
    assert "going back" in notes[0]
    (tmp_path / PREVIOUS).write_bytes(b"")
    with pytest.raises(ValueError, match="no good checkpoint is left"):
        read_newest(tmp_path, notes.append)


@pytest.mark.parametrize("function", ["fsync", "replace", "link"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_failing_disk_leaves_the_last_checkpoint_whole(function, code, tmp_path, monkeypatch):
    write_checkpoint(tmp_path / LAST, {**STATE, "step": 1}, tmp_path / PREVIOUS)
    write_checkpoint(tmp_path / LAST, {**STATE, "step": 2}, tmp_path / PREVIOUS)

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        if function == "link":  # file systems without links take two renames
            write_checkpoint(tmp_path / LAST, {**STATE, "step": 3}, tmp_path / PREVIOUS)
        else:
            with pytest.raises(ValueError, match=os.strerror(code)):
                write_checkpoint(tmp_path / LAST, {**STATE, "step": 3}, tmp_path / PREVIOUS)
    assert read_newest(tmp_path, print)["step"] == (3 if function == "link" else 2)
    assert sorted(os.listdir(tmp_path)) == [LAST, PREVIOUS]


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write"):
        write_atomically(tmp_path / "file" / "x", b"")
