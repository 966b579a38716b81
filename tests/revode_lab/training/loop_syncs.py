"""Run by test_loop_syncs.py: print, as JSON, where a training makes a device wait between lines of metrics, and at them.

The device is that of ``pretended_device``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pretended_device as pretended
import torch
from tiny_runs import tiny

from revode_lab.training.checkpoint import Position
from revode_lab.training.diagnosis import Diverged
from revode_lab.training.distributed import Group
from revode_lab.training.job import AveragedWeights, Job, make_optimizer
from revode_lab.training.loop import Training
from revode_lab.training.run import MetricsLog, read_metrics
from revode_lab.training.terminal import Interruption, Progress

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact, averaged, clipped": {"exact": 14, "ema": 0.9, "clip": 1.0, "nesterov": True},
    "without augmentation": {"augment": False},
    "with cutout and label smoothing": {"cutout": 2, "flips": "alternating", "label_smoothing": 0.1},
}


def on_device(job: Job) -> Job:
    """The job with all its tensors on the pretended device."""
    device = torch.device(f"{pretended.DEVICE}:0")
    job.group = Group(0, 1, device)
    pretended.moved(job.model)
    job.optimizer = make_optimizer(job.model, job.config.optimization)
    if job.average is not None:
        job.average = AveragedWeights(job.model, job.average.decay)
    images, labels = (pretended.OnDevice(tensor) for tensor in (job.train_split.images, job.train_split.labels))
    job.train_split = dataclasses.replace(job.train_split, images=images, labels=labels)
    job.dataset = dataclasses.replace(job.dataset, test=None)  # an evaluation may wait
    return job


class Watched(Training):
    """A training that counts waits between its lines of metrics, and in the writing of them."""

    def fit(self) -> None:
        self.between: dict[str, int] = {}
        self.at_lines = 0
        pretended.waits.clear()
        super().fit()

    def _log(self) -> None:
        for line, count in pretended.waits.items():
            self.between[line] = self.between.get(line, 0) + count
        pretended.waits.clear()
        super()._log()
        self.at_lines += pretended.waits.total()
        pretended.waits.clear()


def start(folder: Path, **settings: Any) -> Watched:
    job = on_device(
        Job(tiny(log_every=4, checkpoint_every=100, max_steps=8, **settings), Group(0, 1, torch.device("cpu")))
    )
    folder.mkdir()
    metrics, progress = MetricsLog(folder / "metrics.jsonl"), Progress(job.num_steps, 32, silent=True)
    return Watched(job, folder, {}, Position(), metrics, progress, Interruption(), [])


def divergence(folder: Path) -> dict[str, Any]:
    """A training that breaks in its fifth update, saves every sixth, and writes a line every fourth."""
    training = start(folder)
    training.job.config = tiny(log_every=4, checkpoint_every=6)
    apply_gradient = training.apply_gradient

    def broken() -> None:
        if training.position.step == 4:
            training.job.optimizer.param_groups[0]["params"][0].grad.mul_(float("nan"))
        apply_gradient()

    training.apply_gradient = broken
    try:
        training.fit()
    except Diverged as error:
        saved = [path.name for path in folder.glob("*.ckpt")]
        return {"step": error.step, "text": error.diagnosis, "saved": saved, "lines": len(read_metrics(folder))}
    return {}


def main() -> None:
    warnings.simplefilter("ignore")
    pretended.pretend_device()
    found: dict[str, Any] = {}
    with pretended.Everywhere(), tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        for number, (name, settings) in enumerate(CASES.items()):
            training = start(Path(place) / str(number), **settings)
            training.fit()
            found[name] = {"between": training.between, "at lines": training.at_lines}
        found["divergence"] = divergence(Path(place) / "divergence")
    json.dump(found, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # autograd's thread for the device may still hold tensors, and would abort an interpreter that ends


if __name__ == "__main__":
    main()
