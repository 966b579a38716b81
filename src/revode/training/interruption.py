"""SIGINT and SIGTERM as a request to stop after the current update, so that the run can be saved and resumed."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any


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
