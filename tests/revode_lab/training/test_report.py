"""The report of a run: whole, offline, and shown by a browser without complaint."""

from __future__ import annotations

import base64
import io
import re
import shutil

import numpy as np
import pytest
import torch
from browser import Visit
from PIL import Image
from tiny_runs import command, tiny
from torch import nn

from revode import BDIA, MidPoint, ReversibleSequence
from revode.networks import create_model
from revode_lab.charts import pictures, shares
from revode_lab.stability.monitor import DEFAULT_QUANTITIES, MEANINGS
from revode_lab.training import load_run, train
from revode_lab.training.report import reconstruction_errors

HEADINGS = (
    "Training",
    "Memory",
    "Over depth",
    "Classes",
    "Configuration and environment",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("report") / "run"
    train(tiny(max_steps=20, ema=0.5, report=True), folder)
    return folder


def test_the_report_has_every_part_and_requests_nothing(run):
    text = (run / "report.html").read_text()
    for heading in HEADINGS:
        assert f"<h2>{heading}</h2>" in text
    assert text.count("<figure>") == 11
    assert "The first mistakes" in text
    assert "http://" not in text
    assert "https://" not in text
    assert len(text) < 2_000_000


def test_the_same_run_gives_the_same_report(run, capsys):
    before = (run / "report.html").read_bytes()
    code, out, _ = command("report", run, capsys=capsys)
    assert code == 0
    assert out.strip() == str(run / "report.html")
    assert (run / "report.html").read_bytes() == before


def test_an_unfinished_run_has_a_report_too(run, tmp_path, capsys):
    for name in ("config.yaml", "metrics.jsonl", "last.ckpt"):
        shutil.copy(run / name, tmp_path / name)
    code, _, _ = command("report", tmp_path, capsys=capsys)
    assert code == 0
    assert "not finished" in (tmp_path / "report.html").read_text()
    assert command("report", tmp_path / "nowhere", capsys=capsys)[0] == 2


def test_reconstruction_errors_are_round_off_or_nothing_at_all(run):
    images = torch.randn(4, 1, 8, 8)
    model = load_run(run).model
    found = reconstruction_errors(model, images)
    assert [len(errors) for errors in found.values()] == [unit.num_blocks for unit in model.sequences()]
    assert all(0 <= error < 1e-5 for errors in found.values() for error in errors)
    exact = create_model("hamiltonian-digits", blocks=(3, 3), channels=(4, 8), exact=14)
    assert all(set(errors) == {0.0} for errors in reconstruction_errors(exact, images).values())


def test_reconstruction_errors_of_units_that_go_on_from_a_pair():
    model = create_model("midpoint-26", blocks=(3, 3, 3), channels=(16, 64, 256), transition="squeeze")
    found = reconstruction_errors(model, torch.randn(2, 3, 32, 32))
    assert [len(errors) for errors in found.values()] == [3, 3, 3]
    assert all(error < 1e-4 for errors in found.values() for error in errors)


@pytest.mark.parametrize(
    ("scheme", "exact", "tells"),
    [(MidPoint(0.5, blend=0.5), False, True), (MidPoint(0.5, blend=0.5), True, False), (BDIA(), False, False)],
)
def test_reconstruction_errors_of_schemes_that_halve(scheme, exact, tells):
    """On the grid they keep bits beside the pair; BDIA draws its signs. Neither walks back from the final pair alone."""
    branches = [nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(5)]
    model = nn.Sequential(nn.Flatten(), ReversibleSequence(branches, scheme, exact=exact))
    (errors,) = reconstruction_errors(model, torch.randn(4, 1, 3, 3)).values()
    assert len(errors) == (5 if tells else 0)
    assert all(error < 1e-5 for error in errors)


def test_an_exact_run_under_a_memory_budget_has_a_report_with_what_its_monitor_wrote(tmp_path):
    result = train(tiny(max_steps=1), tmp_path / "plain")["plan"]["activation_bytes"]
    options = {"memory_budget": (result["reversible"] + result["store"]) // 2}
    settings = {"exact": 14, "options": options, "monitor": True, "monitor_every": 1}
    train(tiny(max_steps=2, **settings, report=True), tmp_path / "run")
    text = (tmp_path / "run" / "report.html").read_text()
    assert "<h2>Over depth</h2>" in text
    assert "<h2>Stability while training</h2>" in text
    assert all(MEANINGS[name] in text for name in DEFAULT_QUANTITIES)  # nobody knows what "step usage" is


def test_a_report_that_fails_leaves_a_finished_run(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of ink")

    monkeypatch.setattr("revode_lab.training.report.write_report", fail)
    result = train(tiny(max_steps=1, report=True), tmp_path / "run")
    assert result["steps"] == 1
    assert "no report.html: RuntimeError: out of ink; `revode report" in capsys.readouterr().out


def test_many_classes_fit_one_matrix():
    names = [f"class{i}" for i in range(100)]
    assert "<text" in shares(torch.eye(100, dtype=torch.int64).tolist(), names, "predicted", "true")


@pytest.mark.browser
@pytest.mark.parametrize("size", ["1200,900", "390,844"])
def test_a_browser_shows_the_page_without_errors_or_requests(size, run):
    visit = Visit(run / "report.html", size)
    assert visit.document.count("<figure>") == 11
    assert visit.document.count("<svg") == 11
    assert visit.console == []
    assert visit.requests == []


@pytest.mark.browser
def test_the_browser_test_notices_requests_and_errors(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<img src='http://nowhere.invalid/x.png'><script>console.error('noticed')</script>")
    visit = Visit(page)
    assert "noticed" in visit.console[0]
    assert len(visit.requests) == 1


def test_colour_images_are_drawn_in_their_colours():
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)
    image[0], image[2] = 200, 50
    for given in (image, image / 255):
        (data,) = re.findall(r"data:image/png;base64,([^\"]+)", pictures([[(given, "red")]]))
        drawn = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
        middle = drawn[drawn.shape[0] // 2, drawn.shape[1] // 2].astype(int)
        assert np.abs(middle - [200, 0, 50]).max() <= 1
