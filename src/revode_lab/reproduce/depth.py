"""The cost of depth: memory under every gradient strategy, and 1,202 layers trained, with their gradients over depth."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch

from revode.engine import DEFAULT_BITS
from revode.networks import model_config
from revode_lab import charts, data
from revode_lab.reproduce import paper
from revode_lab.reproduce.accuracy import REVERSIBLY, smoke_levels
from revode_lab.reproduce.item import ABSENT, SMOKE, SMOKE_NOTE, Budget, Chart, Findings, Item, Outcome, Table, percent
from revode_lab.reproduce.task import NetworkTask, Setup, Task, TaskFailed, TrainingRun
from revode_lab.system import human_bytes

STRATEGIES = ("reversible", "checkpoint-sqrt", "checkpoint", "store")
"""The library, and the baselines of `revode_lab.baselines`."""


@dataclass(frozen=True, kw_only=True)
class StepCost(NetworkTask):
    """Bytes and seconds of one training step on random images of the data set's shape, measured as by ``make bench``.

    Attributes:
        strategy: One of `STRATEGIES`.
        num_timed: Steps to time.
        fresh: Start a process for it; else only the bytes kept for backward mean something.
        autocast: Run branches in bfloat16.
    """

    strategy: str
    batch_size: int = 32
    num_timed: int = 1
    fresh: bool = True
    autocast: bool = False

    @property
    def title(self) -> str:
        return (
            f"{self.name} {self.strategy}, a step of {self.batch_size} images{' in bfloat16' if self.autocast else ''}"
        )

    def flops(self) -> float:
        units = 4 * (1 + self.num_timed) + 1
        return units * self.batch_size * self.forward_flops()

    def measure(self, setup: Setup) -> dict[str, Any]:
        from revode_lab.fresh import in_fresh_process
        from revode_lab.step import network_cost

        options = {**self.options, **data.describe(self.dataset).network_options}
        threads = setup.threads or torch.get_num_threads()
        how = (self.model, options, self.batch_size, self.strategy, threads, self.num_timed, self.autocast)
        try:
            found = in_fresh_process(network_cost, *how) if self.fresh else network_cost(*how) | {"peak_bytes": None}
        except RuntimeError as error:
            raise TaskFailed(str(error)) from error
        return {"layers": model_config(self.model, **self.options).num_layers, **found}


@dataclass(frozen=True, kw_only=True)
class OverDepth(Task):
    """Norms of signal and gradient at every depth of a run's network, before and after training."""

    is_of_training = True

    run: TrainingRun
    num_images: int = 4

    @property
    def title(self) -> str:
        return f"{self.run.name} over depth, seed {self.run.seed}"

    def identity(self) -> dict[str, Any]:
        return {"run": self.run.identity(), "num_images": self.num_images}

    def for_seeds(self, seeds: range) -> list[OverDepth]:
        return [replace(self, run=run) for run in self.run.for_seeds(seeds)]

    def flops(self) -> float:
        return 2 * 5 * self.num_images * self.run.forward_flops()

    def measure(self, setup: Setup) -> dict[str, Any]:
        from revode_lab.stability import signal_propagation
        from revode_lab.training.job import build_model
        from revode_lab.training.run import load_run

        if setup.finished(self.run) is None:
            raise TaskFailed(f"{self.title}: its training has no result")
        dataset = data.load(self.run.dataset, setup.data_root)
        batch = dataset.split("test").take(torch.arange(self.num_images))
        images = data.standardise(batch.images, dataset)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.run.seed)
            fresh = build_model(self.run.config(setup), dataset)
        numbers: dict[str, Any] = {}
        for name, model in (("initial", fresh), ("trained", load_run(setup.folder(self.run)).model)):
            found = signal_propagation(model, images, batch.labels, chunk=self.num_images)
            steps = [i for i, step in enumerate(found.places) if step.kind == "step"]
            numbers[name] = {
                "depth": [found.places[i].depth for i in steps],
                "gradient": [float(found.gradient[i]) for i in steps],
                "signal": [float(found.signal[i]) for i in steps],
                "gradient_growth": found.gradient_growth,
                "signal_growth": found.signal_growth,
            }
        return numbers


DEPTHS = (14, 26, 50, 98, 194, 386, 770, 1202, 2402)
ALIKE: dict[str, Any] = {"channels": [32, 64, 128], "norm": "none", "horizon": 1.0, "init": "independent"}
"""Options at every depth: width, bias in place of batch norm, and a fixed horizon."""


def _steps(batch: int) -> list[Task]:
    """Return a step of every depth under every strategy, and of the ResNet of that depth."""
    tasks: list[Task] = []
    for n in DEPTHS:
        tasks += [StepCost(model=f"hamiltonian-{n}", strategy=s, options=ALIKE, batch_size=batch) for s in STRATEGIES]
        tasks.append(StepCost(model=f"resnet-{n}", strategy="store", batch_size=batch))
    return tasks


SMALL: dict[str, Any] = {"options": ALIKE | {"channels": [4, 8, 8]}, "dataset": "digits", "batch_size": 2}
STEP_OF = "Measured on one training step of {} images of 32x32 pixels{}. Nothing is trained."
MEMORY = {
    "smoke": Budget(
        "Smoke budget: a few channels, 8x8 images, batch 2. Only the shape of the curves means something.",
        "smoke",
        [
            StepCost(model=f"hamiltonian-{n}", strategy=way, fresh=(way, n) == ("reversible", 50), **SMALL)
            for n in DEPTHS[:3]
            for way in STRATEGIES
        ],
    ),
    "cpu": Budget(STEP_OF.format(8, "; the paper's batch for 1,202 layers is 32"), "cpu", _steps(8)),
    "paper": Budget(STEP_OF.format(32, ""), "paper", _steps(32)),
}

Curves = dict[str, dict[int, float]]


def show_memory(budget: Budget, outcomes: list[Outcome]) -> Findings:
    """Show bytes kept for backward and peaks of fresh processes, over layers."""
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
    """Return family and strategy -> layers -> MB, where it was measured."""
    found: Curves = {}
    for task, result, _ in outcomes:
        if result[column] is not None:
            name = f"{task.model.rpartition('-')[0]}, {task.strategy}"
            found.setdefault(name, {})[result["layers"]] = result[column] / 1e6
    return found


def _growth(values: dict[int, float]) -> float:
    """Return the memory of the deepest network over that of the shallowest."""
    return values[max(values)] / values[min(values)]


def _table(caption: str, values: Curves, layers: list[int]) -> Table:
    rows = [{"layers": f"{n:,}"} | {name: _number(row.get(n)) for name, row in values.items()} for n in layers]
    growth = {name: f"{_growth(row):.3g}" if len(row) == len(layers) else ABSENT for name, row in values.items()}
    rows.append({"layers": "deepest / shallowest"} | growth)
    rows.append({"layers": "paper"} | {name: "constant" if "reversible" in name else ABSENT for name in values})
    return Table(rows, caption)


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _chart(values: Curves, name: str, label: str, caption: str) -> Chart:
    series = {key: (sorted(row), [row[n] for n in sorted(row)]) for key, row in values.items()}
    return Chart(charts.lines(series, "layers", label, log_x=True, log_y=True, mark=True), caption, name)


DEEP, BASELINE = "hamiltonian-1202", "resnet-1202"
CPU: dict[str, Any] = {
    "max_steps": 300, "evaluate_every": 0, "log_every": 5, "checkpoint_every": 25, "report": False,
}  # fmt: skip


def _deep(run: dict[str, Any], **cost: Any) -> list[Task]:
    """Return the costs first, as they are short; then the training and its gradients over depth."""
    training = TrainingRun(model=DEEP, **run)
    cost |= {"dataset": training.dataset, "options": training.options}
    pairs = ((DEEP, "reversible"), (DEEP, "store"), (BASELINE, "store"))
    costs = [StepCost(model=model, strategy=strategy, **cost) for model, strategy in pairs]
    return [*costs, training, OverDepth(run=training)]


DEEP_RUN: dict[str, Any] = {"dataset": "cifar10", "recipe": "cifar-1202"}
DEPTH_1202 = {
    "smoke": Budget(SMOKE_NOTE, "smoke budget", _deep(SMOKE, batch_size=4, fresh=False)),
    "cpu": Budget(
        "CPU budget: 300 steps of 32 images; not the paper's schedule of 80,000 steps.",
        "cpu budget",
        _deep({**DEEP_RUN, "settings": CPU}, num_timed=3),
    ),
    "paper": Budget("The paper's schedule: 80,000 steps of 32 images.", "paper budget", _deep(DEEP_RUN, num_timed=3)),
}

# Blocks of 6-6-6, 18-18-18 and 100-100-100. h = 0.018 is 0.3 in the first network, and smoothness decay is a hundred times the
# paper's: refining then loses least (docs/multilevel.md has the trials). Epochs have 490 steps.
BY_REFINEMENT = TrainingRun(
    model=DEEP,
    dataset="cifar10",
    recipe="quick",
    label=f"{DEEP}, by refinement",
    options={"h": 0.018},
    settings={
        **REVERSIBLY,
        "exact": DEFAULT_BITS,
        "levels": "74@16:8,74@24:5,218@24:2,1202@32:1",
        "rate_per_level": True,
        "max_steps": 15 * 490 + 120,
        "batch_size": 100,
        "lr": 0.2,
        "smoothness": 0.02,
        "clip": 1.0,
        "ema": 0.95,
        "validation": 0.02,
        "evaluate_every": 1,
        "checkpoint_every": 50,
        "report": False,
    },
)
LAST_LEVEL = [
    StepCost(
        model=DEEP,
        strategy=strategy,
        options=BY_REFINEMENT.options | {"exact": BY_REFINEMENT.settings["exact"]},
        batch_size=BY_REFINEMENT.batch_size,
        autocast=True,
    )
    for strategy in ("reversible", "store")
]
"""A step of the last level, whose peak is that of a fresh process."""
SMOKE_REFINEMENT = TrainingRun(model=DEEP, **smoke_levels())
LEVELS_1202 = {
    "smoke": Budget(SMOKE_NOTE, "smoke budget", [SMOKE_REFINEMENT, OverDepth(run=SMOKE_REFINEMENT)]),
    "cpu": Budget(
        "CPU budget: 74 layers for 8 epochs at 16x16 and 5 at 24x24, 218 layers for 2 at 24x24, then 120 steps of 100 images "
        "of 1,202 layers at 32x32, with h = 0.018; not the paper's schedule of 80,000 steps, nor its h = 0.1.",
        "cpu budget",
        [*LAST_LEVEL, BY_REFINEMENT, OverDepth(run=BY_REFINEMENT)],
    ),
    "paper": Budget("The paper's schedule: 80,000 steps of 32 images.", "paper budget", DEPTH_1202["paper"].tasks[-2:]),
}


def show_depth_1202(budget: Budget, outcomes: list[Outcome]) -> Findings:
    """Show costs, loss curve, gradients over depth."""
    tables, found = [], []
    for kind, show in ((StepCost, _costs), (TrainingRun, _training), (OverDepth, _over_depth)):
        own = [outcome for outcome in outcomes if isinstance(outcome.task, kind)]
        if own:
            table, chart = show(budget, own)
            tables.append(table)
            found.append(chart)
    changes = [row for outcome in outcomes if isinstance(outcome.task, TrainingRun) for row in _changes(outcome)]
    if changes:
        tables.append(Table(changes, "What is left of the accuracy when the level changes"))
    costs = any(isinstance(outcome.task, StepCost) for outcome in outcomes)
    measured = "Bytes and seconds are those of one forward and backward pass, without the optimizer. " if costs else ""
    remarks = [
        f"{measured}The paper reports that 1,202 layers train on one GPU with 10 GB of memory, and that there is no issue of "
        "exploding or vanishing gradients.",
        "The states before a unit's first block are left out: there the channels that the transition fills with zeros meet a "
        "batch norm of variance 0, whose slope is 1/√ε = 316. Their gradient is large and goes nowhere: they are constants.",
    ]
    return Findings(tables, found, remarks)


def _costs(budget: Budget, costs: list[Outcome]) -> tuple[Table, Chart]:
    rows = [
        {
            "network, strategy": f"{task.name}, {task.strategy}",
            "parameters": f"{result['params']:,}",
            "layers": str(result["layers"]),
            "batch": f"{task.batch_size}{', bfloat16' if task.autocast else ''}",
            "kept for backward": human_bytes(result["saved_bytes"]),
            "peak of a fresh process": ABSENT if result["peak_bytes"] is None else human_bytes(result["peak_bytes"]),
            "time of a step": f"{result['seconds_per_step']:.3g} s",
            "paper": "fits into 10 GB" if task.strategy == "reversible" else ABSENT,
        }
        for task, result, _ in costs
    ]
    known = all(outcome.result["peak_bytes"] is not None for outcome in costs)
    which = "peak_bytes" if known else "saved_bytes"
    values = {f"{o.task.name}, {o.task.strategy}": o.result[which] / 1e6 for o in costs}
    label = "peak of a fresh process in a step, MB" if known else "kept for backward, MB"
    return Table(rows, "What a step costs"), Chart(
        charts.bars(values, label), f"Memory of one training step: {label}.", "memory"
    )


def _training(budget: Budget, runs: list[Outcome]) -> tuple[Table, Chart]:
    series = {outcome.task.title: outcome.metrics("train", "loss") for outcome in runs}
    ends = {title: f"{losses[0]:.3f} → {losses[-1]:.3f}" for title, (_, losses) in series.items()}
    rows = [
        {
            "run": task.title,
            "steps": f"{result['steps']:,}",
            "training loss, first → last line": ends[task.title],
            "activations kept": human_bytes(result["peak_activation_bytes"]),
            f"test accuracy, ours ({budget.schedule})": percent(task.accuracy(result)),
            f"paper ({paper.DEEP_SCHEDULE})": percent(paper.CIFAR[DEEP]["cifar10"]),
        }
        for task, result, _ in runs
    ]
    markup = charts.lines(series, "step", "training loss")
    return Table(rows, "Training"), Chart(markup, f"Training loss of {runs[0].task.name}. {budget.note}", "loss")


RECENT = 3
"""Lines of the training loss that are averaged before a change of level."""


def _changes(run: Outcome) -> list[dict[str, str]]:
    """Return accuracy before and after each change of level, and the steps until the training loss is back."""
    scores = {line["step"]: 100 * line["accuracy"] for line in run.lines("evaluation")}
    losses = {line["step"]: line["loss"] for line in run.lines("train")}
    rows = []
    for line in run.lines("level"):
        step, left = line["step"], line.get("accuracy")
        before = statistics.fmean([loss for at, loss in losses.items() if at <= step][-RECENT:])
        # A line is of the steps since the one before it, so the first may be of both levels.
        later = itertools.pairwise(losses.items())
        recovered = next((at - step for (since, _), (at, loss) in later if since >= step and loss <= before), None)
        rows.append(
            {
                "at step": f"{step:,}",
                "goes on with": f"{line['layers']:,} layers, images of {line['edge']}x{line['edge']}",
                "accuracy before": percent(scores.get(step)),
                "left": percent(left and 100 * left),
                "steps until the training loss is back": ABSENT if recovered is None else f"{recovered:,}",
            }
        )
    return rows


def _over_depth(budget: Budget, profiles: list[Outcome]) -> tuple[Table, Chart]:
    rows = [
        {
            "network": f"{task.title}, {when} weights",
            "norm of the state, smallest to largest": _range(result[when]["signal"]),
            "norm of the gradient by the state": _range(result[when]["gradient"]),
            "paper": "neither exploding nor vanishing",
        }
        for task, result, _ in profiles
        for when in ("initial", "trained")
    ]
    first = profiles[0].result
    series = {f"{when} weights": (first[when]["depth"], first[when]["gradient"]) for when in ("initial", "trained")}
    markup = charts.lines(series, "depth, blocks", "norm of the gradient by the state", log_y=True)
    caption = "Norm of the loss's gradient by the state at every depth, geometric mean over images."
    return Table(rows, "After each of the blocks"), Chart(markup, caption, "gradient")


def _range(values: list[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g} (factor {max(values) / min(values):.3g})"


ITEMS = (
    Item("memory", "Memory over depth", MEMORY, show_memory),
    Item("depth-1202", "1,202 layers", DEPTH_1202, show_depth_1202),
    Item("levels-1202", "1,202 layers by refinement", LEVELS_1202, show_depth_1202),
)
