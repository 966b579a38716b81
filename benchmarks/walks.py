"""How many of our files run during a training step, and during ``revode train``.

    .venv/bin/python benchmarks/walks.py [--files]

A file counts if one of its functions is called; importing it does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

SOURCE = str(Path(__file__).resolve().parents[1] / "src") + os.sep


class Watch:
    """The files of ours whose functions were called since it began."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def _look(self, frame: Any, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(SOURCE) and name not in self.files and not _importing(frame):
            self.files.add(name)

    def stop(self) -> set[str]:
        """End it; the files, relative to the package."""
        sys.setprofile(None)
        return {name.removeprefix(SOURCE) for name in self.files}


def _importing(frame: Any) -> bool:
    """Whether the call belongs to an import, or is that of a module itself."""
    if frame.f_code.co_name == "<module>":
        return True
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def files_of_command(*words: str) -> set[str]:
    """The files that a command runs, in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, str(Path(__file__).resolve()), "--command", *words]
        environment = {**os.environ, "PYTHONPATH": SOURCE}
        done = subprocess.run(command, env=environment, cwd=place, check=True, stdout=subprocess.PIPE, text=True)
    return set(done.stdout.split())


def watch_command(words: list[str]) -> None:
    """Run a command here, and print the files instead of what it says."""
    watch = Watch()
    with contextlib.redirect_stdout(io.StringIO()):
        from revode_lab.cli import main

        main(words)
    print("\n".join(watch.stop()))


def files_of_step() -> set[str]:
    """The files of one update, image to weights, of the default run."""
    from revode_lab.training import configure, train

    found: set[str] = set()
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        config = configure(max_steps=3, monitor_every=1, report=False, log_every=100, evaluate_every=0)
        watches: list[Watch] = []

        class Between:
            """Called after each update: the second one is watched."""

            def on_step(self, model: Any, step: int) -> dict[str, float]:
                if step == 1:
                    watches.append(Watch())
                elif step == 2:
                    found.update(watches[0].stop())
                return {}

        train(config, Path(place) / "run", monitors=[Between()])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--files", action="store_true", help="also list them")
    parser.add_argument("--command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.command:
        return watch_command(args.command)
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
