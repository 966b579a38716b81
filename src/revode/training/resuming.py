"""Where a run starts from: nothing, its own newest checkpoint, or a checkpoint of another run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from revode.files import read_json, write_atomically
from revode.training.checkpoint import BEST, read_checkpoint, read_newest
from revode.training.config import LEAVES, Config, flatten, from_leaves, read_yaml
from revode.training.runs import CONFIG, METRICS, RESULT

_FREE = frozenset(
    "device threads data_root report log_every checkpoint_every tensorboard monitor monitor_every evaluation_batch_size "
    "epochs max_steps".split()
)
"""Settings that may change on resume: where and how it runs, what it writes down, and how long it goes on."""


@dataclass(frozen=True)
class Source:
    """What a run starts with: its configuration and, on resume, the state to go on from."""

    config: Config
    state: dict[str, Any] = field(default_factory=dict)
    home: Path | None = None
    """The directory of the run that goes on."""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def metrics_offset(self) -> int:
        """Bytes of metrics that belong to the state."""
        return self.state.get("metrics_offset", 0)

    def finished(self, num_steps: int) -> bool:
        """Whether the run has its result already."""
        return self.result.get("steps", -1) >= num_steps

    def bring_along(self, folder: Path) -> None:
        """Copy the lines before the checkpoint and the best weights so far, if the run goes on in another directory."""
        if self.home is None or self.home == folder:
            return
        if (self.home / METRICS).exists():
            shutil.copyfile(self.home / METRICS, folder / METRICS)
        if (self.home / BEST).exists():
            write_atomically(folder / BEST, (self.home / BEST).read_bytes())


def find_source(
    config: Config, folder: Path | None, resume: str | None, given: Sequence[str], note: Callable[[str], None]
) -> Source:
    """Decide what to start from.

    Args:
        config: What was asked for.
        folder: The run directory.
        resume: None, ``"auto"``, or a run or checkpoint.
        given: Settings that were asked for by name; a resumed run refuses those that would make it another run.
        note: Called with what the user should know.
    """
    if resume is None or folder is None:
        return Source(config)
    path = folder if resume == "auto" else Path(resume)
    if resume == "auto" or path.is_dir():
        home, state = path, read_newest(path, note)
    else:
        home, state = path.parent, read_checkpoint(path)
    if state is None:
        if resume != "auto":
            raise ValueError(f"{path} holds no checkpoint; give --resume a run directory or a .ckpt")
        if (folder / CONFIG).exists():  # stopped before its first checkpoint: the same run from its beginning
            config = merge(from_leaves(read_yaml(str(folder / CONFIG))), config, given, note)
        return Source(config, home=folder, result=read_json(folder / RESULT) or {})
    config = merge(from_leaves(flatten(state["config"], str(path))), config, given, note)
    if home.resolve() != folder.resolve():
        return Source(config, state, home)
    return Source(config, state, folder, read_json(folder / RESULT) or {})


def merge(old: Config, new: Config, given: Sequence[str], note: Callable[[str], None]) -> Config:
    """The configuration `old` of a run with the given settings of `new`, as far as they leave it the same run."""
    ours, theirs = old.leaves(), new.leaves()
    changed = {name: theirs[name] for name in given if theirs[name] != ours[name]}
    fixed = [name for name in changed if name not in _FREE]
    if fixed:
        name = fixed[0]
        raise ValueError(
            f"the run to resume has {LEAVES[name].path} {ours[name]}, but {theirs[name]} was asked for; "
            "leave that out, or start another run with another --out"
        )
    if changed.keys() & {"epochs", "max_steps"} and ours["schedule"] in ("cosine", "one-cycle"):
        note(
            f"the {ours['schedule']} schedule now spans another length: the result is not that of one uninterrupted run"
        )
    if "threads" in changed:
        note("another number of threads may change the last bits of the result")
    return from_leaves({**ours, **changed})
