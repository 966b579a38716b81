"""Side channels between ``transformers`` models and their blocks, beside arguments and results.

Hooks inside blocks collect router logits and attentions; caches of keys and values are filled on the way. Nothing is imported:
a model of that package has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from revode.engine.call import objects_in
from revode.engine.replay import is_replaying


def _collecting() -> Any:
    """Return the variable of transformers that holds, while a model runs, the lists of its hooks."""
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)


class Collector:
    """The values that hooks collect during a call of a block, made outputs of the block, with their gradients."""

    def __init__(self) -> None:
        found = (_collecting() and _collecting().get()) or {}
        self.before = {key: len(value) if isinstance(value, list) else value for key, value in found.items()}
        """The lengths of the lists in forward, before the call; and the other values there."""

    def call(self, function: Callable[[], Any]) -> tuple[Any, dict[str, list[Any]]]:
        """Return the result of a function, and the values that hooks collect meanwhile, in a recomputation on other lists."""
        fresh = {key: [None] * n if isinstance(n, int) else n for key, n in self.before.items()}
        token = _collecting().set(fresh) if fresh and is_replaying() else None
        try:
            result = function()
            lists = _collecting().get() if fresh else {}
        finally:
            if token is not None:
                _collecting().reset(token)
        collected = {key: lists[key][n:] for key, n in self.before.items() if isinstance(n, int)}
        for key in collected:
            del lists[key][self.before[key] :]
        return result, collected

    def give_back(self, collected: dict[str, list[Any]]) -> None:
        """Append these values to the lists of the call that goes on."""
        for key, values in collected.items():
            _collecting().get()[key].extend(values)


def is_cache(value: Any) -> bool:
    """Return True for a cache of keys and values."""
    return not isinstance(value, type) and hasattr(value, "get_seq_length") and hasattr(value, "update")


def is_filled(cache: Any) -> bool:
    """Return True if a cache is not empty. (Numbers such as the size of a window are tensors without dimensions.)"""
    return any(isinstance(each, Tensor) and each.dim() > 0 and each.numel() > 0 for each in objects_in(cache))


def refuse_updates(cache: Any) -> None:
    """Have a cache, and those inside it, raise on an update, so that nobody goes on from an empty one."""
    for each in filter(is_cache, objects_in(cache)):
        for name in [name for name in dir(each) if name.startswith("update")]:
            setattr(each, name, _refuse)


def _refuse(*_: Any, **__: Any) -> Any:
    raise ValueError("this cache was left empty by converted blocks that recorded gradients: make a new one")
