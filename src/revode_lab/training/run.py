"""The run directory: who may write it, what lies in it, and how it is read back, scored, finished and exported.

config.yaml metrics.jsonl result.json last.ckpt previous.ckpt best.ckpt model.safetensors report.html
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import os
import shlex
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from revode.files import unwritable, write_atomically
from revode.networks import StagedClassifier, load, load_pretrained, save
from revode_lab import data
from revode_lab.data import DatasetInfo, Split
from revode_lab.system import commit, machine, read_json, read_json_lines, versions, write_json
from revode_lab.training.checkpoint import (
    CONFIG,
    FILES,
    LAST,
    METRICS,
    REPORT,
    RESULT,
    WEIGHTS,
    Position,
    is_whole,
    read_newest,
)
from revode_lab.training.config import Config, from_leaves, read_yaml
from revode_lab.training.distributed import Group, choose_device
from revode_lab.training.job import Job, build_model, choose_images
from revode_lab.training.terminal import passing

_DERIVED = ("model.onnx", "stability.html", "stability.json", "events.out.tfevents.*")
"""Default files of ``export``, ``analyze`` and ``--tensorboard``, which are removed with the run."""


def holds_run(folder: Path) -> bool:
    """Return True if any file of a run lies in `folder`."""
    return any((folder / name).exists() for name in FILES)


def check_vacant(folder: Path) -> None:
    """Refuse a folder that holds a run already, or is none."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a directory; give another --out")
    if holds_run(folder):
        raise ValueError(
            f"{folder} holds a run already; go on with it by --resume auto, replace it by --overwrite, "
            "or give another --out"
        )


def vacant_folders(stem: Path) -> Iterator[Path]:
    """Yield `stem`, and `stem` with a number behind it, where no run lies yet."""
    numbered = (stem.with_name(f"{stem.name}-{number}") for number in itertools.count(2))
    return (candidate for candidate in itertools.chain([stem], numbered) if not holds_run(candidate))


def remove_run(folder: Path) -> None:
    """Remove the files of a run and what was made of it, and nothing else, from `folder`."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    _remove(folder, *_DERIVED, ".*.part")


def remove_outcome(folder: Path) -> None:
    """Remove what a run that goes on will write anew, and what a killed process or a bad disk has left of a checkpoint.

    For whoever holds the lock of the run. A finished run that is made longer is then read by its checkpoint, not as it was. A
    damaged ``last.ckpt`` would take the place of the good one before it.
    """
    _remove(folder, RESULT, WEIGHTS, REPORT, ".*.ckpt.*.part")
    if not is_whole(folder / LAST):
        _remove(folder, LAST)


def _remove(folder: Path, *patterns: str) -> None:
    for path in itertools.chain.from_iterable(map(folder.glob, patterns)):
        path.unlink(missing_ok=True)


class MetricsLog:
    """``metrics.jsonl``: one JSON object a line, cut back on resume to what the checkpoint had seen.

    Lines hold no times, so that a resumed run writes the very bytes of an uninterrupted one. `offset` is the number of bytes to
    keep, `board` a TensorBoard writer that gets the numbers, too.
    """

    def __init__(self, path: Path, offset: int = 0, board: Any = None) -> None:
        self.path = path
        self._board = board
        try:
            self._stream = open(path, "ab")  # noqa: SIM115 (closed by `close`)
            self._stream.truncate(min(offset, path.stat().st_size))
            self._stream.seek(0, os.SEEK_END)
        except OSError as error:
            raise ValueError(f"cannot write {path} ({error.strerror}); choose another directory") from error

    def write(self, **values: Any) -> None:
        """Append one line."""
        with self._report_write_errors():
            self._stream.write(json.dumps(values, allow_nan=False).encode() + b"\n")
            self._stream.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{values['kind']}/{name}", value, values["step"])

    def sync(self) -> int:
        """Make all lines durable and return their length in bytes."""
        with self._report_write_errors():
            os.fsync(self._stream.fileno())
        return self._stream.tell()

    @contextlib.contextmanager
    def _report_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"cannot write {self.path} ({error.strerror}); the last checkpoint is intact: "
                "make room and resume the run"
            ) from error

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # what could not be written was reported when it was
            self._stream.close()
        if self._board is not None:
            self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``; a last line cut short by a crash is left out."""
    return read_json_lines(folder / METRICS)


@dataclass(frozen=True)
class Score:
    """Mean cross-entropy and accuracy on a split, and the confusion matrix: true classes down, predicted classes across."""

    loss: float
    accuracy: float
    confusion: Tensor


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: Split,
    info: DatasetInfo,
    group: Group,
    *,
    batch_size: int,
    edge: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    note: Callable[[int, int], None] = lambda done, total: None,
) -> Score | None:
    """Score `model` on every image of `split` once, resampled to `edge`; None if `should_stop` said so on the way.

    Every process makes the same number of calls, since all must answer whether to stop, and with the same statistics,
    those of rank 0. If states leave the grid in one of them, all raise `OutOfRange`.
    """
    group.share_buffers(model)
    was_training = model.training
    model.eval()
    confusion = torch.zeros(info.num_classes, info.num_classes, dtype=group.widest, device=group.device)
    loss = torch.zeros((), dtype=group.widest, device=group.device)
    shares = list(data.evaluation_batches(len(split), batch_size, rank=group.rank, world_size=group.world_size))
    try:
        for index in range(group.largest(len(shares))):
            note(index, len(shares))
            if group.largest(int(should_stop())):
                return None
            batch = split.take(shares[index] if index < len(shares) else torch.zeros(1, dtype=torch.int64))
            x = data.standardise(batch.images, info).contiguous(memory_format=torch.channels_last)
            scores = group.on_grid(lambda x: model(data.resample(x, edge or info.image_size)), x).float()
            if index < len(shares):
                loss += F.cross_entropy(scores, batch.labels, reduction="sum")
                cells = batch.labels * info.num_classes + scores.argmax(1)
                confusion += torch.bincount(cells, minlength=info.num_classes**2).view_as(confusion)
    finally:
        model.train(was_training)
    confusion, loss = group.sum(confusion).cpu(), group.sum(loss)
    correct = float(confusion.diagonal().sum())
    return Score(float(loss) / len(split), correct / len(split), confusion.to(torch.int64))


@dataclass(frozen=True)
class Run:
    """The content of a run directory.

    Attributes:
        model: Its network, in evaluation mode; ``model.config.image_size`` is that of the images it was trained on last.
        weights_of: The origin of the weights, in words.
        result: The content of ``result.json``; empty before the run is finished.
    """

    folder: Path
    config: Config
    model: StagedClassifier
    weights_of: str
    result: dict[str, Any]


def load_run(folder: str | Path, device: str = "cpu") -> Run:
    """Read a run: its kept weights if it is finished, else those of its newest checkpoint (averaged, if it averages)."""
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise ValueError(
            f"{path} holds no training run (no {CONFIG}); give a directory that `revode train --out` wrote"
        )
    config = from_leaves(read_yaml(str(path / CONFIG)))
    where = choose_device(device)
    result = read_json(path / RESULT) or {}
    if result and (path / WEIGHTS).exists():
        return Run(path, config, load(path / WEIGHTS).to(where).eval(), result["weights_of"], result)
    checkpoint = read_newest(path, print)
    if checkpoint is None:
        raise ValueError(f"{path} has no weights yet; wait for its first checkpoint, or resume it")
    state = checkpoint["model"]
    if checkpoint["average"] is not None:
        state = {**state, **checkpoint["average"]["tensors"]}
    model = build_model(config, data.describe(config.data.dataset, config.record.data_root), checkpoint["level"])
    model.load_state_dict(state)
    return Run(path, config, model.to(where).eval(), f"checkpoint at step {checkpoint['step']}", result)


def pretrained_run(name: str, dataset: str, device: str = "cpu") -> Run:
    """Return the network `name` with the weights for `dataset` that come with the package, as a run that has no directory."""
    model = load_pretrained(name, dataset).to(choose_device(device)).eval()
    config = from_leaves({"name": name, "dataset": dataset})
    return Run(Path(name), config, model, f"package for {dataset}", {})


def score_run(run: Run, split: str = "test", data_root: str | None = None) -> Score:
    """Return the score of a run's network on ``"test"``, ``"validation"`` (as it was held out) or ``"train"`` images."""
    dataset = data.load(run.config.data.dataset, data_root or run.config.record.data_root)
    device = next(run.model.parameters()).device
    images = choose_split(run.config, dataset, split).to(device)
    size = run.config.record.evaluation_batch_size
    note = lambda done, total: passing(f"scoring: {done / total:.0%}")  # noqa: E731
    edge = run.model.config.image_size
    score = evaluate(run.model, images, dataset, Group(0, 1, device), batch_size=size, edge=edge, note=note)
    passing("")
    assert score is not None
    return score


def choose_split(config: Config, dataset: data.Dataset, name: str) -> data.Split:
    """Return the images a run calls by this name."""
    if name == "test":
        return dataset.split("test")
    kept, held_out = choose_images(config, dataset)
    if name == "train":
        return kept
    if held_out is None:
        raise ValueError("this run held out no validation images; score it on test or train")
    return held_out


def images_as_seen(
    dataset: data.Dataset, split: data.Split, count: int, edge: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `count` images of a split, standardised and resampled to `edge`, and their labels."""
    batch = split.take(torch.arange(min(count, len(split))))
    return data.resample(data.standardise(batch.images, dataset), edge or dataset.image_size), batch.labels


def finish(
    job: Job, folder: Path, position: Position, plan: dict[str, Any], score: Score | None, weights_of: str
) -> dict[str, Any]:
    """Write ``model.safetensors``, ``result.json`` and ``report.html``; return the result."""
    try:
        save(job.model, folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise unwritable(folder / WEIGHTS, error) from error
    result = make_result(job, position, plan, score, weights_of)
    write_json(folder / RESULT, result)
    accuracy = "no test images" if score is None else f"test accuracy {score.accuracy:.2%}"
    print(f"done: {accuracy} after {result['steps']} steps in {result['seconds']:.1f} s")
    print(f"      ({result['images_per_second']:.0f} images/s, weights of the {weights_of})")
    if job.is_cut:
        print(
            f"      it ends before its last level: these are {result['model']}'s on images of edge {job.image_edge()}"
        )
    for name in (WEIGHTS, RESULT):
        print(f"  {folder / name}")
    if not job.config.record.report:
        return result
    quoted = shlex.quote(str(folder))
    try:
        from revode_lab.training.report import write_report

        path = write_report(folder, job.config.record.data_root)
        print(f"  {path}")
    except ImportError as error:
        print(f"  no {REPORT}: {error}; install revode[lab] and run `revode report {quoted}`")
    except Exception as error:  # the run is done and written: a page that fails must not make it look failed
        print(f"  no {REPORT}: {type(error).__name__}: {error}; `revode report {quoted}` tries again")
    return result


def make_result(
    job: Job, position: Position, plan: dict[str, Any], score: Score | None, weights_of: str
) -> dict[str, Any]:
    """Return the content of ``result.json``; accuracies are fractions."""
    config, trained = job.config, position.seconds - position.seconds_scoring
    return {
        "model": job.level_networks[job.level].name if job.is_cut else config.model.name,
        "dataset": config.data.dataset,
        "recipe": config.recipe,
        "params": sum(parameter.numel() for parameter in job.model.parameters() if parameter.requires_grad),
        "test_accuracy": None if score is None else score.accuracy,
        "test_loss": None if score is None else score.loss,
        "validation_accuracy": position.best_accuracy,
        "weights_of": weights_of,
        "steps": position.step,
        "epochs": position.step / job.steps_per_epoch,
        "seconds": round(position.seconds, 3),
        "images_per_second": round(position.step * config.optimization.batch_size / max(1e-9, trained), 1),
        "peak_activation_bytes": plan["activation_bytes"][plan["strategy"]],
        "plan": plan,
        "confusion": None if score is None else score.confusion.tolist(),
        "seed": config.execution.seed,
        "num_processes": job.group.world_size,
        "machine": machine(job.group.device),
        "versions": versions(),
        "commit": commit(),
    }


TOLERANCE = 1e-4
"""Largest difference of class scores, relative to the largest score, that counts as the same network."""


def export_onnx(folder: str | Path, path: str | Path, *, overwrite: bool = False) -> tuple[Path, float | None]:
    """Write the network of a run as ONNX, for any batch size, once it has given torch's scores.

    Returns:
        The path, and the largest relative difference of its scores to torch's; None where onnxruntime is not installed.
    """
    path = Path(path)
    run = load_run(folder)
    if path.is_dir():
        raise ValueError(f"{path} is a directory; give the file to write, as {path / 'model.onnx'}")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already; give another path or --overwrite")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a directory; create it or give another path")
    size, generator = run.model.config.image_size, torch.Generator().manual_seed(0)
    images = torch.randn(4, run.model.config.in_channels, size, size, generator=generator)
    program = _convert(run.model, images)
    difference = _compare(program, run.model, images)
    if difference is not None and difference > TOLERANCE:
        raise ValueError(f"the ONNX network differs from torch's by {difference:.2g} in its scores; it was not written")
    write_atomically(path, program.model_proto.SerializeToString())
    return path, difference


def _convert(model: nn.Module, images: Tensor) -> torch.onnx.ONNXProgram:
    # The exporter talks about its own progress and deprecations; errors are raised all the same.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            (images,),
            dynamo=True,
            input_names=["images"],
            output_names=["scores"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
    assert program is not None
    return program


@torch.no_grad()
def _compare(program: torch.onnx.ONNXProgram, model: nn.Module, images: Tensor) -> float | None:
    """Return the largest difference of class scores, on the batch and on a single image of it."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    worst = 0.0
    for batch in (images, images[:1]):
        expected, (scores,) = model(batch), program(batch)
        worst = max(worst, float((scores - expected).abs().max() / expected.abs().max()))
    return worst
