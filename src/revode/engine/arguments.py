"""Keyword arguments of branches: tensors in nests, kept for the recomputation, and checks for changes in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revode.engine.replay import version_of


def tensor_leaves(tree: Any) -> list[Tensor]:
    """Return the tensors in a nest of dicts, lists and tuples."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class Template:
    """A nest of dicts, lists and tuples without its tensors, to be filled with others."""

    def __init__(self, tree: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(tree)
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def __len__(self) -> int:
        return len(self._places)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return the nest around these tensors, which come in the order of ``tensor_leaves``."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self._spec)


class Arguments:
    """The keyword arguments of a call, for a branch in forward and again in backward."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.given = bool(kwargs)
        self.tensors: list[Tensor] = []
        """The tensors among the arguments, detached, for the walk to keep."""
        self.trained: list[Tensor] = []
        """The tensors that require a gradient, until the walk has nodes for them."""
        if kwargs:
            self._template, leaves = Template(kwargs), tensor_leaves(kwargs)
            self.trained = [leaf for leaf in leaves if leaf.requires_grad]
            self._at = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
            self.tensors = [leaf.clone() if leaf.is_inference() else leaf.detach() for leaf in leaves]
            self.versions = [version_of(tensor) for tensor in self.tensors]

    def detached(self) -> dict[str, Any]:
        return self._template.fill(self.tensors) if self.given else {}

    def tracked(self, wanted: bool) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the keyword arguments around new leaves, and the leaves to differentiate for."""
        if not self.given:
            return {}, []
        tensors = list(self.tensors)
        for i in self._at:
            tensors[i] = tensors[i].detach().requires_grad_(wanted)
        return self._template.fill(tensors), [tensors[i] for i in self._at]

    def check_unchanged(self) -> None:
        """Raise if a tensor among the arguments is no longer that of forward."""
        if self.given and [version_of(tensor) for tensor in self.tensors] != self.versions:
            raise RuntimeError(
                "a keyword argument of a reversible branch was modified in place between forward and backward: its gradient "
                "would be that of another input; call backward first, or pass a copy"
            )


def alias(leaf: Any) -> Any:
    """Return the same tensor behind a node of its own. (``view_as`` would change the strides of a batch of one.)"""
    return leaf[...] if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Generator)


def objects_in(value: Any) -> list[Any]:
    """Return an object and everything in it, at any depth, except the contents of modules and classes."""
    found, met = [value], set[int]()
    for each in found:  # the list grows meanwhile
        if id(each) not in met and not isinstance(each, (Tensor, nn.Module, type, *_PLAIN)):
            met.add(id(each))
            found.extend(_held_by(each))
    return found


def _held_by(value: Any) -> list[Any]:
    inside = value if isinstance(value, dict | list | tuple | set) else getattr(value, "__dict__", ())
    return list(inside.values() if isinstance(inside, dict) else inside)


def look_into(kwargs: dict[str, Any]) -> list[Any]:
    """Return the parts that a branch could change in the objects it is given: tensors and sizes inside them."""
    found = objects_in(kwargs)
    return [
        (id(x), version_of(x)) if isinstance(x, Tensor) else x if isinstance(x, _PLAIN) else len(_held_by(x))
        for x in found
    ]
