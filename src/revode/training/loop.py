"""The training loop, to be read from top to bottom: `train`, `_fit`, and what they record.

A run is a pure function of its configuration and its thread count: stopped anywhere and resumed, it ends with the same bits.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from revode.engine.grid import OutOfRange
from revode.files import locked, write_atomically
from revode.training import state as states
from revode.training.checkpoint import BEST, LAST, PREVIOUS, read_checkpoint, write_checkpoint
from revode.training.config import Config
from revode.training.diagnosis import Diverged, diagnose, diagnose_weights
from revode.training.distributed import Group, process_group
from revode.training.evaluation import Score, evaluate
from revode.training.finishing import finish
from revode.training.interruption import Interrupted, Interruption
from revode.training.job import Job, StepResult
from revode.training.monitors import Monitor, make_monitors
from revode.training.planning import PeakActivations, Plan, make_plan
from revode.training.progress import Progress
from revode.training.resuming import Source, find_source
from revode.training.runs import CONFIG, METRICS, MetricsLog, check_vacant, remove_run, vacant_folder


def train(
    config: Config,
    out: str | Path | None = None,
    *,
    resume: str | None = None,
    overwrite: bool = False,
    monitors: Sequence[Monitor] = (),
    given: Sequence[str] = (),
) -> dict[str, Any]:
    """Train as `config` says and return what ``result.json`` holds.

    Args:
        config: The configuration; on resume, the run's own takes its place.
        out: The run directory; by default a new one under ``runs``.
        resume: ``"auto"`` to go on with the run in `out` (or to start it, if there is none), or a run or checkpoint.
        overwrite: Whether a run in `out` may be replaced.
        monitors: Called along the way, besides what ``record.monitor`` names.
        given: On resume, the settings of `config` that were asked for: they must agree with the run's own, unless they
            only say where and how it runs.

    Raises:
        ValueError: Bad input, or a file that cannot be read or written. Where only rank 0 can find it, the other processes
            leave with ``SystemExit(2)``.
        Diverged: The loss is not a number any more.
        Interrupted: A signal stopped the run after it was saved.
    """
    if resume is not None and overwrite:
        raise ValueError("--resume keeps a run and --overwrite replaces it; give one of them")
    say = print if int(os.environ.get("RANK", "0")) == 0 else _ignore
    folder = _named_folder(out, resume)
    source = find_source(config, folder, resume, given, say)
    with process_group(source.config.execution) as group, Interruption() as interruption:
        folder = _agree_on_folder(source.config, folder, overwrite or source.home == folder, group)
        job = Job(source.config, group)
        with _writing(folder, group):
            if source.finished(job.num_steps):
                say(f"{folder} is finished, at step {source.result['steps']}: nothing is left to do")
                return source.result
            if source.result and not source.state:
                raise ValueError(
                    f"{folder} is finished, at step {source.result['steps']}, and has no checkpoint to go on from; "
                    "replace it with --overwrite, or give another --out"
                )
            if group.world_size > 1 and job.config.execution.parallel == "fsdp":
                _refuse_sharded(job, monitors)
            watchers = [*make_monitors(job), *monitors]
            return _Run(job, folder, source, interruption, watchers, overwrite).train()


def _refuse_sharded(job: Job, monitors: Sequence[Monitor]) -> None:
    """Raise on what cannot be had with weights spread over processes."""
    if job.config.record.monitor or monitors:
        raise ValueError("monitors look at whole weights, which --parallel fsdp never has; use ddp, or no monitor")
    if job.config.model.options.get("memory_budget") is not None:
        raise ValueError("memory_budget is kept by measuring branches, which --parallel fsdp shards; use ddp")


def _named_folder(out: str | Path | None, resume: str | None) -> Path | None:
    """The run directory as far as the arguments name it."""
    if out is not None:
        return Path(out)
    if resume == "auto":
        raise ValueError("--resume auto needs --out, the directory of the run to go on with")
    if resume is None:
        return None
    return Path(resume) if Path(resume).is_dir() else Path(resume).parent


def _agree_on_folder(config: Config, folder: Path | None, may_hold_run: bool, group: Group) -> Path:
    """The run directory, checked before anything is written; rank 0 decides, since it may write before others look."""

    def decide() -> Path:
        if folder is None:
            stem = f"{config.model.name}-{config.data.dataset}-seed{config.execution.seed}"
            return vacant_folder(Path("runs") / stem)
        if not may_hold_run:
            check_vacant(folder)
        return folder

    return group.decided_by_leader(decide)


@contextlib.contextmanager
def _writing(folder: Path, group: Group) -> Iterator[None]:
    """Rank 0 holds the lock of the run directory; if it cannot have it, all leave."""
    with contextlib.ExitStack() as stack:
        group.decided_by_leader(lambda: stack.enter_context(locked(folder)))
        yield


def _ignore(text: str) -> None:
    """Say nothing."""


def _board_maker() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(f"--tensorboard needs the package tensorboard ({error}); install revode[train]") from error
    return SummaryWriter


class _Run:
    """One call of `train`: a job, its directory, and where it stands."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        source: Source,
        interruption: Interruption,
        monitors: Sequence[Monitor],
        overwrite: bool,
    ) -> None:
        self.job = job
        self.group = job.group
        self.record = job.config.record
        self.folder = folder
        self.source = source
        self.interruption = interruption
        self.monitors = monitors
        self.overwrite = overwrite
        self._last_score: Score | None = None

    def train(self) -> dict[str, Any]:
        """Plan or restore, fit, and finish."""
        self.plan = self._make_plan()
        self.job.start()
        self.position = states.restore(self.job, self.source.state) if self.source.state else states.Position()
        self._open_files()
        images = self.job.config.optimization.batch_size
        try:
            with Progress(self.job.num_steps, self.position.step, images, not self.group.leads) as self.progress:
                self._announce()
                self._fit()
                score, weights_of = self._final_score()
        finally:
            self._close_files()
        weights = states.weights(self.job.model)
        if not self.group.leads:
            return {}
        return finish(self.job, self.folder, self.position, self.plan, score, weights, weights_of)

    def _fit(self) -> None:
        """Update until all steps are done; evaluate, record, save and stop where that is due."""
        job, position = self.job, self.position
        batches = job.batches_from(position.step)
        started = time.perf_counter() - position.seconds
        job.model.train()
        while True:
            if self._evaluation_due():
                self._evaluate()
            position.seconds = time.perf_counter() - started
            if signal_number := self.group.largest(self.interruption.signal_number):
                self._save()
                raise Interrupted(signal_number, position.step, self.folder)
            if position.step >= job.num_steps:
                self._save()
                return

            epoch, indices = next(batches)
            with self._measuring_memory(), self._staying_in_range():
                result = job.accumulate_gradient(indices, epoch)
            self._require_finite(result, indices, epoch)
            job.apply_gradient(position.step)

            position.step += 1
            position.count(result)
            position.seconds = time.perf_counter() - started
            if position.step % self.record.log_every == 0 or position.step == job.num_steps:
                self._log(epoch, result)
            if self.monitors and position.step % self.record.monitor_every == 0:
                self._monitor()
            if position.step % self.record.checkpoint_every == 0:
                self._save()

    def _make_plan(self) -> dict[str, Any]:
        """The cost of the run, measured by rank 0 on a copy; a resumed run knows it already."""
        if self.source.state:
            return self.source.state["plan"]
        return self.group.decided_by_leader(self._measure_plan)

    def _measure_plan(self) -> dict[str, Any]:
        job = self.job
        settings = job.config.optimization
        size = settings.batch_size // settings.accumulate // self.group.world_size
        x, labels = job.images(torch.arange(size), 0)
        plan = make_plan(job.model, x, job.num_steps, settings.accumulate, job.autocast, labels)
        return plan.to_dict()

    def _announce(self) -> None:
        config = self.job.config
        name, dataset, step = config.model.name, config.data.dataset, self.position.step
        if step:
            self.progress.line(f"going on with {name} on {dataset} at step {step} of {self.job.num_steps}")
        else:
            self.progress.line(f"training {name} on {dataset}, recipe {config.recipe}, in {self.folder}")
            for line in Plan(**self.plan).lines() if self.group.leads else []:
                self.progress.line(line)
        for note in self.job.notes:
            self.progress.line(note)

    def _open_files(self) -> None:
        self.metrics: MetricsLog | None = None
        self.board: Any = None
        if not self.group.leads:
            return
        make_board = _board_maker() if self.record.tensorboard else None
        if self.overwrite:  # not before all that can be refused has been looked at
            remove_run(self.folder)
        write_atomically(self.folder / CONFIG, self.job.config.to_yaml())
        self.source.bring_along(self.folder)
        self.metrics = MetricsLog(self.folder / METRICS, self.source.metrics_offset)
        if make_board is not None:
            self.board = make_board(str(self.folder), purge_step=self.position.step or None)

    def _close_files(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        if self.board is not None:
            self.board.close()

    def _write(self, **values: Any) -> None:
        """One line of metrics, by rank 0."""
        if self.metrics is None:
            return
        self.metrics.write(step=self.position.step, **values)
        if self.board is not None:
            kind = values["kind"]
            for name, value in values.items():
                if isinstance(value, float):
                    self.board.add_scalar(f"{kind}/{name}", value, self.position.step)

    @contextlib.contextmanager
    def _measuring_memory(self) -> Iterator[None]:
        """Count activations on the first update; where hooks cannot see them (compiled, sharded), take the plan's number."""
        position, execution = self.position, self.job.config.execution
        if position.peak_activation_bytes:
            yield
        elif execution.compile or (execution.parallel == "fsdp" and self.group.world_size > 1):
            planned = self.plan["activation_bytes"][self.plan["strategy"]] if self.plan else 1
            position.peak_activation_bytes = max(1, planned)
            yield
        else:
            with PeakActivations(self.job.model.parameters()) as peak:
                yield
            position.peak_activation_bytes = max(1, peak.num_bytes)

    def _log(self, epoch: int, result: StepResult) -> None:
        """Write the means since the last line."""
        position = self.position
        sums = torch.tensor([position.loss_sum, position.num_correct, position.num_images], dtype=torch.float64)
        loss, correct, images = self.group.sum(sums.to(self.group.device)).tolist()
        position.clear()
        self._write(
            kind="train",
            epoch=epoch,
            loss=loss / images,
            accuracy=correct / images,
            lr=self.job.learning_rate(position.step - 1),
            gradient_norm=result.gradient_norm if math.isfinite(result.gradient_norm) else None,
        )
        self.progress.step(position.step, loss / images, correct / images)

    def _evaluation_due(self) -> bool:
        """Whether an evaluation belongs here: at the end of every few epochs, and at the end of the run."""
        step, every = self.position.step, self.record.evaluate_every * self.job.steps_per_epoch
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
                raise self._diverged(f"its evaluation failed: {error}") from error
            self.progress.line(f"not evaluated after step {position.step}: {error}")
            position.evaluated_at = position.step
            return
        if score is None:
            return
        self._last_score = score
        position.evaluated_at = position.step
        epoch = (position.step - 1) // self.job.steps_per_epoch
        self._write(kind="evaluation", epoch=epoch, split=name, loss=score.loss, accuracy=score.accuracy)
        self.progress.line(f"epoch {epoch + 1:>3}  {name} loss {score.loss:.3f}  accuracy {score.accuracy:6.2%}")
        if name == "validation" and (position.best_accuracy is None or score.accuracy >= position.best_accuracy):
            position.best_accuracy, position.best_step = score.accuracy, position.step
            self._save(BEST)

    def _score(self, split: Any, stoppable: bool = True) -> Score | None:
        score = evaluate(
            self.job.model,
            split,
            self.job.dataset,
            self.group,
            batch_size=self.record.evaluation_batch_size,
            memory_format=self.job.memory_format,
            should_stop=(lambda: bool(self.interruption.signal_number)) if stoppable else (lambda: False),
        )
        if score is not None and not math.isfinite(score.loss):
            raise self._diverged(f"evaluation found a loss of {score.loss}")
        return score

    @contextlib.contextmanager
    def _staying_in_range(self) -> Iterator[None]:
        """States that leave the range of the grid have diverged, unless they never were inside: that is bad input."""
        try:
            yield
        except OutOfRange as error:
            if not self.position.step:
                raise
            raise self._diverged(str(error)) from error

    def _diverged(self, what: str, diagnosis: str | None = None) -> Diverged:
        step = self.position.step
        return Diverged(step, what, diagnose_weights(self.job, step) if diagnosis is None else diagnosis, self.folder)

    def _final_score(self) -> tuple[Score | None, str]:
        """The test score of the weights that are kept: the best on held-out images, else the last."""
        weights_of = "last step"
        best = self.group.from_leader(self._read_best() if self.group.leads else None)
        if best is not None:
            states.restore(self.job, best)
            weights_of = f"step {self.position.best_step}, best on the validation split"
        if self.job.average is not None:
            self.job.average.swap(self.job.model)  # for good: these are the weights to keep
        test = self.job.dataset.test
        if self.job.validation_split is None and self._last_score is not None:
            return self._last_score, weights_of
        with self._staying_in_range():
            return None if test is None else self._score(test, stoppable=False), weights_of

    def _read_best(self) -> dict[str, Any] | None:
        """The best checkpoint so far; None without one, or if the run went on from a time before the one on disk."""
        if self.position.best_step is None or not (self.folder / BEST).exists():
            return None
        best = read_checkpoint(self.folder / BEST)
        return best if best["step"] == self.position.best_step else None

    def _monitor(self) -> None:
        if not self.group.leads:
            return
        devices = [self.group.device] if self.group.device.type == "cuda" else []
        for monitor in self.monitors:
            with torch.random.fork_rng(devices):
                values = monitor.on_step(self.job.model, self.position.step)
            if values:
                numbers = {name: float(value) for name, value in values.items()}
                self._write(kind="monitor", **{n: x if math.isfinite(x) else None for n, x in numbers.items()})

    def _save(self, name: str = LAST) -> None:
        """Write a checkpoint; the one before it stays as ``previous.ckpt``."""
        offset = self.metrics.sync() if self.metrics is not None else 0
        state = states.collect(self.job, self.position, self.plan, offset)
        if self.group.leads:
            keep_as = self.folder / PREVIOUS if name == LAST else None
            write_checkpoint(self.folder / name, state, keep_as)

    def _require_finite(self, result: StepResult, indices: torch.Tensor, epoch: int) -> None:
        """Stop before an update that would ruin the weights; under float16 the scaler skips such updates itself."""
        finite = result.finite or (self.job.scaler.is_enabled() and result.loss_sum == result.loss_sum)
        if self.group.largest(int(not finite)):
            step, mean = self.position.step, result.loss_sum / max(1, result.num_images)
            text = diagnose(self.job, indices, epoch, step, result) if self.group.world_size == 1 else ""
            raise self._diverged(f"loss {mean:.4g}, norm of the gradient {result.gradient_norm:.4g}", text)
