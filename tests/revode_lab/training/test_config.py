"""The configuration: one tree, three ways in, and no key that is silently ignored."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import command

from revode_lab.cli import main
from revode_lab.training import RECIPES, configure
from revode_lab.training.config import LEAVES, Config, flatten, from_leaves, read_yaml


def test_every_leaf_has_a_name_of_its_own():
    assert len(LEAVES) == len(Config().leaves())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_configuration_reads_back_what_it_writes(recipe, tmp_path):
    config = configure(recipe=recipe, seed=3, options={"h": 0.05})
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert configure(str(path)) == config
    assert from_leaves(read_yaml(str(path))) == config


def test_the_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().recipe = "other"  # type: ignore[misc]


def test_settings_override_the_file_and_the_file_the_recipe(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("optimization:\n  lr: 5e-1\n  momentum: 0.5\n")
    config = configure(str(path), recipe="cifar", momentum=0.6)
    assert (config.optimization.lr, config.optimization.momentum) == (0.5, 0.6)
    assert config.optimization.milestones == (80, 120)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimization:\n  learning_rte: 1", r"'optimization.learning_rte'.*nearest"),
        ("optimization:\n  batchsize: 1", r"nearest.*optimization.batch_size"),
        ("lr: 1", r"spelled 'optimization.lr'"),
        ("optimisation:\n  lr: 1", r"nearest.*optimization"),
        ("model:\n  lr: 1", r"spelled 'optimization.lr'"),
        ("- 1", r"holds a list"),
        ("optimization: 3", r"section 'optimization'"),
        ("optimization:\n  lr: fast", r"optimization.lr is 'fast'; expected a number"),
        ("optimization:\n  epochs: 1.5", r"optimization.epochs is 1.5; expected a whole number or none"),
        ("optimization:\n  schedule: linear", r"expected constant or step"),
        ("data:\n  augment: 1", r"expected true or false"),
        ("optimization: [", r"not a YAML file"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(text, message, tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        configure(str(path))
    code, out, err = command("train", "--config", path, "--out", tmp_path / "run", capsys=capsys)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1}, "lr is -1"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"ema": 1.0}, "ema is 1.0"),
        ({"train_fraction": 0}, "train_fraction is 0"),
        ({"epochs": None}, "both none"),
        ({"schedule": "step"}, "without milestones"),
        ({"nesterov": True, "momentum": 0}, "needs momentum"),
        ({"learning_rate": 1}, "unknown setting 'learning_rate'"),
        ({"recipe": "cifr"}, "nearest: cifar"),
    ],
)
def test_wrong_values_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        configure(**settings)


@given(st.floats(1e-6, 1e3), st.integers(1, 10**6), st.booleans())
def test_numbers_survive_the_command_line_and_yaml(lr, batch_size, augment):
    config = configure(lr=str(lr), batch_size=str(batch_size), augment=str(augment))
    assert (config.optimization.lr, config.optimization.batch_size, config.data.augment) == (lr, batch_size, augment)
    assert from_leaves(flatten(yaml.safe_load(config.to_yaml()), "text")) == config


def test_recipes_of_the_paper_are_as_printed():
    cifar = configure("" or None, recipe="cifar").optimization
    assert (cifar.batch_size, cifar.lr, cifar.epochs, cifar.milestones) == (100, 0.1, 160, (80, 120))
    assert (cifar.weight_decay, cifar.smoothness, cifar.momentum, cifar.ema) == (2e-4, 2e-4, 0.9, 0.0)
    deep = configure(recipe="cifar-1202").optimization
    assert (deep.batch_size, deep.max_steps, deep.milestones, deep.milestone_unit) == (
        32,
        80_000,
        (40_000, 60_000),
        "steps",
    )
    stl = configure(recipe="stl").optimization
    assert (stl.batch_size, stl.max_steps, stl.milestones) == (128, 20_000, (60, 80, 100))
    assert (stl.weight_decay, stl.smoothness) == (5e-4, 3e-4)


@pytest.mark.parametrize(
    ("given_settings", "recipe", "dataset"),
    [
        ({}, "digits", "digits"),
        ({"model": "hamiltonian-74"}, "cifar", "cifar10"),
        ({"model": "hamiltonian-1202"}, "cifar-1202", "cifar10"),
        ({"model": "hamiltonian-74", "recipe": "quick"}, "quick", "cifar10"),
        ({"dataset": "stl10"}, "stl", "stl10"),
        ({"dataset": "cifar100", "recipe": "quick"}, "quick", "cifar100"),
    ],
)
def test_recipe_and_data_set_find_each_other(given_settings, recipe, dataset):
    config = configure(**given_settings)
    assert (config.recipe, config.data.dataset) == (recipe, dataset)


@pytest.mark.parametrize(
    ("given_settings", "model"),
    [
        ({}, "hamiltonian-digits"),
        ({"dataset": "cifar10"}, "hamiltonian-74"),
        ({"recipe": "quick"}, "hamiltonian-74"),
        ({"recipe": "cifar-1202"}, "hamiltonian-1202"),
        ({"dataset": "stl10"}, "hamiltonian-stl"),
        ({"recipe": "quick", "model": "resnet-32"}, "resnet-32"),
    ],
)
def test_a_recipe_brings_its_own_network(given_settings, model):
    assert configure(**given_settings).model.name == model


def test_print_config_writes_what_config_reads(tmp_path, capsys):
    words = ["train", "hamiltonian-74", "--recipe", "quick", "--lr", "0.05", "--milestones", "1,2", "--no-augment"]
    words += ["--options", "h=1e-2,blocks=[1,2]", "--epochs", "none", "--max-steps", "7", "--print-config"]
    code, out, _ = command(*words, capsys=capsys)
    assert code == 0
    path = tmp_path / "c.yaml"
    path.write_text(out)
    config = configure(str(path))
    assert config.model.options == {"h": 0.01, "blocks": [1, 2]}
    assert (config.optimization.milestones, config.optimization.epochs, config.data.augment) == ((1, 2), None, False)
    assert command("train", "--config", path, "--print-config", capsys=capsys)[1] == out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--lr", "fast"], "optimization.lr is 'fast'; expected a number"),
        (["--leyouts", "1"], "unknown flag --leyouts"),
        (["--batchsize=3"], "unknown flag --batchsize, nearest: --batch-size"),
        (["--options", "h"], "expected settings, as h=0.05"),
        (["--recipe", "quik"], "unknown recipe 'quik'; nearest: quick"),
        (["a", "b"], "unknown argument b"),
    ],
)
def test_wrong_flags_exit_with_2_and_one_sentence(words, sentence, capsys):
    try:
        code = main(["train", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_an_unknown_command_is_refused_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as error:
        main(["tarin"])
    assert error.value.code == 2
    assert capsys.readouterr().err == "revode: unknown command tarin, nearest: train; `revode --help` lists all\n"


@pytest.mark.parametrize("name", ["train", "eval", "report", "export"])
def test_help_has_an_example_and_imports_nothing_heavy(name):
    script = (
        "import sys; from revode_lab.cli import build_parser\n"
        f"text = build_parser({name!r})[1][{name!r}].format_help()\n"
        "assert 'example' in text, text\n"
        "heavy = {'torch', 'numpy', 'yaml', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)
