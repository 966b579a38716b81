"""Named sets of settings. The paper's are as printed in it and in its authors' code; the others were chosen by measurement.

| recipe | for | from |
|---|---|---|
| ``digits`` | the embedded digits, under a minute on two cores | measured, see docs/training.md |
| ``quick`` | CIFAR on a CPU | measured, see docs/training.md |
| ``cifar`` | CIFAR-10 and CIFAR-100 | the paper |
| ``cifar-1202`` | hamiltonian-1202 on CIFAR-10 | the paper, with drops by steps as in the authors' code |
| ``stl`` | STL-10 | the paper |
"""

from __future__ import annotations

import difflib
from typing import Any

from revode.training.config import Config
from revode.training.settings import LEAVES, convert, from_leaves, read_yaml

RECIPES: dict[str, dict[str, Any]] = {
    "digits": {
        "dataset": "digits",
        "epochs": 20,
        "batch_size": 32,
        "lr": 0.2,
        "schedule": "one-cycle",
        "label_smoothing": 0.1,
        "ema": 0.99,
        "weight_decay": 5e-4,
        "validation": 0.1,
        "evaluate_every": 5,
    },
    "quick": {
        "name": "hamiltonian-74",
        "dataset": "cifar10",
        "epochs": 25,
        "batch_size": 64,
        "lr": 0.1,
        "schedule": "one-cycle",
        "nesterov": True,
        "ema": 0.99,
        "clip": 1.0,
        "weight_decay": 5e-4,
        "validation": 0.1,
    },
    "cifar": {
        "name": "hamiltonian-74",
        "dataset": "cifar10",
        "epochs": 160,
        "batch_size": 100,
        "lr": 0.1,
        "schedule": "step",
        "milestones": (80, 120),
    },
    "cifar-1202": {
        "name": "hamiltonian-1202",
        "dataset": "cifar10",
        "epochs": None,
        "max_steps": 80_000,
        "batch_size": 32,
        "lr": 0.1,
        "schedule": "step",
        "milestones": (40_000, 60_000),
        "milestone_unit": "steps",
    },
    "stl": {
        "name": "hamiltonian-stl",
        "dataset": "stl10",
        "epochs": None,
        "max_steps": 20_000,
        "batch_size": 128,
        "lr": 0.1,
        "schedule": "step",
        "milestones": (60, 80, 100),
        "weight_decay": 5e-4,
        "smoothness": 3e-4,
    },
}
"""Name -> settings that differ from the defaults of `Config`."""

_USUAL_RECIPES = {"digits": "digits", "cifar10": "cifar", "cifar100": "cifar", "stl10": "stl"}
_USUAL_RECIPES_OF_MODELS = {"hamiltonian-1202": "cifar-1202"}


def configure(config_file: str | None = None, **settings: Any) -> Config:
    """The configuration from a recipe, then a file, then single settings; each overrides the one before.

    With nothing given, it is a Hamiltonian network on the embedded digits. A data set without a recipe takes its usual one,
    and a recipe without a data set or a network its own.

    Args:
        config_file: A YAML file, as ``--print-config`` writes it.
        settings: Settings by name, such as ``epochs=2``; ``model`` stands for the network's ``name``.
    """
    if "model" in settings:
        settings["name"] = settings.pop("model")
    for name in settings:
        if name not in LEAVES:
            near = difflib.get_close_matches(name, LEAVES, n=3)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise ValueError(f"unknown setting {name!r}{hint}")
    given = {**(read_yaml(config_file) if config_file else {}), **settings}
    given = {name: convert(LEAVES[name], value) for name, value in given.items()}
    recipe = given.get("recipe", "auto")
    if recipe == "auto":
        recipe = _usual_recipe(given.get("name"), given.get("dataset"))
    if recipe not in RECIPES:
        near = difflib.get_close_matches(recipe, RECIPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown recipe {recipe!r}; choose one of {', '.join(RECIPES)}{hint}")
    return from_leaves({**RECIPES[recipe], **given, "recipe": recipe})


def _usual_recipe(model: str | None, dataset: str | None) -> str:
    if dataset is None:
        if model is None or model.endswith("-digits"):
            dataset = "digits"
        else:
            dataset = "stl10" if model.endswith("-stl") else "cifar10"
    if dataset == "cifar10" and model in _USUAL_RECIPES_OF_MODELS:
        return _USUAL_RECIPES_OF_MODELS[model]
    return _USUAL_RECIPES.get(dataset, "cifar")
