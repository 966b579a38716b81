"""Progress on the terminal, and signals that ask a run to stop.

A bar on a terminal, plain lines elsewhere; rank 0 speaks, the others are silent.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from revode_lab.system import human_bytes, human_time, peak

if TYPE_CHECKING:
    from revode_lab.training.checkpoint import Position

_QUIET_SECONDS = 10.0
"""Plain lines come no more often than this."""


def passing(text: str) -> None:
    """Say on a terminal what is being done now, in a line that the next one replaces; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


class Progress:
    """A context that shows the state of a run; `work` is the cost of the updates up to a step, in any unit.

    Attributes:
        logged: The last line of metrics in words, which is shown until there is another.
    """

    def __init__(
        self, num_steps: int, images_per_step: int, silent: bool = False, work: Callable[[int], float] = float
    ) -> None:
        self._num_steps, self._work, self._images_per_step = num_steps, work, images_per_step
        self._silent = silent
        self._bar: Any = None
        self._task: Any = None
        self._last_line = 0.0
        self.logged = ""

    def __enter__(self) -> Progress:
        self._last_line = time.perf_counter()
        if not self._silent and sys.stdout.isatty():
            self._open_bar()
        return self

    def _open_bar(self) -> None:
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as RichProgress
        except ImportError:
            return
        self._bar = RichProgress(
            BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.description}"), expand=True
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=self._num_steps)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, position: Position) -> None:
        """Show where training stands, after every update."""
        if not self._due():
            return
        step = position.step
        left = human_time(position.seconds * (self._work(self._num_steps) / max(1, self._work(step)) - 1))
        speed = step * self._images_per_step / max(1e-9, position.seconds - position.seconds_scoring)
        self._show(step, f"{self.logged}{speed:.0f} images/s  {left} left  {memory_in_use()}")

    def scoring(self, step: int, done: int, total: int) -> None:
        """Show how much of a split is scored."""
        if self._due():
            self._show(step, f"scoring: {done / max(1, total):.0%}")

    def _due(self) -> bool:
        """Return True if anything is to be shown now: a bar looks after its own pace, lines come seldom."""
        return not self._silent and (self._bar is not None or time.perf_counter() - self._last_line >= _QUIET_SECONDS)

    def _show(self, step: int, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
            return
        self._last_line = time.perf_counter()
        self.line(f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}  {text}")

    def line(self, text: str) -> None:
        """Say one line, above the bar if there is one."""
        if self._silent:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
            return
        try:
            print(text, flush=True)
        except BrokenPipeError:  # nobody reads any more (`| head`): train on in silence
            self._silent = True
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for what others print until the process ends)


def memory_in_use() -> str:
    """Return peak of the GPU's memory if one is used, else of the memory of this process, in words."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return f"GPU peak {human_bytes(torch.cuda.max_memory_allocated())}"
    return f"process peak {human_bytes(peak())}"


class Interrupted(RuntimeError):
    """A run stopped by a signal after it was saved.

    Attributes:
        exit_code: 128 plus the signal's number: 130 for SIGINT, 143 for SIGTERM.
    """

    def __init__(self, signal_number: int, step: int, folder: Path) -> None:
        self.exit_code = 128 + signal_number
        self.step = step
        self.folder = folder
        super().__init__(f"stopped by {signal.Signals(signal_number).name} after step {step}; the run is saved")


class Interruption:
    """A context in which the first signal is remembered; a second one of the same kind acts as it always did.

    One that came too late to stop the run with `Interrupted` acts when the context is left: nothing further is begun.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal_number = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in self._SIGNALS:
            try:
                self._previous[number] = signal.signal(number, self._remember)
            except ValueError:  # not in the main thread: whoever owns it handles signals
                break
        return self

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        signal.signal(number, self._previous[number])

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self.signal_number and not isinstance(error, Interrupted):
            signal.raise_signal(self.signal_number)
