"""One call of a sequence: its branches with their coefficients, walked forward or back one coupling at a time."""

from __future__ import annotations

import difflib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revode.engine.contents import Contents, ContentsOf, hooks_hear_every_module
from revode.engine.grid import Grid, RangeFlags, with_strides
from revode.engine.randomness import Streams
from revode.engine.regional import CompiledField
from revode.engine.replay import Autocast, version_of
from revode.schemes import Coupling, Rounding, is_number, times
from revode.vjp import KnownField

Call = Callable[[Tensor, dict[str, Any]], Any]
"""How to evaluate a branch: (q, kwargs) -> u."""


_FAILURES = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)


class BranchError(ValueError, RuntimeError):
    """A branch failed, or broke a rule; says which, and on what. Caught as `ValueError` or as torch's `RuntimeError`."""


class BranchTypeError(BranchError, TypeError):
    """A branch was called in a way it does not understand; caught as `TypeError`, too."""


def tensor_leaves(tree: Any) -> list[Tensor]:
    """The tensors in a nest of dicts, lists and tuples."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class ResidualBranch(nn.Module):
    """A branch F(q) = W(q) - q that holds W as ``whole``, so that a plain step q + F(q) is W(q) to the bit."""

    whole: Any


class Template:
    """A nest of dicts, lists and tuples without its tensors, to be filled with others.

    Args:
        tree: the nest.
    """

    def __init__(self, tree: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(tree)
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def __len__(self) -> int:
        """How many tensors it takes."""
        return len(self._places)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The nest around these tensors, which come in the order of ``tensor_leaves``."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self._spec)


class Chain:
    """The branches of one call, their couplings and keyword arguments.

    Args:
        branches: the residual branches in order.
        couplings: the coefficients for each.
        grid: where states live, for exact reversing.
        kwargs: keyword arguments; each goes to the branches that take it.
        contents: what was found in these branches before.
        keeps_aux: whether the aux of branches that return ``(u, aux)`` is wanted.
        compiled: whether fields that give their own product run compiled.
        hint: what to say of the state when a branch fails on it.
    """

    def __init__(
        self,
        branches: Sequence[nn.Module],
        couplings: Sequence[Coupling],
        grid: Grid | None,
        kwargs: dict[str, Any],
        contents: ContentsOf,
        keeps_aux: bool = False,
        compiled: bool = False,
        hint: str = "",
    ) -> None:
        self.branches = list(branches)
        self.couplings = list(couplings)
        self.grid = grid
        self.kwargs = kwargs
        self.traced = torch.compiler.is_compiling()
        self.streams: Any = None if self.traced else Streams()
        self.range_flags = None if grid is None else RangeFlags(grid)
        self.keeps_aux = keeps_aux
        self.compiled = compiled
        self.hint = hint
        self._contents = contents
        self._looked_up: dict[int, Contents] = {}
        if kwargs and not self.traced:
            self._refuse_what_no_branch_takes()

    def name(self, index: int) -> str:
        return f"branch {index} ({type(self.branches[index]).__name__})"

    def contents(self, index: int) -> Contents:
        """What the branch at `index` holds, looked at once in this call."""
        found = self._looked_up.get(index)
        if found is None:
            try:
                found = self._looked_up[index] = self._contents.look_up(index, self.branches[index])
            except ValueError as error:
                raise BranchError(f"{self.name(index)} cannot be recomputed: {error}") from error
        return found

    def warns_of_skips(self) -> bool:
        """Whether nobody has been warned of a skip connection inside a branch of this sequence; from now on somebody was."""
        before, self._contents.warned_of_skip = self._contents.warned_of_skip, True
        return not before

    @functools.cached_property
    def shared_parameters(self) -> set[int]:
        """Identities of the parameters that several branches use."""
        uses = Counter(id(parameter) for branch in self.branches for parameter in branch.parameters())
        return {key for key, count in uses.items() if count > 1}

    def _refuse_what_no_branch_takes(self) -> None:
        taken = [self.contents(index).takes for index in range(len(self.branches))]
        if None in taken:
            return
        names = frozenset().union(*(names for names in taken if names))
        for name in self.kwargs:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise BranchTypeError(f"no branch takes the keyword argument {name!r}{hint}")

    def kwargs_for(self, index: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Those of the keyword arguments that the branch at `index` takes."""
        if not kwargs or self.traced:
            return kwargs
        takes = self.contents(index).takes
        return kwargs if takes is None else {name: value for name, value in kwargs.items() if name in takes}

    def known_field(self, index: int, q: Tensor) -> KnownField | None:
        """The branch at `index`, if it gives its own vector-Jacobian product in this call.

        On the grid a dimension of size 1 rules it out: its stride is ambiguous, and with it the kernel that autograd takes.
        """
        branch = self.branches[index]
        if self.traced or not isinstance(branch, KnownField) or hooks_hear_every_module():
            return None
        ambiguous = self.grid is not None and 1 in q.shape
        return None if self.kwargs or ambiguous or not branch.knows_vjp(q.dtype) else branch

    def parameters(self, index: int) -> dict[str, Tensor]:
        """The parameters of one branch by name."""
        if self.traced:
            return dict(self.branches[index].named_parameters())
        return self.contents(index).named_parameters(self.name(index))

    def evaluate(
        self, index: int, q: Tensor, kwargs: dict[str, Any], call: Call, autocast: Autocast, *, once: bool = True
    ) -> tuple[Tensor, Any]:
        """u = F(q) of the branch at `index` through `call`, in the state's shape, dtype and strides; and its aux, if any.

        Args:
            index: the branch.
            q: the state.
            kwargs: keyword arguments, from which those that it takes are chosen.
            call: how to evaluate it.
            autocast: what the call runs under.
            once: False if it will be evaluated again, so that it must not change what it is given.
        """
        kwargs = self.kwargs_for(index, kwargs)
        if self.traced:
            return self._conform(index, q, call(q, kwargs), autocast)
        slots = self.contents(index).parameters
        inputs = [q, *(slot.tensor for slot in slots), *(tensor_leaves(kwargs) if kwargs else ())]
        versions = [version_of(tensor) for tensor in inputs]
        given = None if once or not kwargs else _look(kwargs)
        try:
            u = call(q, kwargs)
        except _FAILURES as error:
            raise self._failure(index, q, error) from error
        if any(then is not None and version_of(tensor) != then for tensor, then in zip(inputs, versions, strict=True)):
            raise BranchError(
                f"{self.name(index)} modifies its input or its parameters in place (an inplace=True activation first in "
                "it?): both are needed again, so give it an operation that makes a new tensor"
            )
        if given is not None and _look(kwargs) != given:
            raise BranchError(
                f"{self.name(index)} changes an object among its keyword arguments (a cache of keys and values?), which its "
                "recomputation would change again: pass none (use_cache=False), or use backprop='store'"
            )
        return self._conform(index, q, u, autocast)

    def value(self, index: int, q: Tensor, field: KnownField, autocast: Autocast) -> Tensor:
        """The same of a field that we know: it changes neither input nor parameters, nor the shape."""
        try:
            u = field.value(q, autocast.compute_dtype(q)).to(q.dtype)
        except _FAILURES as error:
            raise self._failure(index, q, error) from error
        return with_strides(u, q.stride())

    def _failure(self, index: int, q: Tensor, error: Exception) -> Exception:
        """An error of the branch that says which branch it is, and on what it failed."""
        if isinstance(error, torch.OutOfMemoryError):
            return error
        text = f"{self.name(index)} failed on a state of shape {tuple(q.shape)} and dtype {q.dtype}{self.hint}: {error}"
        return (BranchTypeError if isinstance(error, TypeError) else BranchError)(text)

    def _conform(self, index: int, q: Tensor, u: Any, autocast: Autocast) -> tuple[Tensor, Any]:
        u, aux = u if isinstance(u, tuple) and len(u) == 2 else (u, None)
        if not isinstance(u, Tensor):
            raise ValueError(f"{self.name(index)} must return a tensor, or (tensor, aux), got {type(u).__name__}")
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
        return with_strides(u, q.stride()), aux

    def _halves(self, index: int) -> Grid | None:
        """The grid, if the coupling at `index` carries on half of the old state there."""
        return None if self.couplings[index].carries_whole else self.grid

    def _on_grid(self, index: int) -> Coupling:
        """The coupling at `index` as it is applied: to m of p = 2 m + b, where it halves p on the grid."""
        coupling = self.couplings[index]
        return coupling if self._halves(index) is None else replace(coupling, carry=2.0 * coupling.carry)

    def parity(self, index: int, p: Tensor) -> Tensor | None:
        """What ``retreat`` needs beside the pair to find p again: the bits that ``advance`` drops of it."""
        grid = self._halves(index)
        return None if grid is None else grid.parity(p)

    def compiled_field(self, index: int, q: Tensor, autocast: Autocast) -> CompiledField | None:
        """The branch at `index` as it runs compiled with its coupling, if it does."""
        coupling = self.couplings[index]
        if not self.compiled or self.keeps_aux or isinstance(coupling.carry, Tensor) or self._halves(index) is not None:
            return None
        field = self.known_field(index, q)
        return None if field is None else CompiledField(field, q, autocast.compute_dtype(q))

    def advance_compiled(self, index: int, p: Tensor | None, q: Tensor, field: CompiledField) -> Tensor:
        """``advance`` from the branch's input on."""
        try:
            q_next, *magnitude = field.step(p, q, self.couplings[index], self.grid)
        except _FAILURES as error:
            raise self._failure(index, q, error) from error
        if self.range_flags is not None:
            self.range_flags.note_magnitude(magnitude[0], q.dtype, f"after {self.name(index)}")
        return with_strides(q_next, q.stride())

    def retreat_compiled(
        self,
        index: int,
        q: Tensor,
        q_next: Tensor | None,
        gp: Tensor | None,
        gq: Tensor | None,
        field: CompiledField,
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Sequence[Tensor]]:
        """``retreat`` if the next state is given; then the co-states before this branch, and gradients of its parameters."""
        coupling, strides = self.couplings[index], q.stride()
        gq = torch.zeros_like(q) if gq is None else with_strides(gq, strides)
        gp = None if gp is None else with_strides(gp, strides)
        p, g, products = field.back(q, q_next, gp, gq, coupling, self.grid)
        older = None if is_number(coupling.carry, 0.0) else times(gq, coupling.carry)
        return None if p is None else with_strides(p, strides), older, g, products

    def advance(self, index: int, p: Tensor | None, q: Tensor, u: Tensor, *, over_u: bool = False) -> Tensor:
        """The next state, in the strides of this one, and inside the grid's range; written over u if nobody else needs it."""
        halves = self._halves(index)
        m = p if halves is None or p is None else halves.halve(p)
        q_next = self._on_grid(index).step(m, q, u, self._rounding(over_u), u if over_u else None)
        q_next = with_strides(q_next, q.stride())
        if self.range_flags is not None:
            self.range_flags.note(q_next, f"after {self.name(index)}")
        return q_next

    def retreat(
        self, index: int, q: Tensor, q_next: Tensor, u: Tensor, parity: Tensor | None = None, *, over_u: bool = False
    ) -> Tensor:
        """The state before: ``advance`` undone."""
        p = self._on_grid(index).reverse(q, q_next, u, self._rounding(over_u), u if over_u else None)
        halves = self._halves(index)
        if halves is not None:
            assert parity is not None
            p = halves.double(p, parity)
        return with_strides(p, q.stride())

    def close(self) -> None:
        """Have the range of all states so far judged."""
        if self.range_flags is not None:
            self.range_flags.close()

    def _rounding(self, in_place: bool) -> Rounding | None:
        if self.grid is None:
            return None
        return self.grid.round_ if in_place else self.grid.round


_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Generator)


def _look(kwargs: dict[str, Any]) -> list[Any]:
    """What a branch could change in the objects it is given: the tensors and sizes inside them, a few levels deep."""
    seen: list[Any] = []
    level: list[Any] = [kwargs]
    for _ in range(5):
        following: list[Any] = []
        for value in level:
            if isinstance(value, Tensor):
                seen.append((id(value), version_of(value)))
            elif isinstance(value, dict | list | tuple | set):
                seen.append(len(value))
                following.extend(value.values() if isinstance(value, dict) else value)
            elif not isinstance(value, (*_PLAIN, nn.Module, type)) and hasattr(value, "__dict__"):
                following.extend(vars(value).values())
                seen.append(len(vars(value)))
            elif isinstance(value, _PLAIN):
                seen.append(value)
        level = following
    return seen


def unsuitable(branch: nn.Module, contents: Contents) -> str | None:
    """Why a branch cannot be recomputed on tensors that are lent to it, or None."""
    if any(
        isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.buffers())
        for module in contents.modules
    ):
        return "holds TorchScript code with buffers, which cannot be set back: give the module it was made from"
    if getattr(branch, "_is_replica", False):
        return "is a replica made by nn.DataParallel, whose parameters are copies: use DistributedDataParallel"
    fsdp = sys.modules.get("torch.distributed.fsdp")
    # FSDP2's parameters are not those that our inputs name.
    if fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in contents.modules):
        return "is sharded by itself (fully_shard): shard the ReversibleSequence or a module around it"
    return None
