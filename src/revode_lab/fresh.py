"""A process of its own for a measurement, so that its peak memory is that of the measurement."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``, called in a process that has imported torch and revode and run nothing.

    Raises:
        RuntimeError: It raised there, or the process died.
    """
    context = multiprocessing.get_context("forkserver")
    # What checkpointing and exact mode would import at their first call is imported before the fork, too.
    context.set_forkserver_preload(["revode_lab.step", "torch._dynamo"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, *arguments), daemon=True)
    process.start()
    sender.close()
    try:
        found, problem = receiver.recv()
    except EOFError:
        found, problem = None, "the process died"
    finally:
        process.kill()  # it has answered, or nobody waits for it any more
        process.join()
        receiver.close()
    if problem:
        raise RuntimeError(f"{function.__name__} failed in a process of its own: {problem}")
    return found


def _answer(sender: Any, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        sender.send((function(*arguments), None))
    except Exception as error:
        sender.send((None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
