"""Measure workloads by methods: rows of time, memory and gradient error.

Times are interleaved: one repetition of everything, then the next, so that a drift of the machine hits all alike.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from revode.bench.cases import Case, gradient_errors
from revode.bench.footprint import Footprints
from revode.bench.methods import METHODS, Method
from revode.bench.roofline import Recorder, floor, record, replay
from revode.bench.workloads import Workload, subject

REFERENCE = "store"
SCALING_METHODS = ("store", "revode")
SCALING_BUDGET = 180.0
"""Seconds for the repetitions of all depths together."""
LAYOUTS = ("channels_last", "contiguous")
MIN_REPEATS, MAX_REPEATS = 3, 15
WIDE = 0.2
"""Quartiles that lie further apart, as a share of the median, make a comparison of times meaningless."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure.

    Args:
        threads: CPU threads of torch.
        repeats: repetitions of each step; as many as ``budget`` allows if None.
        fewest: repetitions that are made whatever the budget.
        budget: seconds for the repetitions of one workload.
        layout: memory format of the input, the same for all methods.
    """

    threads: int
    repeats: int | None = None
    fewest: int = MIN_REPEATS
    budget: float = 45.0
    layout: str = LAYOUTS[0]

    def __post_init__(self) -> None:
        for name in ("threads", "repeats", "fewest"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be {' or '.join(LAYOUTS)}, got {self.layout!r}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One workload by one method.

    Args:
        workload: its name.
        method: its name.
        seconds: median of a step (forward and backward).
        ratio_to_store: over the median of ``store`` in the same run.
        saved_bytes: bytes kept for backward, besides parameters and input.
        peak_bytes: peak resident bytes of a step in a fresh process, above those before it.
        grad_error: relative error of the gradient against ``store`` in fp64.
        seconds_low: lower quartile.
        seconds_high: upper quartile.
        roofline: time of the step's convolutions and matrix products called alone, over the step's time.
        repeats: repetitions measured.
        batch: samples in a step.
        block_seconds: time of a block, measured in turn with networks of other depths; None where there are none.
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
    block_seconds: float | None = None

    @property
    def floor(self) -> float:
        """Seconds of the step's convolutions and matrix products, called alone."""
        return self.roofline * self.seconds

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        return (self.seconds_high - self.seconds_low) / self.seconds

    def summary(self) -> dict[str, Any]:
        """The columns that ``revode bench --json`` promises."""
        return {name: getattr(self, name) for name in SUMMARY}

    def to_dict(self) -> dict[str, Any]:
        """Every column."""
        return dataclasses.asdict(self)


SUMMARY = ("workload", "method", "seconds", "ratio_to_store", "saved_bytes", "peak_bytes", "grad_error")


def applicable(workload: Workload, methods: Iterable[Method]) -> list[Method]:
    """Those that are installed and can run the workload's scheme."""
    scheme = subject(workload).scheme
    return [method for method in methods if method.available and (scheme is None or method.supports(scheme))]


def measure(workload: Workload, methods: Sequence[Method], settings: Settings, footprints: Footprints) -> list[Row]:
    """A row for each applicable method; ``store`` is measured in any case, for the ratios.

    Args:
        workload: what to run.
        methods: by which ways.
        settings: how to measure.
        footprints: the entered context that measures peaks.
    """
    wanted = applicable(workload, methods)
    if not wanted:
        return []
    torch.set_num_threads(settings.threads)
    reference = METHODS[REFERENCE]
    run = wanted if reference in wanted else [reference, *wanted]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # memcnn, at every block
        cases = {method.name: Case(workload, method, layout=settings.layout) for method in run}
        timed = _time(cases, settings)
        errors = gradient_errors(workload, [cases[method.name] for method in wanted])
    return [_row(workload, method.name, timed, errors, settings, footprints) for method in wanted]


def with_block_times(rows: list[Row], workloads: Sequence[Workload], settings: Settings) -> list[Row]:
    """The rows of `SCALING_METHODS` on workloads of several depths, with the time of a block.

    The depths are timed in the same rounds, or a drift of the machine would be taken for an effect of depth. Shallow
    networks take as many steps in a round as make them last as long as the deepest.
    """
    found = {workload.name: workload for workload in workloads}
    wanted = [row for row in rows if row.workload in found and row.method in SCALING_METHODS]
    if len({row.workload for row in wanted}) < 2:
        return rows
    deepest = max(workload.options["depth"] for workload in workloads)
    actions: dict[Any, Callable[[], object]] = {}
    blocks: dict[Any, int] = {}
    for row in wanted:
        workload, key = found[row.workload], (row.workload, row.method)
        case = Case(workload, METHODS[row.method], layout=settings.layout)
        case.step()
        steps = deepest // workload.options["depth"]
        actions[key], blocks[key] = _several(case, steps), steps * workload.options["depth"]
    seconds = interleave(actions, settings.repeats, SCALING_BUDGET, settings.fewest)
    times = {key: Spread.of(values).median / blocks[key] for key, values in seconds.items()}
    return [dataclasses.replace(row, block_seconds=times.get((row.workload, row.method))) for row in rows]


def _several(case: Case, count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            case.step()
        case.clear()

    return run


@dataclass
class _Timed:
    spreads: dict[str, Spread]
    saved: dict[str, int]
    floors: dict[str, float]
    repeats: int


def _time(cases: dict[str, Case], settings: Settings) -> _Timed:
    """Steps in shuffled rounds, and the bare convolutions after each round."""
    recorded = {name: record(case) for name, case in cases.items()}  # the warm-up, too
    for case in cases.values():
        if case.method.compiled:
            case.step()
    calls = {call: replay(call) for counts, _ in recorded.values() for call in counts}
    for call in calls.values():
        call()
    actions: dict[Any, Callable[[], object]] = {name: case.step for name, case in cases.items()}
    seconds = interleave(actions, settings.repeats, settings.budget, settings.fewest, then=calls)
    medians = {call: Spread.of(seconds[call]).median for call in calls}
    for case in cases.values():
        case.clear()
    return _Timed(
        spreads={name: Spread.of(seconds[name]) for name in cases},
        saved={name: num_bytes for name, (_, num_bytes) in recorded.items()},
        floors={name: floor(counts, medians) for name, (counts, _) in recorded.items()},
        repeats=len(seconds[REFERENCE]),
    )


def _row(
    workload: Workload,
    method: str,
    timed: _Timed,
    errors: dict[str, float],
    settings: Settings,
    footprints: Footprints,
) -> Row:
    spread = timed.spreads[method]
    return Row(
        workload=workload.name,
        method=method,
        seconds=spread.median,
        ratio_to_store=spread.median / timed.spreads[REFERENCE].median,
        saved_bytes=timed.saved[method],
        peak_bytes=footprints.measure(workload, method, settings.threads, settings.layout)["peak_bytes"],
        grad_error=errors[method],
        seconds_low=spread.low,
        seconds_high=spread.high,
        roofline=timed.floors[method] / spread.median,
        repeats=timed.repeats,
        batch=workload.batch,
    )


@dataclass(frozen=True)
class Spread:
    """The median of some seconds, and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Self:
        """The spread of at least one measurement."""
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0])
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high)


def seconds_alone(step: Callable[[], object], repeats: int) -> float:
    """Seconds that the heavy calls of a step take alone: medians of so many calls each, after two others."""
    with Recorder() as recorder:
        step()
    times = {}
    for call in recorder.calls:
        run = replay(call)
        times[call] = statistics.median([clock(run) for _ in range(repeats + 2)][2:])
    return floor(recorder.calls, times)


def clock(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def interleave(
    actions: Mapping[Any, Callable[[], object]],
    repeats: int | None = None,
    budget: float = 60.0,
    fewest: int = MIN_REPEATS,
    *,
    then: Mapping[Any, Callable[[], object]] | None = None,
) -> dict[Any, list[float]]:
    """Seconds of every repetition of every action. The caller has warmed them up.

    What runs before an action leaves it a heap and caches of its own, so each round has another order.

    Args:
        actions: what to time, by any key.
        repeats: how often; as often as the budget allows if not given.
        budget: seconds that all repetitions together may take.
        fewest: repetitions that are made whatever the budget.
        then: timed as well, but after the actions of each round: short calls of another kind, which should come between
            no two of them.
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
