"""``report.html``: what a run did, on one page that needs nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from revode import data
from revode.charts import Points, bars, lines, pictures, shares
from revode.files import human_bytes, human_time
from revode.page import Page
from revode.training.diagnosis import depth_profile
from revode.training.run import REPORT, Run, existing_run, images_as_seen, load_run, read_metrics
from revode.training.terminal import passing
from revode.training.walk import activations, walk_back

_COLUMNS = 6
_NUM_MISTAKES, _NUM_SHOWN = 12, 6
_NUM_PROFILE_IMAGES = 16
_SCAN = 200
"""Images scored at a time in the search for mistakes."""


def write_report(folder: str | Path, data_root: str | None = None, out: str | Path | None = None) -> Path:
    """Write the report of a run.

    Args:
        folder: The run.
        data_root: Folder of the data sets; where its images are missing, the parts that need them are left out.
        out: The page; ``report.html`` in the run unless given.
    """
    path = existing_run(folder)
    run = load_run(path)
    try:
        dataset = data.load(run.config.data.dataset, data_root or run.config.record.data_root)
        absence = ""
    except (FileNotFoundError, ValueError) as error:
        dataset, absence = None, str(error)
    page = Page(*_titles(run))
    passing("report: curves")
    _cards(page, run)
    _curves(page, path)
    _monitors(page, path)
    _memory(page, run)
    if dataset is None:
        page.text(f"Parts that need the images are missing: {absence}.")
    else:
        passing("report: the network over its depth")
        _walk(page, run, dataset)
        _depth(page, run, dataset)
    _classes(page, run)
    if dataset is not None and dataset.test is not None:
        passing("report: predictions")
        _predictions(page, run, dataset)
    _settings(page, run)
    passing("")
    return page.write(path / REPORT if out is None else Path(out))


def _titles(run: Run) -> tuple[str, str]:
    config = run.config
    words = [f"recipe {config.recipe}", f"seed {config.execution.seed}", f"weights of the {run.weights_of}"]
    return f"{config.model.name} on {config.data.dataset}", ", ".join(words)


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


def _curves(page: Page, folder: Path) -> None:
    rows = read_metrics(folder)
    train = [row for row in rows if row["kind"] == "train"]
    if not train:
        page.text("No metrics were logged yet.")
        return
    page.heading("Training")
    first, last = train[0], train[-1]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    end = f"; {evaluations[-1]['split']} loss ends at {evaluations[-1]['loss']:.3f}" if evaluations else ""
    page.figure(
        lines(_over_steps(rows, "loss"), "step", "loss"),
        "Cross-entropy, means between log lines. The training loss includes label smoothing, where that is on.",
        f"Training loss from {first['loss']:.3f} to {last['loss']:.3f}{end}",
    )
    page.figure(
        lines(_over_steps(rows, "accuracy", 100), "step", "accuracy, %"),
        "Accuracy on augmented training images, and on images not trained on.",
        f"Training accuracy from {first['accuracy']:.1%} to {last['accuracy']:.1%}",
    )
    page.figure(
        lines(_over_steps(rows, "lr"), "step", "learning rate"),
        "The learning rate.",
        f"Learning rate from {first['lr']:.3g} to {last['lr']:.3g}, at most {max(row['lr'] for row in train):.3g}",
    )
    norms = [row["gradient_norm"] for row in train if row["gradient_norm"] is not None]
    if norms:
        page.figure(
            lines(_over_steps(rows, "gradient_norm"), "step", "norm of the gradient", log_y=True),
            "Norm of the whole gradient before clipping.",
            f"Gradient norm from {norms[0]:.3g} to {norms[-1]:.3g}",
        )


def _monitors(page: Page, folder: Path) -> None:
    """What ``--monitor`` wrote, a figure for each quantity."""
    rows = [row for row in read_metrics(folder) if row["kind"] == "monitor"]
    quantities = dict.fromkeys(name for row in rows for name in row if name not in ("kind", "step"))
    if quantities:
        page.heading("Stability while training")
    for name in quantities:
        known = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if known:
            steps, values = zip(*known, strict=True)
            words = name.replace("_", " ")
            chart = lines({words: (steps, values)}, "step", words, mark=len(known) < 30)
            page.figure(
                chart,
                f"{words.capitalize()} on a few training images.",
                f"{words} from {values[0]:.3g} to {values[-1]:.3g}",
            )


def _over_steps(rows: list[dict[str, Any]], quantity: str, scale: float = 1.0) -> dict[str, Points]:
    """A quantity of the metrics over steps: in training, and on the evaluation split where it has it."""
    series: dict[str, Points] = {}
    for kind in ("train", "evaluation"):
        found = [row for row in rows if row["kind"] == kind and row.get(quantity) is not None]
        if found:
            name = found[-1].get("split", kind)
            series[name] = [row["step"] for row in found], [scale * row[quantity] for row in found]
    return series


def _memory(page: Page, run: Run) -> None:
    plan = run.result.get("plan")
    if not plan:
        return
    sizes, used = plan["activation_bytes"], plan["strategy"]
    page.heading("Memory")
    caption = f"Peak activations for one micro-batch, predicted before the run; this run used {used}"
    if "store" in sizes and used != "store":
        caption += f", {sizes['store'] / max(1, sizes[used]):.1f} times less than storing everything"
    listing = ", ".join(f"{name} {human_bytes(size)}" for name, size in sizes.items())
    megabytes = {name: size / 1e6 for name, size in sizes.items()}
    chart = bars(megabytes, "activations kept for backward, MB", unit=" MB", highlight=used)
    page.figure(chart, f"{caption}.", f"Activation memory: {listing}")


def _walk(page: Page, run: Run, dataset: data.Dataset) -> None:
    """Images found back by walking back, and what one looks like on its way."""
    split = dataset.test or dataset.train
    seen, _ = images_as_seen(dataset, split, _COLUMNS)
    walked = walk_back(run.model, seen)
    if walked is None:
        return
    page.heading("An image on its way, and back")
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (dataset.mean, dataset.std))
    images, found = seen * std + mean, walked.images * std + mean
    error = (found - images).abs().amax(dim=1, keepdim=True)
    top = float(error.max())
    rows = [
        [(image, "image") for image in images],
        [(image, "walked back") for image in found],
        [(one, f"error ≤ {float(one.max()):.0e}" if float(one.max()) else "no error") for one in error],
    ]
    page.figure(
        pictures(rows),
        f"Images, and what walking back finds of them from {walked.start}. "
        f"The largest error of a pixel is {top:.1e}, where white is 1 and black 0.",
        f"{len(images)} images, and the same rebuilt with an error of at most {top:.1e}",
    )
    shown = activations(run.model, seen[:1], _COLUMNS)
    page.figure(
        pictures([[(picture, f"unit {unit}\nblock {block}") for block, picture in row] for unit, row in shown.items()]),
        "The first image's state over depth, as the mean of its channels; dark is the least value, white the largest.",
        f"Pictures of the state in {len(shown)} units, at up to {_COLUMNS} depths each",
    )


def _depth(page: Page, run: Run, dataset: data.Dataset) -> None:
    images, labels = images_as_seen(dataset, dataset.test or dataset.train, _NUM_PROFILE_IMAGES)
    profiles = depth_profile(run.model, images, labels)
    if not profiles:
        return
    page.heading("Over depth")
    for label, caption, values in (
        (
            "reconstruction error",
            "States computed back from the end of each unit against those computed forward; 1e-12 stands for exact.",
            [profile.reconstruction_error for profile in profiles],
        ),
        (
            "gradient of the state",
            "Norm of the loss's gradient by each state: where it neither grows nor shrinks, depth costs nothing.",
            [profile.gradient_norm for profile in profiles],
        ),
    ):
        if not any(values):
            continue
        series: dict[str, Points] = {}
        start = 1
        for profile, numbers in zip(profiles, values, strict=True):
            if numbers:  # an error of 0 cannot be shown on a logarithmic axis
                series[profile.name] = list(range(start, start + len(numbers))), [max(x, 1e-12) for x in numbers]
            start += len(numbers)
        chart = lines(series, "branch, from input to output", label, log_y=True, mark=True)
        page.figure(chart, caption, f"The {label} over depth, at most {max(max(x) for x in values if x):.2g}")


def _classes(page: Page, run: Run) -> None:
    confusion = run.result.get("confusion")
    if not confusion:
        return
    names = data.describe(run.config.data.dataset).class_names
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
def _predictions(page: Page, run: Run, dataset: data.Dataset) -> None:
    """The first test images and the first mistakes, each with the confidence of the network."""
    assert dataset.test is not None
    first: list[tuple[Any, str]] = []
    mistakes: list[tuple[Any, str]] = []
    names = dataset.class_names
    for indices in data.evaluation_batches(len(dataset.test), _SCAN):
        batch = dataset.test.take(indices)
        confidences, predictions = run.model(data.standardise(batch.images, dataset)).softmax(1).max(1)
        for image, label, taken, sure in zip(
            batch.images, batch.labels.tolist(), predictions.tolist(), confidences, strict=True
        ):
            if len(first) < _NUM_SHOWN:
                first.append((image, f"{names[taken]}\n{float(sure):.0%}"))
            if taken != label:
                mistakes.append((image, f"{names[label]} → {names[taken]}\n{float(sure):.0%}"))
        if len(mistakes) >= _NUM_MISTAKES:
            break
    page.figure(
        pictures([first]),
        "The first test images: the class they were taken for, and how sure the network is.",
        f"Test images with their predicted classes: {', '.join(caption for _, caption in first)}",
    )
    if not mistakes:
        page.text("No test image is classified wrongly.")
        return
    mistakes = mistakes[:_NUM_MISTAKES]
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
        page.details(
            f"result.json (without the confusion matrix), {os.path.basename(run.folder)}",
            json.dumps(shown, indent=2),
        )
