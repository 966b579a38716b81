"""The Python examples in the documentation run as they are printed, each page from top to bottom."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch

from revode.networks import families, zoo

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]


def python_blocks(page: str) -> list[str]:
    """The ```python blocks of a page, in order, without those marked `# not run`."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "# not run" not in block]


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(zoo, "_RECIPES", dict(zoo._RECIPES))  # a network that a page registers is gone after it
    known = dict(families.FAMILIES)
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        for number, block in enumerate(python_blocks(page)):
            torch.manual_seed(number)
            exec(compile(block, f"{page}, block {number}", "exec"), namespace)
    finally:
        families.FAMILIES.clear()
        families.FAMILIES.update(known)


def test_a_new_scheme_takes_less_than_thirty_lines() -> None:
    first = python_blocks("docs/adding-a-scheme.md")[0]
    assert "Scheme)" in first
    assert len(first.splitlines()) < 30


def test_the_new_scheme_of_the_docs_trains_like_store() -> None:
    """What the page builds is held to the promises that the schemes of the library keep."""
    from revode import ReversibleSequence
    from revode.schemes import SCHEMES, Scheme

    namespace: dict[str, object] = {}
    known = dict(SCHEMES)
    try:
        exec(python_blocks("docs/adding-a-scheme.md")[0], namespace)
    finally:
        SCHEMES.clear()
        SCHEMES.update(known)
    kinds = [
        v
        for v in namespace.values()
        if isinstance(v, type) and issubclass(v, Scheme) and v.__module__ != "revode.schemes"
    ]
    kinds = [kind for kind in kinds if kind is not Scheme and kind not in SCHEMES.values()]
    assert kinds
    for kind in kinds:
        scheme = kind()
        fields = [torch.nn.Linear(2 if scheme.splits else 4, 2 if scheme.splits else 4).double() for _ in range(8)]
        x = torch.randn(3, 4, dtype=torch.float64)
        grads = []
        for backprop in ("reversible", "store"):
            leaf = x.clone().requires_grad_()
            sequence = ReversibleSequence(fields, scheme, backprop=backprop)
            sequence.zero_grad()
            y, state = sequence(leaf, return_state=True)
            y.square().sum().backward()
            grads.append([leaf.grad, *(p.grad.clone() for p in sequence.parameters())])
            torch.testing.assert_close(sequence.inverse(state), x)
        for ours, stored in zip(*grads, strict=True):
            torch.testing.assert_close(ours, stored, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "path", sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]), ids=lambda p: p.name
)
def test_what_a_script_imports_is_there(path: Path) -> None:
    """Nobody runs all examples and scripts every day, so that a moved module would be noticed late."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")
