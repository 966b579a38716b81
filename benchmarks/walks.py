"""Count the files of ours that run during a training step, and during ``revode train``.

    .venv/bin/python benchmarks/walks.py [--files]

A file counts if one of its functions is called; importing it does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from revode_lab.cli import main as main_of_revode
from revode_lab.fresh import in_fresh_process

SOURCE = str(Path(__file__).resolve().parents[1] / "src") + os.sep


class Watch:
    """Collect the files of ours whose functions are called."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def _look(self, frame: Any, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(SOURCE) and name not in self.files and not _importing(frame):
            self.files.add(name)

    def stop(self) -> set[str]:
        """Stop and return the files, relative to the package."""
        sys.setprofile(None)
        return {name.removeprefix(SOURCE) for name in self.files}


def _importing(frame: Any) -> bool:
    """Return True if the call belongs to an import, or is that of a module itself."""
    if frame.f_code.co_name == "<module>":
        return True
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def files_of_command(*words: str) -> set[str]:
    """Return the files that a command runs, in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        return in_fresh_process(_watch_command, place, words)


def _watch_command(place: str, words: Sequence[str]) -> set[str]:
    os.chdir(place)
    watch = Watch()
    with contextlib.redirect_stdout(io.StringIO()):
        main_of_revode([*words])
    return watch.stop()


def files_of_step() -> set[str]:
    """Return the files of one update, image to weights, of the default run."""
    from revode_lab.training import configure, train

    class SecondUpdate:
        """A monitor that watches from the end of the first update to that of the second."""

        files: set[str]
        watch: Watch

        def on_step(self, model: Any, step: int) -> dict[str, float]:
            if step == 1:
                self.watch = Watch()
            elif step == 2:
                self.files = self.watch.stop()
            return {}

    monitor = SecondUpdate()
    config = configure(max_steps=3, monitor_every=1, report=False, log_every=100, evaluate_every=0)
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        train(config, Path(place) / "run", monitors=[monitor])
    return monitor.files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--files", action="store_true", help="also list them")
    args = parser.parse_args()
    walks = {
        "one training step": files_of_step(),
        "revode train": files_of_command("train", "--max-steps", "30", "--out", "run"),
    }
    for name, files in walks.items():
        print(f"{name:<26} {len(files):>3} files")
        if args.files:
            print("".join(f"    {file}\n" for file in sorted(files)), end="")


if __name__ == "__main__":
    main()
