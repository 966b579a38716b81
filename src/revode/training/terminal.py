"""What a run says on the terminal, and what it hears from there: progress, and signals that ask it to stop.

A bar on a terminal, plain lines elsewhere; rank 0 speaks, the others are silent.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from revode.files import human_bytes, human_time

_QUIET_SECONDS = 10.0
"""Plain lines come no more often than this."""


class Progress:
    """A context that shows the state of a run.

    Args:
        num_steps: Updates in the run.
        start_step: Updates already done.
        images_per_step: Size of the global batch.
        silent: Whether to say nothing at all.
    """

    def __init__(self, num_steps: int, start_step: int, images_per_step: int, silent: bool = False) -> None:
        self._num_steps = num_steps
        self._start_step = start_step
        self._images_per_step = images_per_step
        self._silent = silent
        self._bar: Any = None
        self._task: Any = None
        self._last_line = 0.0

    def __enter__(self) -> Progress:
        self._start = time.perf_counter()
        self._last_line = self._start
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
        self._task = self._bar.add_task("", total=self._num_steps, completed=self._start_step)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, loss: float, accuracy: float) -> None:
        """Show where training stands."""
        if self._silent:
            return
        now = time.perf_counter()
        if self._bar is None and now - self._last_line < _QUIET_SECONDS:
            return
        rate = (step - self._start_step) / max(1e-9, now - self._start)
        left = human_time((self._num_steps - step) / rate) if rate else "?"
        text = (
            f"loss {loss:.3f}  accuracy {accuracy:6.1%}  {rate * self._images_per_step:.0f} images/s  "
            f"{left} left  {human_bytes(memory_in_use())}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
            return
        self._last_line = now
        width = len(str(self._num_steps))
        self.line(f"step {step:>{width}}/{self._num_steps}  {text}")

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


def memory_in_use() -> int:
    """Bytes of the GPU if one is used, else of this process."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    import resource

    try:
        import psutil
    except ImportError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return psutil.Process().memory_info().rss


class Interrupted(RuntimeError):
    """A run stopped by a signal after it was saved.

    Attributes:
        exit_code: 128 plus the signal's number: 130 for SIGINT, 143 for SIGTERM.
        step: Updates done.
        folder: The run directory.
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
