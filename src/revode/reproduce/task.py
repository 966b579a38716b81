"""A task: one piece of work with a directory of its own, done once and found again by what it is."""

from __future__ import annotations

import hashlib
import json
import re
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from revode.files import commit, locked, machine, read_json, versions, write_json
from revode.training.runs import RESULT

HOME = Path("runs") / "reproduce"


@dataclass(frozen=True)
class Setup:
    """Where and how tasks are done; threads change the last bits of what they find, processes the batch statistics.

    What changes more than bits is part of a training's directory and of the command that its page names.

    Attributes:
        home: The directory of the tasks' directories.
        data_root: Folder of the data sets.
        threads: CPU threads of a process; 0 leaves torch's choice.
        processes: Processes of a training, each with its share of every batch.
        autocast: Precision of a training's branches, as ``revode train --autocast`` takes it.
    """

    home: Path = HOME
    data_root: str | None = None
    threads: int = 0
    processes: int = 1
    autocast: str = "none"

    def folder(self, task: Task) -> Path:
        """The directory of a task: its name for people, and a digest of all that decides its result."""
        shared = f"-in-{self.processes}" if task.is_training and self.processes > 1 else ""
        precision = f"-{self.autocast}" if task.is_training and self.autocast != "none" else ""
        return self.home / f"{task.slug}{shared}{precision}-{task.digest}"

    @property
    def flags(self) -> str:
        """How a command says what changes more than bits."""
        shared = f" --processes {self.processes}" if self.processes > 1 else ""
        return shared + (f" --autocast {self.autocast}" if self.autocast != "none" else "")

    def finished(self, task: Task) -> dict[str, Any] | None:
        """The result of a task that was done before."""
        return read_json(self.folder(task) / RESULT)


class TaskFailed(RuntimeError):
    """A task that could not be done here, for instance for want of memory; the others can."""


class Task(ABC):
    """What all tasks can say."""

    is_training: ClassVar[bool] = False
    """Whether several processes may do it together, and in lower precision."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The task in a few words."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """All that decides the result, as plain values: tasks of equal identity are the same task."""

    @abstractmethod
    def flops(self) -> float:
        """Floating-point operations it takes, roughly."""

    @abstractmethod
    def execute(self, setup: Setup) -> dict[str, Any]:
        """Do it in its directory, from where it stopped if that can be, and return its result."""

    @property
    def slug(self) -> str:
        """The title as part of a file's name."""
        return re.sub(r"[^a-z0-9.]+", "-", self.title.lower()).strip("-")

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of the identity."""
        text = json.dumps([type(self).__name__, self.identity()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def complete(self, setup: Setup) -> dict[str, Any]:
        """The result, found or made."""
        return setup.finished(self) or self.execute(setup)


class Measurement(Task):
    """A task that is short enough to start anew when it was stopped."""

    @abstractmethod
    def measure(self, setup: Setup) -> dict[str, Any]:
        """The numbers, as plain values."""

    def execute(self, setup: Setup) -> dict[str, Any]:
        """Measure under the directory's lock, and keep the numbers with what they depend on."""
        folder = setup.folder(self)
        with locked(folder, "--runs"):
            found = setup.finished(self)  # another process may have been quicker
            if found is not None:
                return found
            started = time.perf_counter()
            numbers = self.measure(setup)
            environment = {"machine": machine(), "versions": versions(), "commit": commit()}
            result = {**numbers, "seconds": round(time.perf_counter() - started, 3), **environment}
            write_json(folder / RESULT, result)
            return result
