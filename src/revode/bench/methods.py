"""The ways to get a gradient, by name: each makes of branches and a scheme one module from tensor to tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from revode.bench import peers, plain
from revode.engine import ReversibleSequence
from revode.files import unknown
from revode.schemes import Momentum, Scheme

Wrap = Callable[[Sequence[nn.Module], Scheme, int, bool], nn.Module]
"""(fields, scheme, split_dim, whether a pair is wanted) -> module."""


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
        return self.library is None or peers.find(self.library) is not None


def _revode(**options: Any) -> Wrap:
    def wrap(fields: Sequence[nn.Module], scheme: Scheme, split_dim: int, pair: bool) -> nn.Module:
        return ReversibleSequence(fields, scheme, split_dim=split_dim, **options)

    return wrap


def _only_adds(scheme: Scheme) -> bool:
    """Whether a scheme is the additive coupling that most libraries know, up to a factor on its branches."""
    return scheme.splits and scheme.carry == 1.0


def _is_exact(scheme: Scheme) -> bool:
    return scheme.invertible_exactly


def _is_momentum(scheme: Scheme) -> bool:
    return isinstance(scheme, Momentum) and not scheme.damping


BUDGETS = (25, 50, 75)
_ALL = [
    Method("store", plain.store),
    Method("checkpoint", plain.checkpoint_blocks),
    Method("checkpoint-sqrt", plain.checkpoint_sqrt),
    Method("revode", _revode()),
    Method("revode-exact", _revode(exact=True), _is_exact),
    Method("memcnn", peers.memcnn, _only_adds, library="memcnn"),
    Method("revtorch", peers.revtorch, _only_adds, library="revtorch"),
    Method("revlib", peers.revlib, _only_adds, library="revlib"),
    Method("momentumnet", peers.momentumnet, _is_momentum, library="momentumnet"),
    Method("revode-compiled", _revode(compile=True), compiled=True),
    *(Method(f"revode-budget-{share}", _revode(), budget=share) for share in BUDGETS),
]
METHODS: dict[str, Method] = {method.name: method for method in _ALL}
DEFAULT = tuple(method.name for method in _ALL if not method.compiled and method.budget is None)
PEERS = tuple(method.name for method in _ALL if method.library)


def find(names: Iterable[str]) -> list[Method]:
    """The methods of these names, in the registry's order; a wrong name is refused with the choices."""
    wanted = list(names)
    for name in wanted:
        if name not in METHODS:
            raise unknown("method", name, METHODS)
    return [method for method in _ALL if method.name in wanted]
