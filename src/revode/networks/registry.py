"""Networks by name."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
from collections.abc import Callable
from typing import Any

from revode.networks.classifier import StagedClassifier, build
from revode.networks.config import NetworkConfig

Recipe = Callable[[], NetworkConfig]
DepthRecipe = Callable[[int], NetworkConfig]

_RECIPES: dict[str, Recipe] = {}
_FAMILIES: dict[str, DepthRecipe] = {}
STL_SUFFIX, STL_SIZE = "-stl", 96


def register_model(name: str) -> Callable[[Recipe], Recipe]:
    """Decorate a function without arguments that returns the config of the network `name`."""

    def register(recipe: Recipe) -> Recipe:
        if name in _RECIPES:
            raise ValueError(f"a network named {name!r} is registered already: choose another name")
        _RECIPES[name] = recipe
        return recipe

    return register


def register_family(family: str) -> Callable[[DepthRecipe], DepthRecipe]:
    """Decorate a function from a number of layers to the config of ``<family>-<layers>``."""

    def register(recipe: DepthRecipe) -> DepthRecipe:
        if family in _FAMILIES:
            raise ValueError(f"a family named {family!r} is registered already: choose another name")
        _FAMILIES[family] = recipe
        return recipe

    return register


def list_models() -> list[str]:
    """The names of all registered networks; ``<family>-<layers>`` of other valid depths work besides."""
    _load_zoo()
    return sorted(_RECIPES, key=_natural)


def model_config(name: str, **options: Any) -> NetworkConfig:
    """The config of the network `name` with these options, without building it."""
    _load_zoo()
    return _find(name).with_options(**options)


def create_model(name: str, **options: Any) -> StagedClassifier:
    """Build a network by name, with fresh weights.

    Args:
        name: one of `list_models()`, or ``<family>-<layers>`` for any depth that fits the family, with ``-stl`` behind it
            for 96x96 images.
        options: ``num_classes``, ``in_channels``, ``image_size``, ``blocks``, ``channels``, ``activation``, ``norm``; of
            reversible networks also ``backprop``, ``exact``, ``anchor_every``, ``memory_budget``, ``damping``; of ODE
            networks also ``h`` or ``horizon``, ``init``, ``start``, ``transition``. See `OdeConfig`.
    """
    return build(model_config(name, **options))


def _find(name: str) -> NetworkConfig:
    if not isinstance(name, str):
        raise ValueError(f"a network's name is a string, got {name!r}")
    if name in _RECIPES:
        config = _RECIPES[name]()
        if not isinstance(config, NetworkConfig):
            raise ValueError(f"the function registered as {name!r} must return a config, got {type(config).__name__}")
        return config
    if name.endswith(STL_SUFFIX):
        base = _find(name.removesuffix(STL_SUFFIX))
        return dataclasses.replace(base, name=name, image_size=STL_SIZE)
    family, _, layers = name.rpartition("-")
    if family in _FAMILIES and layers.isascii() and layers.isdigit():
        return _FAMILIES[family](int(layers))
    if name in _FAMILIES:
        raise ValueError(f"{name} is a family: say how many layers, as in {_example(name)}")
    near = difflib.get_close_matches(name, list_models(), 3, cutoff=0.4)
    hint = f"the nearest are {', '.join(near)}; " if near else ""
    raise ValueError(f"there is no network {name!r}: {hint}`revode models` lists all")


def _example(family: str) -> str:
    return next((name for name in list_models() if re.fullmatch(rf"{family}-\d+", name)), f"{family}-<layers>")


def _natural(name: str) -> list[Any]:
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name)]


def _load_zoo() -> None:
    importlib.import_module("revode.networks.zoo")
