"""Evaluating a branch a second time so that it computes what it computed the first time, and nothing else moves.

Around a branch these can differ between forward and backward: the autocast state, the random numbers it draws, the buffers
it updates, whether it is in training mode, which kernels torch is told to use. `Replay` records them in forward and puts them
back for the recomputation, in which running statistics stay where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from revode.engine.contents import Contents, Slot, collects_statistics, evaluating
from revode.engine.randomness import (
    Draws,
    Stream,
    Streams,
    can_replay,
    drawn_again,
    held_streams,
    undo,
)
from revode.engine.tracing import RefuseRandom, compilation_is_possible, holds_compiled

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

    def restore(self) -> contextlib.AbstractContextManager[Any]:
        if not self.enabled and not (self.available and torch.is_autocast_enabled(self.device_type)):
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
    slots = [slot for _, slots in collecting for slot in slots]
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


def call_traced(
    branch: nn.Module, q: Tensor, kwargs: dict[str, Any], parameters: dict[str, Tensor] | None = None
) -> Any:
    """branch(q) while torch.compile is tracing, on these parameters and on copies of the batch statistics it collects."""
    lent = dict(parameters or {})
    for prefix, module in branch.named_modules():
        if module.training and collects_statistics(module):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    lent[f"{prefix}.{name}" if prefix else name] = buffer.clone()
    return functional_call(branch, lent, (q,), kwargs) if lent else branch(q, **kwargs)


def call_traced_without_noise(branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
    """The same, refused if the branch draws random numbers."""
    with RefuseRandom():
        return call_traced(branch, q, kwargs)


def call_to_invert(contents: Contents, q: Tensor, kwargs: dict[str, Any], streams: Streams) -> Any:
    """branch(q) as forward computed it, leaving no trace; refused if it draws random numbers, which were not kept."""
    branch = contents.modules[0]
    with evaluating:
        watched = _streams_to_watch(contents, q.device, kwargs, streams)
        streams.before(watched)
        copies = _copies({slot.name: slot.tensor for slot in contents.buffers})
        with _lent([*_idle_statistics(contents), *((slot, copies[slot.name]) for slot in contents.buffers)]):
            u = branch(q, **kwargs)
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


def _call(branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
    return branch(q, **kwargs)


def _call_as_recomputed(contents: Contents, q: Tensor, kwargs: dict[str, Any], to_the_bit: bool) -> Any:
    """branch(q) in forward, by the very code that the recomputation will run.

    Some code is another with gradients than without; such a branch tracks them if its bits must be equal, and always where the
    code is known to differ. What was compiled on its own draws other random numbers in the two cases.
    """
    branch = contents.modules[0]
    compiled = compilation_is_possible() and holds_compiled(branch)
    if not (compiled or contents.minds_gradients or (to_the_bit and not contents.is_known)):
        return _call(branch, q, kwargs)
    # This graph goes with the call; hooks of the user, who may offload or count what is kept, have no business with it.
    # Detached, since a node that keeps its own output keeps itself.
    unseen = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    with torch.enable_grad(), contextlib.nullcontext() if compiled else unseen:
        u = _call(branch, torch.ops.aten.alias(q.detach().requires_grad_()), kwargs)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), u)


@dataclass(slots=True)
class _Record:
    """What one branch met in forward."""

    draws: Draws
    modes: list[bool]
    changed: dict[str, Tensor]
    """Buffers that the branch itself updates and may depend on, as they were before."""
    unchanged: list[tuple[Slot, Tensor, int | None]]
    """The other buffers it may depend on, with their versions."""


class Replay:
    """The record of one forward pass through some branches.

    Args:
        device: where the state lives.
        to_the_bit: whether every branch must give the bits that its recomputation will give.
        streams: the random streams along this walk.
    """

    def __init__(self, device: torch.device, to_the_bit: bool, streams: Streams) -> None:
        self.device = device
        self.to_the_bit = to_the_bit
        self.streams = streams
        self.autocast = Autocast(device.type)
        self.kernels = Kernels()
        self._records: dict[int, _Record] = {}

    def first(self, index: int, contents: Contents, q: Tensor, kwargs: dict[str, Any]) -> Any:
        """branch(q) in forward, with what it drew and changed written down."""
        with evaluating, self.autocast.restore(), _parametrized_anew():
            watched = _streams_to_watch(contents, self.device, kwargs, self.streams)
            self.streams.before(watched)
            held = [(slot, slot.tensor, version_of(slot.tensor)) for slot in contents.buffers_to_read()]
            copies = _copies({slot.name: slot.tensor for slot in contents.buffers if _is_copied(contents, slot)})
            u = _call_as_recomputed(contents, q, kwargs, self.to_the_bit)
            draws = self.streams.after(watched) if watched else []
            unchanged = [entry for entry in held if _rests(*entry, copies)]
            changed = self._changed(contents, copies, held, unchanged)
        self._records[index] = _Record(draws, contents.modes(), changed, unchanged)
        return u

    def _changed(
        self, contents: Contents, copies: dict[str, Tensor], held: Sequence[Any], unchanged: Sequence[Any]
    ) -> dict[str, Tensor]:
        """The buffers that the call has changed, as they were before; learns which of the large ones those are."""
        resting = {slot.name for slot, _, _ in unchanged}
        names = {slot.name for slot, _, _ in held} - resting
        unknown = names - copies.keys()
        contents.changing = (contents.changing or set()) | names
        if unknown:
            raise RuntimeError(
                f"it changed its buffer {sorted(unknown)[0]!r} for the first time after calls that did not, and no copy was "
                "kept: call the sequence again, it is watched from now on"
            )
        return {name: copies[name] for name in names}

    def again(
        self,
        index: int,
        contents: Contents,
        q: Tensor,
        kwargs: dict[str, Any],
        lent: dict[str, Tensor] | None,
    ) -> Any:
        """branch(q) as it was, tracking gradients as the caller does; nothing outside moves.

        Args:
            index: the branch.
            contents: what it holds.
            q: the state.
            kwargs: its keyword arguments.
            lent: tensors to use in place of its own parameters; None if its own will do.
        """
        branch = contents.modules[0]
        record = self._records.get(index)
        if record is None:
            # A field that knew its product in forward: it draws nothing, and its batch norms were in training.
            record = _Record([], [True] * len(contents.modules), {}, [])
        with evaluating, contextlib.ExitStack() as restored:
            if self.autocast.enabled or (self.autocast.available and torch.is_autocast_enabled(self.device.type)):
                restored.enter_context(self.autocast.restore())
            if parametrize._cache_enabled:
                restored.enter_context(_parametrized_anew())
            if contents.modes() != record.modes:
                restored.enter_context(_training_modes(contents, record.modes))
            tensors = self._tensors_to_lend(contents, record)
            if tensors:
                restored.enter_context(_lent(tensors))
            if record.draws:
                restored.enter_context(drawn_again(record.draws))
            return _recall(branch, q, kwargs, lent)

    def _tensors_to_lend(self, contents: Contents, record: _Record) -> list[tuple[Slot, Tensor | None]]:
        """What has to stand in the place of buffers, for a branch to see what it saw in forward."""
        tensors: list[tuple[Slot, Tensor | None]] = []
        for slot, buffer, version in record.unchanged:
            if version_of(buffer) != version:
                raise RuntimeError(f"its buffer {slot.name!r} was modified in place between forward and backward")
            if slot.tensor is not buffer:
                tensors.append((slot, buffer))
        if record.changed:
            copies = _copies(record.changed)
            tensors += [(slot, copies[slot.name]) for slot in contents.buffers if slot.name in copies]
        return tensors + _idle_statistics(contents) if contents.statistics else tensors


def _recall(branch: nn.Module, q: Tensor, kwargs: dict[str, Any], lent: dict[str, Tensor] | None) -> Any:
    return branch(q, **kwargs) if lent is None else functional_call(branch, lent, (q,), kwargs)


def _rests(slot: Slot, buffer: Tensor, version: int | None, copies: dict[str, Tensor]) -> bool:
    """Whether a buffer is what it was. ``buffer.data`` is written without a version, so a small one is compared; but on a CPU
    only, since elsewhere the answer has to be waited for (there the check at the end of the walk back tells)."""
    if slot.tensor is not buffer or version_of(buffer) != version:
        return False
    copy = copies.get(slot.name)
    return copy is None or buffer.device.type != "cpu" or torch.equal(buffer, copy)


def _is_copied(contents: Contents, slot: Slot) -> bool:
    return contents.changing is None or slot.tensor.numel() <= SMALL or slot.name in contents.changing
