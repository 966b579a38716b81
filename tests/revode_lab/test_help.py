"""Every ``--help`` fits a terminal of 80 columns, and examples have one, too."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from revode_lab.cli import COMMANDS, main
from revode_lab.reproduce import BUDGETS, ITEMS


@pytest.mark.parametrize(
    "words", [[], *([name] for name in COMMANDS), ["data", "get"], ["data", "check"]], ids=" ".join
)
def test_help_fits_80_columns(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--help"])
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if len(line) > 80] == []


def test_every_item_of_the_paper_has_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["reproduce", "--help"])
    starts = [line.split()[0] for line in capsys.readouterr().out.splitlines() if re.match(r"  [a-z]", line)]
    assert [word for word in starts if word in ITEMS or word in BUDGETS] == [*ITEMS, *BUDGETS]


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_help_of_an_example_runs_nothing(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(path), run_name="__main__")
    assert stopped.value.code == 0
    assert "usage:" in capsys.readouterr().out


def run_example(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_picture_of_the_readme_is_drawn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_example("memory_over_depth.py", ["--depths", "3", "8", "--figure", str(tmp_path / "x.svg")], monkeypatch)
    said = capfd.readouterr().out
    assert "13 of 13 gradients equal the stored ones bit for bit" in said
    assert "49,152 of 49,152 pixels of the image are found bit for bit" in said
    assert "after 8 blocks" in (tmp_path / "x.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["memory_budget.py", "gradients_in_bfloat16.py", "refinement.py"])
@pytest.mark.filterwarnings("ignore::revode.DriftWarning")
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes half a minute at most; the other examples have tests of their own."""
    run_example(name, [], monkeypatch)
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_gpu_check_runs_on_a_cpu_and_finds_nothing_suspicious(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the compiled method, whose compiling takes minutes; a failure of a method would be named as suspicious."""
    words = ["gpu_check.py", "--small", "--device", "cpu", "--methods", "store,checkpoint,reversible,exact"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(EXAMPLES / "gpu_check.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("| reversible |") == 3
    assert said.count("| equal |") >= 3
    assert "Suspicious: nothing." in said


def test_gpu_check_names_what_fails_and_what_is_wrong() -> None:
    check = runpy.run_path(str(EXAMPLES / "gpu_check.py"))
    found = {"store": (1.0, 100, 1e-7), "reversible": (1.9, 90, 1e-2), "exact": (1.3, 20, 1e-5)}
    found["compiled"] = (2.5, 20, 1e-7)
    odd = check["suspicions"]("stage", found, False)
    assert [line.split(":")[0] for line in odd] == ["stage, reversible"] * 3 + ["stage, compiled"]
