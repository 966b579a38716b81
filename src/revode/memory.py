"""Graphs of autograd: bytes that they keep, counted, and skip connections in them.

`SavedTensors` watches everything saved for backward inside a block, `PeakActivations` also what is let go of again, and
`graph_bytes` asks a graph that already exists. All count each storage once, and leave out what exists anyway (parameters and
other tensors named by the caller).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def _storage_key(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


class SavedTensors:
    """A context that counts the bytes saved for backward while it is entered.

    Args:
        exclude: tensors that are alive anyway, usually ``model.parameters()``.
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        self._excluded = {_storage_key(tensor) for tensor in exclude}
        self._seen: dict[tuple[str, int], Tensor] = {}
        self.num_bytes = 0

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that no hook sees, such as an attribute of a custom Function."""
        key = _storage_key(tensor)
        if key not in self._excluded and key not in self._seen:
            self._seen[key] = tensor.detach()  # kept until exit, so that no address is used twice
            self.num_bytes += tensor.untyped_storage().nbytes()

    def _pack(self, tensor: Tensor) -> Tensor:
        self.count(tensor)
        return tensor.detach()  # a node that kept its own output would keep itself

    def __enter__(self) -> SavedTensors:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
        self._seen.clear()


class PeakActivations:
    """A context that counts the bytes alive for backward while it is entered, and keeps their peak.

    Unlike a count of all that is saved, this sees memory come back: a reversible step saves one branch at a time.

    Args:
        exclude: Tensors that are alive anyway, usually the parameters.
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        self._uses = {tensor.untyped_storage().data_ptr(): 1 for tensor in exclude}
        self._live = self.num_bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # a node that kept its own output would keep itself
        entry = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        self._count(*entry, 1)
        weakref.finalize(kept, self._count, *entry, -1).atexit = False  # when the graph lets go of it
        return kept

    def _count(self, storage: int, num_bytes: int, change: int) -> None:
        """One more or one less keeps the storage at this address."""
        before = self._uses.get(storage, 0)
        self._uses[storage] = before + change
        self._live += num_bytes * (bool(before + change) - bool(before))
        self.num_bytes = max(self.num_bytes, self._live)

    def __enter__(self) -> PeakActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)


def graph_nodes(output: Tensor, inputs: Iterable[Tensor] = ()) -> Iterator[Any]:
    """The nodes of the graph behind `output`, each once, up to those that made `inputs`."""
    visited: set[Any] = {tensor.grad_fn for tensor in inputs}
    pending: list[Any] = [output.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        pending.extend(following for following, _ in node.next_functions)


def adds(y: Tensor, x: Tensor, leads_on: Callable[[str], bool]) -> bool:
    """Whether the graph of y reaches x by a way with an addition on it.

    Args:
        y: where the graph ends.
        x: where it may begin.
        leads_on: by its name, whether a way may go through a node.
    """
    pending: list[tuple[Any, bool]] = [(y.grad_fn, False)]
    visited: set[tuple[Any, bool]] = set()
    while pending:
        node, added = pending.pop()
        if node is None or (node, added) in visited:
            continue
        visited.add((node, added))
        if node is x.grad_fn or getattr(node, "variable", None) is x:
            if added:
                return True
        elif leads_on(node.name()):
            added = added or node.name().startswith(_ADDITIONS)
            pending.extend((following, added) for following, _ in node.next_functions)
    return False


_ADDITIONS = ("AddBackward", "AddcmulBackward", "SubBackward")


def graph_bytes(output: Tensor, inputs: Iterable[Tensor], exclude: Iterable[Tensor] = ()) -> int:
    """Bytes that the graph from `inputs` to `output` has saved, by walking it.

    Args:
        output: where the graph ends.
        inputs: where to stop; what made these is not counted.
        exclude: tensors that are alive anyway.
    """
    seen = {_storage_key(tensor) for tensor in exclude}
    total = 0
    for node in graph_nodes(output, inputs):
        for tensor in _saved_by(node):
            key = _storage_key(tensor)
            if key not in seen:
                seen.add(key)
                total += tensor.untyped_storage().nbytes()
    return total


def _saved_by(node: Any) -> list[Tensor]:
    """The tensors one node of a graph keeps; not those that hooks would make anew, as torch's checkpoint does."""
    values: list[Any] = []
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        raw = getattr(node, name)
        parts = raw if isinstance(raw, tuple | list) else [raw]
        if any(getattr(part, "unpack_hook", None) is not None for part in parts):
            values.extend(getattr(part, "data", None) for part in parts)
        else:
            value = getattr(node, "saved_tensors" if name == "_raw_saved_tensors" else name.removeprefix("_raw"))
            values.extend(value if isinstance(value, tuple | list) else [value])
    return [value for value in values if isinstance(value, Tensor)]
