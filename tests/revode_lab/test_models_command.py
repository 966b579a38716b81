"""``revode models``: the list, the bill of one network, and JSON for both."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import revode
from revode_lab.cli import main
from revode_lab.commands.models import _bill

KEYS = "name family layers units channels params_cifar10 params_cifar100 paper_params_cifar10_m paper_params_cifar100_m".split()


@pytest.fixture(scope="module")
def rows():
    from revode.networks.zoo import summarize_all

    return summarize_all()


def test_list_names_every_network_in_80_columns(rows, capsys, monkeypatch):
    monkeypatch.setattr("revode.networks.zoo.summarize_all", lambda: rows)
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text
    assert all(name in text for name in revode.list_models())
    assert "429,690       0.43" in text


def test_json_list_has_the_papers_figures_beside_ours(rows, capsys, monkeypatch):
    monkeypatch.setattr("revode.networks.zoo.summarize_all", lambda: rows)
    assert main(["models", "--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(found) == revode.list_models()
    assert all(list(row) == KEYS for row in found.values())
    row = found["hamiltonian-74"]
    assert (row["layers"], row["units"], row["channels"]) == (74, [6, 6, 6], [32, 64, 112])
    assert (row["params_cifar10"], row["params_cifar100"]) == (429_690, 439_860)
    assert (row["paper_params_cifar10_m"], row["paper_params_cifar100_m"]) == (0.43, 0.44)


@pytest.mark.parametrize("name", ["hamiltonian-26", "midpoint-26-stl", "resnet-32", "revnet-110"])
def test_bill_fits_80_columns(name, capsys):
    assert main(["models", name, "--batch-size", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1].startswith("total")
    assert sum(line.startswith("unit") for line in lines) == 3


def test_wide_columns_of_a_bill_stay_apart():
    kept = {"reversible": 512_500_000, "checkpoint": 21_130_000_000, "store": 83_270_000_000}
    unit = {"name": "unit 1", "blocks": 101, "shape": [128, 24, 24], "params": 9_699_338, "flops_per_image": 5.09767e10}
    unit["activation_bytes"] = kept
    whole = {"layers": 1202, "image_shape": [3, 96, 96], "config": {"h": 0.1}, "batch_size": 100, "stages": [unit]}
    *_, line, total = _bill(unit | whole)
    assert line.split() == "unit 1 101 128x24x24 9,699,338 50,976.7 512 MB 21.1 GB 83.3 GB".split()
    assert max(len(line), len(total)) <= 80


def test_bill_as_json_adds_up(capsys):
    assert main(["models", "hamiltonian-26", "--json", "--image-size", "16"]) == 0
    bill = json.loads(capsys.readouterr().out)
    for strategy, total in bill["activation_bytes"].items():
        assert sum(stage["activation_bytes"][strategy] for stage in bill["stages"]) == total
    assert bill["image_shape"] == [3, 16, 16]


def test_a_volume_that_would_not_fit_is_billed_at_once(capsys):
    assert main(["models", "unet-3d", "--image-size", "1600,1920,1600", "--json"]) == 0
    bill = json.loads(capsys.readouterr().out)
    assert (bill["image_shape"], bill["batch_size"]) == ([1, 1600, 1920, 1600], 1)
    kept = bill["activation_bytes"]
    assert kept["store"] > 6e12 > kept["checkpoint"] > 3e12 > 1e12 > kept["reversible"]


@pytest.mark.parametrize("edges", ["160,192,160", "1600,1920,1600"])
def test_bill_of_volumes_fits_80_columns(edges, capsys):
    assert main(["models", "unet-3d", "--image-size", edges]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert (
        "2.52 TB" if edges.startswith("1600") else "unit 3         4 64x40x48x40    221,696   67.9    19.7 MB"
    ) in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["models", "hamiltonain-74"], "nearest: hamiltonian-74"),
        (["models", "--batch-size", "3"], "give its NAME"),
        (["models", "hamiltonian-26", "--batch-size", "0"], "batch_size must be a positive integer"),
        (["models", "hamiltonian-26", "--image-size", "2"], "takes images"),
        (["models", "unet-3d", "--image-size", "160,192"], "one edge or 3 of them, got (160, 192)"),
        (["train", "unet-2d"], "unet-2d scores every point"),
        (["analyze", "unet-2d"], "unet-2d scores every point"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(argv, message, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_help_has_an_example_and_does_not_load_torch():
    call = "main(['models', '--help'])"
    code = f"import sys\nfrom revode_lab.cli import main\ntry: {call}\nfinally: assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "example: revode models" in result.stdout
