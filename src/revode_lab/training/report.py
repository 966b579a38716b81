"""``report.html``: what a run did, on one page that needs nothing else."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode_lab import data
from revode_lab.charts import Points, bars, lines, pictures, shares
from revode_lab.page import Page
from revode_lab.stability.monitor import MEANINGS
from revode_lab.system import human_bytes, human_time
from revode_lab.training.checkpoint import REPORT
from revode_lab.training.config import Config
from revode_lab.training.run import Run, images_as_seen, load_run, read_metrics
from revode_lab.training.terminal import passing

_NUM_MISTAKES, _NUM_SHOWN = 12, 6
_NUM_PROFILE_IMAGES = 16
_SCAN = 200
"""Images scored at a time in the search for mistakes."""
_EXACT = 1e-12
"""The place of an error of 0 on a logarithmic axis."""

_CURVES = {
    "loss": (
        "loss",
        "Cross-entropy, means between log lines. The training loss includes label smoothing, where that is on.",
    ),
    "accuracy": ("accuracy, %", "Accuracy on augmented training images, and on images not trained on."),
    "lr": ("learning rate", "The learning rate."),
    "gradient_norm": ("norm of the gradient", "Norm of the whole gradient before clipping."),
}
"""Quantity of ``metrics.jsonl`` -> its axis and the caption of its figure."""


def write_report(folder: str | Path, data_root: str | None = None, out: str | Path | None = None) -> Path:
    """Write the report of a run, to ``report.html`` in it unless `out` is given; parts without their images are left out."""
    if out is not None and Path(out).is_dir():
        raise ValueError(f"{out} is a directory; give the file to write, as {Path(out) / REPORT}")
    run = load_run(folder)
    config = run.config
    words = f"recipe {config.recipe}, seed {config.execution.seed}, weights of the {run.weights_of}"
    page = Page(f"{run.model.config.name} on {Path(config.data.dataset).name}", words)
    passing("report: curves")
    _cards(page, run)
    _curves(page, read_metrics(run.folder))
    _memory(page, run.result.get("plan"))
    dataset = None
    try:
        dataset = data.load(config.data.dataset, data_root or config.record.data_root)
    except (FileNotFoundError, ValueError) as error:
        page.text(f"Parts that need the images are missing: {error}.")
    if dataset is not None:
        passing("report: the network over its depth")
        _depth(page, run, dataset)
    _classes(page, run, dataset)
    if dataset is not None and dataset.test is not None:
        passing("report: predictions")
        _predictions(page, run, dataset, dataset.test)
    _settings(page, run)
    passing("")
    return page.write(run.folder / REPORT if out is None else Path(out))


def write_course(folder: Path, config: Config, plan: dict[str, Any], where: str) -> Path:
    """Write the page of a run that goes on and is at `where`, without computing; the page loads itself anew every minute."""
    words = f"recipe {config.recipe}, seed {config.execution.seed}, {where}; this page follows the run"
    page = Page(f"{config.model.name} on {Path(config.data.dataset).name}", words, refresh=60)
    _curves(page, read_metrics(folder))
    _memory(page, plan)
    page.details("Configuration", config.to_yaml())
    return page.write(folder / REPORT)


def _cards(page: Page, run: Run) -> None:
    result = run.result
    if not result:
        page.text("This run is not finished: curves go as far as it got, and there is no test score yet.")
        return
    accuracy = result["test_accuracy"]
    page.cards(
        [
            ("test accuracy", "none" if accuracy is None else f"{accuracy:.2%}", "of images never trained on"),
            ("parameters", f"{result['params']:,}", f"{result['plan']['flops_per_image'] / 1e6:.3g} MFLOP an image"),
            ("training", human_time(result["seconds"]), f"{result['steps']:,} steps, {result['epochs']:.3g} epochs"),
            ("images a second", f"{result['images_per_second']:.0f}", f"in updates, on {result['machine']['device']}"),
            ("activations", human_bytes(result["peak_activation_bytes"]), "peak kept for backward, measured"),
        ]
    )


def _curves(page: Page, rows: list[dict[str, Any]]) -> None:
    """Return the course of what was logged, and of what ``--monitor`` wrote."""
    if not any(row["kind"] == "train" for row in rows):
        page.text("No metrics were logged yet.")
        return
    page.heading("Training")
    for quantity, (axis, caption) in _CURVES.items():
        _curve(page, rows, quantity, axis, caption)
    monitored = [row for row in rows if row["kind"] == "monitor"]
    names = dict.fromkeys(name for row in monitored for name in row if name not in ("kind", "step"))
    if names:
        page.heading("Stability while training")
        page.text("Measured on a few training images, as they are without augmentation.")
    for name in names:
        words = name.replace("_", " ")
        _curve(page, monitored, name, words, MEANINGS.get(name, f"{words.capitalize()}."))


def _curve(page: Page, rows: list[dict[str, Any]], quantity: str, axis: str, caption: str) -> None:
    """Return a quantity of the metrics over steps: a curve for training and for the evaluation split, where they have it."""
    series: dict[str, Points] = {}
    scale = 100.0 if axis.endswith("%") else 1.0
    for kind in ("train", "evaluation", "monitor"):
        found = [row for row in rows if row["kind"] == kind and row.get(quantity) is not None]
        if found:
            name = found[-1].get("split", kind)
            series[name] = [row["step"] for row in found], [scale * row[quantity] for row in found]
    if series:
        marked = any(row["kind"] == "monitor" for row in rows) and len(rows) < 30
        chart = lines(series, "step", axis, log_y=quantity == "gradient_norm", mark=marked)
        courses = [f"{name} from {values[0]:.3g} to {values[-1]:.3g}" for name, (_, values) in series.items()]
        page.figure(chart, caption, f"{axis}: {'; '.join(courses)}")


def _memory(page: Page, plan: dict[str, Any] | None) -> None:
    if not plan:
        return
    sizes, used = plan["activation_bytes"], plan["strategy"]
    page.heading("Memory")
    caption = f"Peak activations for one micro-batch, measured before the run; this run used {used}"
    if used != "store":
        caption += f", {sizes['store'] / max(1, sizes[used]):.1f} times less than storing everything"
    listing = ", ".join(f"{name} {human_bytes(size)}" for name, size in sizes.items())
    megabytes = {name: size / 1e6 for name, size in sizes.items()}
    chart = bars(megabytes, "activations kept for backward, MB", unit=" MB", highlight=used)
    page.figure(chart, f"{caption}.", f"Activation memory: {listing}")


def _unit_inputs(model: nn.Module, images: Tensor) -> list[tuple[Any, Any]]:
    """Return every reversible unit in the order of evaluation, with what it is given."""
    inputs: list[tuple[Any, Any]] = []
    units = [module for module in model.modules() if isinstance(module, ReversibleSequence)]
    hooks = [unit.register_forward_pre_hook(lambda unit, x: inputs.append((unit, x[0]))) for unit in units]
    model.eval()(images)
    for hook in hooks:
        hook.remove()
    return inputs


def _depth(page: Page, run: Run, dataset: data.Dataset) -> None:
    """Return reconstruction error and gradient over depth, a curve for each unit."""
    edge = run.model.config.image_size
    images, labels = images_as_seen(dataset, dataset.test or dataset.train, _NUM_PROFILE_IMAGES, edge)
    errors = reconstruction_errors(run.model, images)
    if not errors:
        return
    from revode_lab.stability import signal_propagation

    page.heading("Over depth")
    caption = (
        f"States computed back from the end of each unit against those computed forward; {_EXACT:.0e} stands for exact."
    )
    _over_depth(page, errors, "reconstruction error", caption)
    found = signal_propagation(run.model, images, labels)
    gradients: dict[str, list[float]] = {name: [] for name in errors}
    for place, norm in zip(found.places, found.gradient.tolist(), strict=True):
        if place.kind == "step":
            gradients[f"unit {place.unit + 1}"].append(norm)
    caption = "Norm of the loss's gradient by each state: where it neither grows nor shrinks, depth costs nothing."
    _over_depth(page, gradients, "gradient of the state", caption)


def _over_depth(page: Page, units: Mapping[str, list[float]], label: str, caption: str) -> None:
    series: dict[str, Points] = {}
    start = 1
    for name, numbers in units.items():
        if numbers:
            series[name] = list(range(start, start + len(numbers))), [max(number, _EXACT) for number in numbers]
        start += len(numbers)
    if series:
        chart = lines(series, "block, from input to output", label, log_y=True, mark=True)
        page.figure(
            chart, caption, f"The {label} over depth, at most {max(map(max, filter(None, units.values()))):.2g}"
        )


@torch.no_grad()
def reconstruction_errors(model: nn.Module, images: Tensor) -> dict[str, list[float]]:
    """Return unit -> relative error of the state before each of its blocks, after walking back from its end.

    A unit whose final pair alone does not tell the way back has no numbers.
    """
    from revode_lab.stability import reconstruction_profile

    found: dict[str, list[float]] = {}
    for number, (unit, x) in enumerate(_unit_inputs(model, images), 1):
        found[f"unit {number}"] = []
        with contextlib.suppress(ValueError):
            found[f"unit {number}"] = reconstruction_profile(unit, x)[:-1]
    return found


def _classes(page: Page, run: Run, dataset: data.Dataset | None) -> None:
    confusion = run.result.get("confusion")
    if not confusion or (dataset is None and data.own_images(run.config.data.dataset)):
        return
    names = (dataset or data.describe(run.config.data.dataset)).class_names
    accuracies = [row[i] / max(1, sum(row)) for i, row in enumerate(confusion)]
    worst = min(range(len(names)), key=lambda i: accuracies[i])
    page.heading("Classes")
    shown = sorted(range(len(names)), key=lambda i: accuracies[i])[:20] if len(names) > 20 else range(len(names))
    page.figure(
        bars({names[i]: 100 * accuracies[i] for i in shown}, "accuracy, %", largest=112),
        "Accuracy of each class on the test images" + (" (the 20 lowest)." if len(names) > 20 else "."),
        f"Accuracies of the classes; lowest {names[worst]} with {accuracies[worst]:.1%}",
    )
    page.figure(
        shares(confusion, names, "predicted", "true"),
        "Confusion matrix: what each class was taken for.",
        f"Confusion matrix of {len(names)} classes over {sum(map(sum, confusion))} images",
    )


@torch.no_grad()
def _predictions(page: Page, run: Run, dataset: data.Dataset, test: data.Split) -> None:
    """Return the first test images and the first mistakes, each with the confidence of the network."""
    first: list[tuple[Tensor, str]] = []
    mistakes: list[tuple[Tensor, str]] = []
    names = dataset.class_names
    for indices in data.evaluation_batches(len(test), _SCAN):
        batch = test.take(indices)
        x = data.resample(data.standardise(batch.images, dataset), run.model.config.image_size)
        confidences, predictions = run.model(x).softmax(1).max(1)
        for image, label, taken, sure in zip(
            batch.images, batch.labels.tolist(), predictions.tolist(), confidences.tolist(), strict=True
        ):
            first.append((image, f"{names[taken]}\n{sure:.0%}"))
            if taken != label:
                mistakes.append((image, f"{names[label]} → {names[taken]}\n{sure:.0%}"))
        if len(mistakes) >= _NUM_MISTAKES:
            break
    first, mistakes = first[:_NUM_SHOWN], mistakes[:_NUM_MISTAKES]
    page.figure(
        pictures([first]),
        "The first test images: the class they were taken for, and how sure the network is.",
        f"Test images with their predicted classes: {', '.join(caption for _, caption in first)}",
    )
    if not mistakes:
        page.text("No test image is classified wrongly.")
        return
    page.figure(
        pictures([mistakes[i : i + 4] for i in range(0, len(mistakes), 4)]),
        "The first mistakes among the test images: true class → what it was taken for, and how sure the network is.",
        f"Misclassified test images: {', '.join(caption for _, caption in mistakes)}",
    )


def _settings(page: Page, run: Run) -> None:
    page.heading("Configuration and environment")
    page.details("Configuration", run.config.to_yaml())
    result = run.result
    if result:
        facts = {**result["versions"], **result["machine"], "processes": result["num_processes"]}
        page.table(["what", "value"], [[name, value] for name, value in facts.items()], "Environment")
        page.text(
            f"Source: commit {result['commit'] or 'unknown'}. Commands: revode eval, revode report, revode export."
        )
        shown = {key: value for key, value in result.items() if key != "confusion"}
        summary = f"result.json (without the confusion matrix), {run.folder.name}"
        page.details(summary, json.dumps(shown, indent=2))
