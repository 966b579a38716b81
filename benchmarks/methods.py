"""The ways to get a gradient, by name: each puts a module of its own in the place of a reversible sequence of ours.

The baselines are the schemes written out in ordinary PyTorch (`revode_lab.baselines`).

Other libraries stand behind the same call as ours; one that is not installed is absent. They are looked for where Python
looks, and in the folder that ``make bench`` fills beside the environment, so that the environment itself stays as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revode.engine import ReversibleSequence
from revode.errors import unknown
from revode.schemes import AdditiveCoupling, Momentum, Scheme, State
from revode_lab.baselines import BASELINES, PlainSequence, Wrap

FOLDER = Path(sys.prefix) / "benchmark-peers"
"""Where ``make bench`` installs other libraries."""


class Checkpointed(nn.Module):
    """A branch under torch's checkpoint as it comes, random state included."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, q: Tensor) -> Tensor:
        return checkpoint(self.branch, q, use_reentrant=False)


def _checkpoint_branches(sequence: ReversibleSequence, pair: bool) -> nn.Module:
    plain = PlainSequence(sequence, pair)
    plain.fields = nn.ModuleList(map(Checkpointed, plain.fields))
    return plain


class _Walk(torch.autograd.Function):
    """The least that a reversible walk must do: it records nothing, so dropout and batch statistics come out wrong."""

    @staticmethod
    def forward(ctx: Any, fields: Sequence[nn.Module], p: Tensor, q: Tensor, *parameters: Tensor) -> State:
        for field in fields:
            p, q = q, p + field(q)
        ctx.fields = fields
        ctx.save_for_backward(p, q)
        return p, q

    @staticmethod
    def backward(ctx: Any, gp: Tensor, gq: Tensor) -> Any:  # type: ignore[override]
        p, q = ctx.saved_tensors
        gradients: list[Tensor] = []
        for field in reversed(ctx.fields):
            p = p.detach().requires_grad_()
            with torch.enable_grad():
                u = field(p)
            product, *own = torch.autograd.grad(u, [p, *field.parameters()], gq)
            gradients[:0] = own
            p, q = q - u.detach(), p.detach()
            gp, gq = gq, gp + product
        return None, gp, gq, *gradients


class MinimalSequence(nn.Module):
    """Additive couplings by a Function without any bookkeeping."""

    def __init__(self, sequence: ReversibleSequence, pair: bool) -> None:
        super().__init__()
        self.fields, self.split_dim, self.pair = nn.ModuleList(sequence.fields), sequence.split_dim or 1, pair

    def forward(self, x: Tensor | State) -> Tensor | State:
        halves = x.chunk(2, dim=self.split_dim) if isinstance(x, Tensor) else x
        state = _Walk.apply(list(self.fields), *halves, *self.fields.parameters())
        return state if self.pair else torch.cat(state, dim=self.split_dim)


# Other libraries.


@contextlib.contextmanager
def _also_in_folder() -> Iterator[None]:
    sys.path.append(str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))


def library(name: str) -> Any:
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
    if library(name) is None:
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
        make: makes the peer's module of its library, branches that only add, and the dimension of the halves.
    """

    def __init__(self, name: str, make: Callable[..., nn.Module], sequence: ReversibleSequence, pair: bool) -> None:
        super().__init__()
        branches: list[nn.Module] = []
        for index, field in enumerate(sequence.fields):
            gain = sequence.scheme.coupling(index).gain
            branches.append(field if gain == 1.0 else Scaled(field, gain))
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
    """Its branch acts on the second half and is added to the first, then the halves swap, as ours.

    Couplings of one's own could hold the step size, but it applies them to gradients as well: wrong for a gain other than 1.
    """
    return library.ReversibleSequential(*branches, split_dim=split_dim)


def _momentumnet(sequence: ReversibleSequence, pair: bool) -> nn.Module:
    gamma = cast(Momentum, sequence.scheme).gamma
    return library("momentumnet").MomentumNet(list(sequence.fields), gamma=gamma, use_backprop=False)


# The registry.


@dataclass(frozen=True)
class Method:
    """A way to get a gradient.

    Args:
        name: what its rows say.
        wrap: makes the module.
        supports: whether it can run a scheme.
        library: the peer it needs, if any.
        budget: per cent of what ``store`` keeps beyond ``revode`` that may be kept (a ``memory_budget``).
        compiled: whether its branches run compiled, so that the first step is another.
    """

    name: str
    wrap: Wrap
    supports: Callable[[Scheme], bool] = lambda scheme: True
    library: str | None = None
    budget: int | None = None
    compiled: bool = False

    @property
    def available(self) -> bool:
        """Whether it is there to be run."""
        return self.library is None or library(self.library) is not None


def _revode(**options: Any) -> Wrap:
    return lambda sequence, pair: sequence.with_strategy(**options)


def _peer(name: str, make: Callable[..., nn.Module]) -> Method:
    """A library that knows the additive coupling, up to a factor on its branches."""
    return Method(
        name, lambda *how: PeerSequence(name, make, *how), lambda scheme: scheme.splits and scheme.carry == 1.0, name
    )


def _is_exact(scheme: Scheme) -> bool:
    return scheme.invertible_exactly


BUDGETS = tuple(f"revode-budget-{share}" for share in (25, 50, 75))
COMPILED = ("revode-compiled", "revode-exact-compiled", "store-compiled")
_USUAL = [
    *(Method(name, wrap) for name, wrap in BASELINES.items()),
    Method("revode", _revode()),
    Method("revode-exact", _revode(exact=True), _is_exact),
    _peer("memcnn", _memcnn),
    _peer("revtorch", _revtorch),
    _peer("revlib", _revlib),
    Method("momentumnet", _momentumnet, lambda s: isinstance(s, Momentum) and not s.damping, "momentumnet"),
]
_FURTHER = [
    Method("checkpoint-branches", _checkpoint_branches),
    Method("minimal", MinimalSequence, lambda scheme: isinstance(scheme, AdditiveCoupling)),
    Method("revode-compiled", _revode(compile=True), compiled=True),
    Method("revode-exact-compiled", _revode(exact=True, compile=True), _is_exact, compiled=True),
    Method("store-compiled", _revode(backprop="store", compile=True), compiled=True),
    *(Method(name, _revode(), budget=int(name.rsplit("-", 1)[1])) for name in BUDGETS),
]
METHODS: dict[str, Method] = {method.name: method for method in [*_USUAL, *_FURTHER]}
DEFAULT = tuple(method.name for method in _USUAL)
PEERS = tuple(method.name for method in _USUAL if method.library)


Named = TypeVar("Named")


def find(kind: str, names: Iterable[str], registry: Mapping[str, Named]) -> list[Named]:
    """Those of these names, in the registry's order; a wrong name is refused with the choices."""
    wanted = list(names)
    for name in wanted:
        if name not in registry:
            raise unknown(kind, name, registry)
    return [found for name, found in registry.items() if name in wanted]
