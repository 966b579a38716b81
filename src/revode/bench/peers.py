"""Other libraries of reversible networks, each behind the same call as ours; one that is not installed is absent.

They are looked for where Python looks, and in the folder that ``make bench`` fills beside the environment, so that the
environment itself stays as it is. None of them needs torchvision to be imported: only their installation asks for it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from revode.schemes import Momentum, Scheme, State

FOLDER = Path(sys.prefix) / "benchmark-peers"
"""Where ``make bench`` installs them."""


@contextlib.contextmanager
def _also_in_folder() -> Iterator[None]:
    sys.path.append(str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))


def find(name: str) -> Any:
    """The library's module, or None where it is not installed or cannot be imported."""
    if name in sys.modules:
        return sys.modules[name]
    with _also_in_folder(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # memcnn uses a decorator that torch has renamed
        try:
            return importlib.import_module(name)
        except ImportError:
            return None


def version(name: str) -> str:
    """The installed version, or "absent"."""
    if find(name) is None:
        return "absent"
    with _also_in_folder():
        return importlib.metadata.version(name)


class Scaled(nn.Module):
    """gain * F(q): these libraries only add, so step size and sign of a scheme go into the branch."""

    def __init__(self, branch: nn.Module, gain: float) -> None:
        super().__init__()
        self.branch, self.gain = branch, gain

    def forward(self, q: Tensor) -> Tensor:
        return self.branch(q) * self.gain


class PeerSequence(nn.Module):
    """A peer's module from tensor to tensor, in the place of ours: pairs are joined before it and split behind it.

    Args:
        module: the peer's.
        split_dim: the dimension of the halves.
        pair: whether the halves of the output are wanted.
        copies_input: whether it destroys the tensor it is given.
    """

    def __init__(self, module: nn.Module, split_dim: int, pair: bool, copies_input: bool = False) -> None:
        super().__init__()
        self.module, self.split_dim, self.pair, self.copies_input = module, split_dim, pair, copies_input

    def forward(self, x: Tensor | State) -> Tensor | State:
        if not isinstance(x, Tensor):
            x = torch.cat(x, dim=self.split_dim)
        elif self.copies_input:
            x = x.clone()
        y = self.module(x)
        if not self.pair:
            return y
        p, q = y.chunk(2, dim=self.split_dim)
        return p, q


def _branches(fields: Sequence[nn.Module], scheme: Scheme) -> list[nn.Module]:
    gains = [scheme.coupling(index).gain for index in range(len(fields))]
    return [field if gain == 1.0 else Scaled(field, gain) for field, gain in zip(fields, gains, strict=True)]


def _pairs(branches: list[nn.Module]) -> list[tuple[nn.Module, nn.Module]]:
    return list(zip(branches[::2], branches[1::2], strict=True))


def memcnn(fields: Sequence[nn.Module], scheme: Scheme, split_dim: int, pair: bool) -> nn.Module:
    """A chain of wrapped couplings. Each frees the storage of its input, so the first gets a copy."""
    library = find("memcnn")
    blocks = [
        library.InvertibleModuleWrapper(library.AdditiveCoupling(f, g, split_dim=split_dim))
        for f, g in _pairs(_branches(fields, scheme))
    ]
    return PeerSequence(nn.Sequential(*blocks), split_dim, pair, copies_input=True)


def revtorch(fields: Sequence[nn.Module], scheme: Scheme, split_dim: int, pair: bool) -> nn.Module:
    """Its one sequence of blocks."""
    library = find("revtorch")
    blocks = [library.ReversibleBlock(f, g, split_along_dim=split_dim) for f, g in _pairs(_branches(fields, scheme))]
    return PeerSequence(library.ReversibleSequence(nn.ModuleList(blocks)), split_dim, pair)


def revlib(fields: Sequence[nn.Module], scheme: Scheme, split_dim: int, pair: bool) -> nn.Module:
    """Its sequence in the default memory mode.

    Its branch acts on the second half and is added to the first, then the halves swap, as ours. Couplings of one's own
    could hold the step size, but it applies them to gradients as well, which is wrong for a gain other than 1.
    """
    return PeerSequence(
        find("revlib").ReversibleSequential(*_branches(fields, scheme), split_dim=split_dim), split_dim, pair
    )


def momentumnet(fields: Sequence[nn.Module], scheme: Scheme, split_dim: int, pair: bool) -> nn.Module:
    """Its own scheme, without activations."""
    assert isinstance(scheme, Momentum)
    return find("momentumnet").MomentumNet(list(fields), gamma=scheme.gamma, use_backprop=False)
