"""The code of every notebook runs from its first cell to its last, and says nothing that is wrong: its assertions hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    """Return the cells of a notebook."""
    return json.loads(path.read_text())["cells"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells(path)):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_plain_and_has_no_outputs(path: Path) -> None:
    tree = json.loads(path.read_text())
    assert (tree["nbformat"], tree["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in tree["cells"]}) == len(tree["cells"])
    for cell in tree["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        assert not cell.get("outputs")


def test_there_are_two_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["reversible_transformer", "why_deep"]
