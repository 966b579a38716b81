"""`ReversibleSequence`: a chain of couplings, and the one autograd Function that differentiates it without its activations.

The gradient of one coupling needs one evaluation of its branch, shared by the inversion and the vector-Jacobian product:

    q = p';  u = F(q);  p = (q' - c q - a u) / s;   gq = gp' + c gq' + a vjp_F(q; gq');   gp = s gq'.

A call is cut into *segments*. A reversible segment keeps its last pair and walks back from there; a stored segment is
ordinary autograd. ``reversible`` is one long reversible segment, ``checkpoint`` is reversible segments of length one (which
keep their input and never invert), ``store`` is one stored segment, and anchors and memory budgets lie between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from revode.accounting import graph_bytes
from revode.fields import KnownField
from revode.grid import Grid, with_strides
from revode.replay import Autocast, Replay, allow_tracing, call_preserving_buffers
from revode.schemes import Coupling, OpenState, Rounding, Scheme, State

STRATEGIES = ("reversible", "checkpoint", "store")
ROUNDING_GROWTH = 64.0
"""How far a reversible segment may amplify rounding (6 bits) before an anchor is kept, when |s| < 1."""


class BranchError(ValueError, RuntimeError):
    """A branch failed on its input; says which, and on what. Caught as `ValueError` or as torch's `RuntimeError`."""


class _Chain:
    """One call: the branches with their coupling coefficients and keyword arguments."""

    def __init__(self, sequence: ReversibleSequence, started: bool, kwargs: dict[str, Any]) -> None:
        scheme = sequence.scheme
        self.branches: list[nn.Module] = list(sequence.fields)
        self.couplings: list[Coupling] = [scheme.coupling(i) for i in range(len(self.branches))]
        if not started:
            self.couplings[0] = scheme.starting()
        self.grid = sequence.grid
        self.kwargs = kwargs

    def known_fields(self, autocast: Autocast) -> list[KnownField | None]:
        """Each branch that gives its own vector-Jacobian product in this call."""
        if self.kwargs or autocast.enabled or torch.compiler.is_compiling():
            return [None] * len(self.branches)
        return [b if isinstance(b, KnownField) and b.knows_vjp() else None for b in self.branches]

    def check_branch_output(self, index: int, q: Tensor, u: Any, autocast: bool) -> Tensor:
        """u in the shape and dtype of the state, or an error that says which branch broke the rule."""
        name = type(self.branches[index]).__name__
        if not isinstance(u, Tensor):
            raise ValueError(f"branch {index} ({name}) must return a tensor, got {type(u).__name__}")
        if u.shape != q.shape:
            raise ValueError(
                f"branch {index} ({name}) changes the shape of its state from {tuple(q.shape)} to {tuple(u.shape)}: "
                "a residual branch must keep it"
            )
        if u.dtype != q.dtype:
            if not autocast:
                raise ValueError(
                    f"branch {index} ({name}) changes the dtype of its state from {q.dtype} to {u.dtype}: "
                    "a residual branch must keep it, except under autocast"
                )
            u = u.to(q.dtype)
        return u

    def evaluate(self, index: int, q: Tensor, kwargs: dict[str, Any], call: Any, autocast: Autocast) -> Tensor:
        """u = F(q) of the branch at `index` through `call(index, branch, q, kwargs)`, checked."""
        branch = self.branches[index]
        if torch.compiler.is_compiling():
            return self.check_branch_output(index, q, call(index, branch, q, kwargs), autocast.enabled)
        try:
            u = call(index, branch, q, kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise BranchError(
                f"branch {index} ({type(branch).__name__}) failed on a state of shape {tuple(q.shape)}, "
                f"dtype {q.dtype}: {error}"
            ) from error
        return self.check_branch_output(index, q, u, autocast.enabled)

    def advance(self, index: int, p: Tensor | None, q: Tensor, u: Tensor, *, spend: bool = False) -> Tensor:
        """The next state, in the strides of this one, and inside the grid's range; written over u with ``spend``."""
        q_next = self.couplings[index].step(p, q, u, self._rounding(spend), u if spend else None)
        q_next = with_strides(q_next, q.stride())
        if self.grid is not None:
            self.grid.check(q_next, f"after branch {index} ({type(self.branches[index]).__name__})")
        return q_next

    def retreat(self, index: int, q: Tensor, q_next: Tensor, u: Tensor, *, spend: bool = False) -> Tensor:
        """The state before: ``advance`` undone."""
        p = self.couplings[index].reverse(q, q_next, u, self._rounding(spend), u if spend else None)
        return with_strides(p, q.stride())

    def _rounding(self, in_place: bool) -> Rounding | None:
        if self.grid is None:
            return None
        return self.grid.round_ if in_place else self.grid.round


class _Segment:
    """A run of couplings [start, stop) that keeps only its end, and the tensors it differentiates for.

    A parameter, or a tensor among the keyword arguments, that several branches share has one slot among ``inputs``; with
    ``separate`` it has one for each use, from the last to the first, so that autograd adds the uses in the order in which
    other segments and stored ones do.
    """

    def __init__(self, chain: _Chain, start: int, stop: int, separate: bool) -> None:
        self.chain = chain
        self.start = start
        self.stop = stop
        leaves, self.spec = pytree.tree_flatten(chain.kwargs)
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.arguments: list[Tensor] = [leaves[i] for i in self.places]
        self.differentiable = [i for i, argument in enumerate(self.arguments) if argument.requires_grad]
        self.inputs: list[Tensor] = []
        self.slots: dict[int, list[int]] = {}
        self.parameters: dict[int, Sequence[Tensor]] = {}
        slot_of: dict[tuple[int, int], int] = {}
        for index in reversed(range(start, stop)):
            parameters = [p for p in chain.branches[index].parameters() if p.requires_grad]
            slots = []
            for tensor in [*parameters, *(self.arguments[i] for i in self.differentiable)]:
                key = (id(tensor), index if separate else -1)
                if key not in slot_of:
                    slot_of[key] = len(self.inputs)
                    self.inputs.append(tensor)
                slots.append(slot_of[key])
            self.parameters[index] = parameters
            self.slots[index] = slots

    def versions(self) -> list[int]:
        """How often each of ``inputs`` has been modified in place."""
        return [tensor._version for tensor in self.inputs]

    def check_unchanged(self, versions: list[int]) -> None:
        """Refuse to recompute with parameters that are no longer those of the forward pass."""
        if self.versions() != versions:
            raise RuntimeError(
                "a parameter of a reversible sequence was modified in place between forward and backward "
                "(an optimizer step?): its gradient would be that of another network; call backward first"
            )

    def kwargs(self, arguments: Sequence[Tensor]) -> dict[str, Any]:
        """The keyword arguments, rebuilt around these tensors."""
        leaves = list(self.leaves)
        for place, argument in zip(self.places, arguments, strict=True):
            leaves[place] = argument
        return pytree.tree_unflatten(leaves, self.spec)

    def run(self, p: Tensor | None, q: Tensor) -> State:
        """The pair at the end, as an input of whatever comes next."""
        arguments = [argument.detach() for argument in self.arguments]
        return _ReversibleFunction.apply(self, p, q, *arguments, *self.inputs)  # type: ignore[return-value]


class _ReversibleFunction(torch.autograd.Function):
    """Walk a segment forward keeping nothing, and back recomputing each branch once."""

    @staticmethod
    def forward(ctx: Any, segment: _Segment, p: Tensor | None, q: Tensor, *tensors: Tensor) -> State:
        chain = segment.chain
        arguments = tensors[: len(segment.arguments)]
        kwargs = segment.kwargs(arguments)
        replay = Replay(q.device)
        known = chain.known_fields(replay.autocast)
        for index in range(segment.start, segment.stop):
            call = replay.first if known[index] is None else _value
            u = chain.evaluate(index, q, kwargs, call, replay.autocast)
            p, q = q, chain.advance(index, p, q, u, spend=known[index] is not None)
        ctx.segment, ctx.replay, ctx.known = segment, replay, known
        ctx.versions = None if torch.compiler.is_compiling() else segment.versions()
        ctx.num_tensors = len(tensors)
        ctx.set_materialize_grads(False)
        inverts = segment.stop - segment.start > 1
        ctx.save_for_backward(p, q if inverts else None, *arguments)
        assert p is not None
        return p, q

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "create_graph=True (a gradient of the gradient) needs the activations: "
                "build this ReversibleSequence with backprop='store'"
            )
        segment, replay = ctx.segment, ctx.replay
        chain = segment.chain
        if ctx.versions is not None:
            segment.check_unchanged(ctx.versions)
        p, q, *arguments = ctx.saved_tensors
        gp, gq = grad_outputs
        grads: list[Tensor | None] = [None] * len(segment.inputs)
        for index in reversed(range(segment.start, segment.stop)):
            q_next, q = q, p
            known = ctx.known[index] if gq is not None else None
            u, vjp, scale = _differentiate(segment, replay, index, known, q, arguments, gq)
            if index > segment.start:
                p = chain.retreat(index, q, q_next, u, spend=known is not None)
            coupling = chain.couplings[index]
            gp, gq = gq, gp
            if gp is not None:
                gq = _plus(gq, gp, coupling.keep) if coupling.keep else gq
                gq = _plus(gq, vjp[0], scale, spend=known is not None)
                gp = gp * coupling.carry if coupling.carry != 1.0 else gp
                for slot, grad in zip(segment.slots[index], vjp[1:], strict=True):
                    grads[slot] = _plus(grads[slot], grad, scale)
        num_arguments = ctx.num_tensors - len(grads)
        return None, gp if ctx.needs_input_grad[1] else None, gq, *[None] * num_arguments, *grads


def _plus(a: Tensor | None, b: Tensor | None, scale: float = 1.0, *, spend: bool = False) -> Tensor | None:
    """a + scale * b, either of which may be absent; written over b with ``spend``."""
    if b is None:
        return a
    out = b if spend else None
    if a is None:
        return b if scale == 1.0 else torch.mul(b, scale, out=out)
    return torch.add(a, b, alpha=scale, out=out)


def _value(index: int, branch: Any, q: Tensor, kwargs: dict[str, Any]) -> Tensor:
    return branch.value(q)


def _differentiate(
    segment: _Segment,
    replay: Replay,
    index: int,
    known: KnownField | None,
    q: Tensor,
    arguments: Sequence[Tensor],
    gq: Tensor | None,
) -> tuple[Tensor, Sequence[Tensor | None], float]:
    """u = F(q) of one branch, and the products of gq with the Jacobians of a F: by q, by parameters, by arguments.

    The last value is a factor that the products still lack.
    """
    chain = segment.chain
    gain = chain.couplings[index].gain
    if known is not None and gq is not None:
        # Scaling the products spares a pass over gq; on the grid, bits must be those of stored segments.
        g, scale = (gq, gain) if chain.grid is None else (gq * gain, 1.0)
        u, g_state, g_parameters = known.vjp(q, with_strides(g, q.stride()))
        return u, [g_state, *g_parameters], scale
    with torch.set_grad_enabled(gq is not None):
        q = q.detach().requires_grad_(gq is not None)
        arguments = list(arguments)
        for i in segment.differentiable:
            arguments[i] = arguments[i].detach().requires_grad_()
        u = chain.evaluate(index, q, segment.kwargs(arguments), replay.again, replay.autocast)
    wrt = [q, *segment.parameters[index], *(arguments[i] for i in segment.differentiable)]
    if gq is None or not u.requires_grad:
        return u, [None] * len(wrt), 1.0
    gu = with_strides(gq if gain == 1.0 else gq * gain, u.stride())
    return u.detach(), torch.autograd.grad(u, wrt, gu, allow_unused=True), 1.0


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
        _check_arguments(fields, scheme, backprop, exact, anchor_every, memory_budget)
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
        chain = _Chain(self, p is not None, kwargs)
        state = self._run(chain, p, q)
        y = self.scheme.readout(state, self.split_dim)
        return (y, state) if return_state else y

    def inverse(self, state: State, *, return_state: bool = False, **kwargs: Any) -> Any:
        """The input that leads to `state`, by walking back.

        Args:
            state: the pair that ``forward(..., return_state=True)`` returned.
            return_state: whether the forward call went on from a pair, so that a pair is wanted back.
            kwargs: what forward was given.
        """
        q, q_next = self._check_pair(state)
        started = self.scheme.splits or return_state
        chain = _Chain(self, started, kwargs)
        autocast = Autocast(q.device.type)
        for index in reversed(range(0 if started else 1, len(self.fields))):
            u = chain.evaluate(index, q, kwargs, _call_preserving_buffers, autocast)
            q, q_next = chain.retreat(index, q, q_next, u), q
        if return_state:
            return q, q_next
        return torch.cat((q, q_next), dim=self.split_dim) if self.scheme.splits else q

    def _enter(self, x: Tensor | State) -> OpenState:
        """The pair to start from: checked, dense, in the state's dtype and on the grid."""
        if isinstance(x, tuple | list):
            p, q = self._check_pair(x)
        else:
            p, q = self.scheme.init(x, self.split_dim)
        q = self._enter_tensor(q)
        return None if p is None else with_strides(self._enter_tensor(p), q.stride()), q

    def _enter_tensor(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise ValueError(f"a state must be a floating-point tensor, got dtype {x.dtype}")
        if x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(x.device.type):
            x = x.float()
        if self.grid is not None:
            self.grid.limit(x.dtype)
            self.grid.check(x, "at entry")
            x = self.grid.round(x)
        return with_strides(x, torch.empty_like(x, device="meta").stride())

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

    def _run(self, chain: _Chain, p: Tensor | None, q: Tensor) -> State:
        """Walk all couplings, cut into segments as the strategy says."""
        if torch.compiler.is_compiling():
            allow_tracing()
        total = len(self.fields)
        needs_graph = torch.is_grad_enabled() and self._requires_grad(p, q, chain.kwargs)
        if not needs_graph or self.backprop == "store" or torch.compiler.is_exporting():
            num_stored, (p, q) = self._store(chain, p, q, total)
        elif self.memory_budget is not None:
            num_stored, (p, q) = self._store_within_budget(chain, p, q, self.memory_budget)
        else:
            num_stored = 0
        length = self._segment_length()
        separate = self.grid is not None and length < total - num_stored
        for start in range(num_stored, total, length):
            p, q = _Segment(chain, start, min(start + length, total), separate or num_stored > 0).run(p, q)
        assert p is not None
        return p, q

    def _store(self, chain: _Chain, p: Tensor | None, q: Tensor, stop: int) -> tuple[int, OpenState]:
        """The couplings before `stop` as ordinary autograd sees them."""
        call = _StoredCall(chain) if self.grid is not None and torch.is_grad_enabled() else _call
        autocast = Autocast(q.device.type)
        for index in range(stop):
            u = chain.evaluate(index, q, chain.kwargs, call, autocast)
            p, q = q, chain.advance(index, p, q, u)
        return stop, (p, q)

    def _store_within_budget(self, chain: _Chain, p: Tensor | None, q: Tensor, budget: int) -> tuple[int, OpenState]:
        """Store couplings from the first on while they fit beside the final pair; measured once for each kind of call."""
        autocast = Autocast(q.device.type)
        kind = (budget, q.shape, q.dtype, self.training, autocast.enabled, autocast.dtype)
        if kind in self._num_stored:
            return self._store(chain, p, q, self._num_stored[kind])
        if torch.compiler.is_compiling():
            raise ValueError(
                "memory_budget is kept by measuring the branches as they run, which torch.compile cannot do: "
                "call the uncompiled sequence once on an input of this shape first"
            )
        call = _StoredCall(chain) if self.grid is not None else _call
        available = budget - 2 * q.numel() * q.element_size()
        used = largest = index = 0
        while index < len(chain.branches) and used + largest <= available:
            u = chain.evaluate(index, q, chain.kwargs, call, autocast)
            cost = graph_bytes(u, [q, *_tensor_leaves(chain.kwargs)], self.parameters())
            used, largest = used + cost, max(largest, cost)
            p, q = q, chain.advance(index, p, q, u)
            index += 1
        if largest > available:
            raise ValueError(
                f"memory_budget={budget} is too small to hold one block: the final pair and one branch need "
                f"{budget - available + largest} bytes"
            )
        self._num_stored[kind] = index
        return index, (p, q)

    def _segment_length(self) -> int:
        """Branches in a reversible segment."""
        if self.backprop == "checkpoint":
            return 1
        if self.anchor_every is not None:
            return self.anchor_every * self.scheme.fields_per_step
        carry = abs(self.scheme.carry)
        if carry == 1.0:
            return len(self.fields)
        return max(1, math.floor(math.log(ROUNDING_GROWTH) / -math.log(carry))) * self.scheme.fields_per_step

    def _requires_grad(self, p: Tensor | None, q: Tensor, kwargs: dict[str, Any]) -> bool:
        leaves = pytree.tree_leaves(kwargs)
        tensors = [t for t in (p, q, *leaves) if isinstance(t, Tensor)]
        return any(t.requires_grad for t in tensors) or any(p.requires_grad for p in self.parameters())

    def extra_repr(self) -> str:
        parts = [repr(self.scheme), f"backprop={self.backprop!r}"]
        parts += [f"exact={self.grid.bits}"] if self.grid is not None else []
        parts += [f"anchor_every={self.anchor_every}"] if self.anchor_every is not None else []
        parts += [f"memory_budget={self.memory_budget}"] if self.memory_budget is not None else []
        return ", ".join(parts)


def _call(index: int, branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
    return branch(q, **kwargs)


def _call_preserving_buffers(index: int, branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
    return call_preserving_buffers(branch, q, kwargs)


class _StoredCall:
    """Call a branch so that stored gradients are summed in the engine's order: within a branch first, then over depth.

    Each branch sees its own alias of the state, of the keyword arguments and of the parameters it shares with others.
    """

    def __init__(self, chain: _Chain) -> None:
        uses: dict[int, int] = {}
        for branch in chain.branches:
            for parameter in branch.parameters():
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        self.shared = {key for key, count in uses.items() if count > 1}

    def __call__(self, index: int, branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
        q = q.view_as(q)
        kwargs = pytree.tree_map(_alias, kwargs)
        shared = {name: _alias(p) for name, p in branch.named_parameters() if id(p) in self.shared}
        return functional_call(branch, shared, (q,), kwargs) if shared else branch(q, **kwargs)


def _alias(leaf: Any) -> Any:
    return leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _tensor_leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


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
    if anchor_every is not None and (not isinstance(anchor_every, int) or anchor_every < 1):
        raise ValueError(f"anchor_every must be a positive number of steps or None, got {anchor_every!r}")
    if memory_budget is not None:
        if not isinstance(memory_budget, int) or isinstance(memory_budget, bool) or memory_budget < 1:
            raise ValueError(f"memory_budget must be a positive number of bytes or None, got {memory_budget!r}")
        if backprop != "reversible":
            raise ValueError(f"memory_budget goes with backprop='reversible', got backprop={backprop!r}")
