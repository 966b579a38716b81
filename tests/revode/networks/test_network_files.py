"""A network and its file: what is saved is loaded, what is damaged is refused, nothing is half written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from network_gradients import images
from safetensors.torch import save_file

import revode
from revode.networks import files
from revode_lab.cli import main

NAMES = ["hamiltonian-26", "hamiltonian-1layer-14", "midpoint-14", "leapfrog-14", "revnet-14", "resnet-8"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loaded_network_computes_what_the_saved_one_did(name, dtype, tmp_path):
    model = revode.create_model(name, num_classes=4).to(dtype)
    x = images(model, dtype=dtype)
    model(x)  # moves running statistics
    revode.save(model, tmp_path / "net.safetensors")
    stream = torch.get_rng_state()
    loaded = revode.load(tmp_path / "net.safetensors")
    assert torch.equal(stream, torch.get_rng_state())
    assert loaded.config == model.config
    assert torch.equal(loaded.eval()(x), model.eval()(x))
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_strategy_can_be_chosen_when_loading(tmp_path):
    revode.save(revode.create_model("hamiltonian-26"), tmp_path / "net")
    assert revode.load(tmp_path / "net", backprop="store").sequences()[0].sequence.backprop == "store"


def test_saving_replaces_the_file_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "net.safetensors"
    revode.save(revode.create_model("resnet-8"), path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ValueError, match="disk full"):
        revode.save(revode.create_model("resnet-14"), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["net.safetensors"]


@pytest.mark.parametrize("length", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_refused(length, tmp_path):
    path = tmp_path / "net"
    revode.save(revode.create_model("resnet-8"), path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match="not a readable network file, truncated or foreign"):
        revode.load(path)


def test_foreign_files_are_refused(tmp_path):
    save_file({"weight": torch.zeros(2)}, str(tmp_path / "foreign"))
    (tmp_path / "text").write_text("weights: none\n" * 10)
    torch.save({"weight": torch.zeros(2)}, tmp_path / "pickle")
    with pytest.raises(ValueError, match=r"not a network saved by revode\.save"):
        revode.load(tmp_path / "foreign")
    for name in ("text", "pickle"):
        with pytest.raises(ValueError, match="not a readable network file"):
            revode.load(tmp_path / name)
    with pytest.raises(ValueError, match="not a readable network file"):
        revode.load(tmp_path)


def _write(path, config, tensors):
    save_file(tensors, str(path), {"format": files.FORMAT, "config": json.dumps(config)})


def test_mismatching_files_are_refused(tmp_path):
    model = revode.create_model("resnet-8")
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    _write(tmp_path / "classes", config | {"num_classes": 11}, tensors)
    with pytest.raises(ValueError, match=r"another shape, the first is 'head\.linear\.weight'"):
        revode.load(tmp_path / "classes")
    _write(tmp_path / "missing", config, {name: t for name, t in tensors.items() if name != "head.linear.bias"})
    with pytest.raises(ValueError, match=r"1 tensors are missing, .* 'head\.linear\.bias'"):
        revode.load(tmp_path / "missing")
    _write(tmp_path / "config", config | {"surprise": 1}, tensors)
    with pytest.raises(ValueError, match="'surprise'"):
        revode.load(tmp_path / "config")
    _write(tmp_path / "family", config | {"family": "__import__"}, tensors)
    with pytest.raises(ValueError, match="family must be one of"):
        revode.load(tmp_path / "family")
    _write(tmp_path / "type", config | {"blocks": "many"}, tensors)
    with pytest.raises(ValueError, match="blocks must be positive integers"):
        revode.load(tmp_path / "type")
    _write(tmp_path / "list", [1, 2], tensors)
    with pytest.raises(ValueError, match="not a"):
        revode.load(tmp_path / "list")


def test_a_missing_file_and_a_foreign_model_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        revode.load(tmp_path / "none")
    with pytest.raises(ValueError, match=r"save takes a network of revode\.create_model, got Linear"):
        revode.save(torch.nn.Linear(2, 2), tmp_path / "net")  # type: ignore[arg-type]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that comes with weights of hamiltonian-26 for the digits."""
    monkeypatch.setattr(files, "PRETRAINED", tmp_path)
    model = revode.create_model("hamiltonian-26", norm="batch", h=0.5, num_classes=4)
    revode.save(model, tmp_path / "hamiltonian-26-digits.safetensors")
    return model.eval()


def test_a_pretrained_network_has_its_weights_and_its_own_options(package):
    found = revode.create_model("hamiltonian-26", pretrained="digits")
    assert found.config == package.config
    x = images(package, dtype=torch.float32)
    assert torch.equal(found.eval()(x), package(x))


def test_the_strategy_of_a_pretrained_network_is_free(package):
    found = revode.create_model("hamiltonian-26", pretrained="digits", backprop="store", num_classes=4, h=0.5)
    assert found.config.backprop == "store"


@pytest.mark.parametrize("option", [{"h": 0.1}, {"norm": "none"}, {"num_classes": 10}, {"horizon": 1.0}])
def test_options_that_contradict_trained_weights_are_refused(package, option):
    with pytest.raises(ValueError, match="were trained with"):
        revode.create_model("hamiltonian-26", pretrained="digits", **option)


def test_absent_weights_are_named_with_those_that_are_there(package):
    with pytest.raises(ValueError, match="there are: hamiltonian-26-digits"):
        revode.create_model("hamiltonian-74", pretrained="cifar10")


CARD = Path(__file__).resolve().parents[3] / "docs" / "pretrained.md"


def rows_of_the_card():
    """Network, data set and accuracy in per cent of all weights that docs/pretrained.md has."""
    rows = re.findall(r"^\| `(\S+)` \| (\S+) \| ([\d.]+) % \|", CARD.read_text(), re.MULTILINE)
    return [(name, dataset.replace("-", "").lower(), accuracy) for name, dataset, accuracy in rows]


def test_all_weights_of_the_package_have_a_row_in_the_card_and_load():
    files_of_rows = {f"{name}-{dataset}" for name, dataset, _ in rows_of_the_card()}
    assert files_of_rows == {path.stem for path in files.PRETRAINED.glob("*.safetensors")} != set()
    for name, dataset, _ in rows_of_the_card():
        net = revode.create_model(name, pretrained=dataset).eval()
        assert net.config.backprop == "reversible"
        assert net(torch.zeros(1, 3, 32, 32)).isfinite().all()


@pytest.mark.real_data
@pytest.mark.parametrize(("name", "dataset", "accuracy"), rows_of_the_card())
def test_weights_of_the_package_score_what_the_card_says(real_root, capsys, name, dataset, accuracy):
    assert main(["eval", name, "--pretrained", dataset, "--data-root", str(real_root(dataset))]) == 0
    assert f"test accuracy {accuracy}%" in capsys.readouterr().out


def test_equal_networks_give_equal_files(tmp_path):
    """In fresh processes too, where the order of a hash map differs."""
    torch.manual_seed(0)
    model = revode.create_model("resnet-8")
    for number in range(8):
        revode.save(model, tmp_path / f"{number}.safetensors")
    files = {(tmp_path / f"{number}.safetensors").read_bytes() for number in range(8)}
    assert len(files) == 1
