"""Methods, by name: each puts a module of its own in the place of a reversible sequence, to compute the same gradient.

The baselines are the schemes written out in ordinary PyTorch (`revode_lab.baselines`).

Other libraries are looked for where Python looks, and in the folder that ``make bench`` fills beside the environment, so that
the environment itself stays as it is. One that is not installed is absent.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revode.engine import ReversibleSequence
from revode.errors import unknown
from revode.schemes import Scheme, State
from revode_lab.baselines import BASELINES, PlainSequence, Wrap

FOLDER = Path(sys.prefix) / "benchmark-peers"
"""Folder into which ``make bench`` installs other libraries."""


class Checkpointed(nn.Module):
    """A branch under torch's checkpoint with its defaults, RNG state included."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, q: Tensor) -> Tensor:
        return checkpoint(self.branch, q, use_reentrant=False)


def _checkpoint_branches(sequence: ReversibleSequence, pair: bool) -> nn.Module:
    plain = PlainSequence(sequence, pair)
    plain.fields = nn.ModuleList(map(Checkpointed, plain.fields))
    return plain


@contextlib.contextmanager
def _also_in_folder() -> Iterator[None]:
    sys.path.append(str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))


def library(name: str) -> Any:
    """Return the library's module, or None where it cannot be imported."""
    if name in sys.modules:
        return sys.modules[name]
    with _also_in_folder(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # memcnn uses a decorator that torch has renamed
        try:
            return importlib.import_module(name)
        except ImportError:
            return None


def version(name: str) -> str:
    """Return the installed version, or "absent"."""
    if library(name) is None:
        return "absent"
    with _also_in_folder():
        return importlib.metadata.version(name)


class Scaled(nn.Module):
    """gain * F(q): these libraries only add, so a scheme's step size and sign go into the branch."""

    def __init__(self, branch: nn.Module, gain: float) -> None:
        super().__init__()
        self.branch, self.gain = branch, gain

    def forward(self, q: Tensor) -> Tensor:
        return self.branch(q) * self.gain


class PeerSequence(nn.Module):
    """A peer's module in the place of ours: pairs are joined before it and split behind it.

    Args:
        make: makes the peer's module of its library, branches that only add, and the dimension of the halves.
    """

    def __init__(self, name: str, make: Callable[..., nn.Module], sequence: ReversibleSequence, pair: bool) -> None:
        super().__init__()
        gains = [sequence.scheme.coupling(index).gain for index in range(len(sequence.fields))]
        branches = [f if gain == 1.0 else Scaled(f, gain) for f, gain in zip(sequence.fields, gains, strict=True)]
        self.split_dim, self.pair = sequence.split_dim or 1, pair
        self.module = make(library(name), branches, self.split_dim)
        self.copies_input = name == "memcnn"  # which frees the storage of its input

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


def _memcnn(library: Any, branches: list[nn.Module], split_dim: int) -> nn.Module:
    pairs = zip(branches[::2], branches[1::2], strict=True)
    couplings = [library.AdditiveCoupling(f, g, split_dim=split_dim) for f, g in pairs]
    return nn.Sequential(*map(library.InvertibleModuleWrapper, couplings))


def _revtorch(library: Any, branches: list[nn.Module], split_dim: int) -> nn.Module:
    pairs = zip(branches[::2], branches[1::2], strict=True)
    blocks = [library.ReversibleBlock(f, g, split_along_dim=split_dim) for f, g in pairs]
    return library.ReversibleSequence(nn.ModuleList(blocks))


def _revlib(library: Any, branches: list[nn.Module], split_dim: int) -> nn.Module:
    """Make its sequence. It applies user couplings to gradients too, so the gain is in the branch."""
    return library.ReversibleSequential(*branches, split_dim=split_dim)


@dataclass(frozen=True)
class Method:
    """A way to get a gradient.

    Args:
        supports: predicate of the schemes it can run.
        library: the peer it needs, if any.
        budget: per cent of the bytes that ``store`` keeps beyond ``revode`` that may be kept (a ``memory_budget``).
        compiled: its branches run compiled, so the first step differs.
    """

    name: str
    wrap: Wrap
    supports: Callable[[Scheme], bool] = lambda scheme: True
    library: str | None = None
    budget: int | None = None
    compiled: bool = False

    @property
    def available(self) -> bool:
        """Its library, if it needs one, is installed."""
        return self.library is None or library(self.library) is not None


def _revode(**options: Any) -> Wrap:
    return lambda sequence, pair: sequence.with_strategy(**options)


def _peer(name: str, make: Callable[..., nn.Module]) -> Method:
    """Return the method of a library that knows the additive coupling, up to a factor on its branches."""
    return Method(
        name, lambda *how: PeerSequence(name, make, *how), lambda scheme: scheme.splits and scheme.carry == 1.0, name
    )


BUDGETS = tuple(f"revode-budget-{share}" for share in (25, 50, 75))
COMPILED = ("revode-compiled", "revode-exact-compiled", "store-compiled")
_USUAL = [
    *(Method(name, wrap) for name, wrap in BASELINES.items()),
    Method("revode", _revode()),
    Method("revode-exact", _revode(exact=True), lambda scheme: scheme.invertible_exactly),
    _peer("memcnn", _memcnn),
    _peer("revtorch", _revtorch),
    _peer("revlib", _revlib),
]
_FURTHER = [
    Method("checkpoint-branches", _checkpoint_branches),
    Method("revode-compiled", _revode(compile=True), compiled=True),
    Method("revode-exact-compiled", _revode(exact=True, compile=True), lambda s: s.invertible_exactly, compiled=True),
    Method("store-compiled", _revode(backprop="store", compile=True), compiled=True),
    *(Method(name, _revode(), budget=int(name.rsplit("-", 1)[1])) for name in BUDGETS),
]
METHODS: dict[str, Method] = {method.name: method for method in [*_USUAL, *_FURTHER]}
DEFAULT = tuple(method.name for method in _USUAL)
PEERS = tuple(method.name for method in _USUAL if method.library)
Named = TypeVar("Named")


def find(kind: str, names: Iterable[str], registry: Mapping[str, Named]) -> list[Named]:
    """Return the entries of these names in the registry's order; raise ValueError with the choices for a wrong name."""
    wanted = list(names)
    for name in wanted:
        if name not in registry:
            raise unknown(kind, name, registry)
    return [found for name, found in registry.items() if name in wanted]
