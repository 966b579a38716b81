"""The training loop, to be read from top to bottom: `train`, `Training.fit` and its step, and what they record.

A run is a pure function of its configuration and its thread count: stopped anywhere and resumed, it ends with the same bits.
Between two lines of metrics no number is read from the device, so that it never waits for the host.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from revode.engine import OutOfRange, check
from revode.files import write_atomically
from revode.regularizers import smoothness_gradient_
from revode_lab.data import Split
from revode_lab.system import Taken, locked, read_json
from revode_lab.training import checkpoint
from revode_lab.training.checkpoint import BEST, CONFIG, LAST, METRICS, PREVIOUS, RESULT, Position
from revode_lab.training.config import Config
from revode_lab.training.diagnosis import Diverged, diagnose, diagnose_weights
from revode_lab.training.distributed import process_group
from revode_lab.training.job import Job
from revode_lab.training.planning import make_plan, plan_lines
from revode_lab.training.run import (
    MetricsLog,
    Score,
    check_vacant,
    evaluate,
    finish,
    holds_run,
    images_as_seen,
    remove_outcome,
    remove_run,
    vacant_folders,
)
from revode_lab.training.terminal import Interrupted, Interruption, Progress

_NUM_MONITORED = 4
"""Images that ``--monitor`` looks at."""


class Monitor(Protocol):
    """Called on rank 0 every ``record.monitor_every`` updates; its numbers become a line of ``metrics.jsonl``.

    It may look at the model and at its gradients, and must leave both as they are.
    """

    def on_step(self, model: nn.Module, step: int) -> Mapping[str, float]:
        """Return name -> number after update `step`."""
        ...


def train(
    config: Config,
    out: str | Path | None = None,
    *,
    resume: str | None = None,
    overwrite: bool = False,
    monitors: Sequence[Monitor] = (),
    given: Sequence[str] = (),
) -> dict[str, Any]:
    """Train as `config` says and return the content of ``result.json``.

    Args:
        config: The configuration; on resume, the run's own takes its place.
        out: The run directory; by default a new one under ``runs``.
        resume: ``"auto"`` to go on with the run in `out` (or to start it, if there is none), or a run or checkpoint.
        overwrite: Replace a run in `out`.
        monitors: Called along the way, besides that of ``record.monitor``.
        given: On resume, the settings of `config` that were asked for. They must agree with the run's own, but `FREE` ones.

    Raises:
        ValueError: Bad input, or a file that cannot be read or written. Where only rank 0 can find it, the other processes
            leave with ``SystemExit(2)``.
        Diverged: The loss is not a number any more.
        Interrupted: A signal stopped the run after it was saved.
    """
    if resume is not None and overwrite:
        raise ValueError("--resume keeps a run and --overwrite replaces it; give one of them")
    leads = int(os.environ.get("RANK", "0")) == 0
    note = print if leads else lambda text: None
    config, state, home, named = checkpoint.find_source(config, out, resume, given, note)
    with process_group(config.execution) as group, Interruption() as interruption, contextlib.ExitStack() as stack:
        # Rank 0 decides, since it may write before others look.
        if named is not None and home != named and not overwrite:
            group.decided_by_leader(lambda: check_vacant(named))
        job = Job(config, group, state.get("level", 0))
        folder = group.decided_by_leader(lambda: _lock_folder(config, named, stack))
        result = read_json(folder / RESULT) if home == folder else None
        if result and "steps" not in result:
            raise ValueError(f"{folder / RESULT} was not written by `revode train`; choose another directory")
        if result and result["steps"] >= job.num_steps:
            note(f"{folder} is finished, at step {result['steps']}: nothing is left to do")
            return result
        if result and not state:
            raise ValueError(
                f"{folder} is finished, at step {result['steps']}, and has no checkpoint to go on from; "
                "replace it by `revode train --overwrite`, or choose another directory"
            )
        own_monitors = _own_monitors(job)
        plan = state["plan"] if state else group.decided_by_leader(lambda: make_plan(job))
        position = checkpoint.restore(job, state) if state else Position()
        metrics = _open_metrics(job.config, folder, state, home, overwrite) if group.leads else None
        if metrics is not None:
            stack.callback(metrics.close)
        with Progress(job.num_steps, config.optimization.batch_size, not group.leads, job.work) as progress:
            training = Training(job, folder, plan, position, metrics, progress, interruption, monitors, own_monitors)
            training.announce()
            try:
                training.fit()
                score, weights_of = training.final_score()
            except OutOfRange as error:
                if not position.step:  # the states never were in the range of the grid: that is bad input
                    raise
                raise training.diverged(str(error)) from error
        return finish(job, folder, position, plan, score, weights_of) if group.leads else {}


@dataclass
class Training:
    """One call of `train`: a job, its directory, and where it stands."""

    job: Job
    folder: Path
    plan: dict[str, Any]
    position: Position
    metrics: MetricsLog | None
    progress: Progress
    interruption: Interruption
    monitors: Sequence[Monitor]
    own_monitors: Sequence[Monitor] = ()
    """Monitors of ``--monitor``; their images are of the level."""
    last_score: Score | None = None

    def __post_init__(self) -> None:
        group, position = self.job.group, self.position
        # What is counted on the device, and read where it is written down.
        self.loss_sum = torch.full((), position.loss_sum, dtype=group.widest, device=group.device)
        self.num_correct = torch.full((), position.num_correct, device=group.device)
        self.broken_at = torch.full((), -1, device=group.device)

    def fit(self) -> None:
        """Update until all steps are done; evaluate, record, save and stop where that is due."""
        job, position, record = self.job, self.position, self.job.config.record
        batches = job.batches_from(position.step)
        started = time.perf_counter() - position.seconds
        job.model.train()
        while True:
            if self._evaluation_due():
                began = time.perf_counter()
                self._evaluate()
                position.seconds_scoring += time.perf_counter() - began
            position.seconds = time.perf_counter() - started
            if signal_number := job.group.largest(self.interruption.signal_number):
                self._save()
                raise Interrupted(signal_number, position.step, self.folder)
            if position.step >= job.num_steps:
                self._save()
                return

            if job.level_at(position.step) != job.level:
                began = time.perf_counter()
                self._enter_level()
                position.seconds_scoring += time.perf_counter() - began
            self.epoch, self.indices = next(batches)
            self.compute_gradient()
            if job.group.device.type == "cpu":  # nothing waits, so that no update ruins the weights
                self._require_finite()
            self.apply_gradient()

            position.step += 1
            position.seconds = time.perf_counter() - started
            if position.step % record.log_every == 0 or position.step == job.num_steps:
                self._log()
            self.progress.step(position)
            if position.step % record.monitor_every == 0:
                self._monitor()
            if position.step % record.checkpoint_every == 0:
                self._save()

    def compute_gradient(self) -> None:
        """Compute the gradient of the batch's mean loss with smoothness decay, left in the parameters, and its norm."""
        job, settings = self.job, self.job.config.optimization
        x, labels = job.images(self.indices, self.epoch)
        with job.autocast():
            scores = job.group.on_grid(job.network, x) if job.is_exact else job.network(x)
        loss = F.cross_entropy(scores.float(), labels, label_smoothing=settings.label_smoothing)
        loss.backward()
        self.loss = loss.detach().to(self.loss_sum.dtype) * len(self.indices)
        self.num_correct += (scores.argmax(1) == labels).sum()
        if settings.smoothness:
            smoothness_gradient_(job.model, settings.smoothness)
        self.norm = nn.utils.get_total_norm([p.grad for p in job.model.parameters() if p.grad is not None])
        self.loss_sum += self.loss
        self.position.num_images += len(self.indices)
        finite = self.loss.isfinite() & self.norm.isfinite()
        self.broken_at = torch.where(finite | (self.broken_at >= 0), self.broken_at, self.position.step)

    def apply_gradient(self) -> None:
        """Clip the gradient, update weights and average, and clear the gradient."""
        job, clip = self.job, self.job.config.optimization.clip
        if clip:
            nn.utils.clip_grads_with_norm_(job.model.parameters(), clip, self.norm)
        for group in job.optimizer.param_groups:
            group["lr"] = job.learning_rate(self.position.step)
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=True)
        if job.average is not None:
            job.average.update(job.model)

    def announce(self) -> None:
        """Say what is trained, and what it will cost."""
        config, step = self.job.config, self.position.step
        name, dataset = config.model.name, self.job.dataset.name
        if step:
            self.progress.line(f"going on with {name} on {dataset} at step {step} of {self.job.num_steps}")
        else:
            lines = [f"training {name} on {dataset}, recipe {config.recipe}, in {self.folder}", *plan_lines(self.plan)]
            if self.job.levels:
                lines.append(f"  levels       {config.optimization.levels}")
                lines.append("               (the plan above is the last one's: it takes at most that)")
            self.progress.line("\n".join(lines))

    def _write(self, **values: Any) -> None:
        """Write a line of metrics, by rank 0."""
        if self.metrics is not None:
            self.metrics.write(step=self.position.step, **values)

    def _log(self) -> None:
        """Write the means since the last line."""
        self._require_finite()
        position, norm = self.position, float(self.norm)
        seen = [float(self.loss_sum), int(self.num_correct), position.num_images]
        sums = torch.tensor(seen, dtype=torch.float64)
        loss, correct, images = self.job.group.sum(sums).tolist()
        self.loss_sum.zero_()
        self.num_correct.zero_()
        position.num_images = 0
        self.progress.logged = f"loss {loss / images:.3f}  accuracy {correct / images:6.1%}  "
        self._write(
            kind="train",
            epoch=self.epoch,
            loss=loss / images,
            accuracy=correct / images,
            lr=self.job.learning_rate(position.step - 1),
            gradient_norm=norm if math.isfinite(norm) else None,
        )

    def _enter_level(self) -> None:
        """Go on with a deeper network or larger images, and record what is left of the accuracy."""
        job, position = self.job, self.position
        job.enter_level(job.level_at(position.step), position.step // job.steps_per_epoch)
        self.own_monitors = _own_monitors(job)
        level = job.levels[job.level]
        found: dict[str, Any] = {"layers": level.layers, "edge": level.edge}
        text = f"level {job.level + 1}: {level.layers} layers, images of edge {level.edge}"
        with contextlib.suppress(OutOfRange):  # training goes on, as after an evaluation
            if job.evaluation_split is not None:
                name, split = job.evaluation_split
                with job.averaged():
                    score = self._score(split, stoppable=False)
                assert score is not None
                found |= {"split": name, "loss": score.loss, "accuracy": score.accuracy}
                text += f"; {name} accuracy {score.accuracy:.2%}"
        self._write(kind="level", **found)
        self.progress.line(text)

    def _evaluation_due(self) -> bool:
        """Return True at the end of every few epochs, and at the end of the run."""
        step, every = self.position.step, self.job.config.record.evaluate_every * self.job.steps_per_epoch
        if self.position.evaluated_at == step or not step or self.job.evaluation_split is None:
            return False
        return step == self.job.num_steps or (every > 0 and step % every == 0)

    def _evaluate(self) -> None:
        """Score the averaged weights on the evaluation split, and keep the best if it is held-out data."""
        assert self.job.evaluation_split is not None
        name, split = self.job.evaluation_split
        position = self.position
        try:
            with self.job.averaged():
                score = self._score(split)
        except OutOfRange as error:  # running statistics that are not ripe may send states there; training goes on
            if position.step == self.job.num_steps:
                self._save()
                raise self.diverged(f"its evaluation failed: {error}") from error
            self.progress.line(f"not evaluated after step {position.step}: {error}")
            position.evaluated_at = position.step
            return
        if score is None:
            return
        self.last_score = score
        position.evaluated_at = position.step
        epoch = (position.step - 1) // self.job.steps_per_epoch
        self._write(kind="evaluation", epoch=epoch, split=name, loss=score.loss, accuracy=score.accuracy)
        self.progress.line(f"epoch {epoch + 1:>3}  {name} loss {score.loss:.3f}  accuracy {score.accuracy:6.2%}")
        chooses = name == "validation" and not self.job.is_cut
        if chooses and (position.best_accuracy is None or score.accuracy >= position.best_accuracy):
            position.best_accuracy, position.best_step = score.accuracy, position.step
            self._save(BEST)
        if self.metrics is not None and self.job.config.record.report and position.step < self.job.num_steps:
            self.metrics.sync()
            self._rewrite_report()

    def _rewrite_report(self) -> None:
        """Show on the page how far the run is; a page that fails stops nothing."""
        try:
            from revode_lab.training.report import write_course

            write_course(self.folder, self.job.config, self.plan, f"step {self.position.step} of {self.job.num_steps}")
        except Exception as error:
            self.progress.line(f"no page yet: {type(error).__name__}: {error}")

    def _score(self, split: Split, stoppable: bool = True) -> Score | None:
        score = evaluate(
            self.job.model,
            split,
            self.job.dataset,
            self.job.group,
            batch_size=self.job.config.record.evaluation_batch_size,
            edge=self.job.image_edge(),
            should_stop=lambda: stoppable and bool(self.interruption.signal_number),
            note=lambda done, total: self.progress.scoring(self.position.step, done, total),
        )
        if score is not None and not math.isfinite(score.loss):
            raise self.diverged(f"evaluation found a loss of {score.loss}")
        return score

    def final_score(self) -> tuple[Score | None, str]:
        """Return the test score of the weights that are kept: the best on held-out images, else the last."""
        weights_of = "last step"
        best = self.job.group.decided_by_leader(self._read_best)
        if best is not None:
            checkpoint.restore(self.job, best)
            weights_of = f"step {self.position.best_step}, best on the validation split"
        elif self.position.best_step is not None:
            self.position.best_accuracy = None if self.last_score is None else self.last_score.accuracy
        if self.job.average is not None:
            self.job.average.swap(self.job.model)  # for good: these are the weights to keep
        test = self.job.dataset.test
        if self.job.validation_split is None and self.last_score is not None:
            return self.last_score, weights_of
        return None if test is None else self._score(test, stoppable=False), weights_of

    def _read_best(self) -> dict[str, Any] | None:
        """Return the best checkpoint so far; None without one, or, with a note, if it is lost."""
        step = self.position.best_step
        if step is None:
            return None
        try:
            best = checkpoint.read_checkpoint(self.folder / BEST)
            if best["step"] == step:
                return best
            reason = f"{self.folder / BEST} is of step {best['step']}"
        except ValueError as error:
            reason = str(error)
        self.progress.line(
            f"the weights of step {step}, the best on the validation split, are lost ({reason}): the last are kept"
        )
        return None

    def _monitor(self) -> None:
        if not self.job.group.leads:
            return
        for monitor in (*self.own_monitors, *self.monitors):
            with self.job.group.forked_randomness():
                values = monitor.on_step(self.job.model, self.position.step)
            if values:
                numbers = {name: float(value) for name, value in values.items()}
                self._write(kind="monitor", **{n: x if math.isfinite(x) else None for n, x in numbers.items()})

    def _save(self, name: str = LAST) -> None:
        """Write a checkpoint, unless something went wrong on the way; the one before it stays as ``previous.ckpt``."""
        check()
        self._require_finite()
        self.position.loss_sum, self.position.num_correct = float(self.loss_sum), int(self.num_correct)
        offset = self.metrics.sync() if self.metrics is not None else 0
        state = checkpoint.collect(self.job, self.position, self.plan, offset)
        if self.job.group.leads:
            keep_as = self.folder / PREVIOUS if name == LAST else None
            checkpoint.write_checkpoint(self.folder / name, state, keep_as)

    def _require_finite(self) -> None:
        """Stop if an update since the last look saw a loss or gradient that is no number: nothing is written of it."""
        step = self.job.group.largest(int(self.broken_at))
        if step >= 0:
            mean, norm = float(self.loss) / len(self.indices), float(self.norm)
            alone = self.job.group.world_size == 1
            text = diagnose(self.job, self.indices, self.epoch, step, mean) if alone else ""
            raise Diverged(step, f"loss {mean:.4g}, norm of the gradient {norm:.4g}", text, self.folder)

    def diverged(self, what: str) -> Diverged:
        """Return the error for a run that broke here."""
        step = self.position.step
        return Diverged(step, what, diagnose_weights(self.job, step), self.folder)


def _lock_folder(config: Config, named: Path | None, stack: contextlib.ExitStack) -> Path:
    """Lock and return the run directory. A directory without a name that another process has just taken is left to it."""
    if named is not None:
        stack.enter_context(locked(named))
        return named
    stem = Path("runs") / f"{config.model.name}-{Path(config.data.dataset).name}-seed{config.execution.seed}"
    for folder in vacant_folders(stem):
        with contextlib.suppress(Taken):
            stack.enter_context(locked(folder))
            if not holds_run(folder):  # nor did another write one while we looked
                return folder
    raise AssertionError("numbers do not end")


def _own_monitors(job: Job) -> list[Monitor]:
    """Return the monitor of ``--monitor``, on the first training images without augmentation."""
    if not job.config.record.monitor:
        return []
    from revode_lab.stability import StabilityMonitor
    from revode_lab.stability.walk import reversible_units

    reversible_units(job.model)  # refuses a network that has none, before anything is written
    images, _ = images_as_seen(job.dataset, job.train_split, _NUM_MONITORED, job.image_edge())
    return [StabilityMonitor(images, num_images=_NUM_MONITORED)]


def _open_metrics(
    config: Config, folder: Path, state: dict[str, Any], home: Path | None, overwrite: bool
) -> MetricsLog:
    """Open the files of the run, once all that can be refused has been looked at."""
    make_board: Any = None
    if config.record.tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter as make_board
        except ImportError as error:
            raise ValueError(f"--tensorboard needs the package tensorboard ({error}); install revode[lab]") from error
    (remove_run if overwrite else remove_outcome)(folder)
    write_atomically(folder / CONFIG, config.to_yaml())
    if home is not None and home != folder:  # the run goes on in another directory, and takes its past along
        for name in (METRICS, BEST):
            if (home / name).exists():
                write_atomically(folder / name, (home / name).read_bytes())
    board = make_board and make_board(str(folder), purge_step=state["step"] + 1 if state else None)
    return MetricsLog(folder / METRICS, state.get("metrics_offset", 0), board)
