"""Interleaved timing: one repetition of everything, then the next, so that a drift of the machine hits all alike."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

MIN_REPEATS, MAX_REPEATS = 3, 15


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
    """Seconds of every repetition of every action. Whoever calls has warmed them up.

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
