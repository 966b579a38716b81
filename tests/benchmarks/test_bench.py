"""The benchmarks from the command line: rows, tables, pages, refusals."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import bench
import methods
import page
import pytest
from bench import main
from measure import Row, Settings
from page import BARS, Rows, verdicts
from report import replaced, text
from workloads import DEPTHS, WORKLOADS, Workload

SMALL = ["--workload", "stage-8x8", "--batch", "1", "--repeats", "1", "--threads", "1"]


def row(workload: str, method: str, seconds: float, saved: int = 1000, batch: int = 1) -> Row:
    return Row(
        workload=workload,
        method=method,
        seconds=seconds,
        ratio_to_store=1.0,
        saved_bytes=saved,
        peak_bytes=2000,
        grad_error=1e-7,
        seconds_low=seconds,
        seconds_high=seconds,
        roofline=0.8,
        repeats=3,
        batch=batch,
        operations=(7.0, 21.4),
    )


ROWS = [
    *(row(f"depth-{n}", m, n * 0.001, n * 1000) for n in (10, 100, 1000) for m in ("store", "checkpoint", "revode")),
    row("depth-10", "revtorch", 0.012),
    row("hamiltonian-74", "store", 1.0, 800_000, 100),
    row("hamiltonian-74", "revode", 1.2, 100_000, 100),
    row("hamiltonian-74", "revode-budget-50", 1.1, 400_000, 100),
    row("hamiltonian-1202", "store", 10.0, 1_000_000, 32),
    row("hamiltonian-1202", "revode", 13.0, 32_000, 32),
    row("stage-8x8", "store", 0.1),
    row("stage-8x8", "revode", 0.12),
    row("stage-8x8", "revtorch", 0.18),
    row("stage-8x8", "revlib", 0.15),
]


BLOCKS = {method: dict.fromkeys(("depth-10", "depth-100", "depth-1000"), 0.001) for method in ("store", "revode")}


def test_rows_have_the_promised_columns_and_no_null(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(methods, "library", lambda name: None)
    wanted = [word for name in ("revode", "revode-exact", "memcnn", "revlib") for word in ("--method", name)]
    assert main([*SMALL, *wanted, "--out", str(tmp_path)]) == 0
    output = capsys.readouterr()
    rows = json.loads((tmp_path / "benchmarks.json").read_text())["rows"]
    assert [found["method"] for found in rows] == ["revode", "revode-exact"]  # the absent ones have no row
    assert "memcnn, revlib" in output.err
    for found in rows:
        numbers = [value for name, value in found.items() if name not in ("workload", "method", "dtype", "operations")]
        assert all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
        assert found["workload"] == "stage-8x8"
        assert found["seconds"] > 0
        assert found["seconds_low"] <= found["seconds"] <= found["seconds_high"]
        assert found["roofline"] > 0


def test_a_failing_workload_costs_its_own_rows_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def measure(workload: Workload, *rest: object) -> list[Row]:
        if workload.name == "stage-8x8":
            raise ValueError("a state left the grid")
        return [row(workload.name, "store", 1.0)]

    monkeypatch.setattr("bench.measure", measure)
    assert main([*SMALL, "--workload", "attention-12", "--out", str(tmp_path)]) == 1
    output = capsys.readouterr()
    rows = json.loads((tmp_path / "benchmarks.json").read_text())["rows"]
    assert [found["workload"] for found in rows] == ["attention-12"]
    assert "stage-8x8 failed and has no rows: a state left the grid" in output.err


def test_table_fits_the_screen_without_colour() -> None:
    lines = text(ROWS).splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "stage-32"], "nearest: stage-32x32"),
        (["--method", "revode-exakt"], "nearest: revode-exact"),
        (["--threads", "0"], "threads must be at least 1"),
        (["--repeats", "-1"], "repeats must be at least 1"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--dtype", "float16"], "float32 or bfloat16"),
        (["--rows", "no-such-file.json"], "no-such-file.json"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert words in output.err
    assert len(output.err.strip().splitlines()) == 1


def test_broken_rows_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.json"
    path.write_text('{"rows": [{"workload": "x"}]}')
    assert main(["--rows", str(path)]) == 2
    assert "benchmarks.json" in capsys.readouterr().err


def test_page_is_written_from_rows_without_measuring(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "rows.json"
    conditions = {"processor": "abacus", "torch": "2.13"}
    data.write_text(json.dumps({"conditions": conditions, "rows": [dataclasses.asdict(found) for found in ROWS]}))
    assert main(["--rows", str(data), "--out", str(tmp_path / "docs")]) == 0
    assert capsys.readouterr().out == text(ROWS) + "\n"
    (tmp_path / "docs" / "blocks.json").write_text(json.dumps(BLOCKS))
    page.main(tmp_path / "docs")
    written = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "abacus" in written
    assert "**missed**" in written  # hamiltonian-1202 at 1.3
    assert "| 7/21 |" in written  # operations
    assert "| revode | 1.000 | 1.000 | 1.000 |" in written  # time of a block


def test_a_workload_is_measured_anew_among_given_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "rows.json"
    data.write_text(
        json.dumps({"conditions": {"processor": "abacus"}, "rows": [dataclasses.asdict(found) for found in ROWS]})
    )
    assert main([*SMALL, "--method", "revode", "--rows", str(data), "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "benchmarks.json").read_text())["rows"]
    stage = [found for found in rows if found["workload"] == "stage-8x8"]
    assert [found["method"] for found in stage] == ["revode"]
    assert stage[0]["seconds"] != 0.12
    assert [found for found in rows if found["workload"] != "stage-8x8"] == sorted(
        (json.loads(json.dumps(dataclasses.asdict(found))) for found in ROWS if found.workload != "stage-8x8"),
        key=lambda found: list(WORKLOADS).index(found["workload"]),
    )


def test_rows_of_another_dtype_stay(tmp_path: Path) -> None:
    lower = dataclasses.replace(ROWS[-1], dtype="bfloat16", seconds=9.0)
    rows = replaced(ROWS, [lower])
    assert len(rows) == len(ROWS) + 1
    assert rows[-1] == lower
    assert replaced(rows, [lower]) == rows
    assert "bfloat16, batch norm" in text(rows)


def test_bars_take_the_worst_value() -> None:
    found = {verdict.bar.what: verdict for verdict in verdicts(Rows(ROWS, BLOCKS))}
    assert len(found) < len(BARS)  # nothing was compiled, for one
    assert found["hamiltonian-74, reversible / store time"].kept
    assert not found["hamiltonian-74, reversible / store time"].reached
    assert not found["hamiltonian-1202, reversible / store time"].kept
    assert found["each stage, fastest peer library / ours"].worst == pytest.approx(1.25)
    assert found["bytes kept, store / reversible at 1202 layers"].worst == pytest.approx(31.25)
    assert found["bytes kept for an image, 1202 / 74 layers, reversible"].worst == pytest.approx(1.0)
    assert found["step time for a block, 1000 / 10 blocks"].worst == pytest.approx(1.0)


@pytest.mark.parametrize("wide", [False, True])
def test_times_that_mean_little_are_said_to(
    wide: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = dataclasses.replace(row("stage-8x8", "revode", 1.0), seconds_low=0.9, seconds_high=1.3 if wide else 1.0)
    monkeypatch.setattr("bench.measure", lambda *_: [found])
    assert main([*SMALL, "--method", "revode"]) == 0
    assert ("revode's quartiles lie 40% of its median apart" in capsys.readouterr().err) == wide


def test_a_block_over_depth_is_timed_with_the_threads_and_repetitions_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Settings] = []

    def timed(workloads: list[Workload], settings: Settings) -> dict[str, dict[str, float]]:
        seen.append(settings)
        return {"revode": {workload.name: 1.0 for workload in workloads}}

    monkeypatch.setattr(bench, "block_seconds", timed)
    assert main(["--blocks", str(tmp_path), "--threads", "1", "--repeats", "2"]) == 0
    assert [(settings.threads, settings.repeats) for settings in seen] == [(1, 2)]
    assert json.loads((tmp_path / "blocks.json").read_text()) == {"revode": dict.fromkeys(DEPTHS, 1.0)}
