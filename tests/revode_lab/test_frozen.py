"""Behaviour that was frozen (``frozen/write.py`` says how): a change here is a change for users, and has its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from frozen import write as frozen

BEHAVIOUR = json.loads(frozen.BEHAVIOUR.read_text())
TRAINED = 1e-6 if frozen.processor() == BEHAVIOUR["processor"] else 1e-3
"""How near trained weights come: training amplifies the last bits, in which other kernels differ."""


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert (found["tensors"], found["names"]) == (expected["tensors"], expected["names"])
    for name in ("norm", "position"):
        assert found[name] == pytest.approx(expected[name], abs=tolerance * expected["norm"]), name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits, 20 steps, finished."""
    folder = tmp_path_factory.mktemp("frozen") / "trained"
    frozen.train_quietly(folder)
    return folder


def test_no_named_network_has_gone_or_come() -> None:
    assert sorted(BEHAVIOUR["parameters"]) == sorted(frozen.list_models())


@pytest.mark.parametrize("name", BEHAVIOUR["parameters"])
def test_seeded_initial_weights(name: str) -> None:
    assert_same(frozen.statistics(frozen.initial_weights(name)), BEHAVIOUR["initial weights"][name])
    assert frozen.num_parameters(name) == BEHAVIOUR["parameters"][name]


def test_seeded_weights_after_20_steps(run: Path) -> None:
    weights = frozen.load_file(run / "model.safetensors")
    assert_same(frozen.statistics(weights), BEHAVIOUR["trained weights"], TRAINED)


def test_an_old_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    weights = frozen.resume_old_run(tmp_path / "run")
    assert_same(frozen.statistics(weights), BEHAVIOUR["resumed weights"], TRAINED)


def test_files_of_a_run(run: Path) -> None:
    assert frozen.files(run) == BEHAVIOUR["files"]


def test_keys_of_the_result_and_the_metrics(run: Path) -> None:
    assert frozen.result_schema(run) == BEHAVIOUR["result.json"]
    assert frozen.metrics_schema(run) == BEHAVIOUR["metrics.jsonl"]


@pytest.mark.parametrize("name", BEHAVIOUR["json"])
def test_keys_of_what_commands_print(name: str, run: Path) -> None:
    printed = json.loads(frozen.output_of(frozen.json_commands(run)[name]))
    assert frozen.schema(printed) == BEHAVIOUR["json"][name]
