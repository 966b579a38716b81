"""The library never imports the laboratory; everything built on the library imports its public names only."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import revode

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "src" / "revode").rglob("*.py"))
USERS = sorted(file for name in ("src/revode_lab", "benchmarks", "examples") for file in (ROOT / name).rglob("*.py"))
NEEDED = {"torch", "numpy", "safetensors"}
"""What the library may import besides itself and Python's own modules."""


def imports(file: Path) -> Iterator[tuple[int, str, str | None]]:
    """Yield line, module and name of every import in a file, wherever it stands; no name for a bare ``import``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)


def public_names(module: ModuleType) -> set[str]:
    """Return the names that a module offers: in a package those of its ``__init__``, elsewhere what it defines."""
    if module is revode:
        return {*revode.__all__, *revode._MODULES}
    own = {name for name in vars(module) if not name.startswith("_")}
    if hasattr(module, "__path__"):
        return {name for name in own if not isinstance(getattr(module, name), ModuleType)}
    tree = ast.parse(Path(module.__file__ or "").read_text())
    taken = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    return own - taken


@pytest.mark.parametrize("file", LIBRARY, ids=lambda file: str(file.relative_to(ROOT / "src")))
def test_the_library_stands_alone(file: Path) -> None:
    allowed = NEEDED | {"revode"} | set(sys.stdlib_module_names)
    foreign = {f"{line}: {module}" for line, module, _ in imports(file) if module.split(".")[0] not in allowed}
    assert not foreign


@pytest.mark.parametrize("file", USERS, ids=lambda file: str(file.relative_to(ROOT)))
def test_users_of_the_library_import_public_names(file: Path) -> None:
    public = {"revode", *(f"revode.{name}" for name in revode._MODULES)}
    for line, module, name in imports(file):
        if module.split(".")[0] != "revode":
            continue
        place = f"{file.relative_to(ROOT)}:{line}"
        assert module in public, f"{place} reaches into {module}"
        if name is not None:
            assert name in public_names(importlib.import_module(module)), f"{place}: {module}.{name} is not public"


def test_importing_the_library_loads_nothing_else() -> None:
    """Not even its own optional parts: no laboratory, no plotting, no YAML."""
    code = (
        "import sys, revode, revode.networks, revode.memory\n"
        "found = {'revode_lab', 'yaml', 'matplotlib', 'scipy', 'PIL', 'jinja2'} & set(sys.modules)\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
