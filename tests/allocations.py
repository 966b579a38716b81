"""What a computation made and what of it is still there, as torch counts references: Python would miss what a graph holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def storages(tensors: Iterable[Tensor]) -> set[int]:
    return {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in tensors}


class Allocations(TorchDispatchMode):
    """Every storage that operations inside make, apart from some that were there before; without holding any."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.before = storages(before)
        self.made: dict[int, StorageWeakRef] = {}
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                self.made[reference.cdata] = reference
                self.sizes[reference.cdata] = tensor.untyped_storage().nbytes()
        return made

    def alive(self) -> set[int]:
        """Those still there."""
        return {key for key, reference in self.made.items() if not reference.expired()} - self.before

    def alive_bytes(self) -> int:
        """The bytes of those still there."""
        return sum(self.sizes[key] for key in self.alive())
