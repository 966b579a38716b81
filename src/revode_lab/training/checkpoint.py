"""Checkpoints that are whole or not there, their content, and the source from which a run goes on.

A checkpoint is one file of `torch.save`: a zip archive whose directory stands at its end, so a file cut short at any byte has
none, and whose records carry a CRC-32, so a changed byte shows. `write_checkpoint` writes beside the old file, makes it
durable, and renames; the checkpoint before is kept as ``previous.ckpt``, and `read_newest` falls back to it.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from revode.files import write_atomically
from revode_lab.training.config import FREE, LEAVES, Config, flatten, from_leaves, read_yaml
from revode_lab.training.distributed import Group
from revode_lab.training.job import Job

FORMAT = "revode-training-1"
LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
CONFIG, METRICS, RESULT = "config.yaml", "metrics.jsonl", "result.json"
WEIGHTS, REPORT = "model.safetensors", "report.html"
FILES = (CONFIG, METRICS, RESULT, LAST, PREVIOUS, BEST, WEIGHTS, REPORT)
"""The files of a run."""


def write_checkpoint(path: Path, state: dict[str, Any], keep_as: Path | None = None) -> None:
    """Write `state` to `path` in one atomic, durable step; the file now at `path` is kept as `keep_as`."""
    stream = io.BytesIO()
    torch.save({"format": FORMAT, **state}, stream)
    write_atomically(path, stream.getbuffer(), keep_as)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in `path`, verified; no code in it is ever run.

    Raises:
        ValueError: It is missing, cut short, altered, or not a checkpoint of a run.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the checkpoint {path} ({error.strerror}); give a run or a .ckpt") from error
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"its part {damaged} has changed")
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds more than tensors and numbers, so it was not loaded; it is not ours") from error
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"the checkpoint {path} is damaged ({reason}); resume from another") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of `revode train`; give a run directory or its .ckpt")
    return state


def is_whole(path: Path) -> bool:
    """Return True if there is a checkpoint at `path` that can be read."""
    try:
        return bool(read_checkpoint(path))
    except ValueError:
        return False


def read_newest(folder: Path, note: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the newest good checkpoint of a run, or None if it has none yet.

    `note` is called with a sentence if the newest file is damaged and an older one is taken.

    Raises:
        ValueError: There are checkpoints and all are damaged.
    """
    faults: list[str] = []
    for name in (LAST, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            state = read_checkpoint(path)
        except ValueError as error:
            faults.append(str(error))
            continue
        if faults:
            note(f"{faults[0]}; going back to {path}, step {state.get('step')}")
        return state
    if faults:
        raise ValueError(
            f"{'; '.join(faults)}; no good checkpoint is left: start again with `revode train --overwrite`"
        )
    return None


@dataclass
class Position:
    """Where a run stands.

    Attributes:
        step: Updates done; epoch and place in it follow from it.
        evaluated_at: The step of the last evaluation.
        best_accuracy, best_step: The best evaluation on the validation split, if any.
        seconds, seconds_scoring: Since its start, over all its processes' lives; and of these, not spent on updates.
        loss_sum, num_correct, num_images: This process's sums since the last line of metrics; the first two as last saved.
    """

    step: int = 0
    evaluated_at: int = -1
    best_accuracy: float | None = None
    best_step: int | None = None
    seconds: float = 0.0
    seconds_scoring: float = 0.0
    loss_sum: float = 0.0
    num_correct: int = 0
    num_images: int = 0

    @classmethod
    def restored(cls, saved: list[dict[str, Any]], group: Group) -> Position:
        """Return this process's position among the saved ones; the first gets all sums if their number has changed."""
        mine = dict(saved[group.rank if len(saved) == group.world_size else 0])
        if len(saved) != group.world_size:
            for name in ("loss_sum", "num_correct", "num_images"):
                mine[name] = sum(position[name] for position in saved) if group.leads else 0
        return cls(**mine)


def collect(job: Job, position: Position, plan: dict[str, Any], metrics_offset: int) -> dict[str, Any]:
    """Return the state of a run in types that load with ``weights_only=True``. All processes must call it."""
    optimizer = job.optimizer.state_dict()
    momenta = {
        index: {name: value.cpu() if isinstance(value, Tensor) else value for name, value in entry.items()}
        for index, entry in optimizer["state"].items()
    }
    average = job.average and {
        "num_updates": job.average.num_updates,
        "tensors": {name: tensor.cpu() for name, tensor in job.average.tensors.items()},
    }
    processes = job.group.gather({"random": random_states(), "position": asdict(position)})
    return {
        "step": position.step,
        "level": job.level,
        "config": asdict(job.config),
        "model": {name: tensor.cpu() for name, tensor in job.model.state_dict().items()},
        "momenta": momenta,
        "average": average,
        "processes": processes,
        "plan": plan,
        "metrics_offset": metrics_offset,
    }


def restore(job: Job, state: dict[str, Any]) -> Position:
    """Put a run back to where `collect` found it, and return its position."""
    own = job.model.state_dict()
    if own.keys() != state["model"].keys():
        odd = sorted(own.keys() ^ state["model"].keys())[0]
        raise ValueError(f"the checkpoint does not fit {job.config.model.name}: only one of them has {odd!r}")
    for name, tensor in own.items():
        tensor.copy_(state["model"][name])
    _restore_momenta(job, state["momenta"])
    if job.average is not None and state["average"] is not None:
        job.average.num_updates = state["average"]["num_updates"]
        for name, tensor in job.average.tensors.items():
            tensor.copy_(state["average"]["tensors"][name])
    processes = state["processes"]
    if len(processes) == job.group.world_size:
        restore_random_states(processes[job.group.rank]["random"])
    return Position.restored([process["position"] for process in processes], job.group)


def _restore_momenta(job: Job, momenta: dict[int, dict[str, Any]]) -> None:
    """Give each parameter its momentum, in the layout that the parameter has."""
    parameters = [p for group in job.optimizer.param_groups for p in group["params"]]
    for index, entry in momenta.items():
        own = parameters[index]
        job.optimizer.state[own] = {
            name: own.detach().clone().copy_(value) if isinstance(value, Tensor) else value
            for name, value in entry.items()
        }


def random_states() -> dict[str, Any]:
    """Return the states of torch's generators, in types that load with ``weights_only=True``."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def restore_random_states(states: dict[str, Any]) -> None:
    """Set torch's generators to what `random_states` returned."""
    torch.set_rng_state(states["cpu"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


_FREE = FREE | {"epochs", "max_steps"}
"""Settings that may change on resume: those, and how long it goes on."""


def find_source(
    config: Config, out: str | Path | None, resume: str | None, given: Sequence[str], note: Callable[[str], None]
) -> tuple[Config, dict[str, Any], Path | None, Path | None]:
    """Decide what to start from, with the arguments of `train`; `note` is called with what the user should know.

    Returns:
        The configuration; the state to go on from, empty at a beginning; the directory of the run that goes on, if one
        does; and the run directory, None if it is a new one without a name.
    """
    if resume is None:
        return config, {}, None, None if out is None else Path(out)
    if resume == "auto" and out is None:
        raise ValueError("--resume auto needs --out, the directory of the run to go on with")
    path = Path(out if out is not None and resume == "auto" else resume)
    if resume == "auto" or path.is_dir():
        home, state = path, read_newest(path, note)
    else:
        home, state = path.parent, read_checkpoint(path)
    folder = home if out is None else Path(out)
    if home.resolve() == folder.resolve():
        home = folder
    if state is not None:
        return merge(from_leaves(flatten(state["config"], str(path))), config, given, note), state, home, folder
    if resume != "auto":
        raise ValueError(f"{path} holds no checkpoint; give --resume a run directory or a .ckpt")
    if (folder / CONFIG).exists():  # stopped before its first checkpoint: the same run from its beginning
        config = merge(from_leaves(read_yaml(str(folder / CONFIG))), config, given, note)
    else:
        note(f"there is no run in {folder} yet: this starts one")
    return config, {}, folder, folder


def merge(old: Config, new: Config, given: Sequence[str], note: Callable[[str], None]) -> Config:
    """Return the configuration `old` of a run with the given settings of `new`, as far as they leave it the same run."""
    ours, theirs = old.leaves(), new.leaves()
    changed = {name: theirs[name] for name in given if theirs[name] != ours[name]}
    fixed = [name for name in changed if name not in _FREE]
    if fixed:
        name = fixed[0]
        raise ValueError(
            f"the run to resume has {LEAVES[name].path} {ours[name]}, but {theirs[name]} was asked for; "
            "leave that out, or start another run in another directory"
        )
    if changed.keys() & {"epochs", "max_steps"} and ours["schedule"] == "one-cycle":
        note("the one-cycle schedule now spans another length: the result is not that of one uninterrupted run")
    if "threads" in changed:
        note("another number of threads may change the last bits of the result")
    return from_leaves({**ours, **changed})
