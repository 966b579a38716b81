"""``revode analyze``: sentences, numbers and a page for every family; one sentence and exit code 2 for bad input."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from small_networks import FAMILIES, NAMED, images, small_network

import revode
from revode_lab.cli import main
from revode_lab.stability import analyze
from revode_lab.stability.report import CALM, sentences, summary, verdict, write_page


@pytest.fixture(scope="module")
def results():
    return {
        family: analyze(small_network(family), images(), name=NAMED[family]) for family in ("hamiltonian", "revnet")
    }


@pytest.fixture(scope="module")
def page(results, tmp_path_factory):
    return write_page(list(results.values()), tmp_path_factory.mktemp("pages") / "new", "digits")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_analysed(family):
    found = analyze(small_network(family), images(2))
    numbers = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert numbers["perturbation_growth"] > 0
    assert (numbers["step_usage"] is None) == (family == "revnet")
    assert len(numbers["signal_norms"]) == len(numbers["gradient_norms"])
    assert set(sentences(found)) >= {"step size", "perturbations", "signals", "eigenvalues", "reversing", "sensitivity"}


def test_sentences_carry_the_numbers_of_the_run(results):
    found = results["hamiltonian"]
    said = sentences(found)
    assert f"uses {found.tightest.usage:.0%} of its bound" in said["step size"]
    assert "At h = 0.1" in said["step size"]
    assert f"grow {found.lyapunov.growth:.3g} times over {found.num_layers} layers" in said["perturbations"]
    assert "on the imaginary axis" in said["eigenvalues"]
    assert "bit for bit" in said["reversing"]
    assert "no bound" in sentences(results["revnet"])["step size"]
    assert "leave the imaginary axis" in sentences(results["revnet"])["eigenvalues"]


def test_the_verdict_comes_first(results, page):
    calm, wild = verdict(results["hamiltonian"]), verdict(results["revnet"])
    assert "is stable on these images" in calm
    assert html.escape(calm) == re.findall(r"<p>(.*?)</p>", page.read_text())[0]
    assert ("is not stable" in wild) == (results["revnet"].lyapunov.growth >= CALM)
    steep = dataclasses.replace(results["hamiltonian"].tightest, h=1.0, sharp=0.5)
    found = verdict(dataclasses.replace(results["hamiltonian"], bounds=[steep]))
    assert "is not stable on these images: a step uses 200% of its bound." in found


def test_summary_fits_80_columns(results):
    text = summary(list(results.values()), "digits")
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_page_is_complete_and_self_contained(results, page):
    text = page.read_text()
    assert text.count("<figure>") == 8
    assert "http://" not in text
    assert "https://" not in text
    assert "<script" not in text
    for label in ("1/time", "depth, blocks", "% of its bound", "change of H, %", "input standard deviations"):
        assert label in text
    for row in sentences(results["hamiltonian"]).values():
        assert row[:40] in text.replace("&#x27;", "'")
    numbers = json.loads((page.parent / "stability.json").read_text())
    assert [entry["model"] for entry in numbers] == ["hamiltonian-74", "revnet-38"]


def test_analysis_leaves_the_model_alone():
    model = small_network("revnet").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    analyze(model, images(2))
    assert model.training
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


TINY = "blocks=[2,2],channels=[8,16]"


def test_command_prints_a_summary_and_writes_a_page(tmp_path, capsys):
    assert main(["analyze", "hamiltonian-digits", "--options", TINY, "--num-images", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "hamiltonian-digits, 2 images (digits)" in printed
    assert max(map(len, printed.splitlines())) <= max(80, len(str(tmp_path)) + 30)
    assert (tmp_path / "stability.html").exists()


def test_command_prints_json_and_writes_nothing_unasked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    array = tmp_path / "images.npy"
    np.save(array, np.random.default_rng(0).standard_normal((3, 1, 8, 8)))
    args = [
        "analyze",
        "hamiltonian-digits",
        "--json",
        "--dataset",
        str(array),
        "--options",
        f"{TINY},h=0.2",
    ]
    assert main(args) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["images"] == 3
    assert numbers["bounds"][0]["h"] == 0.2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images.npy"]


def test_command_reads_saved_weights_and_compares(tmp_path, capsys):
    model = revode.create_model("hamiltonian-digits", blocks=(2, 2), channels=(8, 16))
    revode.save(model, tmp_path / "net.safetensors")
    revode.save(model, tmp_path / "same.safetensors")
    args = [
        "analyze",
        str(tmp_path / "net.safetensors"),
        "--against",
        str(tmp_path / "same.safetensors"),
        "--num-images",
        "2",
        "--json",
    ]
    assert main(args) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert [entry["model"] for entry in numbers] == [
        "hamiltonian-digits (net.safetensors)",
        "hamiltonian-digits (same.safetensors)",
    ]
    assert numbers[0]["perturbation_growth"] == numbers[1]["perturbation_growth"]


@pytest.mark.slow
def test_command_analyses_a_monitored_run_in_its_own_directory(tmp_path, capsys):
    run = str(tmp_path / "run")
    train = ["train", "hamiltonian-digits", "--out", run, "--max-steps", "2", "--monitor", "--monitor-every", "1"]
    assert main(train) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"perturbation_growth", "step_usage", "reconstruction_error"} <= set(
        next(line for line in lines if line["kind"] == "monitor")
    )
    capsys.readouterr()
    assert main(["analyze", run, "--num-images", "2"]) == 0
    assert "hamiltonian-digits (run), 2 images (digits)" in capsys.readouterr().out
    assert (tmp_path / "run" / "stability.html").exists()


def bad_inputs(tmp_path):
    broken = revode.create_model("hamiltonian-digits")
    next(broken.parameters()).data.fill_(float("nan"))
    revode.save(broken, tmp_path / "nan.safetensors")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.yaml").write_text("model: hamiltonian-digits\n")
    np.save(tmp_path / "flat.npy", np.zeros((3, 8)))
    return {
        "NaN or infinity": [str(tmp_path / "nan.safetensors")],
        "no training run": [str(tmp_path / "empty")],
        "unfinished": [str(tmp_path / "unfinished")],
        "no run and no file": [str(tmp_path / "absent")],
        "nearest|did you mean": ["hamiltonian-7x"],
        "unknown data set": ["hamiltonian-digits", "--dataset", "imagenet"],
        "expected numbers of shape": ["hamiltonian-digits", "--dataset", str(tmp_path / "flat.npy")],
        "at least 1": ["hamiltonian-digits", "--num-images", "0"],
        "expected settings, as h=0.05": ["hamiltonian-digits", "--options", "h"],
        "unknown option": ["hamiltonian-digits", "--options", "depth=3"],
    }


def test_bad_input_gets_one_sentence_and_exit_code_2(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for message, args in bad_inputs(tmp_path).items():
        assert main(["analyze", *args]) == 2, args
        said = capsys.readouterr().err.strip()
        assert said.startswith("revode analyze: "), said
        assert len(said.splitlines()) == 1, said
        assert re.search(message, said), said


def test_help_answers_without_torch():
    code = "import sys; from revode_lab.cli import main\ntry: main(['analyze', '--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "example: revode analyze hamiltonian-74" in done.stdout


@pytest.mark.browser
def test_page_shows_in_a_browser(page, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on PATH")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    done = subprocess.run(
        [
            browser,
            *flags,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=420,900",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.count("<figure>") == 8
    assert "Refused to" not in done.stderr
    assert "CONSOLE" not in done.stderr


@pytest.mark.slow
def test_hamiltonian_218_on_32_images_takes_under_a_minute_and_a_gigabyte(tmp_path):
    """In a process of its own; seconds are those of the CPU, so that a busy machine does not fail it."""
    program = f"""
import time
from revode_lab.cli import main
from revode_lab.system import peak
assert main(["analyze", "hamiltonian-218", "--out", {str(tmp_path)!r}, "--threads", "1"]) == 0
print(time.process_time(), peak())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, peak = map(float, done.stdout.split()[-2:])
    assert seconds < 60
    assert peak < 1e9


def test_a_resnet_stands_beside_a_hamiltonian_network(tmp_path, capsys):
    words = [
        "--options",
        "blocks=[1,1],channels=[4,8]",
        "--against",
        "resnet-14",
        "--num-images",
        "2",
        "--threads",
        "1",
    ]
    assert main(["analyze", "hamiltonian-digits", *words, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    rows = {line[:27].strip(): line[27:].split() for line in text.split("page: ")[0].splitlines() if len(line) > 60}
    assert rows["largest real part"][1] == rows["reconstruction error"][1] == rows["h in use, of its bound"][1] == "–"
    assert all(float(number) > 0 for number in rows["growth of perturbations"] + rows["growth of the gradient"])
    first, second = json.loads((tmp_path / "stability.json").read_text())
    assert (second["model"], second["layers"], second["steps"]) == ("resnet-14", 14, 4)
    assert (second["bounds"], second["drift"], second["max_real_part"]) == ([], [], None)
    assert first["drift"]
    assert (tmp_path / "stability.html").read_text().count("<figure>") == 8


def test_a_resnet_alone_says_what_it_has_not(tmp_path, capsys):
    assert main(["analyze", "resnet-8", "--num-images", "2", "--threads", "1", "--out", str(tmp_path)]) == 0
    assert "Its blocks are not reversible" in capsys.readouterr().out


def test_two_networks_of_one_name_are_told_apart(tmp_path, capsys):
    common = ["--num-images", "2", "--out", str(tmp_path)]
    options = "blocks=[2,2],channels=[4,8],h=0.05"
    assert (
        main(["analyze", "hamiltonian-digits", "--options", options, "--against", "hamiltonian-digits", *common]) == 0
    )
    text = capsys.readouterr().out
    assert "hamiltonian-digits against hamiltonian-digits (2)" in text
    assert "hamiltonian-digits (2), perturbation 1" in (tmp_path / "stability.html").read_text()


def test_a_run_is_analysed_on_images_of_its_own_edge(tmp_path, capsys, monkeypatch):
    from revode_lab.commands import analyze as command
    from revode_lab.training import configure, train

    options = {"blocks": [2, 2], "channels": [4, 8]}
    settings = {"levels": "18@4:1,18@8:1", "max_steps": 1, "report": False, "options": options}
    train(configure(model="hamiltonian-74", dataset="digits", **settings), tmp_path / "run")
    seen = []
    found = command._images
    monkeypatch.setattr(command, "_images", lambda *args: seen.append(found(*args)) or seen[-1])
    assert main(["analyze", str(tmp_path / "run"), "--num-images", "2"]) == 0
    assert seen[0][0].shape == (2, 1, 4, 4)


def test_a_network_that_overflows_is_said_to(tmp_path, capsys):
    options = "blocks=[12,12],channels=[8,16],norm=batch,h=1e30"
    assert main(["analyze", "hamiltonian-digits", "--options", options, "--out", str(tmp_path)]) == 2
    assert "overflow on these images" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["empty", "archive", "complex"])
def test_a_file_that_is_no_array_of_images_is_refused(kind, tmp_path, capsys):
    path = tmp_path / "images.npy"
    if kind == "empty":
        path.touch()
    elif kind == "archive":
        np.savez(tmp_path / "images", np.zeros((2, 1, 8, 8)))
        (tmp_path / "images.npz").rename(path)
    else:
        np.save(path, np.zeros((2, 1, 8, 8), dtype=np.complex64))
    assert main(["analyze", "hamiltonian-digits", "--dataset", str(path), "--out", str(tmp_path)]) == 2
    assert "images.npy" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["hamiltonian", "midpoint", "leapfrog"])
def test_a_network_whose_pairs_go_on_can_be_analysed(family):
    model = small_network(family, transition="squeeze", blocks=(2, 2), channels=(4, 16))
    assert analyze(model, images(2)).reconstruction_error < 1e-4
