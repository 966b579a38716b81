"""The example on a neural ODE runs, and writes what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ode
import pytest


def test_the_spiral_is_measured_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchdiffeq", reason="torchdiffeq is not installed")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setattr(sys, "argv", ["ode.py", "--smoke", "--out", str(tmp_path / "out")])
    ode.main()
    result = json.loads((tmp_path / "out" / "ode.json").read_text())
    kept = {way: [row["bytes"] for row in rows.values()] for way, rows in result["over_steps"].items()}
    assert kept["torchdiffeq, stored"][1] == 2 * kept["torchdiffeq, stored"][0]
    assert kept["revode"][1] < 1.5 * kept["revode"][0] < 0.1 * kept["torchdiffeq, stored"][0]
    assert all(error < 1e-3 for row in result["errors"].values() for error in row.values())
    assert capsys.readouterr().out.count("\n| revode |") == 2
    written = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert written.keys() == {"ode.json", "ode.md", "ode.svg"}
    assert "<svg" in written["ode.svg"]
