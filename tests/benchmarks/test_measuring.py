"""Timing, the floor of a step and peak memory measure what they say."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from cases import Case, measure_step, replay
from measure import Settings, block_seconds, interleave, measure, quartiles
from methods import METHODS
from workloads import Workload, stage

from revode_lab.fresh import in_fresh_process


def test_spread_is_median_and_quartiles() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)


def test_every_round_holds_every_action_behind_changing_neighbours_and_then_the_rest() -> None:
    seen: list[str] = []
    actions, rest = ({name: lambda name=name: seen.append(name) for name in names} for names in ("abc", "xy"))
    seconds = interleave(actions, repeats=20, then=rest)
    rounds = ["".join(seen[i : i + 5]) for i in range(0, len(seen), 5)]
    assert all(sorted(each[:3]) == list("abc") and each[3:] == "xy" for each in rounds)
    assert {each[:3].find("a") for each in rounds} == {0, 1, 2}
    assert {each[each.index("c") - 1] for each in rounds if each[0] != "c"} == {"a", "b"}
    assert {len(values) for values in seconds.values()} == {20}


def test_budget_bounds_repetitions_but_not_below_the_fewest() -> None:
    calls: list[int] = []
    interleave({"a": lambda: calls.append(torch.randn(300, 300).mm(torch.randn(300, 300)).numel())}, None, 1e-9, 2)
    assert len(calls) == 2


@pytest.mark.parametrize(("name", "evaluations", "spared"), [("store", 3, 0), ("revode", 4, 1)])
def test_recorder_counts_the_convolutions_of_a_step(
    name: str, evaluations: int, spared: int, tiny_stage: Workload
) -> None:
    """Reversing spares K' in the first branch, behind which nothing is reversed."""
    calls, _ = Case(tiny_stage, METHODS[name]).record()
    forward = sum(count for call, count in calls.items() if "backward" not in str(call[0]))
    backward = sum(count for call, count in calls.items() if "backward" in str(call[0]))
    branches = 2 * tiny_stage.options["depth"]
    assert backward == 2 * branches
    assert forward == 2 * branches * (evaluations - 2) - spared


def test_recorded_calls_can_be_replayed(tiny: Workload) -> None:
    calls, _ = Case(tiny, METHODS["revode"]).record()
    assert calls
    for call in calls:
        replay(call)()


def test_peak_of_a_fresh_process_grows_with_the_batch_and_falls_with_the_method() -> None:
    deep = Workload(name="s", title="", make=stage, batch=32, options={"channels": 16, "size": 32, "depth": 32})

    def peak(workload: Workload, method: str) -> int:
        return in_fresh_process(measure_step, workload, method, 1)["peak_bytes"]

    store, revode = peak(deep, "store"), peak(deep, "revode")
    with pytest.raises(RuntimeError, match="no-such-method"):
        peak(deep, "no-such-method")
    assert peak(dataclasses.replace(deep, batch=1), "revode") < revode
    state = 4 * 32 * 8 * 32 * 32
    assert store > 64 * state
    assert revode < store / 3


def test_time_of_a_block_is_taken_from_all_depths_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", time.thread_time)  # a busy machine is no fault
    options = {"channels": 8, "size": 6}
    workloads = [
        Workload(name=f"depth-{depth}", title="", make=stage, batch=2, options={**options, "depth": depth})
        for depth in (2, 8)
    ]
    found = block_seconds(workloads, Settings(threads=1, repeats=2))
    for name in ("store", "revode"):
        assert 0.1 < found[name]["depth-8"] / found[name]["depth-2"] < 10


def test_operations_are_counted(tiny_stage: Workload) -> None:
    methods = [METHODS["store"], METHODS["revode"]]
    rows = {row.method: row for row in measure(tiny_stage, methods, Settings(threads=1, repeats=1))}
    for row in rows.values():
        assert row.operations is not None
        assert all(number > 1 for number in row.operations)
    assert rows["revode"].operations[1] > rows["store"].operations[1]  # it evaluates its branches again


@pytest.mark.parametrize("name", ["store", "revode", "revode-exact"])
def test_bfloat16_is_autocast_beside_float32_weights(name: str, tiny_stage: Workload) -> None:
    lower = dataclasses.replace(tiny_stage, in_bfloat16={"norm": "batch"}).with_dtype("bfloat16")
    case = Case(lower, METHODS[name])
    assert {parameter.dtype for parameter in case.parameters} == {torch.float32}
    assert any(isinstance(part, torch.nn.BatchNorm2d) for part in case.module.modules())
    calls, _ = case.record()
    assert {kind.dtype for _, kinds, _ in calls for kind in kinds if hasattr(kind, "dtype")} == {torch.bfloat16}
    expected = Case(lower, METHODS["store"], torch.float64).gradient(2)
    assert 1e-4 < (case.gradient(2) - expected).norm() / expected.norm() < 0.2


def test_a_memory_budget_has_a_row(tiny_stage: Workload) -> None:
    (row,) = measure(tiny_stage, [METHODS["revode-budget-50"]], Settings(threads=1, repeats=1))
    assert row.saved_bytes > 0
