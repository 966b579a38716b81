"""The random number streams a branch may draw from: read, compare, set back.

Covered are torch's global generators (CPU and the state's device), the global streams of Python's ``random`` and of NumPy, and
the generators of all three that a branch holds as attributes, also in a list, tuple or dict, or is given as arguments.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class Stream(NamedTuple):
    """A stream's name or identity, how to read its state, and how to set it."""

    key: Hashable
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def streams_of(branch: nn.Module, device: torch.device, arguments: Iterable[Any] = ()) -> list[Stream]:
    """Every stream that `branch` on `device` might draw from, given these arguments."""
    streams = [
        Stream("torch", torch.get_rng_state, torch.set_rng_state),
        Stream("python", random.getstate, random.setstate),
    ]
    if device.type in ("cuda", "xpu"):
        of = getattr(torch, device.type)
        streams.append(Stream(device, lambda: of.get_rng_state(device), lambda state: of.set_rng_state(state, device)))
    elif device.type == "mps":
        streams.append(Stream(device, torch.mps.get_rng_state, torch.mps.set_rng_state))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        streams.append(_numpy_stream("numpy", numpy.random))
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
        return Stream(id(value), value.get_state, value.set_state)
    if isinstance(value, random.SystemRandom):
        raise ValueError(
            "it holds or is given a random.SystemRandom, whose numbers nobody can draw again: use random.Random"
        )
    if isinstance(value, random.Random):
        return Stream(id(value), value.getstate, value.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return Stream(id(value), lambda: pickle.dumps(bits.state), lambda s: setattr(bits, "state", pickle.loads(s)))
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return _numpy_stream(id(value), value)
    return None


def _numpy_stream(key: Hashable, source: Any) -> Stream:
    """The stream of a ``RandomState``, or of ``numpy.random``. Pickled, since dicts of arrays do not compare at once."""
    return Stream(
        key, lambda: pickle.dumps(source.get_state(legacy=False)), lambda s: source.set_state(pickle.loads(s))
    )


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class Draw:
    """What the streams were before a branch ran, and which of them it moved.

    Those it did not move are kept, too: it may have drawn from them and set them back (``torch.random.fork_rng``).

    Args:
        branch: what draws.
        device: where its state lives.
        arguments: what it is given.
        seen: the states that were last met, by stream, to be shared as long as they stay the same.
    """

    def __init__(
        self,
        branch: nn.Module,
        device: torch.device,
        arguments: Iterable[Any] = (),
        seen: dict[Hashable, Any] | None = None,
    ) -> None:
        seen = {} if seen is None else seen
        self._streams = streams_of(branch, device, arguments)
        self._before = []
        for stream in self._streams:
            state = stream.read()
            if stream.key in seen and _same(seen[stream.key], state):
                state = seen[stream.key]
            seen[stream.key] = state
            self._before.append(state)
        self._moved = [False] * len(self._streams)

    def close(self) -> None:
        """Find out which streams have moved since."""
        pairs = zip(self._streams, self._before, strict=True)
        self._moved = [not _same(before, stream.read()) for stream, before in pairs]

    def __bool__(self) -> bool:
        return any(self._moved)

    def undo(self) -> None:
        """Set the streams back to where they were before."""
        for stream, before in zip(self._streams, self._before, strict=True):
            stream.write(before)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers inside, and leave the streams as they were."""
        outside = []
        for stream, before, moved in zip(self._streams, self._before, self._moved, strict=True):
            now = stream.read()
            elsewhere = not _same(before, now)
            if elsewhere:
                stream.write(before)
            if elsewhere or moved:
                outside.append((stream, now))
        try:
            yield
        finally:
            for stream, state in outside:
                stream.write(state)
