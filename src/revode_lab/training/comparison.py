"""Several runs on one page: what they reached, where their settings differ, and their curves over epochs and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from revode_lab.charts import Points, bars, lines
from revode_lab.page import Page
from revode_lab.system import human_bytes, human_time, read_json
from revode_lab.training.checkpoint import CONFIG, RESULT
from revode_lab.training.config import LEAVES, Config, cost_until, from_leaves, parse_levels, read_yaml
from revode_lab.training.run import read_metrics

PAGE = "comparison.html"
_ABSENT = "–"


@dataclass(frozen=True)
class _Course:
    """The files of a run; `result` is empty while it goes on."""

    name: str
    config: Config
    result: dict[str, Any]
    rows: list[dict[str, Any]]

    def curve(self, kind: str, quantity: str, scale: float, unit: float | None = None) -> Points | None:
        """Return a quantity over epochs, or over time in units of so many seconds; None where it is not known."""
        rows = [row for row in self.rows if row["kind"] == kind and row.get(quantity) is not None]
        if not rows or (unit and not self.result):
            return None
        ends = [row for row in self.rows if row["kind"] == "evaluation"] or rows
        done, last = self.result.get("epochs"), ends[-1]
        per_epoch = self.result["steps"] / done if done else last["step"] / (last["epoch"] + 1)
        x = [row["step"] / per_epoch for row in rows]
        if unit:
            x = [self.result["seconds"] / unit * self._cost(epochs) / self._cost(done or 1.0) for epochs in x]
        return x, [scale * row[quantity] for row in rows]

    def _cost(self, epochs: float) -> float:
        """Return the cost of the first epochs, the last of them in part."""
        levels, whole = parse_levels(self.config.optimization.levels), int(epochs)
        before = cost_until(levels, whole)
        return before + (epochs - whole) * (cost_until(levels, whole + 1) - before)


def write_comparison(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write one page about several runs, finished or not; ``comparison.html`` beside the first unless `out` says where."""
    path = Path(out or Path(folders[0]).resolve().parent / PAGE)
    if path.is_dir():
        raise ValueError(f"{path} is a directory; give the file to write, as {path / PAGE}")
    runs = [_read(Path(folder)) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        parts = [Path(folder).absolute().parts for folder in folders]
        # As much of each path, from its end, as tells the runs apart.
        names = ([Path(*own[-n:]).as_posix() for own in parts] for n in range(1, max(map(len, parts)) + 1))
        apart = next((found for found in names if len(set(found)) == len(found)), [str(folder) for folder in folders])
        runs = [replace(run, name=name) for name, run in zip(apart, runs, strict=True)]
    page = Page(f"{len(runs)} runs", ", ".join(run.name for run in runs))
    page.table(["run", "network", "images", *_COLUMNS], [_row(run) for run in runs], "What they reached.")
    _settings(page, runs)
    page.heading("Curves")
    longest = max((run.result["seconds"] for run in runs if run.result), default=0.0)
    over = {"epochs": None, **({"hours": 3600.0} if longest > 3600 else {"minutes": 60.0})}
    for kind, label, quantity, scale in (
        ("evaluation", "accuracy, %", "accuracy", 100.0),
        ("train", "training loss", "loss", 1.0),
    ):
        for name, unit in over.items():
            curves = {run.name: run.curve(kind, quantity, scale, unit) for run in runs}
            series = {run: points for run, points in curves.items() if points is not None}
            if series:
                ends = "; ".join(f"{run} ends at {values[-1]:.3g}" for run, (_, values) in series.items())
                chart = lines(series, name, label, mark=kind == "evaluation")
                page.figure(chart, _caption(kind, unit, runs), f"{label}: {ends}")
    sizes = {run.name: run.result["peak_activation_bytes"] / 1e6 for run in runs if run.result}
    if sizes:
        page.heading("Memory")
        caption = "Peak of the activations kept for backward in one micro-batch, measured before each run."
        alt = ", ".join(f"{name} {size:.3g} MB" for name, size in sizes.items())
        page.figure(bars(sizes, "activations kept for backward, MB", unit=" MB"), caption, alt)
    return page.write(path)


def _read(folder: Path) -> _Course:
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} holds no training run (no {CONFIG}); give directories that `revode train --out` wrote"
        )
    config = from_leaves(read_yaml(str(folder / CONFIG)))
    return _Course(folder.resolve().name, config, read_json(folder / RESULT) or {}, read_metrics(folder))


_COLUMNS = ("test accuracy", "parameters", "epochs", "time", "images a second", "activations", "device")


def _row(run: _Course) -> list[str]:
    found, images = run.result, Path(run.config.data.dataset).name
    if not found:
        step = max((row["step"] for row in run.rows), default=0)
        return [run.name, run.config.model.name, images, f"at step {step:,}", *[_ABSENT] * (len(_COLUMNS) - 1)]
    accuracy = found["test_accuracy"]
    return [
        run.name, found["model"], images, _ABSENT if accuracy is None else f"{accuracy:.2%}", f"{found['params']:,}",
        f"{found['epochs']:.3g}", human_time(found["seconds"]), f"{found['images_per_second']:.0f}",
        human_bytes(found["peak_activation_bytes"]), found["machine"].get("gpu", found["machine"]["device"]),
    ]  # fmt: skip


def _settings(page: Page, runs: Sequence[_Course]) -> None:
    """Return the settings that are not equal everywhere."""
    leaves = [run.config.leaves() for run in runs]
    differing = [name for name in LEAVES if len({str(own[name]) for own in leaves}) > 1 and name != "data_root"]
    page.heading("Settings that differ")
    if not differing:
        page.text("None: these runs have equal settings.")
        return
    page.table(
        ["setting", *(run.name for run in runs)], [[name, *(str(own[name]) for own in leaves)] for name in differing]
    )


def _caption(kind: str, unit: float | None, runs: Sequence[_Course]) -> str:
    splits = {row["split"] for run in runs for row in run.rows if row["kind"] == "evaluation"}
    text = f"Accuracy on {' and '.join(sorted(splits))} images" if kind == "evaluation" else "Training loss"
    if unit is None:
        return f"{text} over passes through the training images."
    return f"{text} over time: that of a finished run is spread over its steps by what they cost."
