"""Graphs of autograd: bytes that they keep, counted, and skip connections in them.

`SavedTensors` counts everything saved for backward inside a block. `PeakActivations` also sees memory that is freed again.
`graph_bytes` counts in a graph that exists. All count each storage once, and leave out parameters and other tensors named by
the caller. A walk whose end is not known keeps its newest pair itself, where no hook on saved tensors sees it. It tells the
counters in `watching`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

watching: list[Any] = []
"""The counters that are entered; walks tell them what they keep."""


def _storage_key(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


class SavedTensors:
    """A context that counts the bytes saved for backward while it is entered, without those of tensors to `exclude`.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    >>> with SavedTensors(exclude=model.parameters()) as saved:
    ...     y = model(torch.randn(2, 4))
    >>> saved.num_bytes  # the input and the output of tanh
    64
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        self._excluded = {_storage_key(tensor) for tensor in exclude}
        self._seen: dict[tuple[str, int], Tensor] = {}
        self._saved = 0
        self._walks: dict[object, int] = {}

    @property
    def num_bytes(self) -> int:
        """Return the bytes counted so far."""
        return self._saved + sum(self._walks.values())

    def note_walk(self, walk: object, added: Iterable[Tensor], pairs: Iterable[Tensor]) -> None:
        """Count the tensors of a walk: those of its last step, and these pairs in place of all earlier ones."""
        for tensor in added:
            self.count(tensor)
        storages = {_storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in pairs}
        self._walks[walk] = sum(size for key, size in storages.items() if key not in self._excluded)

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that no hook sees, such as an attribute of a custom Function."""
        key = _storage_key(tensor)
        if key not in self._excluded and key not in self._seen:
            self._seen[key] = tensor.detach()  # kept until exit, so that no address is used twice
            self._saved += tensor.untyped_storage().nbytes()

    def _pack(self, tensor: Tensor) -> Tensor:
        self.count(tensor)
        return tensor.detach()  # a node that kept its own output would keep itself

    def __enter__(self) -> SavedTensors:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        watching.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        watching.remove(self)
        self._hooks.__exit__(*exception)
        self._seen.clear()


class PeakActivations:
    """A context that counts the bytes alive for backward while it is entered, and keeps their peak.

    Unlike `SavedTensors`, it sees memory come back: a reversible step saves one branch at a time.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    >>> with PeakActivations(exclude=model.parameters()) as peak:
    ...     model(torch.randn(2, 4)).sum().backward()
    >>> peak.num_bytes
    64
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        self._uses = {tensor.untyped_storage().data_ptr(): 1 for tensor in exclude}
        self._live = self.num_bytes = 0
        self._followed: Any = WeakTensorKeyDictionary()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # a node that kept its own output would keep itself
        self._follow(kept)
        return kept

    def _follow(self, kept: Tensor) -> None:
        entry = kept.untyped_storage().data_ptr(), kept.untyped_storage().nbytes()
        self._count(*entry, 1)
        weakref.finalize(kept, self._count, *entry, -1).atexit = False  # when the graph lets go of it

    def note_walk(self, walk: object, added: Iterable[Tensor], pairs: Iterable[Tensor]) -> None:
        """Count the tensors of a walk, each until it is gone."""
        for tensor in (*added, *pairs):
            if tensor not in self._followed:
                self._followed[tensor] = True
                self._follow(tensor)

    def _count(self, storage: int, num_bytes: int, change: int) -> None:
        """Add a number to the uses of the storage at this address."""
        before = self._uses.get(storage, 0)
        self._uses[storage] = before + change
        self._live += num_bytes * (bool(before + change) - bool(before))
        self.num_bytes = max(self.num_bytes, self._live)

    def __enter__(self) -> PeakActivations:
        self._hooks.__enter__()
        watching.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        watching.remove(self)
        self._hooks.__exit__(*exception)


def graph_nodes(output: Tensor, inputs: Iterable[Tensor] = ()) -> Iterator[Any]:
    """Yield the nodes of the graph behind `output`, each once, up to those that made `inputs`.

    >>> x = torch.ones(2, requires_grad=True)
    >>> [node.name() for node in graph_nodes(x.exp().tanh())]
    ['TanhBackward0', 'ExpBackward0', 'torch::autograd::AccumulateGrad']
    """
    visited: set[Any] = {tensor.grad_fn for tensor in inputs}
    pending: list[Any] = [output.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        pending.extend(following for following, _ in node.next_functions)


def graph_leaves(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves of the graphs behind `outputs`, each once.

    >>> x = torch.ones(2, requires_grad=True)
    >>> [leaf is x for leaf in graph_leaves([x.exp(), x.tanh()])]
    [True]
    """
    pending: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    visited = set(pending)
    while pending:
        node = pending.pop()
        following = node.next_functions
        for after, _ in following:
            if after is not None and after not in visited:
                visited.add(after)
                pending.append(after)
        if not following:
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                yield leaf


def adds(y: Tensor, x: Tensor, leads_on: Callable[[str], bool]) -> bool:
    """Return True if the graph of y reaches x by a way with an addition on it, through nodes whose names `leads_on` allows.

    >>> x = torch.ones(2, requires_grad=True)
    >>> adds(x + x.tanh(), x, lambda name: True), adds(x.tanh(), x, lambda name: True)
    (True, False)
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
    """Return the bytes that the graph from `inputs` to `output` has saved, without those of tensors to `exclude`.

    >>> x = torch.ones(2, requires_grad=True)
    >>> graph_bytes(x.tanh(), [x])
    8
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
    """Return the tensors that one node keeps; not those that hooks would recompute, as torch's checkpoint does."""
    walk = getattr(node, "path", None)  # of a walk whose end is not known
    values: list[Any] = [] if walk is None else walk.tensors_kept()
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
