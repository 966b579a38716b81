"""The examples in docstrings run, and every public class and function has one; docstrings begin with a verb."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import revode
from revode.networks import families, zoo

MODULES = ["revode", *(module.name for module in pkgutil.walk_packages(revode.__path__, "revode."))]
PUBLIC = ("revode", *(f"revode.{name}" for name in revode._MODULES))
NO_VERBS = {"Whether", "What", "How", "Who", "The", "A", "An", "One", "It", "This", "All", "Every", "Of", "As"}
SOURCES = sorted(Path(__file__).parents[1].glob("src/*/**/*.py"))


def names_for_examples(module: object) -> dict[str, object]:
    networks = importlib.import_module("revode.networks")
    public = {name: getattr(revode, name) for name in revode.__all__}
    public |= {name: value for name, value in vars(networks).items() if not name.startswith("_")}
    return public | {"torch": torch, "nn": torch.nn, "revode": revode} | vars(module)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    registries = (zoo._RECIPES, families.FAMILIES)
    for example in doctest.DocTestFinder().find(module, name, globs=names_for_examples(module)):
        known = [dict(registry) for registry in registries]
        torch.manual_seed(0)
        try:
            assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0
        finally:
            for registry, before in zip(registries, known, strict=True):
                registry.clear()
                registry.update(before)


def public_objects() -> Iterator[tuple[str, object]]:
    for name in PUBLIC:
        module = importlib.import_module(name)
        for key in getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]:
            value = getattr(module, key)
            is_ours = getattr(value, "__module__", "").startswith(name)
            if is_ours and (inspect.isclass(value) or inspect.isfunction(value)):
                yield f"{name}.{key}", value


def test_public_classes_and_functions_have_an_example() -> None:
    lacking = [
        name
        for name, value in public_objects()
        if not (inspect.isclass(value) and issubclass(value, Exception | Warning))
        and ">>>" not in (value.__doc__ or "")
    ]
    assert not lacking


def is_property(function: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[path.parts.index("src") + 1 :]))
def test_docstrings_of_functions_begin_with_a_verb(path: Path) -> None:
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    functions = (function for function in functions if not is_property(function))
    texts = {f"{path.name}:{node.lineno}": (ast.get_docstring(node) or "Return").split()[0] for node in functions}
    assert not {place: word for place, word in texts.items() if word in NO_VERBS or not word[0].isupper()}
