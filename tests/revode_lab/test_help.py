"""Every ``--help`` fits a terminal of 80 columns."""

from __future__ import annotations

import pytest

from revode_lab.cli import COMMANDS, main


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
