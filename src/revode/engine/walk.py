"""`Walk`: branches in a loop of the user's own, each reversible."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from revode.engine import arrival
from revode.engine.branch import Context
from revode.engine.call import Arguments, compilation_is_possible, eagerly, tensor_leaves, version_of, with_strides
from revode.engine.path import Path, entered
from revode.engine.step import Pass, step_of
from revode.engine.strategy import Strategy
from revode.schemes import Coupling, OpenState, Scheme, State


class Walk:
    """One forward pass through residual branches, in a loop of your own that may decide its steps on the way.

    Each branch is one autograd node that saves no activations. Only the newest pair of states is kept.

    >>> walk = Walk(MidPoint(h=0.1))
    >>> state = walk.enter(torch.randn(2, 4))
    >>> for branch in [nn.Linear(4, 4), nn.Linear(4, 4)]:
    ...     state = walk.step(branch, state)
    >>> walk.leave(state).sum().backward()

    A state is a pair of tensors; the newer one is ``state[1]``. Losses may use the state of any step. A step may also start
    from another pair than the newest: that pair is kept, and a new stretch begins.

    Args:
        scheme: the integrator.
        split_dim: the dimension that splitting schemes halve, as for `ReversibleSequence`.
        options: of `Strategy`: ``backprop``, ``exact``, ``anchor_every``, ``verify``.
    """

    def __init__(self, scheme: Scheme, *, split_dim: int | None = None, **options: Any) -> None:
        self.scheme = scheme
        self.split_dim = split_dim
        self.strategy = Strategy().replace(**options)
        self.strategy.check_scheme(scheme)
        if self.strategy.memory_budget is not None or self.strategy.compile:
            raise ValueError("a Walk takes no memory_budget and does not compile: use ReversibleSequence")
        self.num_steps = 0
        self._warned: set[str] = set()
        self._path: Path | None = None
        self._newest: tuple[Any, ...] | None = None

    def enter(self, x: Tensor) -> OpenState:
        """Return the pair that x enters the walk with: its halves, or (None, x)."""
        p, q = self.scheme.init(x, self.split_dim)
        q = self._enter_tensor(q)
        return None if p is None else with_strides(self._enter_tensor(p), q.stride()), q

    def _enter_tensor(self, x: Tensor) -> Tensor:
        return entered(x, self.strategy.grid_for(self.scheme))

    def step(
        self,
        branch: nn.Module,
        state: OpenState,
        *,
        coupling: Coupling | None = None,
        return_aux: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the pair behind one branch; ``(pair, aux)`` if asked.

        Args:
            branch: a module that keeps shape and dtype of ``state[1]``, without a skip connection.
            state: the pair before the branch.
            coupling: the coefficients of this step; the scheme's unless given.
            return_aux: whether to return the aux of a branch that returns ``(u, aux)``.
            kwargs: keyword arguments of the branch; tensors among them get their gradients.
        """
        step = eagerly(Walk._step) if compilation_is_possible() else Walk._step
        pair, aux = step(self, branch, state, coupling, kwargs, return_aux)
        return (pair, aux) if return_aux else pair

    def _step(
        self, branch: nn.Module, state: OpenState, coupling: Coupling | None, kwargs: dict[str, Any], keeps_aux: bool
    ) -> tuple[State, Any]:
        _check_pair(state)
        arrival.check_arrived()
        (p, q), index = state, self.num_steps
        scheme = self.scheme if branch.training else self.scheme.in_eval()
        context = Context(q.device, self.strategy.grid_for(scheme), keeps_aux, warned=self._warned)
        if coupling is None:
            (coupling,) = scheme.couplings(1, q, p is not None, index)
        try:
            if self._records() and _require_grad([p, q, *tensor_leaves(kwargs), *branch.parameters()]):
                path = self._path if self._goes_on_from(state) else None
                path = path or Path(self.strategy.segment_length(scheme, 0) or None, self.strategy.verify)
                make = functools.partial(step_of, context, index, branch, coupling, Arguments(kwargs), q)
                pair, aux = path.run(branch, make, p, q)
            else:
                call = Pass([branch], [coupling], context, kwargs, index)
                path, pair = None, (q, call.advance(0, p, q))
                aux = call.aux[0] if keeps_aux else None
        finally:
            context.close()
        self.num_steps += 1
        self._path, self._newest = path, (*pair, *map(version_of, pair))
        return pair, aux

    def _records(self) -> bool:
        """Return True if steps become nodes of a path; else they are ordinary autograd."""
        return torch.is_grad_enabled() and self.strategy.backprop != "store"

    def _goes_on_from(self, state: OpenState) -> bool:
        """Return True if this walk made this pair last, and nobody changed it."""
        if self._newest is None or state[0] is not self._newest[0] or state[1] is not self._newest[1]:
            return False
        return self._newest[2:] == tuple(version_of(tensor) for tensor in state if tensor is not None)

    def undo(self, state: OpenState) -> None:
        """Undo the newest step, which was made from the pair `state`; that pair is the newest again.

        Use it for a step on trial, as in an adaptive solver. RNG states and buffers that the branch has changed stay changed.
        """
        _check_pair(state)
        older = None if self._newest is None else self._newest[0]
        if older is None or not older.is_set_to(state[1]):
            raise ValueError("undo takes the pair that the newest step was made from, got another one")
        if self._path is not None:
            self._path.forget(*state)
        self.num_steps -= 1
        self._newest = (*state, *(version_of(tensor) for tensor in state if tensor is not None))

    def leave(self, state: State) -> Tensor:
        """Return the readout of a pair."""
        _check_pair(state)
        return self.scheme.readout(state, self.split_dim)


def _check_pair(state: Any) -> None:
    if not isinstance(state, tuple | list) or len(state) != 2:
        found = f"a tensor of shape {tuple(state.shape)}" if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(
            f"state must be the pair that enter(x) or step(...) returned, got {found}: call enter(x) first"
        )


def _require_grad(tensors: Any) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
