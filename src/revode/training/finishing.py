"""The end of a run: weights, result and report on disk, and where they are in words."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from torch import Tensor

from revode.files import commit, machine, unwritable, versions, write_json
from revode.training.evaluation import Score
from revode.training.job import Job, build_model
from revode.training.runs import REPORT, RESULT, WEIGHTS
from revode.training.state import Position


def finish(
    job: Job,
    folder: Path,
    position: Position,
    plan: dict[str, Any],
    score: Score | None,
    weights: dict[str, Tensor],
    weights_of: str,
) -> dict[str, Any]:
    """Write ``model.safetensors``, ``result.json`` and ``report.html``; return the result."""
    write_weights(job, weights, folder / WEIGHTS)
    result = make_result(job, position, plan, score, weights_of)
    write_json(folder / RESULT, result)
    for line in summary(result):
        print(line)
    for name in (WEIGHTS, RESULT):
        print(f"  {folder / name}")
    if not job.config.record.report:
        return result
    quoted = shlex.quote(str(folder))
    try:
        from revode.training.report import write_report

        print(f"  {write_report(folder, job.config.record.data_root)}")
    except ImportError as error:
        print(f"  no {REPORT}: {error}; install revode[plot] and run `revode report {quoted}`")
    except Exception as error:  # the run is done and written: a page that fails must not make it look failed
        print(f"  no {REPORT}: {type(error).__name__}: {error}; `revode report {quoted}` tries again")
    return result


def write_weights(job: Job, weights: dict[str, Tensor], path: Path) -> None:
    """Write the network as `revode.load` reads it, from a whole copy: the job's own may be sharded."""
    from safetensors import SafetensorError

    from revode.networks.files import save

    model = build_model(job.config, job.dataset)
    model.load_state_dict(weights)
    try:
        save(model, path)
    except (OSError, SafetensorError) as error:
        raise unwritable(path, error) from error


def make_result(
    job: Job, position: Position, plan: dict[str, Any], score: Score | None, weights_of: str
) -> dict[str, Any]:
    """What ``result.json`` holds; accuracies are fractions."""
    config = job.config
    return {
        "model": config.model.name,
        "dataset": config.data.dataset,
        "recipe": config.recipe,
        "params": plan["params"],
        "test_accuracy": None if score is None else score.accuracy,
        "test_loss": None if score is None else score.loss,
        "validation_accuracy": position.best_accuracy,
        "weights_of": weights_of,
        "steps": position.step,
        "epochs": position.step / job.steps_per_epoch,
        "seconds": round(position.seconds, 3),
        "images_per_second": round(position.step * config.optimization.batch_size / max(1e-9, position.seconds), 1),
        "peak_activation_bytes": position.peak_activation_bytes,
        "plan": plan,
        "confusion": None if score is None else score.confusion.tolist(),
        "seed": config.execution.seed,
        "num_processes": job.group.world_size,
        "machine": machine(job.group.device),
        "versions": versions(),
        "commit": commit(),
    }


def summary(result: dict[str, Any]) -> list[str]:
    """The result in a line or two for a reader."""
    accuracy = "no test images" if result["test_accuracy"] is None else f"test accuracy {result['test_accuracy']:.2%}"
    line = f"done: {accuracy} after {result['steps']} steps in {result['seconds']:.1f} s"
    return [line, f"      ({result['images_per_second']:.0f} images/s, weights of the {result['weights_of']})"]
