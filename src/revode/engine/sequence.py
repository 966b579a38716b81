"""`ReversibleSequence`: residual branches run by a reversible scheme, with a choice of how gradients are computed.

Each branch is one autograd node on a `Path`, which keeps the final pair, and pairs at anchors. ``checkpoint`` is a path that
keeps a state before every branch and never inverts, ``store`` is ordinary autograd, and a memory budget lies between.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revode.engine import arrival
from revode.engine.branch import Context, refuse_unknown_arguments
from revode.engine.call import Arguments, compilation_is_possible, eagerly, tensor_leaves, with_strides
from revode.engine.grid import Grid, bytes_kept
from revode.engine.inspection import KNOWN, is_sharded
from revode.engine.path import Path, entered
from revode.engine.regional import compile_branches
from revode.engine.step import Pass, Step, step_of
from revode.engine.strategy import OPTIONS, Strategy
from revode.memory import graph_bytes
from revode.schemes import OpenState, Scheme, State


class ReversibleSequence(nn.Module):
    """Residual branches run by a reversible scheme; an ``nn.Module`` from tensor to tensor of the same shape.

    ``backprop`` chooses how gradients are computed and nothing else: outputs are the same under all three.

    >>> sequence = ReversibleSequence([nn.Linear(4, 4), nn.Linear(4, 4)], MidPoint(h=0.1))
    >>> sequence(torch.randn(2, 4)).sum().backward()  # in the activation memory of one branch

    Args:
        branches: the branches in order, any ``nn.Module`` that keeps shape and dtype; pairs ``F1, G1, F2, G2, ...`` for
            ``Verlet`` and ``AdditiveCoupling``. Leave out skip connections: the scheme adds them. A branch may return ``(u,
            aux)``, see ``forward``.
        scheme: the integrator.
        split_dim: the dimension that splitting schemes halve; by default that of the channels. Give it for inputs of three
            dimensions, where (batch, channels, length) and (batch, time, width) look alike.
        options: of `Strategy`: ``backprop``, ``exact``, ``anchor_every``, ``memory_budget``, ``verify``, ``compile``. Branches
            other than our own fields are compiled in place, as by ``branch.compile()``.
    """

    def __init__(
        self, branches: Sequence[nn.Module], scheme: Scheme, *, split_dim: int | None = None, **options: Any
    ) -> None:
        super().__init__()
        branches = list(branches)
        _check_arguments(branches, scheme, split_dim)
        self.strategy = Strategy().replace(**options)
        self.strategy.check_scheme(scheme)
        self.fields = nn.ModuleList(branches)
        self.scheme = scheme
        self.split_dim = split_dim
        if self.strategy.compile:
            compile_branches(branches)
        self._num_stored: dict[Any, int] = {}
        self._warned: set[str] = set()

    @property
    def backprop(self) -> str:
        return self.strategy.backprop

    @property
    def grid(self) -> Grid | None:
        return self.strategy.grid

    def with_strategy(self, **changes: Any) -> ReversibleSequence:
        """Return a sequence of the same branches and parameters, with another gradient strategy.

        Args:
            changes: options of `Strategy`, or ``split_dim``. A memory budget is dropped unless ``backprop="reversible"``.
        """
        split_dim = changes.pop("split_dim", self.split_dim)
        strategy = self.strategy.replace(**changes)
        options = {name: getattr(strategy, name) for name in OPTIONS}
        twin = ReversibleSequence(list(self.fields), self.scheme, split_dim=split_dim, **options)
        twin.training = self.training
        return twin

    def forward(self, x: Tensor | State, *, return_state: bool = False, return_aux: bool = False, **kwargs: Any) -> Any:
        """Return the readout of the final pair; if asked, also the pair and the aux of the branches.

        Args:
            x: the input; or a pair from another sequence of the same scheme, to go on from it.
            return_state: whether to return ``(y, state)``; ``inverse(state)`` gives x back.
            return_aux: whether to return ``(y, aux)``, or ``(y, state, aux)``. The list has the aux (a tensor, or a nest of
                tensors, with gradients) of each branch that returned ``(u, aux)``, and None for the others.
            kwargs: each is passed to the branches whose ``forward`` takes it.
        """
        p, q = self._enter(x)
        run = ReversibleSequence._run
        reversibly = self._runs_reversibly(p, q, kwargs)
        # A walk breaks the graph of torch.compile, and dynamo leaves its frames alone.
        if reversibly and (torch.compiler.is_compiling() or compilation_is_possible()):
            run = eagerly(run)
        state, aux = run(self, p, q, kwargs, return_aux, reversibly)
        y = self.scheme.readout(state, self.split_dim)
        extras = [state] * return_state + [aux] * return_aux
        return (y, *extras) if extras else y

    def states(self, x: Tensor | State, **kwargs: Any) -> Iterator[OpenState]:
        """Yield the pairs over depth: at entry, and after each branch. Ordinary autograd follows if gradients are enabled.

        ``send(pair)`` goes on from that pair in place of the last one. Before a scheme on one tensor has started, the first
        member of its pair is None. `x` and `kwargs` are as for ``forward``.
        """
        p, q = state = self._enter(x)
        call = self._call(p, q, kwargs)
        state = (yield state) or state
        for index in range(len(self.fields)):
            p, q = state
            state = q, call.advance(index, p, q)
            call.context.close()
            state = (yield state) or state

    def states_back(self, state: State, *, started: bool | None = None, **kwargs: Any) -> Iterator[OpenState]:
        """Yield the pairs that the walk back rebuilds: the final one, and before each branch from the last on.

        `state`, and `kwargs` of forward, are as for ``inverse``. `started` is True if forward went on from a pair; by default
        it does so only in schemes that split their input.
        """
        q, q_next = self._check_pair(state)
        self._check_invertible()
        if self.grid is not None:
            self.grid.check_on_grid(q, "in state[0]")
            self.grid.check_on_grid(q_next, "in state[1]")
        q = q.clone()  # what a branch is given must not be the caller's
        started = self.scheme.splits if started is None else started
        call = self._call(q if started else None, q, kwargs)
        yield q, q_next
        for index in reversed(range(0 if started else 1, len(self.fields))):
            q, q_next = call.retreat(index, q, q_next), q
            yield q, q_next
        if not started:
            yield None, q

    def inverse(self, state: State, *, return_state: bool = False, **kwargs: Any) -> Any:
        """Return the input that leads to `state`, by walking back.

        Where gradients are enabled, autograd keeps a graph of all branches; under ``torch.no_grad()`` nothing is kept. A branch
        that draws random numbers is refused: call ``eval()`` first.

        Args:
            state: the pair that ``forward(..., return_state=True)`` returned.
            return_state: whether the forward call went on from a pair, so that a pair is wanted back.
            kwargs: the keyword arguments of forward.
        """
        walk_back = ReversibleSequence._first_pair
        walk_back = eagerly(walk_back) if torch.compiler.is_compiling() else walk_back
        p, q = walk_back(self, self._check_pair(state), self.scheme.splits or return_state, kwargs)
        if p is None or return_state:
            return q if p is None else (p, q)
        return self.scheme.undo_init((p, q), self.split_dim)

    def _first_pair(self, state: State, started: bool, kwargs: dict[str, Any]) -> OpenState:
        *_, first = self.states_back(state, started=started, **kwargs)
        return first

    def _check_invertible(self) -> None:
        if not self.scheme.invertible:
            raise ValueError(
                f"{self.scheme!r} cannot be inverted: "
                + (
                    "it draws its coefficients in training, and is a plain residual network in eval mode"
                    if self.scheme.draws
                    else "it carries nothing of the older state on"
                )
            )
        if self.grid is not None and self.scheme.shift:
            raise ValueError(
                f"exact={self.grid.bits} with {self.scheme!r} cannot be inverted from the final pair alone, since bits of "
                "each element and step are kept beside it: use exact=False"
            )

    def scheme_now(self) -> Scheme:
        """Return the scheme of the present mode: in eval mode it may be another."""
        return self.scheme if self.training else self.scheme.in_eval()

    def _grid_now(self) -> Grid | None:
        return self.strategy.grid_for(self.scheme_now())

    def _call(self, p: Tensor | None, q: Tensor, kwargs: dict[str, Any], keeps_aux: bool = False) -> Pass:
        """Return a call that starts from this pair; p is None at the start of a scheme on one tensor."""
        branches, started = list(self.fields), p is not None
        couplings = self.scheme_now().couplings(len(branches), q, started)
        hint = f" (half of the input, as {type(self.scheme).__name__} splits it)" if self.scheme.halves else ""
        context = Context(q.device, self._grid_now(), keeps_aux, self.strategy.compile, hint, self._warned)
        if not context.traced:
            refuse_unknown_arguments(branches, kwargs)
        context.note(p, "at entry")
        context.note(q, "at entry")
        return Pass(branches, couplings, context, kwargs)

    def _enter(self, x: Tensor | State) -> OpenState:
        """Return the pair to start from: a copy, dense, in the state's dtype and on the grid."""
        if isinstance(x, tuple | list):
            p, q = self._check_pair(x)
        else:
            self._check_input(x)
            p, q = self.scheme.init(x, self.split_dim)
        q = self._enter_tensor(q)
        return None if p is None else with_strides(self._enter_tensor(p), q.stride()), q

    def _enter_tensor(self, x: Tensor) -> Tensor:
        return entered(x, self._grid_now())

    def _check_input(self, x: Any) -> None:
        if not isinstance(x, Tensor):
            raise ValueError(f"x must be a tensor, or a pair of tensors to go on from, got {_kind(x)}")

    def _check_pair(self, state: Any) -> State:
        if not (isinstance(state, tuple | list) and len(state) == 2 and all(isinstance(t, Tensor) for t in state)):
            raise ValueError(f"state must be a pair of tensors as returned with return_state=True, got {_kind(state)}")
        p, q = state
        if p.shape != q.shape or p.dtype != q.dtype or p.device != q.device:
            raise ValueError(
                "the two members of a state must agree in shape, dtype and device, "
                f"got {_kind(p)} on {p.device} and {_kind(q)} on {q.device}"
            )
        return p, q

    def _run(
        self, p: Tensor | None, q: Tensor, kwargs: dict[str, Any], keeps_aux: bool, reversibly: bool
    ) -> tuple[State, list[Any]]:
        if not torch.compiler.is_compiling():
            arrival.check_arrived()
        call = self._call(p, q, kwargs, keeps_aux)
        try:
            if reversibly:
                return self._walk(call, p, q)
            state = self._store(call, p, q, len(self.fields))
            assert state[0] is not None
            return (state[0], state[1]), call.aux
        finally:  # an earlier state out of range explains the error of a branch
            call.context.close()

    def _walk(self, call: Pass, p: Tensor | None, q: Tensor) -> tuple[State, list[Any]]:
        """Store as many branches as the budget allows, and make each of the others a node of a path."""
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "torch.func's transforms (grad, vmap, jvp, ...) need the activations: "
                "build this ReversibleSequence with backprop='store'"
            )
        first, total, budget = 0, len(call.branches), self.strategy.memory_budget
        if budget is not None:
            first, (p, q) = self._store_within_budget(call, p, q, budget)
        if first == total:
            assert p is not None
            return (p, q), call.aux
        length = self.segment_length()
        if length > 1:
            _warn_of_half_precision(q.dtype)
        path, arguments = Path(length, self.strategy.verify), Arguments(call.kwargs)

        def step(index: int) -> Step:
            return step_of(call.context, index, call.branches[index], call.couplings[index], arguments, q)

        if not call.context.keeps_aux and not any(is_sharded(branch) for branch in call.branches):
            return path.run_all([step(index) for index in range(first, total)], p, q), call.aux
        for index in range(first, total):
            (p, q), aux = path.run(call.branches[index], functools.partial(step, index), p, q)
            if call.context.keeps_aux:
                call.aux.append(aux)
        assert p is not None
        return path.close((p, q), call.aux)

    def _store(self, call: Pass, p: Tensor | None, q: Tensor, stop: int) -> OpenState:
        """Return the pair behind the branches before `stop`, as ordinary autograd sees it."""
        for index in range(stop):
            p, q = q, call.advance(index, p, q)
        return p, q

    def _store_within_budget(self, call: Pass, p: Tensor | None, q: Tensor, budget: int) -> tuple[int, OpenState]:
        """Store branches from the first on while they fit beside the final pair; measured once for each kind of call."""
        autocast, arguments = call.context.autocast, tensor_leaves(call.kwargs)
        kind = (
            budget,
            self.training,
            (autocast.enabled, autocast.dtype),
            tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in [q, *arguments]),
            tuple(parameter.requires_grad for parameter in self.parameters()),
        )
        if kind in self._num_stored:
            return self._num_stored[kind], self._store(call, p, q, self._num_stored[kind])
        total = len(call.branches)
        used = largest = index = 0
        while index < total and (index == 0 or used + largest + self._kept_bytes(q, total - index - 1) <= budget):
            u = call.evaluate(index, q)
            cost = graph_bytes(u, [q, *arguments], self.parameters())
            used, largest = used + cost, max(largest, cost)
            p, q = q, call.couple(index, p, q, u)
            index += 1
        least = largest + self._kept_bytes(q, total - 1)
        if least > budget:
            raise ValueError(
                f"memory_budget={budget} is too small to hold one block: the final pair (one for every anchor) and one "
                f"branch need {least} bytes"
            )
        self._num_stored[kind] = index
        return index, (p, q)

    def _kept_bytes(self, q: Tensor, num_reversed: int) -> int:
        """Return the bytes kept if so many branches at the end are not stored: pairs, and bits dropped on the grid."""
        states = max(2, states_kept(num_reversed, self.segment_length()))
        shift = self.scheme_now().shift if self._grid_now() is not None else 0
        return states * q.numel() * q.element_size() + num_reversed * bytes_kept(shift or 0, q.numel())

    def segment_length(self) -> int:
        """Return the number of branches between two kept pairs: all, or as many as between two anchors."""
        return self.strategy.segment_length(self.scheme_now(), len(self.fields))

    def _runs_reversibly(self, p: Tensor | None, q: Tensor, kwargs: dict[str, Any]) -> bool:
        """Return True if a call runs as a walk: gradients are wanted, and activations are not stored."""
        if self.backprop == "store" or not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return False
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            return False
        tensors = [t for t in (p, q, *tensor_leaves(kwargs)) if t is not None]
        return any(t.requires_grad for t in tensors) or any(p.requires_grad for p in self.parameters())

    def extra_repr(self) -> str:
        options = repr(self.strategy)[len("Strategy(") : -1]
        return f"{self.scheme!r}, {options}" if options else repr(self.scheme)


KNOWN.add(ReversibleSequence)


def states_kept(num_branches: int, length: int) -> int:
    """Return how many states reversible segments of this length keep: a pair each, or the input of a single branch.

    >>> states_kept(12, length=4), states_kept(12, length=1)
    (6, 12)
    """
    return math.ceil(num_branches / length) * (2 if length > 1 else 1)


def _warn_of_half_precision(dtype: torch.dtype) -> None:
    if dtype in (torch.float16, torch.bfloat16) and not torch.compiler.is_compiling():
        warnings.warn(
            f"states in {str(dtype).removeprefix('torch.')} are rebuilt with an error of {torch.finfo(dtype).eps:.0e} at every "
            "branch, and gradients suffer from it: keep the states in float32 (and train under autocast), set "
            "anchor_every, or use backprop='checkpoint'",
            stacklevel=2,
        )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _check_arguments(branches: list[nn.Module], scheme: Scheme, split_dim: int | None) -> None:
    if not isinstance(scheme, Scheme):
        raise ValueError(f"scheme must be a revode scheme such as Verlet(h=0.1), got {scheme!r}")
    for index, branch in enumerate(branches):
        if not isinstance(branch, nn.Module):
            raise ValueError(f"branches[{index}] must be an nn.Module, got {type(branch).__name__}")
    if not branches or len(branches) % scheme.fields_per_step:
        raise ValueError(
            f"{type(scheme).__name__} takes its branches in groups of {scheme.fields_per_step}, got {len(branches)} branches"
        )
    if split_dim is not None and (not isinstance(split_dim, int) or isinstance(split_dim, bool)):
        raise ValueError(f"split_dim must be an integer or None, got {split_dim!r}")
