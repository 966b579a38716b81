"""Evaluating a branch a second time so that it computes what it computed the first time, and nothing else moves.

Around a branch these can differ between forward and backward: the autocast state, the random numbers it draws, the buffers
it updates, and whether it is in training mode. `Replay` records them in forward and puts them back for the recomputation,
which runs on the parameters of the forward pass, given as fresh leaves, and on copies of the buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from revode.engine.randomness import Draw
from revode.engine.tracing import RefuseRandom, dynamo_is_about, eagerly, holds_compiled, refuse_random_nodes

_STATISTICS_ONLY = {_BatchNorm.forward, SyncBatchNorm.forward, _InstanceNorm.forward}
"""Forwards whose output in training mode does not depend on the buffers they update."""


_MIND_GRADIENTS = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that take other kernels, which give other bits, where no gradient is wanted."""


class Autocast:
    """The autocast state of a device type at construction, to be entered again later.

    The weight cache is off inside: a cast made without gradient tracking must not be found by code that needs one.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.enabled = torch.is_autocast_enabled(device_type)
        self.dtype = torch.get_autocast_dtype(device_type)

    def compute_dtype(self, q: Tensor) -> torch.dtype:
        """What convolutions of q compute in."""
        return self.dtype if self.enabled and q.dtype != torch.float64 else q.dtype

    def restore(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)

    def disabled(self) -> contextlib.AbstractContextManager[Any]:
        """No autocast inside, whatever the backward pass is called under."""
        if not torch.is_autocast_enabled(self.device_type):
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, enabled=False)


def version_of(tensor: Tensor) -> int | None:
    """How often `tensor` was modified in place, if that is known."""
    return None if tensor.is_inference() else tensor._version


def _buffers(branch: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The buffers of `branch` by name: batch statistics being collected, such only being read, and all others."""
    collected, read, others = {}, {}, {}
    for prefix, module in branch.named_modules():
        norm = type(module).forward in _STATISTICS_ONLY
        kind = others if not norm else collected if module.training else read
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kind[f"{prefix}.{name}" if prefix else name] = buffer
    return collected, read, others


def _clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies by name; what is one tensor under two names stays one."""
    copies = {id(tensor): tensor.clone() for tensor in {id(t): t for t in tensors.values()}.values()}
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


@contextlib.contextmanager
def _parametrized_anew() -> Iterator[None]:
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
def _training_modes(branch: nn.Module, modes: list[bool]) -> Iterator[None]:
    """The modules of `branch` in these modes inside, and as they were afterwards."""
    modules = list(branch.modules())
    outside = [module.training for module in modules]
    if outside == modes:
        yield
        return
    _set_modes(modules, modes)
    try:
        yield
    finally:
        _set_modes(modules, outside)


def _set_modes(modules: list[nn.Module], modes: list[bool]) -> None:
    for module, mode in zip(modules, modes, strict=True):
        module.training = mode


def call_without_trace(
    branch: nn.Module, q: Tensor, kwargs: dict[str, Any], tensors: dict[str, Tensor] | None = None
) -> Any:
    """branch(q) on `tensors` in place of its parameters and buffers, and on copies of its batch statistics."""
    collected, _, _ = _buffers(branch)
    instead = _clones(collected) | (tensors or {})
    return functional_call(branch, instead, (q,), kwargs) if instead else branch(q, **kwargs)


def call_to_invert(branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
    """branch(q) as forward computed it, leaving no trace; refused if it draws random numbers, which nobody has kept."""
    if torch.compiler.is_compiling():
        with RefuseRandom():
            return call_without_trace(branch, q, kwargs)
    _, _, others = _buffers(branch)
    draw = Draw(branch, q.device, pytree.tree_leaves(kwargs))
    u = call_without_trace(branch, q, kwargs, _clones(others))
    draw.close()
    if draw:
        draw.undo()
        raise ValueError(
            "it draws random numbers (dropout in training mode?), and inverse() does not know those of forward; "
            "call eval() before forward and inverse"
        )
    return u


def _call(branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
    return branch(q, **kwargs)


def _call_as_recomputed(branch: nn.Module, q: Tensor, kwargs: dict[str, Any], to_the_bit: bool) -> Any:
    """branch(q) in forward, by the very code that the recomputation will run.

    Compiled code draws other random numbers than eager code, so when dynamo is about, frames are not compiled behind our back.
    Some code is another with gradients than without; such a branch, and any one whose bits must be equal, tracks them.
    """
    compiled = dynamo_is_about() and holds_compiled(branch)
    call = eagerly(_call) if dynamo_is_about() and not compiled else _call
    if not (compiled or to_the_bit or any(isinstance(module, _MIND_GRADIENTS) for module in branch.modules())):
        return call(branch, q, kwargs)
    # This graph goes with the call; hooks of the user, who may offload or count what is kept, have no business with it.
    # Detached, since a node that keeps its own output keeps itself.
    unseen = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    with torch.enable_grad(), contextlib.nullcontext() if compiled else unseen:
        u = call(branch, torch.ops.aten.alias(q.detach().requires_grad_()), kwargs)
    return u.detach() if isinstance(u, Tensor) else u


@dataclass
class _Record:
    """What one branch met in forward."""

    draw: Draw
    modes: list[bool]
    changed: dict[str, Tensor]
    """Buffers that the branch itself updates and may depend on, as they were before."""
    unchanged: dict[str, tuple[Tensor, int | None]]
    """The other buffers it may depend on, with their versions."""


class Replay:
    """The record of one forward pass through some branches.

    Args:
        device: where the state lives.
        to_the_bit: whether every branch must give the bits that its recomputation will give.
        seen: the states of random streams that were last met in this call (see `Draw`).
    """

    def __init__(self, device: torch.device, to_the_bit: bool, seen: dict[Hashable, Any]) -> None:
        self.device = device
        self.to_the_bit = to_the_bit
        self.seen = seen
        self.autocast = Autocast(device.type)
        self._records: dict[int, _Record] = {}

    def first(self, index: int, branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
        """branch(q) in forward, with what it drew and changed written down."""
        if torch.compiler.is_compiling():
            with RefuseRandom():
                u = branch(q, **kwargs)
            refuse_random_nodes()
            return u
        _, read, others = _buffers(branch)
        copies = _clones(read | others)
        before = {name: (buffer, version_of(buffer)) for name, buffer in (read | others).items()}
        draw = Draw(branch, self.device, pytree.tree_leaves(kwargs), self.seen)
        with self.autocast.restore(), _parametrized_anew():
            u = _call_as_recomputed(branch, q, kwargs, self.to_the_bit)
        draw.close()
        after = {name: buffer for kind in _buffers(branch) for name, buffer in kind.items()}
        kept = {
            name: (buffer, version)
            for name, (buffer, version) in before.items()
            if after.get(name) is buffer
            and version_of(buffer) == version
            and (name in read or torch.equal(buffer, copies[name]))  # ``buffer.data`` is written without a version
        }
        changed = {name: copy for name, copy in copies.items() if name not in kept}
        self._records[index] = _Record(draw, [module.training for module in branch.modules()], changed, kept)
        return u

    def again(
        self, index: int, branch: nn.Module, q: Tensor, kwargs: dict[str, Any], parameters: dict[str, Tensor]
    ) -> Any:
        """branch(q) as it was, on these parameters, tracking gradients as the caller does; nothing outside moves."""
        if torch.compiler.is_compiling():
            with self.autocast.restore():
                return call_without_trace(branch, q, kwargs, parameters)
        with self.autocast.restore(), _parametrized_anew():
            record = self._records.get(index)
            if record is None:
                # A field that knew its product in forward: it draws nothing, and its batch norms were in training.
                with _training_modes(branch, [True] * sum(1 for _ in branch.modules())):
                    return call_without_trace(branch, q, kwargs, parameters)
            for name, (buffer, version) in record.unchanged.items():
                if version_of(buffer) != version:
                    raise RuntimeError(f"its buffer {name!r} was modified in place between forward and backward")
            tensors = parameters | {name: buffer for name, (buffer, _) in record.unchanged.items()}
            tensors |= _clones(record.changed)
            call = eagerly(call_without_trace) if dynamo_is_about() else call_without_trace
            with record.draw.again(), _training_modes(branch, record.modes):
                return call(branch, q, kwargs, tensors)
