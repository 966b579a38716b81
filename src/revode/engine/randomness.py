"""RNG states that a branch may draw from: read, compared, restored.

Covered are torch's global generators (of the CPU and of the state's device), those of Python's ``random`` and of NumPy, and
generators that a branch holds or is given. They may be attributes, or lie in containers, plain helper objects and
``functools.partial``, or be globals that its ``forward`` names.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import pickle
import random
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class Stream(NamedTuple):
    """One RNG: its name or identity, functions that read and set its state, and perhaps a quick test that nothing was drawn."""

    key: Hashable
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    rests_at: Callable[[Any], bool] = lambda state: False

    def has_left(self, state: Any) -> Any:
        """Return the present RNG state if it differs from `state`, else None."""
        if self.rests_at(state):
            return None
        now = self.read()
        return None if _same(state, now) else now


def torch_streams(device: torch.device) -> list[Stream]:
    """Return torch's global RNGs: the CPU's, and the device's."""
    streams = [Stream("torch", torch.get_rng_state, torch.set_rng_state)]
    if device.type == "mps":
        streams.append(Stream(device, torch.mps.get_rng_state, torch.mps.set_rng_state))
    elif device.type not in ("cpu", "meta"):
        module: Any = getattr(torch, device.type, None)
        if hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state"):
            streams.append(
                Stream(device, lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device))
            )
    return streams


def can_replay(device: torch.device) -> bool:
    """Return True if random numbers drawn on `device` can be drawn again."""
    return device.type in ("cpu", "meta") or len(torch_streams(device)) > 1


def global_streams(device: torch.device) -> list[Stream]:
    """Return every RNG that code may draw from without holding a generator."""
    streams = [*torch_streams(device), _python_stream("python", random._inst)]  # type: ignore[attr-defined]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        streams.append(_numpy_stream("numpy", numpy_random.mtrand._rand))
    return streams


def held_streams(values: Iterable[Any]) -> list[Stream]:
    """Return the RNGs of all generators among `values`, and inside them."""
    found: dict[Hashable, Stream] = {}
    for value in _reachable(values):
        stream = _stream_of(value)
        if stream is not None:
            found[stream.key] = stream
    return list(found.values())


def held_by(module: nn.Module) -> Iterator[Any]:
    """Yield the attributes of `module`, and the globals that its ``forward`` names."""
    yield from vars(module).values()
    if isinstance(module, torch.jit.ScriptModule):
        return
    forward = getattr(type(module).forward, "__wrapped__", type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is not None:
        scope = forward.__globals__
        yield from (scope[name] for name in code.co_names if name in scope)


_OPAQUE = (
    torch.Tensor,
    nn.Module,
    type,
    str,
    bytes,
    int,
    float,
    bool,
    type(None),
    types.ModuleType,
    torch.dtype,
    torch.device,
)
_DEPTH = 6


def _reachable(values: Iterable[Any]) -> Iterator[Any]:
    """Yield `values` and the contents of their containers, partial functions and plain objects, a few levels deep."""
    seen: set[int] = set()
    level = list(values)
    for _ in range(_DEPTH):
        following: list[Any] = []
        for value in level:
            if id(value) in seen or isinstance(value, _OPAQUE):
                continue
            seen.add(id(value))
            yield value
            following.extend(_inside(value))
        level = following


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        return list(inspect.getclosurevars(value).nonlocals.values())
    if isinstance(value, types.MethodType):
        return [value.__self__]
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def is_generator(value: Any) -> bool:
    """Return True if `value` itself is a generator of torch, Python or NumPy."""
    return isinstance(value, torch.Generator | random.Random) or type(value).__module__.startswith("numpy.random")


def _stream_of(value: Any) -> Stream | None:
    """Return the RNG of `value`, if it is a generator."""
    if isinstance(value, torch.Generator):
        return Stream(id(value), value.get_state, value.set_state)
    if isinstance(value, random.SystemRandom):
        raise ValueError(
            "it holds or is given a random.SystemRandom, whose numbers cannot be drawn again: use random.Random"
        )
    if isinstance(value, random.Random):
        return _python_stream("python" if value is random._inst else id(value), value)  # type: ignore[attr-defined]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and isinstance(value, numpy_random.Generator):
        bits = value.bit_generator
        return Stream(id(value), lambda: pickle.dumps(bits.state), lambda s: setattr(bits, "state", pickle.loads(s)))
    if numpy_random is not None and isinstance(value, numpy_random.RandomState):
        return _numpy_stream("numpy" if value is numpy_random.mtrand._rand else id(value), value)
    return None


def _words_of(source: random.Random) -> ctypes.Array[ctypes.c_uint32]:
    """Return the index and the 624 words of a Mersenne twister, where CPython has them in its object."""
    return (ctypes.c_uint32 * 625).from_address(id(source) + object.__basicsize__)


@functools.cache
def _python_shows_its_words() -> bool:
    """Return True if this Python lays a ``random.Random`` out as expected."""
    source = random.Random(0)
    large_enough = random.Random.__basicsize__ >= object.__basicsize__ + 4 * 625
    return large_enough and (*(words := _words_of(source))[1:], words[0]) == source.getstate()[1]


def _python_stream(key: Hashable, source: random.Random) -> Stream:
    """Return the RNG of a ``random.Random``. Its state takes 12 µs to read in Python, so its words are compared first."""
    words = _words_of(source) if type(source) is random.Random and _python_shows_its_words() else None

    def read() -> tuple[Any, bytes]:
        state = source.getstate()
        return state, b"" if words is None or state[2] is not None else bytes(words)

    def rests_at(state: tuple[Any, bytes]) -> bool:
        return bool(state[1]) and bytes(words or b"") == state[1] and source.gauss_next is None  # type: ignore[attr-defined]

    return Stream(key, read, lambda state: source.setstate(state[0]), rests_at)


def _numpy_stream(key: Hashable, source: Any) -> Stream:
    """Return the RNG of a ``RandomState``. Its state takes 60 µs to read, its words below 1. A stored normal moves no word."""
    bits = source._bit_generator
    words = (
        (ctypes.c_uint32 * 625).from_address(bits.ctypes.state_address) if type(bits).__name__ == "MT19937" else None
    )

    def read() -> tuple[bytes, bytes]:
        state = source.get_state(legacy=False)
        quick = b"" if words is None or state["has_gauss"] else bytes(words)
        return pickle.dumps(state), quick

    def rests_at(state: tuple[bytes, bytes]) -> bool:
        return bool(state[1]) and bytes(words or b"") == state[1]

    return Stream(key, read, lambda state: source.set_state(pickle.loads(state[0])), rests_at)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.numpy().tobytes() == b.numpy().tobytes() if a.device.type == "cpu" else torch.equal(a, b)
    return a == b


Draws = list[tuple[Stream, Any]]
"""The RNGs that a branch has moved, with their states before it ran."""


class Streams:
    """The RNG states along one walk: each is read once, and again behind a branch that may have moved it."""

    _walking: object = None
    """The walk that ran last."""

    def __init__(self) -> None:
        self._walk = object()
        self._last: dict[Hashable, Any] = {}
        self.of_torch = functools.cache(torch_streams)
        self.of_all = functools.cache(global_streams)

    def forget(self) -> None:
        """Read every RNG state anew from now on."""
        self._last.clear()

    def before(self, streams: list[Stream]) -> None:
        """Read the RNG states before a branch that may draw from `streams`."""
        if Streams._walking is not self._walk:  # another walk, perhaps in another thread, has run in between
            Streams._walking = self._walk
            self._last.clear()
        for stream in streams:
            if stream.key not in self._last:
                self._last[stream.key] = stream.read()

    def after(self, streams: list[Stream]) -> Draws:
        """Return the RNGs that the branch has moved."""
        moved = []
        for stream in streams:
            before = self._last[stream.key]
            now = stream.has_left(before)
            if now is not None:
                moved.append((stream, before))
                self._last[stream.key] = now
        return moved


def undo(draws: Draws) -> None:
    """Restore the RNG states from before."""
    for stream, before in draws:
        stream.write(before)


@contextlib.contextmanager
def drawn_again(draws: Draws) -> Iterator[None]:
    """Draw the same numbers inside; leave the RNG states as they are."""
    outside = [(stream, stream.read()) for stream, _ in draws]
    undo(draws)
    try:
        yield
    finally:
        undo(outside)
