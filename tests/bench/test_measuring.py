"""Timing, the floor of a step, peak memory and the profile measure what they say."""

from __future__ import annotations

import profile_step as profile
import pytest
import torch

from revode.bench import roofline
from revode.bench.cases import Case
from revode.bench.footprint import Footprints
from revode.bench.measure import Settings, Spread, interleave, measure, with_block_times
from revode.bench.methods import METHODS, find
from revode.bench.workloads import Workload


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0)


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
    calls, _ = roofline.record(Case(tiny_stage, METHODS[name]))
    forward = sum(count for call, count in calls.items() if "backward" not in str(call[0]))
    backward = sum(count for call, count in calls.items() if "backward" in str(call[0]))
    branches = 2 * tiny_stage.options["depth"]
    assert backward == 2 * branches
    assert forward == 2 * branches * (evaluations - 2) - spared


def test_recorded_calls_can_be_replayed(tiny: Workload) -> None:
    calls, saved = roofline.record(Case(tiny, METHODS["revode"]))
    assert calls
    assert saved > 0
    for call in calls:
        roofline.replay(call)()
    assert roofline.floor(calls, dict.fromkeys(calls, 1.0)) == sum(calls.values())


def test_peak_of_a_fresh_process_grows_with_the_batch_and_falls_with_the_method() -> None:
    stage = Workload(name="s", title="", kind="stage", batch=32, options={"channels": 16, "size": 32, "depth": 32})
    with Footprints() as footprints:
        store = footprints.measure(stage, "store", 1)["peak_bytes"]
        revode = footprints.measure(stage, "revode", 1)["peak_bytes"]
        with pytest.raises(RuntimeError, match="no-such-method"):
            footprints.measure(stage, "no-such-method", 1)
        assert footprints.measure(stage.with_batch(1), "revode", 1)["peak_bytes"] < revode  # and it still answers
    state = 4 * 32 * 8 * 32 * 32
    assert store > 64 * state
    assert revode < store / 3


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("aten::mkldnn_convolution", "convolutions"),
        ("aten::convolution_backward", "convolutions"),
        ("aten::addmm", "matrix products"),
        ("aten::empty_strided", "allocation"),
        ("aten::_to_copy", "copies"),
        ("aten::sum", "reductions"),
        ("aten::as_strided", "views"),
        ("aten::threshold_backward", "pointwise"),
        ("aten::add_", "pointwise"),
    ],
)
def test_operations_are_sorted_by_kind(operation: str, kind: str) -> None:
    assert profile.kind_of(operation) == kind


def test_profile_adds_up_and_fits_the_screen(tiny_stage: Workload) -> None:
    case = Case(tiny_stage, METHODS["revode"])
    seconds, shares = profile.profile_step(case, repeats=1)
    assert sum(share.seconds for share in shares) == pytest.approx(seconds)
    assert {"convolutions", "pointwise", profile.REST} <= {share.kind for share in shares}
    assert max(map(len, profile.text(case, seconds, shares).splitlines())) <= 80


def test_time_of_a_block_is_taken_from_all_depths_in_turn() -> None:
    options = {"channels": 8, "size": 6}
    workloads = [
        Workload(name=f"depth-{depth}", title="", kind="stage", batch=2, options={**options, "depth": depth})
        for depth in (2, 8)
    ]
    settings = Settings(threads=1, repeats=2)
    methods = find(["store", "checkpoint", "revode"])
    with Footprints() as footprints:
        rows = [row for workload in workloads for row in measure(workload, methods, settings, footprints)]
    found = {(row.workload, row.method): row.block_seconds for row in with_block_times(rows, workloads, settings)}
    assert found["depth-2", "checkpoint"] is None
    for name in ("store", "revode"):
        assert 0.1 < found["depth-8", name] / found["depth-2", name] < 10
    assert with_block_times(rows[:3], workloads[:1], settings) == rows[:3]  # one depth says nothing
