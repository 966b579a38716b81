"""The random number streams a branch may draw from: read, compare, set back.

Covered are torch's global generators (CPU and the state's device), the global streams of Python's ``random`` and of NumPy, and
the generators of all three that a branch holds as attributes, also in a list, tuple or dict, or is given as arguments.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

Stream = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How to read a stream's state, and how to set it."""


def streams_of(branch: nn.Module, device: torch.device, arguments: Iterable[Any] = ()) -> list[Stream]:
    """Every stream that `branch` on `device` might draw from, given these arguments."""
    streams: list[Stream] = [(torch.get_rng_state, torch.set_rng_state), (random.getstate, random.setstate)]
    if device.type in ("cuda", "xpu"):
        of_device = getattr(torch, device.type)
        streams.append((lambda: of_device.get_rng_state(device), lambda state: of_device.set_rng_state(state, device)))
    elif device.type == "mps":
        streams.append((torch.mps.get_rng_state, torch.mps.set_rng_state))
    if "numpy" in sys.modules:
        streams.append((_read_numpy, _set_numpy))
    for value in [*arguments, *(value for module in branch.modules() for value in _held(module))]:
        stream = _stream_of(value)
        if stream is not None:
            streams.append(stream)
    return streams


def _held(module: nn.Module) -> Iterator[Any]:
    """The attributes of `module`, and what those that are containers hold."""
    for value in vars(module).values():
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _stream_of(value: Any) -> Stream | None:
    """The stream that `value` is, if it is a generator."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    # NumPy's states are pickled, since some are dicts of arrays, which do not compare at once.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return lambda: pickle.dumps(bits.state), lambda state: setattr(bits, "state", pickle.loads(state))
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return lambda: pickle.dumps(value.get_state(legacy=False)), lambda state: value.set_state(pickle.loads(state))
    return None


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

    def __init__(self, branch: nn.Module, device: torch.device, arguments: Iterable[Any] = ()) -> None:
        self._before = [(stream, stream[0]()) for stream in streams_of(branch, device, arguments)]

    def close(self) -> None:
        """Keep only the streams that have moved since."""
        self._before = [(stream, state) for stream, state in self._before if not _same(state, stream[0]())]

    def __bool__(self) -> bool:
        return bool(self._before)

    def undo(self) -> None:
        """Set the streams back to where they were before."""
        for (_, write), state in self._before:
            write(state)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers inside, and leave the streams as they were."""
        outside = [(stream, stream[0]()) for stream, _ in self._before]
        self.undo()
        try:
            yield
        finally:
            for (_, write), state in outside:
                write(state)
