"""The example on volumes runs on its phantom, and splits it as it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
import volumes

SCRIPT = Path(__file__).parents[1] / "examples" / "volumes.py"


def test_the_phantom_is_segmented_and_drawn(tmp_path, monkeypatch, capsys):
    """The default learns in 25 steps: an earlier one had a Dice of 0.43 after as many."""
    command = [
        "volumes.py",
        "--smoke",
        "--steps",
        "25",
        "--lr",
        "5e-3",
        "--threads",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    monkeypatch.setattr(sys, "argv", command)
    volumes.main()
    text = capsys.readouterr().out
    assert "Dice on 7 held-out planes of 25" in text
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["log"][-1]["loss"] < 0.5 * result["log"][0]["loss"]
    assert result["steps"] == 25
    for way in ("whole", "windows"):
        assert sum(list(result["dice"][way].values())[1:]) / 3 > 0.75
    assert result["bytes_peak"] > result["bytes_kept"] > 0
    monkeypatch.setattr(sys, "argv", [*command, "--score"])
    volumes.main()
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written >= {"slices.png", "memory-over-depth.svg", "memory-over-volume.svg", "unet.safetensors"}


def test_a_step_is_predicted_and_measured():
    """In a process of its own, whose peak it tells."""
    command = [sys.executable, str(SCRIPT), "--smoke", "--threads", "1", "--step", "reversible"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "reversible, 1 blocks a unit, float32" in text
    assert "peak resident" in text


def test_a_quarter_is_held_out_and_its_labels_are_never_trained_on():
    held_out, with_margin = volumes.coronal(233), volumes.coronal(233, volumes.MARGIN)
    assert 0.2 < held_out.float().mean() < 0.3
    distance = (torch.arange(233)[:, None] - held_out.nonzero().flatten()).abs().min(1).values
    assert torch.equal(with_margin, distance <= volumes.MARGIN)


def test_dice_counts_points_in_common():
    found, truth = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2])
    assert volumes.dice(found, truth) == {"background": 1.0, "grey": 2 / 3, "white": 2 / 3, "other": 0.0}
