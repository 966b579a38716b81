"""Segments of a chain, and the one autograd Function that differentiates a reversible one without its activations.

The gradient of one coupling needs one evaluation of its branch, shared by the inversion and the vector-Jacobian product:

    q = p';  u = F(q);  p = (q' - c q - a u) / s;   gq = gp' + c gq' + a vjp_F(q; gq');   gp = s gq'.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.func import functional_call
from torch.utils import _pytree as pytree

from revode.engine import arrival
from revode.engine.accounting import adds, graph_nodes
from revode.engine.chain import BranchError, Chain, Template, tensor_leaves, unsuitable
from revode.engine.contents import hooks_hear_every_module
from revode.engine.grid import with_strides
from revode.engine.regional import CompiledField
from revode.engine.replay import Autocast, Replay, call_traced, version_of
from revode.engine.tracing import RefuseRandom, compilation_is_possible, eagerly, refuse_unrepeatable
from revode.schemes import Factor, State, is_number, times
from revode.vjp import KnownField


class ReversibleSegment:
    """A run of couplings [start, stop) that keeps only its end, and the tensors it differentiates for.

    A parameter, or a tensor among the keyword arguments, that several branches share has one slot among ``inputs``; with
    ``separate`` it has one for each use, from the last to the first, so that autograd adds the uses in the order in which
    other segments and stored ones do.

    Args:
        chain: the call.
        start: its first branch.
        stop: the branch behind its last one.
        separate: whether every use of a tensor has a slot of its own.
        warned: whether the sequence has warned of drift before, and will not again; None if nothing is verified.
    """

    def __init__(
        self, chain: Chain, start: int, stop: int, separate: bool, warned: Callable[[], bool] | None = None
    ) -> None:
        self.chain = chain
        self.start = start
        self.stop = stop
        self.warned = warned
        self.template = Template(chain.kwargs)
        self.arguments = tensor_leaves(chain.kwargs)
        self.aux: dict[int, Template] = {}
        """What branches returned beside their value in forward, without the tensors."""
        self.differentiable = [i for i, argument in enumerate(self.arguments) if argument.requires_grad]
        self.parameters = {index: chain.parameters(index) for index in range(start, stop)}
        self.trained: dict[int, list[str]] = {}
        """Names of the parameters that had a gradient in forward, in the order of their slots; by the time of backward they may
        be frozen."""
        self.inputs: list[Tensor] = []
        self.slots: dict[int, list[int]] = {}
        slot_of: dict[tuple[int, int], int] = {}
        for index in reversed(range(start, stop)):
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

    def run(self, p: Tensor | None, q: Tensor) -> tuple[State, list[Any]]:
        """The pair at the end, and the aux of each branch if that is wanted."""
        arguments = [argument.detach() for argument in self.arguments]
        if self.chain.traced and any(isinstance(coupling.carry, Tensor) for coupling in self.chain.couplings):
            raise ValueError(
                "a scheme that draws its coefficients cannot be compiled as part of a reversible sequence: compile the "
                "branches themselves (torch.compile(branch)), or build it with backprop='store'"
            )
        if self.chain.traced and self.chain.keeps_aux:
            raise ValueError(
                "return_aux=True cannot be compiled as part of a reversible sequence: compile the branches themselves "
                "(torch.compile(branch)), or build it with backprop='store'"
            )
        if not self.chain.traced:
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(
                    "torch.func's transforms (grad, vmap, jvp, ...) need the activations: "
                    "build this ReversibleSequence with backprop='store'"
                )
            for index in range(self.start, self.stop):
                reason = unsuitable(self.chain.branches[index], self.chain.contents(index))
                if reason is not None:
                    raise BranchError(f"{self.chain.name(index)} {reason}")
            arguments = [argument.clone() if argument.is_inference() else argument for argument in arguments]
        outputs: Any = _ReversibleFunction.apply(self, p, q, *arguments, *self.inputs)
        aux = [template.fill(self.aux_of(index, outputs)) for index, template in self.aux.items()]
        return (outputs[0], outputs[1]), aux

    def kwargs(self, arguments: Sequence[Tensor]) -> dict[str, Any]:
        """The keyword arguments, rebuilt around these tensors."""
        return self.template.fill(arguments) if self.chain.kwargs else {}

    def aux_of(self, index: int, outputs: Sequence[Any]) -> Sequence[Any]:
        """Those of the Function's outputs (or of their gradients) that are tensors of this branch's aux."""
        if not self.aux:
            return ()
        start = 2 + sum(len(self.aux[i]) for i in range(self.start, index))
        return outputs[start : start + len(self.aux[index])]

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

    def verify(self, then: Sequence[Tensor], arrived: Sequence[Tensor], end: Tensor) -> None:
        """Compare what the walk back arrived at with what forward had seen: the first state, and perhaps its branch's value.

        `end` is the size of a state at the end; beside it, a first state of zeros is rebuilt to rounding only.
        """
        exactly, dtype = self.chain.grid is not None, arrived[0].dtype
        floor = arrival.rounding(dtype, self.stop - self.start) * end
        floors = (floor, floor + 1e-6 * torch.linalg.vector_norm(then[0]))
        distances = torch.stack(
            [
                arrival.distance(arrival.fingerprint(tensor, exactly), known, tensor, smallest)
                for tensor, known, smallest in zip(arrived, then, floors, strict=False)
            ]
        )
        if self.chain.traced:
            bound = arrival.largest_distance(dtype, exactly)
            text = "revode: the walk back missed the state that forward had seen"
            torch.ops.aten._assert_async.msg(~(distances > bound).any(), text)
            return
        where = f"branches {self.start} to {self.stop - 1}"
        assert self.warned is not None
        warned = self.warned
        arrival.post(distances, lambda found: arrival.judge(found, dtype, exactly, where, warned))


class _ReversibleFunction(torch.autograd.Function):
    """Walk a segment forward keeping nothing, and back evaluating each branch once."""

    @staticmethod
    def forward(ctx: Any, segment: ReversibleSegment, p: Tensor | None, q: Tensor, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return _walk_forward(ctx, segment, p, q, *tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        # Whether this is traced depends on how forward ran: compiled autograd may trace the backward of an eager forward.
        if ctx.traced:
            return _walk_back(ctx, *grad_outputs)
        walk = eagerly(_walk_back_eagerly) if compilation_is_possible() else _walk_back_eagerly
        return walk(ctx, *grad_outputs)


def _walk_forward(
    ctx: Any, segment: ReversibleSegment, p: Tensor | None, q: Tensor, *tensors: Tensor
) -> tuple[Tensor, ...]:
    chain = segment.chain
    arguments = tensors[: len(segment.arguments)]
    kwargs = segment.kwargs(arguments)
    replay = _Traced(q.device.type) if chain.traced else Replay(q.device, chain.grid is not None, chain.streams)
    exactly = chain.grid is not None
    verifies = segment.warned is not None and q.numel() > 0 and arrival.can_be_judged(q)
    inverts = segment.stop - segment.start > 1
    fingerprints: list[Tensor] = []
    parities: dict[int, Tensor] = {}
    known = {}
    aux_outputs: list[Tensor] = []
    for index in range(segment.start, segment.stop):
        compiled = known[index] = chain.compiled_field(index, q, replay.autocast)
        if compiled is not None:
            if verifies and index == segment.start and inverts:
                fingerprints.append(arrival.fingerprint(q, exactly))
            p, q = q, chain.advance_compiled(index, p, q, compiled)
            continue
        field = known[index] = chain.known_field(index, q)
        aux = None
        if field is None:
            u, aux = chain.evaluate(index, q, kwargs, _first(chain, replay, index), replay.autocast, once=False)
        else:
            u = chain.value(index, q, field, replay.autocast)
        if chain.keeps_aux:
            segment.aux[index] = Template(aux)
            aux_outputs += [tensor.clone() for tensor in tensor_leaves(aux)]  # never a view of a state or an input
        if verifies and index == segment.start and (inverts or field is None):
            fingerprints.append(arrival.fingerprint(q, exactly))
            if field is None:
                fingerprints.append(arrival.fingerprint(u, exactly))
        if p is not None and index > segment.start:
            parity = chain.parity(index, p)
            if parity is not None:
                parities[index] = parity
        p, q = q, chain.advance(index, p, q, u, over_u=field is not None)
    ctx.segment, ctx.replay, ctx.known, ctx.traced = segment, replay, known, chain.traced
    ctx.versions = None if chain.traced else segment.versions()
    ctx.num_fingerprints, ctx.with_parity = len(fingerprints), list(parities)
    # Compiled, there are no versions to look at; autograd looks at those of what it saves itself.
    inputs = tensors[len(arguments) :] if chain.traced else ()
    ctx.save_for_backward(p, q if inverts else None, *fingerprints, *parities.values(), *arguments, *inputs)
    if aux_outputs:
        ctx.mark_non_differentiable(*(t for t in aux_outputs if not (t.is_floating_point() or t.is_complex())))
    assert p is not None
    return p, q, *aux_outputs


def _walk_back_eagerly(ctx: Any, *grad_outputs: Any) -> Any:
    with contextlib.nullcontext() if ctx.replay is None else ctx.replay.kernels.restore():
        return _walk_back(ctx, *grad_outputs)


def _walk_back(ctx: Any, *grad_outputs: Any) -> Any:
    p, q, *saved = ctx.saved_tensors
    segment, replay, fields = ctx.segment, ctx.replay, ctx.known
    chain = segment.chain
    if torch.is_grad_enabled() and not chain.traced:
        raise RuntimeError(
            "create_graph=True (a gradient of the gradient) needs the activations: "
            "build this ReversibleSequence with backprop='store'"
        )
    fingerprints, saved = saved[: ctx.num_fingerprints], saved[ctx.num_fingerprints :]
    parities = dict(zip(ctx.with_parity, saved, strict=False))
    saved = saved[len(parities) :]
    if ctx.versions is not None:
        segment.check_unchanged(ctx.versions)
    if not (chain.traced or _graph_is_retained()):
        ctx.segment = ctx.replay = ctx.known = None  # as autograd lets go of what it saved
    arguments, inputs = saved[: len(segment.arguments)], saved[len(segment.arguments) :]
    gp, gq = grad_outputs[:2]
    if not chain.traced:  # once here, and not at each branch
        gp, gq = (None if g is None else with_strides(g, p.stride()) for g in (gp, gq))
    grads = _Gradients(segment.inputs, chain.traced)
    end = arrival.size(p) if fingerprints else None
    u: Tensor | None = None
    known: Any = None
    for index in reversed(range(segment.start, segment.stop)):
        q_next, q = q, p
        if isinstance(fields[index], CompiledField):
            known, inverts = fields[index], segment.stop - segment.start > 1
            p, gp, gq, products = chain.retreat_compiled(index, q, q_next if inverts else None, gp, gq, known)
            grads.add(segment.slots[index], products, 1.0)
            continue
        known = None if gq is None else _still_known(fields[index], segment.parameters[index])
        needs_value = index > segment.start
        g_aux = segment.aux_of(index, grad_outputs)
        u = None
        products: Sequence[Tensor | None] = []
        scale = 1.0
        if known is not None and gq is not None:
            u, products, scale = _differentiate(segment, replay, index, known, q, gq, needs_value)
        elif needs_value or gq is not None or any(g is not None for g in g_aux):
            u, products = _differentiate_by_autograd(segment, replay, index, q, arguments, inputs, gq, g_aux)
        if needs_value:
            p = chain.retreat(index, q, q_next, u, parities.get(index), over_u=known is not None)
        coupling = chain.couplings[index]
        gp, gq = gq, gp
        if gp is not None:
            gq = _plus_kept(gq, gp, coupling.keep, chain.grid is not None)
            gp = None if is_number(coupling.carry, 0.0) else times(gp, coupling.carry)
        if products:
            gq = _plus(gq, products[0], scale, over_b=known is not None)
            grads.add(segment.slots[index], products[1:], scale)
    if fingerprints:
        arrived = [q, u] if len(fingerprints) > 1 and u is not None and known is None else [q]
        if chain.traced:
            # Without a tie to the gradients, the compiler would put the check, and all that it needs, into the forward graph.
            tie = sum(0.0 * grad.reshape(-1)[0] for grad in grad_outputs if grad is not None)
            arrived = [tensor + tie for tensor in arrived]
        assert end is not None
        segment.verify(fingerprints, arrived, end)
    num_arguments = len(segment.arguments)
    return None, gp if ctx.needs_input_grad[1] else None, gq, *[None] * num_arguments, *grads.sums


class _Traced:
    """In place of a record, while torch.compile traces a whole sequence: what the graph does not show is refused."""

    def __init__(self, device_type: str) -> None:
        self.autocast = Autocast(device_type)


def _first(chain: Chain, replay: Any, index: int) -> Callable[[Tensor, dict[str, Any]], Any]:
    """How to call the branch at `index` in forward."""
    if not chain.traced:
        contents = chain.contents(index)
        return lambda q, kwargs: replay.first(index, contents, q, kwargs)

    def first(q: Tensor, kwargs: dict[str, Any]) -> Any:
        with RefuseRandom():
            u = chain.branches[index](q, **kwargs)
        refuse_unrepeatable()
        return u

    return first


def _again(
    chain: Chain, replay: Any, index: int, parameters: dict[str, Tensor] | None
) -> Callable[[Tensor, dict[str, Any]], Any]:
    """How to call it in backward, perhaps on other parameters than its own."""
    if not chain.traced:
        contents = chain.contents(index)
        return lambda q, kwargs: replay.again(index, contents, q, kwargs, parameters)

    def again(q: Tensor, kwargs: dict[str, Any]) -> Any:
        with replay.autocast.restore():
            return call_traced(chain.branches[index], q, kwargs, parameters)

    return again


def _graph_is_retained() -> bool:
    """Whether this backward pass may be repeated (``retain_graph=True``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


class _Gradients:
    """Sums of gradients, one for each slot.

    Small tensors that live on, allocated between large ones that come and go, would pin the heap: the process would grow
    with depth although nothing is kept. They are copied to memory taken before the walk back; large ones live in pages of
    their own.

    Autograd may give one tensor for several inputs, or the incoming gradient itself. So what comes first to a slot is only
    read, and sums are written over what was made here.
    """

    def __init__(self, inputs: Sequence[Tensor], traced: bool) -> None:
        self.sums: list[Tensor | None] = [None] * len(inputs)
        self._traced = traced
        small = [] if traced else [slot for slot, tensor in enumerate(inputs) if _pins_the_heap(tensor)]
        # One call for all of them; what they hold is written over.
        memory = torch._foreach_neg([inputs[slot] for slot in small]) if small else ()  # pyright: ignore[reportPrivateImportUsage]
        self._memory = dict(zip(small, memory, strict=True))
        self._made_here = set(small)

    def add(self, slots: Sequence[int], grads: Sequence[Tensor | None], scale: float) -> None:
        """Add what one branch gives for these slots."""
        copied: dict[int, Tensor] = {}
        for slot, grad in zip(slots, grads, strict=True):
            if grad is None:
                continue
            if slot in self._memory and self.sums[slot] is None and grad.layout == torch.strided:
                self.sums[slot], copied[slot] = self._memory[slot], grad
                continue
            if slot in copied:
                self._copy(copied, scale)
            self._add(slot, grad, scale)
        self._copy(copied, scale)

    def _copy(self, grads: dict[int, Tensor], scale: float) -> None:
        if grads:
            memory = [self._memory[slot] for slot in grads]
            torch._foreach_copy_(memory, list(grads.values()))  # pyright: ignore[reportPrivateImportUsage]
            if scale != 1.0:
                torch._foreach_mul_(memory, scale)  # pyright: ignore[reportPrivateImportUsage]
            grads.clear()

    def _add(self, slot: int, grad: Tensor, scale: float) -> None:
        total = self.sums[slot]
        if self._traced:
            self.sums[slot] = _plus(total, grad, scale)
        elif grad.layout != torch.strided or (total is not None and total.layout != torch.strided):
            # Sparse gradients (of an embedding) are added to dense ones, not the other way round.
            swap = total is not None and total.layout != torch.strided and grad.layout == torch.strided
            self.sums[slot] = _plus(grad * scale, total) if swap else _plus(total, grad, scale)
        elif total is None:
            self.sums[slot] = grad if scale == 1.0 and grad._base is None else grad * scale
        elif slot in self._made_here:
            torch.add(total, grad, alpha=scale, out=total)
        else:
            self.sums[slot] = torch.add(total, grad, alpha=scale)
            self._made_here.add(slot)


def _pins_the_heap(tensor: Tensor) -> bool:
    """Whether a tensor like this one lies between others on the heap of a CPU. (Devices keep small ones apart.)"""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
    return is_plain and tensor.numel() * tensor.element_size() < 1 << 17


def _plus(a: Tensor | None, b: Tensor | None, scale: float = 1.0, *, over_b: bool = False) -> Tensor | None:
    """a + scale * b, either of which may be absent; written over b if nobody else needs it."""
    if b is None:
        return a
    out = b if over_b else None
    if a is None:
        return b if scale == 1.0 else torch.mul(b, scale, out=out)
    return torch.add(a, b, alpha=scale, out=out)


def _plus_kept(gq: Tensor | None, gp: Tensor, keep: Factor, to_the_bit: bool) -> Tensor | None:
    """gq + keep * gp; in two roundings, as autograd does it, where bits must be those of stored segments."""
    if is_number(keep, 0.0):
        return gq
    if isinstance(keep, Tensor) or to_the_bit:
        return _plus(gq, times(gp, keep))
    return _plus(gq, gp, keep)


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
    later = chain.grid is None and dtype == q.dtype and isinstance(gain, float)
    g, scale = (gq, gain) if later else (gq * gain, 1.0)
    with replay.autocast.disabled():  # the field casts by itself
        u, g_state, g_parameters = known.vjp(q, with_strides(g, q.stride()), dtype, needs_value)
    return None if u is None else u.to(q.dtype), [g_state, *g_parameters], scale


def _differentiate_by_autograd(
    segment: ReversibleSegment,
    replay: Any,
    index: int,
    q: Tensor,
    arguments: Sequence[Tensor],
    inputs: Sequence[Tensor],
    gq: Tensor | None,
    g_aux: Sequence[Tensor | None],
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """The same for any branch, and by arguments, through a graph of its own, whose leaves are q, parameters and arguments.

    `inputs` are the segment's as they were saved, if they were; `g_aux` are the gradients of the branch's aux, if any.
    """
    chain = segment.chain
    gain = chain.couplings[index].gain
    wanted = gq is not None or any(g is not None for g in g_aux)
    tracked = wanted or chain.grid is not None  # on the grid, bits must be those of a call that tracks gradients
    leaf = q.detach().requires_grad_(tracked)
    own, lent = _leaves(segment, index, inputs, wanted)
    arguments = list(arguments)
    for i in segment.differentiable:
        arguments[i] = arguments[i].detach().requires_grad_(wanted)
    with torch.set_grad_enabled(tracked):
        inside = _alias(leaf)  # as in an ordinary forward, the branch's input is not a leaf
        again = _again(chain, replay, index, lent)
        u, aux = chain.evaluate(index, inside, segment.kwargs(arguments), again, replay.autocast)
    wrt = [leaf, *own, *(arguments[i] for i in segment.differentiable)]
    gu = None if gq is None else with_strides(times(gq, gain), q.stride())
    pairs = [(u, gu), *zip(tensor_leaves(aux), g_aux, strict=True)] if g_aux else [(u, gu)]
    outputs = [(tensor, g) for tensor, g in pairs if g is not None and tensor.requires_grad]
    if not outputs:
        return u.detach(), [None] * len(wrt)
    if not chain.traced:
        _look_at_graph(chain, index, [tensor for tensor, _ in outputs], wrt)
    try:
        return u.detach(), _grad([t for t, _ in outputs], [g for _, g in outputs], wrt, chain.traced)
    except RuntimeError as error:
        if "use_reentrant" in str(error) or "Checkpointing is not compatible" in str(error):
            raise BranchError(
                f"{chain.name(index)} uses torch's checkpoint with use_reentrant=True, which cannot be differentiated inside "
                "a reversible sequence: give it use_reentrant=False"
            ) from error
        raise


def _grad(outputs: list[Tensor], grads: list[Tensor], wrt: list[Tensor], traced: bool) -> Sequence[Tensor | None]:
    """``torch.autograd.grad`` without its look at shapes, which takes a tenth of a tiny branch's time; ours are right."""
    if traced:
        return torch.autograd.grad(outputs, wrt, grads, allow_unused=True)
    return _engine_run_backward(
        tuple(outputs), tuple(grads), False, False, tuple(wrt), allow_unreachable=True, accumulate_grad=False
    )


def _leaves(
    segment: ReversibleSegment, index: int, inputs: Sequence[Tensor], wanted: bool
) -> tuple[list[Tensor], dict[str, Tensor] | None]:
    """The tensors to differentiate for among a branch's parameters, and what to lend it if its own will not do.

    Its own parameters serve as leaves where nothing distinguishes them from those of the forward pass and no hook on them
    would be called twice.
    """
    trained, own = segment.trained[index], segment.parameters[index]
    if not segment.chain.traced:
        slots = segment.chain.contents(index).parameters
        if not hooks_hear_every_module() and all(
            slot.tensor is then and then.requires_grad == (slot.name in trained) and not then._backward_hooks
            for slot, then in zip(slots, own.values(), strict=True)
        ):
            return [own[name] for name in trained], None
    own = dict(own)
    if inputs:
        own.update({name: inputs[slot] for name, slot in zip(trained, segment.slots[index], strict=False)})
    leaves = {name: p.detach().requires_grad_(wanted and name in trained) for name, p in own.items()}
    if segment.chain.traced:
        return [leaves[name] for name in trained], leaves
    with torch.enable_grad():  # aliases, since hooks on modules cannot be given leaves in autograd.grad
        return [leaves[name] for name in trained], {name: _alias(leaf) for name, leaf in leaves.items()}


def _look_at_graph(chain: Chain, index: int, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Raise if an output depends on a tensor that requires grad and that we do not know: its gradient would be lost.

    Warn once of a branch that contains its own skip connection.
    """
    ours = {id(leaf) for leaf in leaves}
    for node in itertools.chain.from_iterable(map(graph_nodes, outputs)):
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in ours:
            raise BranchError(
                f"{chain.name(index)} uses a tensor of shape {tuple(variable.shape)} that requires grad but is neither its "
                "parameter nor a keyword argument: register it, or pass it as a keyword argument, to get its gradient"
            )
    contents, coupling = chain.contents(index), chain.couplings[index]
    adds_states = not (is_number(coupling.carry, 0.0) and is_number(coupling.keep, 0.0))
    if contents.has_skip is None and adds_states:
        contents.has_skip = adds(outputs[0], leaves[0], lambda name: name.startswith(_NEUTRAL))
        if contents.has_skip and chain.warns_of_skips():
            warnings.warn(
                f"{chain.name(index)} adds its own input, as a residual block does, and the scheme adds it once more: leave "
                "out the skip connection, or use revode.convert",
                stacklevel=2,
            )


_NEUTRAL = ("AddBackward", "AliasBackward", "CloneBackward", "ToCopyBackward", "ViewBackward", "UnsafeViewBackward")


def call_stored(chain: Chain, branch: nn.Module, q: Tensor, kwargs: dict[str, Any], autocast: Autocast) -> Any:
    """Call a branch so that stored gradients are summed in the engine's order: within a branch first, then over depth.

    Each branch sees its own alias of the state, of the keyword arguments and of the parameters it shares with others, and
    under autocast casts its weights itself, so that gradients of several uses are added in full precision.
    """
    kwargs = pytree.tree_map(_alias, kwargs)
    shared = {name: _alias(p) for name, p in branch.named_parameters() if id(p) in chain.shared_parameters}
    q = _alias(q)
    with autocast.restore():
        return functional_call(branch, shared, (q,), kwargs) if shared else branch(q, **kwargs)


def _alias(leaf: Any) -> Any:
    """The same tensor behind a node of its own. (``view_as`` would change the strides of a batch of one.)"""
    return torch.ops.aten.alias(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
