"""Evaluating a branch a second time so that it computes what it computed the first time, and nothing else moves.

Around a branch these can differ between forward and backward: the autocast state, the random numbers it draws, the buffers
it updates, whether it is in training mode, which kernels torch is told to use. A `Record` keeps them in forward and puts them
back for the recomputation, in which running statistics stay where they are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from revode.engine.inspection import Contents, Slot, evaluating
from revode.engine.randomness import (
    Draws,
    Stream,
    Streams,
    can_replay,
    drawn_again,
    held_streams,
    undo,
)
from revode.engine.tracing import compilation_is_possible, holds_compiled

Call = Callable[[Tensor, dict[str, Any]], Any]
"""How to evaluate a branch: (q, kwargs) -> u."""
SMALL = 4096
"""Elements of a buffer that is copied before every call; a larger one only if calls are known to change it."""


class Autocast:
    """The autocast state of a device type at construction, to be entered again later.

    The weight cache is off inside: a cast made without gradient tracking must not be found by code that needs one.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.available = torch.amp.is_autocast_available(device_type)
        self.enabled = self.available and torch.is_autocast_enabled(device_type)
        self.dtype = torch.get_autocast_dtype(device_type) if self.available else torch.float32

    def compute_dtype(self, q: Tensor) -> torch.dtype:
        """What convolutions of q compute in."""
        return self.dtype if self.enabled and q.dtype != torch.float64 else q.dtype

    def differs(self) -> bool:
        """Return whether autocast has to be entered or left for a recomputation here and now."""
        return self.enabled or (self.available and torch.is_autocast_enabled(self.device_type))

    def restore(self) -> contextlib.AbstractContextManager[Any]:
        if not self.differs():
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)

    def disabled(self) -> contextlib.AbstractContextManager[Any]:
        """No autocast inside, whatever the backward pass is called under."""
        if not (self.available and torch.is_autocast_enabled(self.device_type)):
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, enabled=False)


_KERNEL_FLAGS = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),  # type: ignore[attr-defined]
)
"""Settings that choose between kernels of different bits, each with the function that sets it."""


class Kernels:
    """Which kernels torch was told to use at construction (``sdpa_kernel``, ``torch.backends.mkldnn.flags``)."""

    def __init__(self) -> None:
        self.flags = [read() for read, _ in _KERNEL_FLAGS]

    @contextlib.contextmanager
    def restore(self) -> Iterator[None]:
        outside = [read() for read, _ in _KERNEL_FLAGS]
        if outside == self.flags:
            yield
            return
        self._set(self.flags)
        try:
            yield
        finally:
            self._set(outside)

    def _set(self, flags: list[bool]) -> None:
        for (_, write), flag in zip(_KERNEL_FLAGS, flags, strict=True):
            write(flag)


_replaying = threading.local()


def is_replaying() -> bool:
    """Return whether this thread is recomputing a branch."""
    return getattr(_replaying, "depth", 0) > 0


def version_of(tensor: Tensor) -> int | None:
    """How often `tensor` was modified in place, if that is known."""
    if type(tensor) is UninitializedParameter:
        return None
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode
        return None


def _parametrized_anew() -> contextlib.AbstractContextManager[None]:
    """Parametrized weights are computed inside, whatever ``parametrize.cached`` says."""
    return _without_cache() if parametrize._cache_enabled else contextlib.nullcontext()


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Parametrized weights are computed inside: torch's cache of them (``parametrize.cached``) is neither filled nor read.

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
    """These tensors stand in the slots inside, and those that stood there do so afterwards."""
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
    """The modules of a branch in these modes inside, and as they were afterwards."""
    outside = contents.modes()
    if outside == modes:
        yield
        return
    _set_modes(contents.modules, modes)
    try:
        yield
    finally:
        _set_modes(contents.modules, outside)


def _set_modes(modules: list[nn.Module], modes: list[bool]) -> None:
    for module, mode in zip(modules, modes, strict=True):
        module.training = mode


def _idle_statistics(contents: Contents) -> list[tuple[Slot, Tensor | None]]:
    """What to lend in place of the running statistics that norms in training mode would update.

    They do not use them, so nothing will do; but a module that we do not know might look at them, and SyncBatchNorm does.
    """
    collecting = [(module, slots) for module, slots in contents.statistics if module.training]
    slots = [slot for _, slots in collecting for slot in slots if slot.tensor is not None]
    if contents.is_known and not any(isinstance(module, nn.SyncBatchNorm) for module, _ in collecting):
        return [(slot, None) for slot in slots]
    copies = _copies({slot.name: slot.tensor for slot in slots})
    return [(slot, copies[slot.name]) for slot in slots]


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies by name; what is one tensor under two names stays one."""
    copies: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.clone()
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def call_to_invert(contents: Contents, q: Tensor, kwargs: dict[str, Any], streams: Streams) -> Any:
    """Return branch(q) as forward computed it, and change nothing; raise if it draws random numbers, which were not kept."""
    with evaluating:
        watched = _streams_to_watch(contents, q.device, kwargs, streams)
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


def _streams_to_watch(
    contents: Contents, device: torch.device, kwargs: dict[str, Any], streams: Streams
) -> list[Stream]:
    """The streams that this call of a branch may move."""
    if contents.draws_only_from_torch() and not kwargs:
        if not contents.draws_from_torch():
            return []
        if not can_replay(device):
            raise ValueError(
                f"it draws random numbers on the device {str(device)!r}, and torch.{device.type} has no get_rng_state and "
                "set_rng_state to draw them again: use backprop='store'"
            )
        return streams.of_torch(device)
    given = held_streams(kwargs.values()) if kwargs else []
    return [*streams.of_all(device), *contents.generators, *given]


def _call_as_recomputed(contents: Contents, q: Tensor, kwargs: dict[str, Any], call: Call, to_the_bit: bool) -> Any:
    """Return branch(q) in forward, by the very code that the recomputation will run.

    Some code is another with gradients than without; such a branch tracks them if its bits must be equal, and always where the
    code is known to differ. What was compiled on its own draws other random numbers in the two cases.
    """
    compiled = compilation_is_possible() and holds_compiled(contents.branch)
    if not (compiled or contents.minds_gradients or (to_the_bit and not contents.is_known)):
        return call(q, kwargs)
    # Hide this temporary graph from the user's saved-tensor hooks. Detached: a node that keeps its own output keeps itself.
    hidden = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    with torch.enable_grad(), contextlib.nullcontext() if compiled else hidden:
        u = call(torch.ops.aten.alias(q.detach().requires_grad_()), kwargs)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), u)


class Record:
    """What one branch met in forward, and its replay.

    Args:
        contents: what the branch holds.
        autocast: the autocast state of the call.
        streams: the RNG states along this walk.
        to_the_bit: whether the branch must give the bits that its recomputation will give.
    """

    __slots__ = ("autocast", "changed", "contents", "draws", "modes", "streams", "to_the_bit", "unchanged")

    def __init__(self, contents: Contents, autocast: Autocast, streams: Streams, to_the_bit: bool) -> None:
        self.contents = contents
        self.autocast = autocast
        self.streams = streams
        self.to_the_bit = to_the_bit
        # Until `first` runs: a field that knew its VJP in forward. It draws nothing, and its batch norms were in training.
        self.draws: Draws = []
        self.modes = [True] * len(contents.modules)
        self.changed: dict[str, Tensor] = {}
        """Buffers that the branch itself updates and may depend on, as they were before."""
        self.unchanged: list[tuple[Slot, Tensor, int | None]] = []
        """The other buffers it may depend on, with their versions."""

    def first(self, q: Tensor, kwargs: dict[str, Any], call: Call) -> Any:
        """Return branch(q) = call(q, kwargs) in forward; record its RNG states and the buffers it changed."""
        contents, streams = self.contents, self.streams
        with evaluating, self.autocast.restore(), _parametrized_anew():
            watched = _streams_to_watch(contents, q.device, kwargs, streams)
            streams.before(watched)
            held = [(slot, slot.tensor, version_of(slot.tensor)) for slot in contents.buffers_to_read()]
            copies = _copies({slot.name: slot.tensor for slot in contents.buffers if _is_copied(contents, slot)})
            u = _call_as_recomputed(contents, q, kwargs, call, self.to_the_bit)
            self.draws = streams.after(watched) if watched else []
            self.unchanged = [entry for entry in held if _rests(*entry, copies)]
            self.changed = self._changed(copies, held)
            self.modes = contents.modes()
        return u

    def _changed(self, copies: dict[str, Tensor], held: Sequence[Any]) -> dict[str, Tensor]:
        """Return the buffers that the call has changed, as they were before; learn which of the large ones those are."""
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
        """Return branch(q) as it was, tracking gradients as the caller does; nothing outside moves.

        Args:
            q: the state.
            kwargs: its keyword arguments.
            call: how to call the branch: (q, kwargs) -> u.
            lent: tensors to use in place of its own parameters; None if its own will do.
        """
        contents = self.contents
        with evaluating, contextlib.ExitStack() as restored:
            if self.autocast.differs():
                restored.enter_context(self.autocast.restore())
            if parametrize._cache_enabled:
                restored.enter_context(_parametrized_anew())
            if contents.modes() != self.modes:
                restored.enter_context(_training_modes(contents, self.modes))
            tensors = self._tensors_to_lend()
            if tensors:
                restored.enter_context(_lent(tensors))
            if self.draws:
                restored.enter_context(drawn_again(self.draws))
            _replaying.depth = getattr(_replaying, "depth", 0) + 1
            restored.callback(lambda: setattr(_replaying, "depth", _replaying.depth - 1))
            return _recall(contents.branch, call, q, kwargs, lent)

    def _tensors_to_lend(self) -> list[tuple[Slot, Tensor | None]]:
        """Return what has to stand in the place of buffers, for a branch to see what it saw in forward."""
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
    """Whether a buffer is what it was. ``buffer.data`` is written without a version, so a small one is compared; but on a CPU
    only, since elsewhere the answer has to be waited for (there the check at the end of the walk back tells)."""
    if slot.tensor is not buffer or version_of(buffer) != version:
        return False
    copy = copies.get(slot.name)
    return copy is None or buffer.device.type != "cpu" or torch.equal(buffer, copy)


def _is_copied(contents: Contents, slot: Slot) -> bool:
    return contents.changing is None or slot.tensor.numel() <= SMALL or slot.name in contents.changing
