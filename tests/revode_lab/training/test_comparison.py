"""Several runs on one page: what each reached, where they differ, how they got there."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from tiny_runs import command, tiny

from revode_lab.training import train
from revode_lab.training.comparison import _read, write_comparison


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    train(tiny(), home / "first")
    train(tiny(lr=0.05, options={"h": 0.2}), home / "second")
    train(tiny(levels="18@4:1,18@8:1", epochs=2, max_steps=None), home / "levels")
    train(tiny(), home / "stopped")
    for name in ("result.json", "model.safetensors"):
        (home / "stopped" / name).unlink()
    return home


def test_the_page_has_what_differs_and_nothing_that_is_equal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command("report", runs / "first", runs / "second", runs / "stopped", capsys=capsys)
    assert code == 0
    assert out.strip() == str(runs / "comparison.html")
    text = (runs / "comparison.html").read_text()
    settings = html.unescape(text[text.index("Settings that differ") : text.index("Curves")])
    found = re.findall(r"<tr><td>(\w+)</td>", settings)
    assert found == ["options", "lr"]
    assert "at step 12" in text  # the one that goes on
    assert text.count("<figure>") == 5  # accuracy and loss over epochs and minutes, and memory
    assert "http" not in re.sub("http-equiv", "", text)


def test_curves_lie_where_they_belong(runs: Path) -> None:
    epochs, losses = _read(runs / "first").curve("train", "loss", 1.0) or ([], [])
    assert epochs == pytest.approx([step / 8 for step in range(1, 13)])
    assert len(losses) == 12
    stopped = _read(runs / "stopped")
    assert (stopped.curve("train", "loss", 1.0) or ([], []))[0] == pytest.approx(epochs, rel=0.35)
    assert stopped.curve("train", "loss", 1.0, 60.0) is None  # nobody knows how long it will take
    run = _read(runs / "levels")
    hours, _ = run.curve("train", "loss", 1.0, 3600.0) or ([], [])
    assert hours[-1] == pytest.approx(run.result["seconds"] / 3600)
    assert hours[len(hours) // 2 - 1] == pytest.approx(hours[-1] / 5)  # images of a quarter of the area first


def test_equal_runs_are_said_to_be_equal(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "first").symlink_to(runs / "first")
    page = write_comparison([runs / "first", tmp_path / "first"], tmp_path / "both.html").read_text()
    assert "None: these runs have equal settings" in page
    assert f"{tmp_path.name}/first" in page  # equal names are told apart
    assert str(tmp_path) not in page


def test_what_is_no_run_is_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no training run"):
        write_comparison([runs / "first", tmp_path])
    with pytest.raises(ValueError, match="is a directory"):
        write_comparison([runs / "first", runs / "second"], tmp_path)
