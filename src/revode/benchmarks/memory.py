"""Bytes kept for backward, counted: what autograd saves, and what custom Functions keep on their contexts besides.

Two of the peers hide tensors from ``saved_tensors_hooks`` by storing them as attributes; they are found by walking the
graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from torch import Tensor

from revode.engine.accounting import SavedTensors, graph_nodes


class KeptTensors(SavedTensors):
    """`SavedTensors` that also counts the attributes of the nodes behind an output."""

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def add_contexts(self, output: Tensor) -> None:
        """Count what Python Functions in the graph of `output` keep as attributes."""
        for node in graph_nodes(output):
            for tensor in _tensors(list(getattr(node, "__dict__", {}).values())):
                self._pack(tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _tensors(member)
