"""The random number streams a branch may draw from: read, compare, set back.

Covered are torch's global generators (CPU and the state's device), generators that a branch holds as attributes, and the
global streams of Python's ``random`` and of NumPy.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Stream = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How to read a stream's state, and how to set it."""


def streams_of(branch: nn.Module, device: torch.device) -> list[Stream]:
    """Every stream that `branch` on `device` might draw from."""
    streams: list[Stream] = [(torch.get_rng_state, torch.set_rng_state), (random.getstate, random.setstate)]
    if device.type == "cuda":
        streams.append(
            (lambda: torch.cuda.get_rng_state(device), lambda state: torch.cuda.set_rng_state(state, device))
        )
    elif device.type == "mps":
        streams.append((torch.mps.get_rng_state, torch.mps.set_rng_state))
    if "numpy" in sys.modules:
        streams.append((_read_numpy, _set_numpy))
    for module in branch.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                streams.append((value.get_state, value.set_state))
    return streams


def _read_numpy() -> Any:
    """NumPy's global state with its words as bytes, so that two states are compared at once."""
    kind, words, *rest = sys.modules["numpy"].random.get_state()
    return kind, words.tobytes(), *rest


def _set_numpy(state: Any) -> None:
    kind, words, *rest = state
    numpy: Any = sys.modules["numpy"]
    numpy.random.set_state((kind, numpy.frombuffer(words, dtype=numpy.uint32), *rest))


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class Draw:
    """What the streams were before a branch drew from them; empty if it did not."""

    def __init__(self, branch: nn.Module, device: torch.device) -> None:
        self._before = [(stream, stream[0]()) for stream in streams_of(branch, device)]

    def close(self) -> None:
        """Keep only the streams that have moved since."""
        self._before = [(stream, state) for stream, state in self._before if not _same(state, stream[0]())]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers inside, and leave the streams as they were."""
        outside = [(stream, stream[0]()) for stream, _ in self._before]
        for (_, write), state in self._before:
            write(state)
        try:
            yield
        finally:
            for (_, write), state in outside:
                write(state)
