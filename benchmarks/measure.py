"""Measure workloads by methods: rows of time, memory and gradient error.

Times are interleaved: one repetition of everything, then the next, so that a drift of the machine hits all alike.
"""

from __future__ import annotations

import gc
import random
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cases import Case, Recorder, gradient_errors, measure_step, replay, sequences
from methods import METHODS, Method
from workloads import Workload

from revode_lab.fresh import in_fresh_process
from revode_lab.step import clock

REFERENCE = "store"
MIN_REPEATS, MAX_REPEATS = 3, 15
OVER_DEPTH = 180.0
"""Seconds for the repetitions of a block at all depths together."""
WIDE = 0.2
"""Largest distance of quartiles, as a share of the median, for which times can be compared."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a measurement.

    Args:
        threads: CPU threads of torch.
        repeats: repetitions of each step; None: as many as ``budget`` allows.
        fewest: least number of repetitions, whatever the budget.
        budget: seconds for the repetitions of one workload.
    """

    threads: int
    repeats: int | None = None
    fewest: int = MIN_REPEATS
    budget: float = 45.0

    def __post_init__(self) -> None:
        for name in ("threads", "repeats", "fewest"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One workload by one method.

    Args:
        seconds, seconds_low, seconds_high: median and quartiles of a step (forward and backward).
        ratio_to_store: seconds over those of ``store`` in the same run.
        saved_bytes: bytes kept for backward, without parameters and input.
        peak_bytes: peak resident bytes of a step in a fresh process, above those before it.
        grad_error: relative error of the gradient against ``store`` in fp64.
        roofline: time of the step's convolutions and matrix products called alone, over the step's time.
        operations: aten operations for each branch, in forward and in backward; None if compiled, where they are fused.
    """

    workload: str
    method: str
    seconds: float
    ratio_to_store: float
    saved_bytes: int
    peak_bytes: int
    grad_error: float
    seconds_low: float
    seconds_high: float
    roofline: float
    repeats: int
    batch: int
    dtype: str = "float32"
    operations: tuple[float, float] | None = None

    @property
    def spread(self) -> float:
        return (self.seconds_high - self.seconds_low) / self.seconds


def applicable(workload: Workload, methods: Iterable[Method]) -> list[Method]:
    """Return the methods that are installed and can run the workload's scheme."""
    schemes = [sequence.scheme for sequence in sequences(workload.build()[0])]
    return [method for method in methods if method.available and all(map(method.supports, schemes))]


def measure(workload: Workload, methods: Sequence[Method], settings: Settings) -> list[Row]:
    """Return a row for each applicable method; ``store`` is measured in any case, for the ratios."""
    wanted = applicable(workload, methods)
    if not wanted:
        return []
    torch.set_num_threads(settings.threads)
    reference = METHODS[REFERENCE]
    run = wanted if reference in wanted else [reference, *wanted]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # memcnn, at every block
        cases = {method.name: Case(workload, method) for method in run}
        for case in cases.values():
            case()
        saved = {name: case.saved_bytes() for name, case in cases.items()}
        recorded = {name: case.record() for name, case in cases.items()}
        calls = {call: replay(call) for counts, _ in recorded.values() for call in counts}
        for call in calls.values():
            call()
        seconds = interleave(cases, settings.repeats, settings.budget, settings.fewest, then=calls)
        errors = gradient_errors(workload, [cases[method.name] for method in wanted])
    rows = []
    for method in wanted:
        name = method.name
        low, median, high = quartiles(seconds[name])
        counts, operations = recorded[name]
        found = in_fresh_process(measure_step, workload, name, settings.threads)
        rows.append(
            Row(
                workload=workload.name,
                method=name,
                seconds=median,
                ratio_to_store=median / quartiles(seconds[REFERENCE])[1],
                saved_bytes=saved[name],
                peak_bytes=found["peak_bytes"],
                grad_error=errors[name],
                seconds_low=low,
                seconds_high=high,
                roofline=_alone(counts, seconds) / median,
                repeats=len(seconds[name]),
                batch=workload.batch,
                dtype=workload.dtype,
                operations=None if method.compiled else operations,
            )
        )
    return rows


def _alone(counts: Counter[Any], seconds: Mapping[Any, list[float]]) -> float:
    """Return the seconds that recorded calls take alone."""
    return sum(count * statistics.median(seconds[call]) for call, count in counts.items())


def quartiles(seconds: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else 3 * seconds
    return low, median, high


def seconds_alone(step: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the heavy calls of a step, alone: medians of `repeats` calls after two warm-ups."""
    with Recorder() as recorder:
        step()
    runs = {call: replay(call) for call in recorder.calls}
    return _alone(recorder.calls, {call: [clock(run) for _ in range(repeats + 2)][2:] for call, run in runs.items()})


def interleave(
    actions: Mapping[Any, Callable[[], object]],
    repeats: int | None = None,
    budget: float = 60.0,
    fewest: int = MIN_REPEATS,
    *,
    then: Mapping[Any, Callable[[], object]] | None = None,
) -> dict[Any, list[float]]:
    """Return the seconds of every repetition of every action. The caller has warmed the actions up.

    Each round has another order: what runs before an action decides its heap and caches.

    Args:
        actions: actions by key.
        repeats: repetitions; None: as many as the budget allows.
        budget: seconds for all repetitions together.
        fewest: least number of repetitions, whatever the budget.
        then: short actions of another kind, timed after the actions of each round.
    """
    last = dict(then or {})
    seconds: dict[Any, list[float]] = {key: [] for key in [*actions, *last]}
    keys = list(actions)
    collecting = gc.isenabled()
    gc.disable()
    try:
        done, limit = 0, MAX_REPEATS if repeats is None else repeats
        while done < limit:
            gc.collect()
            for key in random.Random(done).sample(keys, len(keys)):
                seconds[key].append(clock(actions[key]))
            for key, action in last.items():
                seconds[key].append(clock(action))
            done += 1
            if repeats is None:
                one_round = sum(map(sum, seconds.values())) / done
                limit = min(MAX_REPEATS, max(fewest, int(budget / one_round)))
    finally:
        if collecting:
            gc.enable()
    return seconds


def _repeated(case: Case, count: int) -> Callable[[], None]:
    case()

    def run() -> None:
        for _ in range(count):
            case()
        case.clear()

    return run


def block_seconds(workloads: Sequence[Workload], settings: Settings) -> dict[str, dict[str, float]]:
    """Return method -> workload -> seconds of a block. A shallow network takes more steps in a round, to last equally long."""
    torch.set_num_threads(settings.threads)
    depths = {workload.name: workload.options["depth"] for workload in workloads}
    counts = {name: max(depths.values()) // depth for name, depth in depths.items()}
    actions = {
        (method, workload.name): _repeated(Case(workload, METHODS[method]), counts[workload.name])
        for workload in workloads
        for method in ("store", "revode")
    }
    found: dict[str, dict[str, float]] = {method: {} for method in ("store", "revode")}
    for (method, name), seconds in interleave(actions, settings.repeats, OVER_DEPTH, settings.fewest).items():
        found[method][name] = statistics.median(seconds) / (counts[name] * depths[name])
    return found
