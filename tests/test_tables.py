"""Tables that quote results are what the results say, and every accuracy says how its gradients were computed."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = load()


@pytest.mark.parametrize("page", TABLES.PAGES)
def test_a_page_quotes_what_was_measured(page: str) -> None:
    text = (ROOT / page).read_text()
    assert len(TABLES.BLOCK.findall(text)) == text.count("<!-- end -->") > 0
    assert text == TABLES.rewritten(page), "run `python docs/tables.py`"


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_no_accuracy_stands_in_a_table_that_was_written_by_hand(page: str) -> None:
    by_hand = TABLES.BLOCK.sub("", (ROOT / page).read_text())
    assert not re.findall(r"^\|.*\d\d\.\d+ (?:± [\d.]+ )?%.*$", by_hand, flags=re.MULTILINE)


@pytest.mark.parametrize("path", sorted(ROOT.glob("results/*/*.json")), ids=lambda path: path.stem)
def test_every_training_says_how_its_gradients_were_computed(path: Path) -> None:
    content = json.loads(path.read_text())
    for entry in content.get("tasks", []):
        if entry["kind"] != "TrainingRun":
            continue
        settings, said = entry["settings"], entry["result"]["gradients"]
        stored = settings.get("backprop") == "store" or settings["name"].startswith("resnet")
        assert (said == "stored") == stored, entry["title"]
        if not stored:
            lower = content.get("autocast", "none") != "none" and "damping" not in settings.get("options", {})
            assert said == ("reversible, exact" if settings.get("exact") or lower else "reversible")
        assert f"| {said} |" in path.with_suffix(".md").read_text()
