"""The example on fine-tuning runs on made-up reviews, and goes on where it stopped."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import fine_tune
import pytest
import torch


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, *flags: str) -> dict[str, Any]:
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["fine_tune.py", "--smoke", "--threads", "1", *folders, *flags])
    fine_tune.main()
    return json.loads((tmp_path / "out" / "fine-tune.json").read_text())["runs"]


def test_every_conversion_learns_and_a_second_call_computes_nothing(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="the encoder is from transformers")
    found = run(monkeypatch, tmp_path, "--epochs", "6")
    assert "train-BDIA(1/16)-0" in capsys.readouterr().out
    for way in fine_tune.CONVERSIONS:
        assert found[f"train-{way}-0"]["accuracy"] > 0.9, way
        exactly_plain = way.startswith(("BDIA", "plain"))
        assert (found[f"before-{way}"]["cosine"] > 1 - 1e-6) == exactly_plain
    kept = found["deep"]["kept"]
    assert kept[fine_tune.DEFAULT] < kept["checkpoint of each layer"] < 0.2 * kept["plain"]
    page = (tmp_path / "out" / "fine-tune.md").read_text()
    assert all(f"| {way} | " in page for way in fine_tune.CONVERSIONS)
    run(monkeypatch, tmp_path, "--minutes", "0")
    assert "train-" not in capsys.readouterr().out


def test_batches_hold_every_snippet_once_with_its_mask():
    reviews = fine_tune.Reviews([[n + 1] * (n % 7 + 1) for n in range(50)], [n % 2 for n in range(50)])
    seen = []
    for tokens, mask, labels in fine_tune.batches(reviews, 8, random.Random(0)):
        assert torch.equal(mask, (tokens != 0).long())
        seen += [(row[row != 0].tolist(), int(label)) for row, label in zip(tokens, labels, strict=True)]
    assert sorted(seen) == sorted(zip(reviews.tokens, reviews.labels, strict=True))
