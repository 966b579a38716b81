"""Memory over depth: reversible flat, store and checkpoint linear, checkpoint in √N segments in between."""

from __future__ import annotations

from typing import Any

from revode import charts
from revode.reproduce.item import ABSENT, Chart, Findings, Item, Outcome, Scope, Table
from revode.reproduce.step_cost import METHODS, StepCost
from revode.reproduce.task import Task

DEPTHS = {
    "smoke": (14, 26, 50),
    "cpu": (14, 26, 50, 98, 194, 386, 770, 1202, 2402),
    "paper": (14, 26, 50, 98, 194, 386, 770, 1202, 2402),
}
BATCHES = {"smoke": 2, "cpu": 8, "paper": 32}
ALIKE: dict[str, Any] = {"channels": [32, 64, 128], "norm": "none", "horizon": 1.0, "init": "independent"}
"""The same at every depth: width, bias in place of batch norm, and a fixed horizon."""

Curves = dict[str, dict[int, float]]


def tasks(scope: Scope) -> list[Task]:
    """A step of every depth under every strategy, and of the ResNet of that depth."""
    smoke, depths, batch = scope.budget == "smoke", DEPTHS[scope.budget], BATCHES[scope.budget]
    shared: dict[str, Any] = (
        {"options": ALIKE | {"channels": [4, 8, 8]}, "dataset": "digits"} if smoke else {"options": ALIKE}
    )
    found: list[Task] = []
    for depth in depths:
        for strategy in METHODS:
            fresh = not smoke or (strategy == "reversible" and depth == depths[-1])
            name = f"hamiltonian-{depth}"
            found.append(StepCost(model=name, strategy=strategy, batch_size=batch, fresh=fresh, **shared))
        if not smoke:
            found.append(StepCost(model=f"resnet-{depth}", strategy="store", batch_size=batch))
    return found


def budget_note(scope: Scope) -> str:
    """What the numbers are."""
    batch = BATCHES[scope.budget]
    if scope.budget == "smoke":
        return f"Smoke budget: a few channels, 8x8 images, batch {batch}. Only the shape of the curves means something."
    other = "" if scope.budget == "paper" else "; the paper's batch for 1,202 layers is 32"
    return f"Measured on one training step of {batch} images of 32x32 pixels{other}. Nothing is trained."


def findings(scope: Scope, outcomes: list[Outcome]) -> Findings:
    """Bytes kept for backward and peaks of fresh processes, over layers."""
    kept, peaks = _curves(outcomes, "saved_bytes"), _curves(outcomes, "peak_bytes")
    layers = sorted({depth for values in kept.values() for depth in values})
    tables = [_table("Kept for backward after the forward pass, MB", kept, layers)]
    found = [
        _chart(kept, "kept", "kept for backward, MB", "Bytes kept for backward over depth, both axes logarithmic.")
    ]
    if peaks:
        tables.append(_table("Peak of the process during a step, above its idle state, MB", peaks, layers))
        text = "Peak memory of a training step in a fresh process over depth, both axes logarithmic."
        found.append(_chart(peaks, "peak", "peak of the process, MB", text))
    remark = (
        "What checkpoint-sqrt keeps grows as √N; in backward it holds one recomputed segment of √N blocks besides, which only "
        "the peaks show. Peaks include the gradients of the parameters, whose number grows with depth. The paper prints no "
        "figure of memory; it states that memory does not grow with depth, and that 1,202 "
        "layers run in 10 GB of a GPU (batch 32)."
    )
    return Findings(tables, found, [remark], {"growth": {name: _growth(values) for name, values in kept.items()}})


def _curves(outcomes: list[Outcome], column: str) -> Curves:
    """Family and strategy -> layers -> MB, of those that have it."""
    found: Curves = {}
    for task, result in ((outcome.task, outcome.result) for outcome in outcomes):
        if result[column] is not None:
            name = f"{task.model.rpartition('-')[0]}, {task.strategy}"
            found.setdefault(name, {})[result["layers"]] = result[column] / 1e6
    return found


def _growth(values: dict[int, float]) -> float:
    """Memory of the deepest network over that of the shallowest."""
    return values[max(values)] / values[min(values)]


def _table(caption: str, values: Curves, layers: list[int]) -> Table:
    rows = [[f"{n:,}", *(_number(values[name].get(n)) for name in values)] for n in layers]
    if len(layers) == max(map(len, values.values())):
        rows.append(["deepest / shallowest", *(f"{_growth(values[name]):.3g}" for name in values)])
    rows.append(["paper", *("constant" if "reversible" in name else ABSENT for name in values)])
    return Table(["layers", *values], rows, caption)


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _chart(values: Curves, name: str, label: str, caption: str) -> Chart:
    series = {key: (sorted(row), [row[n] for n in sorted(row)]) for key, row in values.items()}
    return Chart(charts.lines(series, "layers", label, log_x=True, log_y=True, mark=True), caption, name)


ITEMS = (Item("memory", "Memory over depth", tasks, budget_note, findings),)
