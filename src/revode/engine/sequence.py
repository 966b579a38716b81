"""`ReversibleSequence`: residual branches run by a reversible scheme, with a choice of how gradients are computed.

A call is cut into *segments*. A reversible segment keeps its last pair and walks back from there; a stored segment is
ordinary autograd. ``reversible`` is one long reversible segment, ``checkpoint`` is reversible segments of length one (they
keep their input and never invert), ``store`` is one stored segment, and anchors and memory budgets lie between.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revode.engine import arrival
from revode.engine.accounting import graph_bytes
from revode.engine.chain import Call, Chain, ResidualBranch, tensor_leaves
from revode.engine.contents import ContentsOf
from revode.engine.grid import Grid, gradient_in_strides, with_strides
from revode.engine.regional import compile_branches
from revode.engine.replay import Autocast, call_to_invert, call_traced_without_noise
from revode.engine.segment import ReversibleSegment, call_stored
from revode.engine.tracing import allow_tracing, compilation_is_possible, eagerly, whole_or_eager
from revode.schemes import Coupling, OpenState, Scheme, State

STRATEGIES = ("reversible", "checkpoint", "store")
STRATEGY_OPTIONS = ("backprop", "exact", "anchor_every", "memory_budget", "split_dim", "verify", "compile")
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
        split_dim: the dimension that splitting schemes halve; by default that of the channels, and it must be given for
            inputs of three dimensions, where (batch, channels, length) and (batch, time, width) look alike.
        verify: whether the walk back checks that it ends where forward began, and raises `ReversalError` if not.
        compile: whether to compile the branches, once for each kind and shape, and run them in the eager engine. Branches
            other than our own fields are compiled in place, as by ``branch.compile()``.

    A branch is given without its skip connection: the scheme adds it. It may return ``(u, aux)``, see ``forward``.
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
        split_dim: int | None = None,
        verify: bool = True,
        compile: bool = False,
    ) -> None:
        super().__init__()
        fields = list(fields)
        _check_arguments(fields, scheme, backprop, exact, anchor_every, memory_budget, split_dim)
        self.fields = nn.ModuleList(fields)
        self.scheme = scheme
        self.backprop = backprop
        self.exact = exact
        self.grid = None if exact is False else Grid(exact)
        self.anchor_every = anchor_every
        self.memory_budget = memory_budget
        self.split_dim = split_dim
        self.verify = verify
        self.compile_branches = compile
        if compile:
            compile_branches(fields)
        self._num_stored: dict[Any, int] = {}
        self._contents = ContentsOf()
        self._has_warned = False

    def with_strategy(self, **changes: Any) -> ReversibleSequence:
        """A sequence of the same branches, with the same parameters, that computes gradients in another way.

        Args:
            changes: ``backprop``, ``exact``, ``anchor_every``, ``memory_budget``, ``split_dim`` or ``verify``. A budget goes
                with ``backprop="reversible"`` only, and is dropped with it.
        """
        return self._twin(list(self.fields), **changes)

    def split(self, k: int) -> list[ReversibleSequence]:
        """k sequences of successive branches, with the same parameters: each goes on from the pair of the one before.

        ``y, state = part(state, return_state=True)``, with x in place of the first state, gives the y of the whole. Each part
        keeps its own final pair, and finishes its gradients by itself, so that FSDP2 can shard parts one by one.

        Args:
            k: how many; the steps are shared out as evenly as they can be, and so is a memory budget.
        """
        width = self.scheme.fields_per_step
        num_steps = len(self.fields) // width
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= num_steps:
            raise ValueError(
                f"k must be a number of parts from 1 to {num_steps}, the steps of this sequence, got {k!r}"
            )
        ends = [width * (num_steps * part // k) for part in range(k + 1)]
        budget = None if self.memory_budget is None else max(1, self.memory_budget // k)
        fields = list(self.fields)
        return [self._twin(fields[start:stop], memory_budget=budget) for start, stop in itertools.pairwise(ends)]

    def _twin(self, fields: list[nn.Module], **changes: Any) -> ReversibleSequence:
        options = {name: getattr(self, name) for name in STRATEGY_OPTIONS if name != "compile"}
        options["compile"] = self.compile_branches
        if changes.get("backprop", "reversible") != "reversible":
            options["memory_budget"] = None
        twin = ReversibleSequence(fields, self.scheme, **(options | changes))
        twin.training = self.training
        return twin

    def forward(self, x: Tensor | State, *, return_state: bool = False, return_aux: bool = False, **kwargs: Any) -> Any:
        """The readout of the final pair; the pair itself, and what branches returned beside their value, if asked.

        Args:
            x: the input; or a pair from another sequence of the same scheme, to go on from it.
            return_state: whether to return ``(y, state)``; ``inverse(state)`` gives x back.
            return_aux: whether to return ``(y, aux)``, or ``(y, state, aux)``. The list has the aux (a tensor, or a nest of
                tensors, with gradients) of each branch that returned ``(u, aux)``, and None for the others.
            kwargs: each is passed to the branches whose ``forward`` takes it.
        """
        p, q = self._enter(x)
        state, aux = self._run(p, q, kwargs, return_aux)
        y = self.scheme.readout(state, self.split_dim)
        extras = [state] * return_state + [aux] * return_aux
        return (y, *extras) if extras else y

    def states(self, x: Tensor | State, **kwargs: Any) -> Iterator[OpenState]:
        """The pairs over depth: at entry, and after each branch; ordinary autograd follows if gradients are enabled.

        It is a generator: ``send(pair)`` goes on from that pair in place of the one it gave. Before a scheme on one tensor has
        started, the first member of its pair is None.

        Args:
            x: what ``forward`` takes.
            kwargs: as for ``forward``.
        """
        state = self._enter(x)
        chain = self._chain_from(*state, kwargs)
        autocast = Autocast(state[1].device.type)
        state = (yield state) or state
        for index in range(len(self.fields)):
            p, q = state
            u, _ = chain.evaluate(index, q, kwargs, self._stored_call(chain, index, q, autocast), autocast)
            state = q, chain.advance(index, p, q, self._stored(chain, u))
            chain.close()
            state = (yield state) or state

    def states_back(self, state: State, *, started: bool | None = None, **kwargs: Any) -> Iterator[OpenState]:
        """The pairs that the walk back rebuilds: the final one, and before each branch from the last on.

        Args:
            state: the pair that ``forward(..., return_state=True)`` returned.
            started: whether forward went on from a pair; by default it does so only in schemes that split their input.
            kwargs: what forward was given.
        """
        q, q_next = self._check_pair(state)
        self._check_invertible()
        if self.grid is not None:
            self.grid.check_on_grid(q, "in state[0]")
            self.grid.check_on_grid(q_next, "in state[1]")
        q = q.clone()  # what a branch is given must not be the caller's
        started = self.scheme.splits if started is None else started
        chain = self._chain(q, started, kwargs)
        autocast = Autocast(q.device.type)
        yield q, q_next
        for index in reversed(range(0 if started else 1, len(self.fields))):
            u, _ = chain.evaluate(index, q, kwargs, self._inverting_call(chain, index, q, autocast), autocast)
            q, q_next = chain.retreat(index, q, q_next, u), q
            yield q, q_next
        if not started:
            yield None, q

    def inverse(self, state: State, *, return_state: bool = False, **kwargs: Any) -> Any:
        """The input that leads to `state`, by walking back.

        It is differentiable as any other computation, so where gradients are enabled it keeps a graph of all branches; under
        ``torch.no_grad()`` it keeps nothing. A branch that draws random numbers is refused: call ``eval()`` first.

        Args:
            state: the pair that ``forward(..., return_state=True)`` returned.
            return_state: whether the forward call went on from a pair, so that a pair is wanted back.
            kwargs: what forward was given.
        """
        *_, (p, q) = self.states_back(self._check_pair(state), started=self.scheme.splits or return_state, **kwargs)
        if p is None or return_state:
            return q if p is None else (p, q)
        return self.scheme.undo_init((p, q), self.split_dim)

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
        if self.grid is not None and abs(self.scheme.carry) != 1.0:
            raise ValueError(
                f"exact={self.grid.bits} with {self.scheme!r} cannot be inverted from the final pair alone, since a bit of "
                "each element and step is kept beside it: use exact=False"
            )

    def scheme_now(self) -> Scheme:
        """The scheme that a call in the present mode runs: in eval mode it may be another."""
        return self.scheme if self.training else self.scheme.in_eval()

    def _grid_now(self) -> Grid | None:
        return self.grid if self.scheme_now().invertible_exactly else None

    def _chain(self, q: Tensor, started: bool, kwargs: dict[str, Any], keeps_aux: bool = False) -> Chain:
        """A call on states like this one."""
        fields = list(self.fields)
        couplings = self.scheme_now().couplings(len(fields), q, started)
        for index, (field, coupling) in enumerate(zip(fields, couplings, strict=True)):
            if coupling.is_plain and isinstance(field, ResidualBranch):
                fields[index], couplings[index] = field.whole, Coupling(0.0, 0.0, 1.0)
        hint = f" (half of the input, as {type(self.scheme).__name__} splits it)" if self.scheme.halves else ""
        compiled, grid = self.compile_branches, self._grid_now()
        return Chain(fields, couplings, grid, kwargs, self._contents, keeps_aux, compiled, hint)

    def _chain_from(self, p: Tensor | None, q: Tensor, kwargs: dict[str, Any], keeps_aux: bool = False) -> Chain:
        """A call that starts from this pair."""
        chain = self._chain(q, p is not None, kwargs, keeps_aux)
        for state in (p, q):
            if chain.range_flags is not None and state is not None:
                chain.range_flags.note(state, "at entry")
        return chain

    def _enter(self, x: Tensor | State) -> OpenState:
        """The pair to start from: ours alone, dense, in the state's dtype and on the grid."""
        if isinstance(x, tuple | list):
            p, q = self._check_pair(x)
        else:
            self._check_input(x)
            p, q = self.scheme.init(x, self.split_dim)
        q = self._enter_tensor(q)
        return None if p is None else with_strides(self._enter_tensor(p), q.stride()), q

    def _enter_tensor(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise ValueError(f"a state must be a floating-point tensor, got dtype {x.dtype}")
        if x.dtype in (torch.float16, torch.bfloat16) and Autocast(x.device.type).enabled:
            x = x.float()
        grid = self._grid_now()
        return x.clone() if grid is None else grid.round(x)

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

    @whole_or_eager
    def _run(self, p: Tensor | None, q: Tensor, kwargs: dict[str, Any], keeps_aux: bool) -> tuple[State, list[Any]]:
        """Walk all couplings: as part of a graph that is being traced, or eagerly."""
        if torch.compiler.is_compiling():
            allow_tracing()
            return self._walk(self._chain_from(p, q, kwargs, keeps_aux), p, q)
        walk = (
            eagerly(ReversibleSequence._walk_eagerly) if compilation_is_possible() else ReversibleSequence._walk_eagerly
        )
        return walk(self, p, q, kwargs, keeps_aux)

    def _walk_eagerly(
        self, p: Tensor | None, q: Tensor, kwargs: dict[str, Any], keeps_aux: bool
    ) -> tuple[State, list[Any]]:
        arrival.check_arrived()
        chain = self._chain_from(p, q, kwargs, keeps_aux)
        try:
            return self._walk(chain, p, q)
        finally:  # a state out of range explains what a branch then makes of it
            chain.close()

    def _walk(self, chain: Chain, p: Tensor | None, q: Tensor) -> tuple[State, list[Any]]:
        """Walk all couplings, cut into segments as the strategy says; the final pair and the aux of the branches."""
        total = len(self.fields)
        aux: list[Any] = []
        needs_graph = torch.is_grad_enabled() and self._requires_grad(p, q, chain.kwargs)
        exported = torch.compiler.is_exporting() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        if not needs_graph or self.backprop == "store" or exported:
            num_stored, (p, q) = self._store(chain, p, q, total, aux)
        elif self.memory_budget is not None:
            num_stored, (p, q) = self._store_within_budget(chain, p, q, self.memory_budget, aux)
        else:
            num_stored = 0
        length = self.segment_length()
        if num_stored < total and length > 1:
            _warn_of_half_precision(q.dtype)
        separate = chain.grid is not None and length < total - num_stored
        warned = self._warned if self.verify else None
        for start in range(num_stored, total, length):
            stop = min(start + length, total)
            segment = ReversibleSegment(chain, start, stop, separate or num_stored > 0, warned)
            (p, q), found = segment.run(p, q)
            aux += found
        assert p is not None
        return (p, q), aux

    def _warned(self) -> bool:
        """Whether this sequence has warned of drift before; from now on it has."""
        before, self._has_warned = self._has_warned, True
        return before

    def _store(self, chain: Chain, p: Tensor | None, q: Tensor, stop: int, aux: list[Any]) -> tuple[int, OpenState]:
        """The couplings before `stop` as ordinary autograd sees them; what branches return beside their value goes to `aux`."""
        autocast = Autocast(q.device.type)
        for index in range(stop):
            u = self._evaluate_stored(chain, index, q, autocast, aux)
            p, q = q, chain.advance(index, p, q, u)
        return stop, (p, q)

    def _evaluate_stored(self, chain: Chain, index: int, q: Tensor, autocast: Autocast, aux: list[Any]) -> Tensor:
        call = self._stored_call(chain, index, q, autocast)
        u, found = chain.evaluate(index, q, chain.kwargs, call, autocast)
        if chain.keeps_aux:
            aux.append(found)
        return self._stored(chain, u)

    def _stored_call(self, chain: Chain, index: int, q: Tensor, autocast: Autocast) -> Call:
        branch = chain.branches[index]
        field = chain.compiled_field(index, q, autocast)
        if field is not None:
            return lambda q, kwargs: field.stored(q)
        if chain.grid is None or not torch.is_grad_enabled():
            return lambda q, kwargs: branch(q, **kwargs)
        return lambda q, kwargs: call_stored(chain, branch, q, kwargs, autocast)

    def _inverting_call(self, chain: Chain, index: int, q: Tensor, autocast: Autocast) -> Call:
        branch, field = chain.branches[index], chain.compiled_field(index, q, autocast)
        if field is not None:
            return lambda q, kwargs: field.stored(q, counts=False)
        if chain.traced:
            return lambda q, kwargs: call_traced_without_noise(branch, q, kwargs)
        return lambda q, kwargs: call_to_invert(chain.contents(index), q, kwargs, chain.streams)

    def _stored(self, chain: Chain, u: Tensor) -> Tensor:
        """u as part of a stored segment: on the grid, gradients must be the engine's to the bit."""
        return u if chain.grid is None or not u.requires_grad else gradient_in_strides(u)

    def _store_within_budget(
        self, chain: Chain, p: Tensor | None, q: Tensor, budget: int, aux: list[Any]
    ) -> tuple[int, OpenState]:
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
            return self._store(chain, p, q, self._num_stored[kind], aux)
        if torch.compiler.is_compiling():
            raise ValueError(
                "memory_budget is kept by measuring the branches as they run, which torch.compile cannot do: "
                "call the uncompiled sequence once on an input of this shape first"
            )
        total = len(chain.branches)
        used = largest = index = 0
        while index < total and (index == 0 or used + largest + self._kept_bytes(q, total - index - 1) <= budget):
            u = self._evaluate_stored(chain, index, q, autocast, aux)
            cost = graph_bytes(u, [q, *arguments], self.parameters())
            used, largest = used + cost, max(largest, cost)
            p, q = q, chain.advance(index, p, q, u)
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
        """Bytes kept when so many branches at the end are not stored: pairs, and bits of states that are halved on the grid."""
        states = max(2, states_kept(num_reversed, self.segment_length()))
        halves = self._grid_now() is not None and abs(self.scheme_now().carry) != 1.0
        return states * q.numel() * q.element_size() + halves * num_reversed * math.ceil(q.numel() / 8)

    def segment_length(self) -> int:
        """How many branches a reversible segment holds: all, or as many as lie between two anchors."""
        if self.backprop == "checkpoint":
            return 1
        carry = abs(self.scheme_now().carry)
        if carry == 0.0:
            return 1
        if self.anchor_every is not None:
            return self.anchor_every * self.scheme.fields_per_step
        if carry == 1.0 or self._grid_now() is not None:
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
    split_dim: int | None,
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
            f"exact={exact!r} needs a scheme that carries the old state on, or half of it; {scheme!r} scales it by "
            f"{scheme.carry:g} at each step: use exact=False"
        )
    if split_dim is not None and (not isinstance(split_dim, int) or isinstance(split_dim, bool)):
        raise ValueError(f"split_dim must be an integer or None, got {split_dim!r}")
    for name, value in (("anchor_every", anchor_every), ("memory_budget", memory_budget)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            unit = "bytes" if name == "memory_budget" else "steps"
            raise ValueError(f"{name} must be a positive number of {unit} or None, got {value!r}")
    if memory_budget is not None and backprop != "reversible":
        raise ValueError(f"memory_budget goes with backprop='reversible', got backprop={backprop!r}")
