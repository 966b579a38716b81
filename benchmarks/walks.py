"""Count the files of ours that run during a training step, and during ``revode train``.

    .venv/bin/python benchmarks/walks.py [--files]

A file counts if one of its functions is called; importing it does not count, so each walk is taken twice, and counted once.
"""

from __future__ import annotations

import contextlib
import cProfile
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from revode_lab.cli import main
from revode_lab.training import configure, train

SOURCE = str(Path(__file__).resolve().parents[1] / "src") + os.sep


def files_of(profile: cProfile.Profile) -> list[str]:
    """Return the files whose functions were called, relative to the package."""
    profile.create_stats()
    called = {file for file, _, name in profile.stats if file.startswith(SOURCE) and name != "<module>"}  # type: ignore[attr-defined]
    return sorted(name.removeprefix(SOURCE) for name in called)


class Step:
    """A monitor that profiles from the end of the first update to that of the second."""

    def __init__(self) -> None:
        self.profile = cProfile.Profile()

    def on_step(self, model: Any, step: int) -> dict[str, float]:
        if step == 1:
            self.profile.enable()
        elif step == 2:
            self.profile.disable()
        return {}


if __name__ == "__main__":
    step, command = Step(), cProfile.Profile()
    config = configure(max_steps=3, monitor_every=1, report=False, log_every=100, evaluate_every=0)
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        train(config, Path(place) / "step", monitors=[step])
        words = ["train", "--max-steps", "30", "--out", str(Path(place) / "run"), "--overwrite"]
        main(words)
        command.runcall(main, words)
    for name, profile in {"one training step": step.profile, "revode train": command}.items():
        print(f"{name:<26} {len(files_of(profile)):>3} files")
        if "--files" in sys.argv:
            print("".join(f"    {file}\n" for file in files_of(profile)), end="")
