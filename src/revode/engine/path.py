"""The path of one forward pass through branches. Each branch is one autograd node that saves no activations.

A node takes the pair and returns the pair, so that it adds the gradients of both members itself. The walk keeps the newest
pair, and pairs at anchors. The node of step k needs the pair behind step k. That pair is at hand when the node of step k + 1
has just run. Otherwise it is rebuilt from the next pair that was kept: for a loss on a state in the middle, a part of the
gradients, or a second try after an exception. So every order of backward passes is right.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revode import memory
from revode.engine import arrival
from revode.engine.branch import BranchError
from revode.engine.call import Autocast, Template, compilation_is_possible, eagerly, tensor_leaves, version_of
from revode.engine.inspection import is_sharded
from revode.engine.step import Step
from revode.schemes import OpenState, State

Pair = tuple[Any, Any]
"""A pair of states, of which one may be missing."""


class Path:
    """The steps of one forward pass, and the pairs that are kept of it. The pair before step k has the position k.

    Args:
        length: how many steps lie between two pairs that are kept; None keeps the newest pair only.
        verifies: whether to check that the walk back ends where forward began.
    """

    def __init__(self, length: int | None = None, verifies: bool = True) -> None:
        self.length = length
        self.verifies = verifies
        self.steps: list[Step] = []
        self.first = 0
        """The position at which the walk back ends: nothing before it needs a gradient."""
        self.kept: dict[int, Pair] = {}
        """Pairs by their position; the second member is None where the pair before is kept too."""
        self._versions: dict[int, list[int | None]] = {}
        self._at_hand: tuple[int, Pair] | None = None
        self._end: tuple[int, Tensor] | None = None
        """The position that the walk back began from, and the size of a state there."""
        self._memory: dict[tuple[int, int], Tensor] = {}
        """Memory for small gradients, by position and number; see ``_reserve``."""
        self._layout: Any = None
        self._placeholder: Tensor | None = None
        self.token = object()
        """A stand-in for this path in counts of memory, also after the path is gone."""
        self._lock = threading.RLock()

    def run(self, branch: nn.Module, make: Callable[[], Step], p: Tensor | None, q: Tensor) -> tuple[State, Any]:
        """Return the pair behind a step, and the branch's aux; the step becomes one node of autograd's graph.

        `make` makes the step. It is called where the parameters of a sharded branch are whole.
        """

        def run(p: Tensor | None, q: Tensor) -> tuple[State, Any]:
            return self.run_here(make, p, q)[:2]

        return _inside_call(branch, run, p, q) if is_sharded(branch) else run(p, q)

    def run_here(self, make: Callable[[], Step], p: Tensor | None, q: Tensor) -> tuple[State, Any, Any]:
        """Return the pair behind a step, the branch's aux and its evaluation, inside a call of the branch."""
        step = make()
        self._add(step, p, q)
        try:
            outputs: Any = self._apply(step, p, q)
        except BaseException:
            self.steps.pop()
            raise
        return outputs[:2], None if step.aux is None else step.aux.fill(outputs[2:]), step.evaluation

    def run_all(self, steps: Sequence[Step], p: Tensor | None, q: Tensor) -> State:
        """Return the pair behind all steps, which end the path.

        The nodes are made first, on placeholders that have the shape of the states and next to no memory. Small objects that
        live on, allocated between states that come and go, would pin the heap of a CPU: the process would grow with depth.
        """
        pair: OpenState = p, q
        self._placeholder = q.new_empty(()).expand(q.shape)  # the shape of a state, in the memory of one element
        for step in steps:
            self._add(step, *pair)
            step.is_planned = True
            pair = self._apply(step, *pair)
        self._placeholder = None
        with torch.no_grad():
            p, q = None if p is None else p.detach(), q.detach()
            for step in steps:
                p, q = q, self.advance(step, p, q)[0]
        assert p is not None
        ended: Any = _End.apply(self, (p, q), *pair)
        return ended

    def placeholders(self) -> State:
        """Return the pair that stands for a state while nodes are made."""
        assert self._placeholder is not None
        return self._placeholder.detach(), self._placeholder.detach()

    def _add(self, step: Step, p: Tensor | None, q: Tensor) -> None:
        step.position = len(self.steps)
        self.steps.append(step)
        if not (q.requires_grad or (p is not None and p.requires_grad)):
            self.first, self.kept = step.position, {}

    def _apply(self, step: Step, p: Tensor | None, q: Tensor) -> Any:
        tensors = step.tensors()  # each requires a gradient
        step.has_gradient = bool(tensors) or q.requires_grad or (p is not None and p.requires_grad)
        return _Node.apply(self, step, p, q, *tensors)

    def advance(self, step: Step, p: Tensor | None, q: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run a step forward and keep what its way back needs; return q' and the tensors of the branch's aux."""
        index, keeps_aux = step.position, step.evaluation.context.keeps_aux
        begins = self._keeps(index)
        alone = begins and self._keeps(index + 1)
        judged = begins and self.verifies and q.numel() > 0 and arrival.can_be_judged(q)
        watched = judged and not (alone and step.evaluation.writes_over_value)
        q_next, aux = step.advance(p, q, watched, not begins)
        if not begins:
            self.kept.pop(index, None)
            self._versions.pop(index, None)
        pair = self.kept[index + 1] = _bare(q), None if alone else q_next if step.is_planned else q_next.detach()
        self._versions[index + 1] = _versions_of(pair)
        if memory.watching and not step.is_planned:
            pairs = [tensor for pair in self.kept.values() for tensor in pair if tensor is not None]
            for counter in memory.watching:
                counter.note_walk(self.token, step.tensors_kept(), pairs)
        if not keeps_aux:
            step.evaluation.warn_of_lost_aux(aux)
            return q_next, []
        step.aux = Template(aux)
        return q_next, [tensor.clone() for tensor in tensor_leaves(aux)]  # never a view of a state or an input

    def forget(self, p: Tensor | None, q: Tensor) -> None:
        """Forget the newest step, which was made from (p, q), and keep that pair again."""
        if not self.steps:
            raise ValueError("undo takes back the newest step of a stretch, and this stretch has none")
        index = self.steps.pop().position
        self.kept.pop(index + 1, None)
        if p is not None and not self._keeps(index):
            pair = self.kept[index] = p.detach(), q.detach()
            self._versions[index] = _versions_of(pair)

    def _keeps(self, position: int) -> bool:
        """Return True if the walk back ends at this position, or begins anew there."""
        return position <= self.first or (self.length is not None and position % self.length == 0)

    def close(self, state: State, aux: Sequence[Any]) -> tuple[State, list[Any]]:
        """Return the final pair and all aux behind a last node, which saves the tensors that the path keeps.

        So hooks on saved tensors (``save_on_cpu``) and torch's version checks see them.
        """
        template, tensors = Template(list(aux)), tensor_leaves(list(aux))
        p, q, *tensors = _End.apply(self, None, *state, *tensors)  # type: ignore[misc]
        return (p, q), template.fill(tensors)

    def pack(self) -> list[Tensor | None]:
        """Return the tensors that the path keeps, and hold them no longer."""
        arguments = {id(step.evaluation.arguments): step.evaluation.arguments for step in self.steps}
        holders = [step for step in self.steps if step.own_tensors() != [None]]
        for counter in memory.watching:
            counter.note_walk(self.token, (), ())  # hooks on saved tensors count them now
        self._layout = list(self.kept), holders, list(arguments.values())
        tensors: list[Tensor | None] = [tensor for pair in self.kept.values() for tensor in pair]
        for step in holders:
            tensors += step.own_tensors()
        for each in arguments.values():
            tensors += each.tensors
            each.trained = []
        self._drop()
        return tensors

    def tensors_kept(self) -> list[Tensor]:
        """Return the tensors that the path itself keeps for backward; none once a last node saves them."""
        pairs = [tensor for pair in self.kept.values() for tensor in pair if tensor is not None]
        return pairs + [tensor for step in self.steps for tensor in step.tensors_kept()]

    def _drop(self) -> None:
        self.kept, self._versions, self._at_hand, self._end = {}, {}, None, None
        _, holders, arguments = self._layout
        for step in holders:
            step.set_own_tensors(itertools.repeat(None))
        for each in arguments:
            each.tensors = [None] * len(each.tensors)

    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Hold these tensors again, which ``pack`` returned."""
        positions, holders, arguments = self._layout
        following = iter(tensors)
        with self._lock:
            self._at_hand = None
            self.kept = {position: (next(following), next(following)) for position in positions}
            for step in holders:
                step.set_own_tensors(following)
            for each in arguments:
                each.tensors = [next(following) for _ in each.tensors]
                each.versions = [version_of(tensor) for tensor in each.tensors]

    def retreat(self, step: Step, gp: Tensor | None, g: Tensor | None, g_aux: Sequence[Tensor | None]) -> Any:
        """Run a step backward; return the gradients by p, by q and by the branch's tensors."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True (a gradient of the gradient) needs the activations: use backprop='store' (of odeint: "
                "gradient='store')"
            )
        with self._lock, step.evaluation.context.settings.restore():
            self._check(step)
            index, inverts = step.position, not self._keeps(step.position)
            q, q_next = self._pair_behind(index)
            u, p, (g, gq, products) = step.retreat(q, q_next if inverts else None, gp, g, g_aux)
            self._at_hand = (index, (p, q)) if inverts else None
            if step.fingerprints:
                self._verify(step, q, u)
            products = self._placed(step, products)
            self._let_go(step)
            return g, gq, *products

    def _check(self, step: Step) -> None:
        if step.is_released:
            raise RuntimeError(
                "trying to go back through a reversible branch a second time, but what it kept was freed: call the first "
                "backward() with retain_graph=True"
            )
        step.evaluation.check_unchanged()

    def _pair_behind(self, index: int) -> Pair:
        """Return the pair behind the step at `index`: at hand, kept, or rebuilt from the next one without gradients."""
        start, pair = self._at_hand or (-1, None)
        self._at_hand = None
        if pair is None or start <= index:
            start = min((position for position in self.kept if position > index), default=-1)
            if start < 0:
                raise RuntimeError(
                    "the states behind a reversible branch were freed by an earlier backward pass: call that one with "
                    "retain_graph=True"
                )
            pair = self.kept[start]
            if self._versions.get(start, _versions_of(pair)) != _versions_of(pair):
                raise RuntimeError(
                    "a state of a reversible walk was modified in place between forward and backward: change a copy of it"
                )
            if pair[0].numel() >= _LARGE:
                self._reserve(index, start)
            if self.verifies:
                self._end = start, arrival.size(pair[0])
        for step in reversed(self.steps[index + 1 : start]):
            self._check(step)
            q, q_next = pair
            pair = step.rebuild(q, q_next), q
        return pair

    def _reserve(self, index: int, start: int) -> None:
        """Take memory for the small gradients of the steps from `index` down, if none was taken yet.

        Small tensors that live on, allocated between large ones that come and go, would pin the heap of a CPU: the process
        would grow with depth. Large ones live in pages of their own. Where states are small, too, nothing large comes and goes.
        """
        if any(position < start for position, _ in self._memory):
            return
        self._memory = {
            (step.position, number): torch.empty_like(tensor)
            for step in self.steps[self.first : index + 1]
            if not step.is_released
            for number, tensor in enumerate(step.parameters())
            if _pins_the_heap(tensor)
        }

    def _placed(self, step: Step, products: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return gradients; the small ones are copied to the memory that was taken for them."""
        if not self._memory:
            return products
        placed, copied = list(products), []
        for number, product in enumerate(products):
            memory = self._memory.pop((step.position, number), None)
            if memory is not None and product is not None and product.layout == torch.strided:
                placed[number] = memory
                copied.append((memory, product))
        if copied:
            torch._foreach_copy_([to for to, _ in copied], [product for _, product in copied])  # pyright: ignore[reportPrivateImportUsage]
        return placed

    def _let_go(self, step: Step) -> None:
        """Free what the walk back no longer needs, as autograd does: unless the graph is retained."""
        retained = _graph_is_retained()
        if not retained:
            step.release()
            self.kept.pop(step.position + 1, None)
        if step.position == self.first and self._layout is not None:
            self._drop()
            self._layout = self._layout if retained else None

    def _verify(self, step: Step, q: Tensor, u: Tensor | None) -> None:
        """Compare the first state of the walk back, and perhaps F of it, with that of forward."""
        assert self._end is not None
        context, then = step.evaluation.context, step.fingerprints
        arrived = [q] if len(then) == 1 or u is None else [q, u]
        stop, end = self._end
        exactly, dtype = context.grid is not None, q.dtype
        # Beside the states at the end, a first state of zeros is rebuilt to rounding only.
        floor = arrival.rounding(dtype, stop - step.position) * end
        floors = (floor, floor + 1e-6 * torch.linalg.vector_norm(then[0]))
        distances = torch.stack(
            [
                arrival.distance(arrival.fingerprint(tensor, exactly), known, tensor, smallest)
                for tensor, known, smallest in zip(arrived, then, floors, strict=False)
            ]
        )
        first, last = step.evaluation, self.steps[stop - 1].evaluation
        where = f"branches {first.index} to {last.index}"
        arrival.post(
            distances, lambda found: arrival.judge(found, dtype, exactly, where, lambda: not context.warns_of("drift"))
        )


_LARGE = 1024
"""The elements of a state from which on small gradients get memory of their own."""


def _pins_the_heap(tensor: Tensor) -> bool:
    """Return True if a tensor like this one lies between others on the heap of a CPU. (Devices keep small ones apart.)"""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
    return is_plain and tensor.numel() * tensor.element_size() < 1 << 17


def _bare(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _versions_of(pair: Pair) -> list[int | None]:
    return [None if tensor is None else version_of(tensor) for tensor in pair]


def entered(x: Tensor, grid: Any) -> Tensor:
    """Return x as it enters a walk: a copy, in the state's dtype and on the grid."""
    if not x.is_floating_point():
        raise ValueError(f"a state must be a floating-point tensor, got dtype {x.dtype}")
    if x.is_nested:
        raise ValueError(
            "a state must be one dense tensor, got a nested (jagged) one: pad it, and pass a mask to the branches"
        )
    if x.dtype in (torch.float16, torch.bfloat16) and Autocast(x.device.type).enabled:
        x = x.float()
    return x.clone() if grid is None else grid.round(x)


class _Node(torch.autograd.Function):
    """One step: it takes the pair and the tensors of its branch, and returns the pair and the branch's aux."""

    @staticmethod
    def forward(ctx: Any, path: Path, step: Step, p: Tensor | None, q: Tensor, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.path, ctx.step = path, step
        if step.is_planned:
            return path.placeholders()
        q_next, aux = path.advance(step, p, q)
        _mark_what_has_no_gradient(ctx, aux)
        return q[...], q_next, *aux

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        gp, g, *g_aux = grad_outputs
        retreat = eagerly(Path.retreat) if compilation_is_possible() else Path.retreat
        return None, None, *retreat(ctx.path, ctx.step, gp, g, g_aux)


class _End(torch.autograd.Function):
    """The end of a path: it returns the final pair, in place of placeholders if there are some, and saves the kept tensors."""

    @staticmethod
    def forward(ctx: Any, path: Path, state: State | None, p: Tensor, q: Tensor, *aux: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.path = path
        ctx.save_for_backward(*path.pack())
        _mark_what_has_no_gradient(ctx, aux)
        p, q = state or (p, q)
        return tuple(tensor[...] for tensor in (p, q, *aux))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        ctx.path.unpack(ctx.saved_tensors)
        return None, None, *grad_outputs


def _mark_what_has_no_gradient(ctx: Any, tensors: Sequence[Tensor]) -> None:
    without = [tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
    if without:
        ctx.mark_non_differentiable(*without)


def _graph_is_retained() -> bool:
    """Return True if this backward pass may be repeated (``retain_graph=True``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


class _Hidden:
    """Outputs that FSDP2's hooks do not see: they warn of views, and the first member of a pair is one."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs


def _inside_call(branch: nn.Module, run: Any, p: Tensor | None, q: Tensor) -> tuple[State, Any]:
    """Call `run` inside a call of `branch`, so that the module's hooks stay outside the new node.

    FSDP2's hooks gather the parameters before the call and before its backward. A shallow twin of the module is called, with
    its hooks and this ``forward``. The module itself, which other threads may call, is not changed.
    """
    twin = object.__new__(type(branch))
    twin.__dict__.update(vars(branch))

    def forward(p: Tensor | None, q_given: Tensor) -> Any:
        if q_given.dtype != q.dtype:
            raise BranchError(
                f"{type(branch).__name__} is sharded with a policy that casts the states from {q.dtype} to {q_given.dtype}: "
                "use MixedPrecisionPolicy() without param_dtype, and autocast"
            )
        (p, q_next), aux = run(p, q_given)
        return q_next, _Hidden(p, aux)

    twin.__dict__["forward"] = forward
    q_next, hidden = twin(p, q)
    return (hidden.outputs[0], q_next), hidden.outputs[1]
