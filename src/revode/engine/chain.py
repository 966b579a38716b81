"""One call of a sequence: its branches with their coefficients, walked forward or back one coupling at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree

from revode.engine.grid import Grid, with_strides
from revode.engine.replay import Autocast, version_of
from revode.schemes import Rounding, Scheme
from revode.vjp import KnownField

Call = Callable[[int, nn.Module, Tensor, dict[str, Any]], Any]
"""How to evaluate the branch at an index: (index, branch, q, kwargs) -> u."""


class BranchError(ValueError, RuntimeError):
    """A branch failed, or broke a rule; says which, and on what. Caught as `ValueError` or as torch's `RuntimeError`."""


class BranchTypeError(BranchError, TypeError):
    """A branch was called in a way it does not understand; caught as `TypeError`, too."""


def tensor_leaves(tree: Any) -> list[Tensor]:
    """The tensors in a nest of dicts, lists and tuples."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class Chain:
    """The branches of one call, their couplings and keyword arguments.

    Args:
        branches: the residual branches in order.
        scheme: gives the coefficients.
        grid: where states live, for exact reversing.
        started: whether the call begins with a pair; if not, the first branch starts the scheme.
        kwargs: what every branch is given.
    """

    def __init__(
        self, branches: Sequence[nn.Module], scheme: Scheme, grid: Grid | None, started: bool, kwargs: dict[str, Any]
    ) -> None:
        self.branches = list(branches)
        self.couplings = [scheme.coupling(index) for index in range(len(self.branches))]
        if not started:
            self.couplings[0] = scheme.starting()
        self.grid = grid
        self.kwargs = kwargs
        self.streams_seen: dict[Hashable, Any] = {}
        """States of random streams, shared by the branches that meet the same."""

    def name(self, index: int) -> str:
        return f"branch {index} ({type(self.branches[index]).__name__})"

    def known_field(self, index: int, q: Tensor) -> KnownField | None:
        """The branch at `index`, if it gives its own vector-Jacobian product in this call.

        On the grid a dimension of size 1 rules it out: its stride is ambiguous, and with it the kernel that autograd takes.
        """
        branch = self.branches[index]
        if torch.compiler.is_compiling() or not isinstance(branch, KnownField):
            return None
        ambiguous = self.grid is not None and 1 in q.shape
        return None if self.kwargs or ambiguous or not branch.knows_vjp(q.dtype) else branch

    def parameters(self, index: int) -> dict[str, Tensor]:
        """The parameters of one branch by name."""
        parameters: dict[str, Tensor] = dict(self.branches[index].named_parameters())
        for name, parameter in parameters.items():
            if isinstance(parameter, UninitializedParameter):
                raise ValueError(
                    f"{self.name(index)} has the uninitialised (lazy) parameter {name!r}: "
                    "run the sequence once under torch.no_grad() before training it"
                )
        return parameters

    def evaluate(self, index: int, q: Tensor, kwargs: dict[str, Any], call: Call, autocast: Autocast) -> Tensor:
        """u = F(q) of the branch at `index` through `call`, in the state's shape, dtype and strides."""
        branch = self.branches[index]
        if torch.compiler.is_compiling():
            return self._conform(index, q, call(index, branch, q, kwargs), autocast)
        parameters = (p for p in branch.parameters() if not isinstance(p, UninitializedParameter))
        inputs = [q, *tensor_leaves(kwargs), *parameters]
        versions = [version_of(tensor) for tensor in inputs]
        try:
            u = call(index, branch, q, kwargs)
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise self._failure(index, q, error) from error
        if [version_of(tensor) for tensor in inputs] != versions:
            raise BranchError(
                f"{self.name(index)} modifies its input or its parameters in place (an inplace=True activation first in "
                "it?): both are needed again, so give it an operation that makes a new tensor"
            )
        return self._conform(index, q, u, autocast)

    def value(self, index: int, q: Tensor, field: KnownField, autocast: Autocast) -> Tensor:
        """The same of a field that we know: it changes neither input nor parameters, nor the shape."""
        try:
            u = field.value(q, autocast.compute_dtype(q)).to(q.dtype)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise self._failure(index, q, error) from error
        return with_strides(u, q.stride())

    def _failure(self, index: int, q: Tensor, error: Exception) -> BranchError:
        text = f"{self.name(index)} failed on a state of shape {tuple(q.shape)} and dtype {q.dtype}: {error}"
        if not isinstance(error, TypeError):
            return BranchError(text)
        given = ", ".join(self.kwargs)
        return BranchTypeError(f"{text} (every branch is given the keyword arguments {given})" if given else text)

    def _conform(self, index: int, q: Tensor, u: Any, autocast: Autocast) -> Tensor:
        if not isinstance(u, Tensor):
            raise ValueError(f"{self.name(index)} must return a tensor, got {type(u).__name__}")
        if u.shape != q.shape:
            raise ValueError(
                f"{self.name(index)} changes the shape of its state from {tuple(q.shape)} to {tuple(u.shape)}: "
                "a residual branch must keep it"
            )
        if u.dtype != q.dtype:
            if not autocast.enabled:
                raise ValueError(
                    f"{self.name(index)} changes the dtype of its state from {q.dtype} to {u.dtype}: "
                    "a residual branch must keep it, except under autocast"
                )
            u = u.to(q.dtype)
        return with_strides(u, q.stride())

    def advance(self, index: int, p: Tensor | None, q: Tensor, u: Tensor, *, spend: bool = False) -> Tensor:
        """The next state, in the strides of this one, and inside the grid's range; written over u with ``spend``."""
        q_next = self.couplings[index].step(p, q, u, self._rounding(spend), u if spend else None)
        q_next = with_strides(q_next, q.stride())
        if self.grid is not None:
            self.grid.check(q_next, f"after {self.name(index)}")
        return q_next

    def retreat(self, index: int, q: Tensor, q_next: Tensor, u: Tensor, *, spend: bool = False) -> Tensor:
        """The state before: ``advance`` undone."""
        p = self.couplings[index].reverse(q, q_next, u, self._rounding(spend), u if spend else None)
        return with_strides(p, q.stride())

    def _rounding(self, in_place: bool) -> Rounding | None:
        if self.grid is None:
            return None
        return self.grid.round_ if in_place else self.grid.round
