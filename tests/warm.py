"""``revode`` commands as processes that begin with torch imported: they are forked from one that has done it already."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any, TextIO

COMMAND = [sys.executable, "-m", "revode_lab.cli"]
PRELOADED = [
    "revode_lab.fresh",
    "revode_lab.cli",
    "revode_lab.training.loop",
    "torch._dynamo",
    "torch.distributed.fsdp",
]
"""With what `in_fresh_process` needs: a process of tests has one server to fork from, and its first user starts it."""


class WarmProcess:
    """As much of ``subprocess.Popen`` as tests ask of a ``python -m revode_lab.cli``; `communicate` gives all of its output.

    The interpreter neither starts nor ends as it does elsewhere. What could happen there needs a real one.
    """

    def __init__(self, args: list[Any], env: dict[str, str] | None = None, **pipes: Any) -> None:
        words = [str(word) for word in args]
        assert words[:3] == COMMAND, words
        assert pipes.keys() <= {"stdout", "stderr", "text"}, pipes
        self._output: list[TextIO] = []
        numbers = (1, 2)
        if pipes.get("stdout") is not None:
            self._output = [tempfile.TemporaryFile("w+") for _ in numbers]  # noqa: SIM115 (closed in `communicate`)
            numbers = tuple(file.fileno() for file in self._output)
        streams = [Connection(os.dup(number), readable=False) for number in numbers]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        place = (dict(os.environ if env is None else env), os.getcwd(), streams)
        self._process = context.Process(target=_run, args=(words[3:], *place), daemon=True)
        self._process.start()
        for stream in streams:
            stream.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(COMMAND, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, ...]:
        self.wait(timeout)
        texts = []
        for file in self._output:
            file.seek(0)
            texts.append(file.read())
            file.close()
        return tuple(texts)


def _run(words: list[str], environment: dict[str, str], folder: str, streams: list[Connection]) -> None:
    for stream, number in zip(streams, (1, 2), strict=True):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    from revode_lab.cli import main

    sys.exit(main(words))
