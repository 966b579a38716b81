"""`ReversibleSequence`: residual branches run by a reversible scheme, with a choice of how gradients are computed.

A call is cut into *segments*. A reversible segment keeps its last pair and walks back from there; a stored segment is
ordinary autograd. ``reversible`` is one long reversible segment, ``checkpoint`` is reversible segments of length one (they
keep their input and never invert), ``store`` is one stored segment, and anchors and memory budgets lie between.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revode.engine.accounting import graph_bytes
from revode.engine.chain import Chain, tensor_leaves
from revode.engine.grid import Grid, gradient_in_strides, with_strides
from revode.engine.replay import Autocast, call_to_invert
from revode.engine.segment import ReversibleSegment, StoredCall
from revode.engine.tracing import allow_tracing
from revode.schemes import OpenState, Scheme, State

STRATEGIES = ("reversible", "checkpoint", "store")
ROUNDING_GROWTH = 64.0
"""How far a reversible segment may amplify rounding (6 bits) before an anchor is kept, when |s| < 1."""


class ReversibleSequence(nn.Module):
    """Residual branches run by a reversible scheme; an ``nn.Module`` from tensor to tensor of the same shape.

    ``backprop`` chooses how gradients are computed and nothing else: outputs are the same under all three.

    Args:
        fields: the branches in order, any ``nn.Module`` that keeps shape and dtype; pairs ``F1, G1, F2, G2, ...`` for
            ``Verlet`` and ``AdditiveCoupling``.
        scheme: the integrator.
        backprop: ``"reversible"`` (memory of one branch), ``"checkpoint"`` (one state a branch) or ``"store"``.
        exact: True, or the bits k of the grid 2^-k, for bit-exact reversing (k = 14 if True).
        anchor_every: keep the state of every k-th step, so that drift starts anew there. Schemes that invert with
            amplified rounding (Momentum, damping) have anchors by default.
        memory_budget: bytes of activations that may be kept; as many branches as fit are stored, the rest recomputed.
        split_dim: the dimension that splitting schemes halve.
    """

    def __init__(
        self,
        fields: Sequence[nn.Module],
        scheme: Scheme,
        *,
        backprop: str = "reversible",
        exact: bool | int = False,
        anchor_every: int | None = None,
        memory_budget: int | None = None,
        split_dim: int = 1,
    ) -> None:
        super().__init__()
        fields = list(fields)
        _check_arguments(fields, scheme, backprop, exact, anchor_every, memory_budget, split_dim)
        self.fields = nn.ModuleList(fields)
        self.scheme = scheme
        self.backprop = backprop
        self.grid = None if exact is False else Grid(exact)
        self.anchor_every = anchor_every
        self.memory_budget = memory_budget
        self.split_dim = split_dim
        self._num_stored: dict[Any, int] = {}

    def forward(self, x: Tensor | State, *, return_state: bool = False, **kwargs: Any) -> Any:
        """The readout of the final pair, and the pair itself if asked.

        Args:
            x: the input; or a pair from another sequence of the same scheme, to go on from it.
            return_state: whether to return ``(y, state)``; ``inverse(state)`` gives x back.
            kwargs: passed to every branch.
        """
        p, q = self._enter(x)
        chain = Chain(list(self.fields), self.scheme, self.grid, p is not None, kwargs)
        state = self._run(chain, p, q)
        y = self.scheme.readout(state, self.split_dim)
        return (y, state) if return_state else y

    def inverse(self, state: State, *, return_state: bool = False, **kwargs: Any) -> Any:
        """The input that leads to `state`, by walking back.

        It is differentiable as any other computation, so where gradients are enabled it keeps a graph of all branches; under
        ``torch.no_grad()`` it keeps nothing. A branch that draws random numbers is refused: call ``eval()`` first.

        Args:
            state: the pair that ``forward(..., return_state=True)`` returned.
            return_state: whether the forward call went on from a pair, so that a pair is wanted back.
            kwargs: what forward was given.
        """
        q, q_next = self._check_pair(state)
        if self.grid is not None:
            self.grid.check_on_grid(q, "in state[0]")
            self.grid.check_on_grid(q_next, "in state[1]")
        q = q.clone()  # what a branch is given must not be the caller's
        started = self.scheme.splits or return_state
        chain = Chain(list(self.fields), self.scheme, self.grid, started, kwargs)
        autocast = Autocast(q.device.type)
        for index in reversed(range(0 if started else 1, len(self.fields))):
            u = chain.evaluate(index, q, kwargs, _call_to_invert, autocast)
            q, q_next = chain.retreat(index, q, q_next, u), q
        if return_state:
            return q, q_next
        return torch.cat((q, q_next), dim=self.split_dim) if self.scheme.splits else q

    def _enter(self, x: Tensor | State) -> OpenState:
        """The pair to start from: ours alone, dense, in the state's dtype and on the grid."""
        if isinstance(x, tuple | list):
            p, q = self._check_pair(x)
        else:
            self._check_input(x)
            p, q = self.scheme.init(x, self.split_dim)
        q = self._enter_tensor(q, torch.empty_like(q, device="meta").stride())
        return None if p is None else self._enter_tensor(p, q.stride()), q

    def _enter_tensor(self, x: Tensor, strides: tuple[int, ...]) -> Tensor:
        if not x.is_floating_point():
            raise ValueError(f"a state must be a floating-point tensor, got dtype {x.dtype}")
        if x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(x.device.type):
            x = x.float()
        if self.grid is not None:
            self.grid.check(x, "at entry")
            return with_strides(self.grid.round(x), strides)
        return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)

    def _check_input(self, x: Any) -> None:
        if not isinstance(x, Tensor):
            raise ValueError(f"x must be a tensor, or a pair of tensors to go on from, got {_kind(x)}")
        if self.scheme.splits and not -x.dim() <= self.split_dim < x.dim():
            raise ValueError(f"split_dim={self.split_dim} is out of range for an input of shape {tuple(x.shape)}")

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

    def _run(self, chain: Chain, p: Tensor | None, q: Tensor) -> State:
        """Walk all couplings, cut into segments as the strategy says."""
        if torch.compiler.is_compiling():
            allow_tracing()
        total = len(self.fields)
        needs_graph = torch.is_grad_enabled() and self._requires_grad(p, q, chain.kwargs)
        traced = torch.compiler.is_exporting() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        if not needs_graph or self.backprop == "store" or traced:
            num_stored, (p, q) = self._store(chain, p, q, total)
        elif self.memory_budget is not None:
            num_stored, (p, q) = self._store_within_budget(chain, p, q, self.memory_budget)
        else:
            num_stored = 0
        length = self.segment_length()
        if num_stored < total and length > 1:
            _warn_of_half_precision(q.dtype)
        separate = self.grid is not None and length < total - num_stored
        for start in range(num_stored, total, length):
            p, q = ReversibleSegment(chain, start, min(start + length, total), separate or num_stored > 0).run(p, q)
        assert p is not None
        return p, q

    def _store(self, chain: Chain, p: Tensor | None, q: Tensor, stop: int) -> tuple[int, OpenState]:
        """The couplings before `stop` as ordinary autograd sees them."""
        autocast = Autocast(q.device.type)
        call = StoredCall(chain, autocast) if self.grid is not None and torch.is_grad_enabled() else _call
        for index in range(stop):
            u = self._stored(chain.evaluate(index, q, chain.kwargs, call, autocast))
            p, q = q, chain.advance(index, p, q, u)
        return stop, (p, q)

    def _stored(self, u: Tensor) -> Tensor:
        """u as part of a stored segment: on the grid, gradients must be the engine's to the bit."""
        return u if self.grid is None or not u.requires_grad else gradient_in_strides(u)

    def _store_within_budget(self, chain: Chain, p: Tensor | None, q: Tensor, budget: int) -> tuple[int, OpenState]:
        """Store couplings from the first on while they fit beside the final pair; measured once for each kind of call."""
        autocast = Autocast(q.device.type)
        arguments = tensor_leaves(chain.kwargs)
        kind = (
            budget,
            self.training,
            (autocast.enabled, autocast.dtype),
            tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in [q, *arguments]),
            tuple(parameter.requires_grad for parameter in self.parameters()),
        )
        if kind in self._num_stored:
            return self._store(chain, p, q, self._num_stored[kind])
        if torch.compiler.is_compiling():
            raise ValueError(
                "memory_budget is kept by measuring the branches as they run, which torch.compile cannot do: "
                "call the uncompiled sequence once on an input of this shape first"
            )
        call = StoredCall(chain, autocast) if self.grid is not None else _call
        total, state = len(chain.branches), q.numel() * q.element_size()
        used = largest = index = 0
        while index < total and (index == 0 or used + largest + self._kept_states(total - index - 1) * state <= budget):
            u = chain.evaluate(index, q, chain.kwargs, call, autocast)
            u = self._stored(u)
            cost = graph_bytes(u, [q, *arguments], self.parameters())
            used, largest = used + cost, max(largest, cost)
            p, q = q, chain.advance(index, p, q, u)
            index += 1
        least = largest + self._kept_states(total - 1) * state
        if least > budget:
            raise ValueError(
                f"memory_budget={budget} is too small to hold one block: the final pair (one for every anchor) and one "
                f"branch need {least} bytes"
            )
        self._num_stored[kind] = index
        return index, (p, q)

    def _kept_states(self, num_reversed: int) -> int:
        """States that are kept when so many branches at the end are not stored; the final pair in any case."""
        return max(2, states_kept(num_reversed, self.segment_length()))

    def segment_length(self) -> int:
        """How many branches a reversible segment holds: all, or as many as lie between two anchors."""
        if self.backprop == "checkpoint":
            return 1
        if self.anchor_every is not None:
            return self.anchor_every * self.scheme.fields_per_step
        carry = abs(self.scheme.carry)
        if carry == 1.0:
            return len(self.fields)
        return max(1, math.floor(math.log(ROUNDING_GROWTH) / -math.log(carry))) * self.scheme.fields_per_step

    def _requires_grad(self, p: Tensor | None, q: Tensor, kwargs: dict[str, Any]) -> bool:
        tensors = [t for t in (p, q, *tensor_leaves(kwargs)) if t is not None]
        return any(t.requires_grad for t in tensors) or any(p.requires_grad for p in self.parameters())

    def extra_repr(self) -> str:
        parts = [repr(self.scheme), f"backprop={self.backprop!r}"]
        parts += [f"exact={self.grid.bits}"] if self.grid is not None else []
        parts += [f"anchor_every={self.anchor_every}"] if self.anchor_every is not None else []
        parts += [f"memory_budget={self.memory_budget}"] if self.memory_budget is not None else []
        return ", ".join(parts)


def _call(index: int, branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
    return branch(q, **kwargs)


def _call_to_invert(index: int, branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
    return call_to_invert(branch, q, kwargs)


def states_kept(num_branches: int, length: int) -> int:
    """States that so many branches keep in reversible segments of this length: a pair each, or the input of a single one."""
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


def _check_arguments(
    fields: list[nn.Module],
    scheme: Scheme,
    backprop: str,
    exact: bool | int,
    anchor_every: int | None,
    memory_budget: int | None,
    split_dim: int,
) -> None:
    if not isinstance(scheme, Scheme):
        raise ValueError(f"scheme must be a revode scheme such as Verlet(h=0.1), got {scheme!r}")
    for index, field in enumerate(fields):
        if not isinstance(field, nn.Module):
            raise ValueError(f"fields[{index}] must be an nn.Module, got {type(field).__name__}")
    if not fields or len(fields) % scheme.fields_per_step:
        raise ValueError(
            f"{type(scheme).__name__} takes its fields in groups of {scheme.fields_per_step}, got {len(fields)} fields"
        )
    if backprop not in STRATEGIES:
        raise ValueError(f"backprop must be one of {', '.join(map(repr, STRATEGIES))}, got {backprop!r}")
    if exact is not False and not scheme.invertible_exactly:
        raise ValueError(
            f"exact={exact!r} needs a scheme that adds and subtracts only; {scheme!r} scales the old state by "
            f"{scheme.carry:g} at each step: use exact=False"
        )
    if not isinstance(split_dim, int) or isinstance(split_dim, bool):
        raise ValueError(f"split_dim must be an integer, got {split_dim!r}")
    for name, value in (("anchor_every", anchor_every), ("memory_budget", memory_budget)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            unit = "bytes" if name == "memory_budget" else "steps"
            raise ValueError(f"{name} must be a positive number of {unit} or None, got {value!r}")
    if memory_budget is not None and backprop != "reversible":
        raise ValueError(f"memory_budget goes with backprop='reversible', got backprop={backprop!r}")
