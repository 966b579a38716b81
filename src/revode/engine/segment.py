"""Segments of a chain, and the one autograd Function that differentiates a reversible one without its activations.

The gradient of one coupling needs one evaluation of its branch, shared by the inversion and the vector-Jacobian product:

    q = p';  u = F(q);  p = (q' - c q - a u) / s;   gq = gp' + c gq' + a vjp_F(q; gq');   gp = s gq'.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from revode.engine.accounting import graph_nodes
from revode.engine.chain import BranchError, Chain
from revode.engine.grid import with_strides
from revode.engine.replay import Autocast, Replay, version_of
from revode.schemes import State
from revode.vjp import KnownField


class ReversibleSegment:
    """A run of couplings [start, stop) that keeps only its end, and the tensors it differentiates for.

    A parameter, or a tensor among the keyword arguments, that several branches share has one slot among ``inputs``; with
    ``separate`` it has one for each use, from the last to the first, so that autograd adds the uses in the order in which
    other segments and stored ones do.
    """

    def __init__(self, chain: Chain, start: int, stop: int, separate: bool) -> None:
        self.chain = chain
        self.start = start
        self.stop = stop
        leaves, self.spec = pytree.tree_flatten(chain.kwargs)
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.arguments: list[Tensor] = [leaves[i] for i in self.places]
        self.differentiable = [i for i, argument in enumerate(self.arguments) if argument.requires_grad]
        self.parameters = {index: chain.parameters(index) for index in range(start, stop)}
        self.trained: dict[int, list[str]] = {}
        """Names of the parameters that had a gradient in forward, in the order of their slots; by the time of backward they may
        be frozen."""
        self.inputs: list[Tensor] = []
        self.slots: dict[int, list[int]] = {}
        slot_of: dict[tuple[int, int], int] = {}
        for index in reversed(range(start, stop)):
            _refuse_unsuitable(chain, index)
            own = self.parameters[index]
            self.trained[index] = [name for name, p in own.items() if p.requires_grad]
            self.slots[index] = []
            for tensor in [
                *(own[name] for name in self.trained[index]),
                *(self.arguments[i] for i in self.differentiable),
            ]:
                key = (id(tensor), index if separate else -1)
                if key not in slot_of:
                    slot_of[key] = len(self.inputs)
                    self.inputs.append(tensor)
                self.slots[index].append(slot_of[key])

    def run(self, p: Tensor | None, q: Tensor) -> State:
        """The pair at the end."""
        arguments = [argument.detach() for argument in self.arguments]
        if not torch.compiler.is_compiling():
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(
                    "torch.func's transforms (grad, vmap, jvp, ...) need the activations: "
                    "build this ReversibleSequence with backprop='store'"
                )
            arguments = [argument.clone() if argument.is_inference() else argument for argument in arguments]
        return _ReversibleFunction.apply(self, p, q, *arguments, *self.inputs)  # type: ignore[return-value]

    def kwargs(self, arguments: Sequence[Tensor]) -> dict[str, Any]:
        """The keyword arguments, rebuilt around these tensors."""
        leaves = list(self.leaves)
        for place, argument in zip(self.places, arguments, strict=True):
            leaves[place] = argument
        return pytree.tree_unflatten(leaves, self.spec)

    def versions(self) -> list[int | None]:
        """How often each parameter has been modified in place."""
        return [version_of(parameter) for own in self.parameters.values() for parameter in own.values()]

    def check_unchanged(self, versions: list[int | None]) -> None:
        """Refuse to recompute with parameters that are no longer those of the forward pass."""
        if self.versions() != versions:
            raise RuntimeError(
                "a parameter of a reversible sequence was modified in place between forward and backward "
                "(an optimizer step?): its gradient would be that of another network; call backward first"
            )


class _ReversibleFunction(torch.autograd.Function):
    """Walk a segment forward keeping nothing, and back evaluating each branch once."""

    @staticmethod
    def forward(ctx: Any, segment: ReversibleSegment, p: Tensor | None, q: Tensor, *tensors: Tensor) -> State:
        chain = segment.chain
        arguments = tensors[: len(segment.arguments)]
        kwargs = segment.kwargs(arguments)
        replay = Replay(q.device, chain.grid is not None, chain.streams_seen)
        known = {}
        for index in range(segment.start, segment.stop):
            field = known[index] = chain.known_field(index, q)
            if field is None:
                u = chain.evaluate(index, q, kwargs, replay.first, replay.autocast)
            else:
                u = chain.value(index, q, field, replay.autocast)
            p, q = q, chain.advance(index, p, q, u, spend=field is not None)
        ctx.segment, ctx.replay, ctx.known = segment, replay, known
        ctx.versions = None if torch.compiler.is_compiling() else segment.versions()
        ctx.set_materialize_grads(False)
        inverts = segment.stop - segment.start > 1
        # Compiled, there are no versions to look at; autograd looks at those of what it saves itself.
        inputs = tensors[len(arguments) :] if torch.compiler.is_compiling() else ()
        ctx.save_for_backward(p, q if inverts else None, *arguments, *inputs)
        assert p is not None
        return p, q

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "create_graph=True (a gradient of the gradient) needs the activations: "
                "build this ReversibleSequence with backprop='store'"
            )
        p, q, *saved = ctx.saved_tensors
        segment, replay, fields = ctx.segment, ctx.replay, ctx.known
        chain = segment.chain
        if ctx.versions is not None:
            segment.check_unchanged(ctx.versions)
        if not (torch.compiler.is_compiling() or _graph_is_retained()):
            ctx.segment = ctx.replay = ctx.known = None  # as autograd lets go of what it saved
        arguments, inputs = saved[: len(segment.arguments)], saved[len(segment.arguments) :]
        gp, gq = grad_outputs
        grads = _Gradients(segment.inputs)
        for index in reversed(range(segment.start, segment.stop)):
            q_next, q = q, p
            known = None if gq is None else _still_known(fields[index], segment.parameters[index])
            needs_value = index > segment.start
            u: Tensor | None = None
            products: Sequence[Tensor | None] = []
            scale = 1.0
            if known is not None and gq is not None:
                u, products, scale = _differentiate(segment, replay, index, known, q, gq, needs_value)
            elif needs_value or gq is not None:
                u, products = _differentiate_by_autograd(segment, replay, index, q, arguments, inputs, gq)
            if needs_value:
                p = chain.retreat(index, q, q_next, u, spend=known is not None)
            coupling = chain.couplings[index]
            gp, gq = gq, gp
            if gp is not None:
                gq = _plus(gq, gp, coupling.keep) if coupling.keep else gq
                gq = _plus(gq, products[0], scale, spend=known is not None)
                gp = gp * coupling.carry if coupling.carry != 1.0 else gp
                for slot, grad in zip(segment.slots[index], products[1:], strict=True):
                    grads.add(slot, grad, scale)
        num_arguments = len(segment.arguments)
        return None, gp if ctx.needs_input_grad[1] else None, gq, *[None] * num_arguments, *grads.sums


def _graph_is_retained() -> bool:
    """Whether this backward pass may be repeated (``retain_graph=True``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


class _Gradients:
    """Sums of gradients, one for each slot, in memory taken before the walk back.

    Small tensors that live on, allocated between large ones that come and go, would pin the heap: the process would grow
    with depth although nothing is kept.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.sums: list[Tensor | None] = [None] * len(inputs)
        self._memory = [] if torch.compiler.is_compiling() else [torch.empty_like(tensor) for tensor in inputs]

    def add(self, slot: int, grad: Tensor | None, scale: float) -> None:
        total = self.sums[slot]
        if grad is None or torch.compiler.is_compiling() or grad.layout != torch.strided:
            self.sums[slot] = _plus(total, grad, scale)
        elif total is None:
            self.sums[slot] = torch.mul(grad, scale, out=self._memory[slot])
        else:
            torch.add(total, grad, alpha=scale, out=total)


def _plus(a: Tensor | None, b: Tensor | None, scale: float = 1.0, *, spend: bool = False) -> Tensor | None:
    """a + scale * b, either of which may be absent; written over b with ``spend``."""
    if b is None:
        return a
    out = b if spend else None
    if a is None:
        return b if scale == 1.0 else torch.mul(b, scale, out=out)
    return torch.add(a, b, alpha=scale, out=out)


def _still_known(field: KnownField | None, parameters: dict[str, Tensor]) -> KnownField | None:
    """The field, if it still holds the parameters of the forward pass (``torch.func.functional_call`` lends others)."""
    if field is None or any(a is not b for a, b in zip(field.tensors(), parameters.values(), strict=True)):
        return None
    return field


def _differentiate(
    segment: ReversibleSegment,
    replay: Replay,
    index: int,
    known: KnownField,
    q: Tensor,
    gq: Tensor,
    needs_value: bool,
) -> tuple[Tensor | None, Sequence[Tensor | None], float]:
    """u = F(q) of one branch if wanted, and the products of gq with the Jacobians of a F: by q, by parameters.

    The last value is a factor that the products still lack.
    """
    chain = segment.chain
    gain = chain.couplings[index].gain
    dtype = replay.autocast.compute_dtype(q)
    # Scaling the products spares a pass over gq. But on the grid, bits must be those of stored segments, and float16 has no
    # range to spare for what is scaled only later.
    g, scale = (gq, gain) if chain.grid is None and dtype == q.dtype else (gq * gain, 1.0)
    with replay.autocast.disabled():  # the field casts by itself
        u, g_state, g_parameters = known.vjp(q, with_strides(g, q.stride()), dtype, needs_value)
    return None if u is None else u.to(q.dtype), [g_state, *g_parameters], scale


def _differentiate_by_autograd(
    segment: ReversibleSegment,
    replay: Replay,
    index: int,
    q: Tensor,
    arguments: Sequence[Tensor],
    inputs: Sequence[Tensor],
    gq: Tensor | None,
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """The same for any branch, and by arguments, through a graph of its own: q, parameters and arguments are its leaves.

    `inputs` are the segment's as they were saved, if they were.
    """
    gain = segment.chain.couplings[index].gain
    tracked = gq is not None
    leaf = q.detach().requires_grad_(tracked)
    trained = segment.trained[index]
    own = dict(segment.parameters[index])
    if inputs:
        own.update({name: inputs[slot] for name, slot in zip(trained, segment.slots[index], strict=False)})
    parameters = {name: p.detach().requires_grad_(tracked and name in trained) for name, p in own.items()}
    arguments = list(arguments)
    for i in segment.differentiable:
        arguments[i] = arguments[i].detach().requires_grad_(tracked)

    def again(index: int, branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
        return replay.again(index, branch, q, kwargs, parameters)

    with torch.set_grad_enabled(tracked):
        q = _alias(leaf)  # as in an ordinary forward, the branch's input is not a leaf
        u = segment.chain.evaluate(index, q, segment.kwargs(arguments), again, replay.autocast)
    wrt = [leaf, *(p for p in parameters.values() if p.requires_grad), *(arguments[i] for i in segment.differentiable)]
    if gq is None or not u.requires_grad:
        return u, [None] * len(wrt)
    if not torch.compiler.is_compiling():
        _refuse_foreign_leaves(segment.chain, index, u, wrt)
    gu = with_strides(gq if gain == 1.0 else gq * gain, q.stride())
    return u.detach(), torch.autograd.grad(u, wrt, gu, allow_unused=True)


def _refuse_foreign_leaves(chain: Chain, index: int, u: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raise if u depends on a tensor that requires grad and that we do not know: its gradient would be lost."""
    ours = {id(leaf) for leaf in leaves}
    for node in graph_nodes(u):
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in ours:
            raise BranchError(
                f"{chain.name(index)} uses a tensor of shape {tuple(variable.shape)} that requires grad but is neither its "
                "parameter nor a keyword argument: register it, or pass it as a keyword argument, to get its gradient"
            )


def _refuse_unsuitable(chain: Chain, index: int) -> None:
    """Raise on a branch that cannot be given other parameters than its own."""
    branch = chain.branches[index]
    if torch.compiler.is_compiling():
        return
    if isinstance(branch, torch.jit.ScriptModule):
        raise BranchError(
            f"{chain.name(index)} is TorchScript, which cannot be recomputed on parameters that are lent to it: give the "
            "module it was made from, or use backprop='store'"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    # FSDP2's parameters are not those that our inputs name.
    if fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in branch.modules()):
        raise BranchError(
            f"{chain.name(index)} is sharded by itself (fully_shard): shard the ReversibleSequence or a module around it"
        )


class StoredCall:
    """Call a branch so that stored gradients are summed in the engine's order: within a branch first, then over depth.

    Each branch sees its own alias of the state, of the keyword arguments and of the parameters it shares with others, and
    under autocast casts its weights itself, so that gradients of several uses are added in full precision.
    """

    def __init__(self, chain: Chain, autocast: Autocast) -> None:
        self.autocast = autocast
        uses: dict[int, int] = {}
        for branch in chain.branches:
            for parameter in branch.parameters():
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        self.shared = {key for key, count in uses.items() if count > 1}

    def __call__(self, index: int, branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
        kwargs = pytree.tree_map(_alias, kwargs)
        shared = {name: _alias(p) for name, p in branch.named_parameters() if id(p) in self.shared}
        q = _alias(q)
        with self.autocast.restore():
            return functional_call(branch, shared, (q,), kwargs) if shared else branch(q, **kwargs)


def _alias(leaf: Any) -> Any:
    """The same tensor behind a node of its own. (``view_as`` would change the strides of a batch of one.)"""
    return torch.ops.aten.alias(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
