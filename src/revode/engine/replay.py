"""Recompute a branch so that it gives the same value again, and nothing outside changes.

Around a branch these can differ between forward and backward: the autocast state, random numbers, the buffers it updates, and
training mode. A `Record` keeps them in forward and restores them for the recomputation. (Settings of torch: see ``call``.)
Running statistics stay where they are.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from revode.engine.call import version_of
from revode.engine.inspection import Contents, Slot, evaluating
from revode.engine.randomness import (
    Draws,
    Stream,
    can_replay,
    drawn_again,
    held_streams,
    undo,
)

Call = Callable[[Tensor, dict[str, Any]], Any]
"""Evaluation of a branch: (q, kwargs) -> u."""
SMALL = 4096
"""Elements of a buffer that is copied before every call; a larger one only if calls are known to change it."""


class _Calls(threading.local):
    """The calls of branches on this thread."""

    def __init__(self) -> None:
        self.stack: list[tuple[Record, Iterator[Tensor] | None]] = []
        """Records of the branches under evaluation, each with the kept values left to read; None in forward."""


_calls = _Calls()


def is_replaying() -> bool:
    """Return True if this thread is recomputing a branch."""
    return any(kept is not None for _, kept in _calls.stack)


def keep(value: Any) -> Any:
    """Keep a tensor inside a branch, and return the kept one in the branch's recomputation.

    Use it for decisions that must not be taken twice, such as the experts that a router chooses among equals. Use it also for
    kernels whose results differ from run to run. Gradients pass through. Kept tensors cost memory, which `revode.memory`
    counts.

    >>> class Router(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.scores, self.experts = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4, 4))
    ...     def forward(self, x):
    ...         weights = self.scores(x).softmax(-1)
    ...         chosen = keep(weights.argmax(-1))
    ...         return torch.einsum("bi,bij->bj", x, self.experts[chosen]) * weights.gather(1, chosen[:, None])
    >>> ReversibleSequence([Router(), Router()], MidPoint(h=0.1))(torch.randn(2, 4)).sum().backward()

    Args:
        value: a tensor, or a nest of dicts, lists and tuples with tensors. Outside a reversible branch it is returned as it is.
    """
    return pytree.tree_map_only(Tensor, _keep, value)


def _keep(x: Tensor) -> Tensor:
    for record, left in _calls.stack:
        if left is None:
            record.kept.append(x.detach())
            continue
        value = next(left, None)
        if value is None or (value.shape != x.shape and x.requires_grad):
            raise RuntimeError(
                "the recomputation calls revode.keep more often, or on other shapes, than forward: keep what decides it, too"
            )
        x = _Kept.apply(x, value) if x.requires_grad and torch.is_grad_enabled() else value.detach()  # type: ignore[assignment]
    return x


class _Kept(torch.autograd.Function):
    """The value that was kept, with the gradient of the one that was computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor) -> Tensor:
        return kept.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0], None


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Compute parametrized weights anew inside, past torch's cache of them (``parametrize.cached``).

    A weight computed without gradients must not be found by code that needs one.
    """
    enabled = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        parametrize._cache_enabled = enabled


@contextlib.contextmanager
def _lent(tensors: list[tuple[Slot, Tensor | None]]) -> Iterator[None]:
    """Put these tensors into the slots inside, and the old ones back afterwards."""
    outside = [(slot, slot.tensor) for slot, _ in tensors]
    for slot, tensor in tensors:
        slot.home[slot.key] = tensor
    try:
        yield
    finally:
        for slot, tensor in outside:
            slot.home[slot.key] = tensor


@contextlib.contextmanager
def _training_modes(contents: Contents, modes: list[bool]) -> Iterator[None]:
    """Set the modules of a branch to these modes inside, and back afterwards."""
    outside = contents.modes()
    _set_modes(contents.modules, modes)
    try:
        yield
    finally:
        _set_modes(contents.modules, outside)


def _set_modes(modules: list[nn.Module], modes: list[bool]) -> None:
    for module, mode in zip(modules, modes, strict=True):
        module.training = mode


def _idle_statistics(contents: Contents) -> list[tuple[Slot, Tensor | None]]:
    """Return stand-ins for the running statistics that norms in training mode would update.

    These norms do not use them, so any would do; but a module of an unknown class might look at them, and SyncBatchNorm does.
    """
    collecting = [(module, slots) for module, slots in contents.statistics if module.training]
    slots = [slot for _, slots in collecting for slot in slots if slot.tensor is not None]
    if contents.is_known and not any(isinstance(module, nn.SyncBatchNorm) for module, _ in collecting):
        return [(slot, None) for slot in slots]
    copies = _copies({slot.name: slot.tensor for slot in slots})
    return [(slot, copies[slot.name]) for slot in slots]


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies by name; one tensor under two names stays one."""
    copies: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.clone()
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def call_to_invert(contents: Contents, q: Tensor, kwargs: dict[str, Any], context: Any) -> Any:
    """Return branch(q) as forward computed it, and change nothing; raise if it draws random numbers, which were not kept."""
    with evaluating:
        watched, streams = _streams_to_watch(contents, q, kwargs, context), context.streams
        streams.before(watched)
        copies = _copies({slot.name: slot.tensor for slot in contents.buffers})
        with _lent([*_idle_statistics(contents), *((slot, copies[slot.name]) for slot in contents.buffers)]):
            u = contents.branch(q, **kwargs)
        draws = streams.after(watched)
    if draws:
        undo(draws)
        raise ValueError(
            "it draws random numbers (dropout in training mode?), and inverse() does not know those of forward; "
            "call eval() before forward and inverse"
        )
    return u


def _streams_to_watch(contents: Contents, q: Tensor, kwargs: dict[str, Any], context: Any) -> list[Stream]:
    """Return the RNGs that this call of a branch may move. (Fake tensors draw nothing, and have no RNG state.)"""
    if isinstance(q, FakeTensor):
        return []
    device = q.device
    if contents.draws_only_from_torch() and not kwargs:
        if not contents.draws_from_torch():
            return []
        if not can_replay(device):
            raise ValueError(
                f"it draws random numbers on the device {str(device)!r}, and torch.{device.type} has no get_rng_state and "
                "set_rng_state to draw them again: use backprop='store'"
            )
        return context.streams.of_torch(device)
    given = held_streams(kwargs.values()) if kwargs else []
    return [*context.streams.of_all(device), *contents.generators, *given]


def _call_as_recomputed(
    contents: Contents, q: Tensor, kwargs: dict[str, Any], call: Call, to_the_bit: bool, recomputed: bool
) -> Any:
    """Return branch(q) in forward, by the very code that the recomputation will run.

    Some code is another with gradients than without. Such a branch tracks them if its bits must be equal, and always where the
    code is known to differ. Separately compiled code draws other random numbers in the two cases.
    """
    compiled = contents.is_compiled
    if not (compiled or contents.minds_gradients or (to_the_bit and not contents.is_known)) or not recomputed:
        return call(q, kwargs)
    # Hide this temporary graph from the user's saved-tensor hooks. Detached: a node that keeps its own output keeps itself.
    hidden = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    with torch.enable_grad(), contextlib.nullcontext() if compiled else hidden:
        u = call(q.detach().requires_grad_()[...], kwargs)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), u)


class Record:
    """The RNG states, buffers and modes of one branch in forward, and its replay."""

    __slots__ = ("cached", "changed", "contents", "context", "draws", "kept", "modes", "unchanged")

    def __init__(self, contents: Contents, context: Any) -> None:
        self.contents = contents
        self.context = context
        # Until `first` runs: a field that knew its VJP in forward. It draws nothing, and its batch norms were in training.
        self.draws: Draws = []
        self.kept: list[Tensor] = []
        """The tensors that the branch gave to ``keep``, in its order."""
        self.cached: list[weakref.ref[Tensor]] = []
        """Tensors that the call has left on the branch's modules."""
        self.modes = [True] * len(contents.modules)
        self.changed: dict[str, Tensor] = {}
        """Buffers that the branch itself updates and may depend on, as they were before."""
        self.unchanged: list[tuple[Slot, Tensor, int | None]] = []
        """The other buffers it may depend on, with their versions."""

    def first(self, q: Tensor, kwargs: dict[str, Any], call: Call, recomputed: bool = True) -> Any:
        """Return branch(q) = call(q, kwargs) in forward; record its RNG states and the buffers it changed.

        `recomputed` is False if nothing that reaches the branch has a gradient, so that it is never evaluated again.
        """
        contents, context, stack = self.contents, self.context, _calls.stack
        with evaluating, self._surroundings():
            watched = _streams_to_watch(contents, q, kwargs, context)
            if watched:
                context.streams.before(watched)
            held, copies = self._look_at_buffers() if contents.holds_state else ([], {})
            attributes = [] if contents.is_known else contents.held()
            stack.append((self, None))
            try:
                u = _call_as_recomputed(contents, q, kwargs, call, context.grid is not None, recomputed)
            finally:
                stack.pop()
            if not contents.is_known and contents.held() != attributes:
                before = set(itertools.chain.from_iterable(attributes))
                left = contents.tensors_held()
                self.cached = [weakref.ref(tensor) for key, tensor in left.items() if key not in before]
            self.draws = context.streams.after(watched) if watched else []
            if contents.holds_state:
                self.unchanged = [entry for entry in held if _rests(*entry, copies)]
                self.changed = self._changed(copies, held)
            self.modes = contents.modes()
        return u

    def _surroundings(self) -> contextlib.AbstractContextManager[Any]:
        """Restore the autocast state of forward inside, and compute parametrized weights anew."""
        autocast = self.context.autocast
        if not parametrize._cache_enabled:
            return autocast.restore() if autocast.differs() else _NOTHING
        both = contextlib.ExitStack()
        both.enter_context(autocast.restore())
        both.enter_context(_without_cache())
        return both

    def _look_at_buffers(self) -> tuple[list[tuple[Slot, Tensor, int | None]], dict[str, Tensor]]:
        """Return the buffers that a call may depend on with their versions, and copies of those that it may change."""
        contents = self.contents
        held = [(slot, slot.tensor, version_of(slot.tensor)) for slot in contents.buffers_to_read()]
        return held, _copies({slot.name: slot.tensor for slot in contents.buffers if _is_copied(contents, slot)})

    def _changed(self, copies: dict[str, Tensor], held: Sequence[Any]) -> dict[str, Tensor]:
        """Return the changed buffers as they were before; learn which of the large ones calls change."""
        resting = {slot.name for slot, _, _ in self.unchanged}
        names = {slot.name for slot, _, _ in held} - resting
        unknown = names - copies.keys()
        self.contents.changing = (self.contents.changing or set()) | names
        if unknown:
            raise RuntimeError(
                f"it changed its buffer {sorted(unknown)[0]!r} for the first time after calls that did not, and no copy was "
                "kept: call the sequence again, it is watched from now on"
            )
        return {name: copies[name] for name in names}

    def again(self, q: Tensor, kwargs: dict[str, Any], call: Call, lent: dict[str, Tensor] | None) -> Any:
        """Return branch(q) as it was, tracking gradients as the caller does; nothing outside changes.

        `lent` has tensors to use in place of the branch's own parameters, or None.
        """
        contents, left, stack = self.contents, iter(self.kept), _calls.stack
        with (
            evaluating,
            self._surroundings(),
            _NOTHING if contents.modes() == self.modes else _training_modes(contents, self.modes),
            _lent(self._tensors_to_lend()) if contents.holds_state else _NOTHING,
            drawn_again(self.draws) if self.draws else _NOTHING,
        ):
            stack.append((self, left))
            try:
                u = _recall(contents.branch, call, q, kwargs, lent)
            finally:
                stack.pop()
        if next(left, None) is not None:
            raise RuntimeError(
                "the recomputation calls revode.keep less often than forward did: keep what decides it, too"
            )
        return u

    def reads_a_cache(self) -> bool:
        """Return True if tensors that forward left on the branch's modules are still there after a recomputation."""
        return bool(self.cached) and {id(held()) for held in self.cached} <= self.contents.tensors_held().keys()

    def _tensors_to_lend(self) -> list[tuple[Slot, Tensor | None]]:
        """Return the tensors that must stand in the place of buffers in a recomputation."""
        tensors: list[tuple[Slot, Tensor | None]] = []
        for slot, buffer, version in self.unchanged:
            if version_of(buffer) != version:
                raise RuntimeError(f"its buffer {slot.name!r} was modified in place between forward and backward")
            if slot.tensor is not buffer:
                tensors.append((slot, buffer))
        if self.changed:
            copies = _copies(self.changed)
            tensors += [(slot, copies[slot.name]) for slot in self.contents.buffers if slot.name in copies]
        return tensors + _idle_statistics(self.contents)


def _recall(branch: nn.Module, call: Call, q: Tensor, kwargs: dict[str, Any], lent: dict[str, Tensor] | None) -> Any:
    if lent is None:
        return call(q, kwargs)
    with _reparametrize_module(branch, lent, tie_weights=True):
        return call(q, kwargs)


def _rests(slot: Slot, buffer: Tensor, version: int | None, copies: dict[str, Tensor]) -> bool:
    """Return True if a buffer is unchanged. ``buffer.data`` has no version, so on a CPU a small buffer is compared. Elsewhere
    the comparison would wait for the device, and the check at the end of the walk back tells.
    """
    if slot.tensor is not buffer or version_of(buffer) != version:
        return False
    copy = copies.get(slot.name)
    return copy is None or buffer.device.type != "cpu" or torch.equal(buffer, copy)


def _is_copied(contents: Contents, slot: Slot) -> bool:
    return contents.changing is None or slot.tensor.numel() <= SMALL or slot.name in contents.changing
