"""How many of our files run during a training step, during ``revode train``, and during ``revode reproduce table-1``.

    .venv/bin/python benchmarks/walks.py [--files]

A file counts if one of its functions is called, in the process itself or in one that it starts; importing it does not count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

SOURCE = str(Path(__file__).resolve().parents[1] / "src") + os.sep
TARGETS = {"one training step": 14, "revode train": 28, "revode reproduce table-1": 32}
_PLACE = "REVODE_WALKS"
"""The environment variable with the folder where processes leave what they saw; set, it makes this file watch on import."""


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


def watch_process(place: str) -> None:
    """Watch until this process ends, then leave the names in a file of its own."""
    import atexit

    watch = Watch()
    atexit.register(lambda: Path(place, f"{os.getpid()}.txt").write_text("\n".join(watch.stop())))


def files_of_command(*words: str) -> set[str]:
    """The files that a command and the processes it starts run."""
    with tempfile.TemporaryDirectory() as place:
        Path(place, "sitecustomize.py").write_text(Path(__file__).read_text().replace("__file__", repr(__file__)))
        path = os.pathsep.join([place, SOURCE])
        command = [sys.executable, "-m", "revode_lab.cli", *words]
        environment = {**os.environ, "PYTHONPATH": path, _PLACE: place}
        subprocess.run(command, env=environment, cwd=place, check=True, stdout=subprocess.DEVNULL)
        return {name for file in Path(place).glob("*.txt") for name in file.read_text().split()}


def files_of_step() -> set[str]:
    """The files of one update, image to weights, of the default run."""
    import contextlib
    import io

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
    args = parser.parse_args()
    walks = {
        "one training step": files_of_step(),
        "revode train": files_of_command("train", "--max-steps", "30", "--out", "run"),
        "revode reproduce table-1": files_of_command("reproduce", "table-1", "--budget", "smoke"),
    }
    for name, files in walks.items():
        print(f"{name:<26} {len(files):>3} files, target {TARGETS[name]}")
        if args.files:
            print("".join(f"    {file}\n" for file in sorted(files)), end="")


if _PLACE in os.environ:
    watch_process(os.environ[_PLACE])
elif __name__ == "__main__":
    main()
