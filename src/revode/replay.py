"""Evaluating a branch a second time so that it computes what it computed the first time, and nothing else moves.

Three things around a branch can differ between forward and backward: the autocast state, the random numbers it draws, and
the buffers it updates. `Replay` records them in forward and puts them back for the recomputation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase


class Autocast:
    """The autocast state of a device type at construction, to be entered again later.

    The weight cache is off inside: a cast made without gradient tracking must not be found by code that needs one.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.enabled = torch.is_autocast_enabled(device_type)
        self.dtype = torch.get_autocast_dtype(device_type)

    def restore(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """The state of every generator that a branch on `device` draws from by default."""
    if device.type == "cuda":
        return torch.get_rng_state(), torch.cuda.get_rng_state(device)
    if device.type == "mps":
        return torch.get_rng_state(), torch.mps.get_rng_state()
    return (torch.get_rng_state(),)


def set_random_state(device: torch.device, state: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state[1])


@contextlib.contextmanager
def _random_numbers(device: torch.device, state: tuple[Tensor, ...] | None) -> Iterator[None]:
    """Draw from `state` inside, and leave the global stream as it was."""
    if state is None:
        yield
        return
    outside = random_state(device)
    set_random_state(device, state)
    try:
        yield
    finally:
        set_random_state(device, outside)


def training_buffers(branch: nn.Module) -> dict[str, Tensor]:
    """The buffers that a training-mode forward of `branch` may update, by qualified name."""
    found = {}
    for prefix, module in branch.named_modules():
        if module.training and module._buffers:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _steering_buffers(branch: nn.Module, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of `buffers` that may influence the output in training mode: all but batch statistics."""
    return {
        name: buffer
        for name, buffer in buffers.items()
        if not isinstance(branch.get_submodule(name.rpartition(".")[0]), _NormBase)
    }


def call_preserving_buffers(branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
    """branch(q) on copies of its buffers, so that running statistics stay where they are."""
    buffers = training_buffers(branch)
    if not buffers:
        return branch(q, **kwargs)
    copies = {name: buffer.clone() for name, buffer in buffers.items()}
    return functional_call(branch, copies, (q,), kwargs)


class Replay:
    """The record of one forward pass through some branches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.autocast = Autocast(device.type)
        self.random: dict[int, tuple[Tensor, ...]] = {}
        self.buffers: dict[int, dict[str, Tensor]] = {}

    def first(self, index: int, branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
        """branch(q) in forward, with what it drew and changed written down."""
        if torch.compiler.is_compiling():
            return branch(q, **kwargs)
        steering = _steering_buffers(branch, training_buffers(branch))
        before = {name: (buffer._version, buffer.clone()) for name, buffer in steering.items()}
        drawn = random_state(self.device)
        with self.autocast.restore():
            u = branch(q, **kwargs)
        if any(not torch.equal(a, b) for a, b in zip(drawn, random_state(self.device), strict=True)):
            self.random[index] = drawn
        changed = {name: copy for name, (version, copy) in before.items() if steering[name]._version != version}
        if changed:
            self.buffers[index] = changed
        return u

    def again(self, index: int, branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
        """branch(q) as it was, with gradient tracking as the caller has it; buffers and generators stay untouched."""
        with self.autocast.restore(), _random_numbers(self.device, self.random.get(index)):
            if index in self.buffers:
                buffers = {name: buffer.clone() for name, buffer in training_buffers(branch).items()}
                buffers |= {name: copy.clone() for name, copy in self.buffers[index].items()}
                return functional_call(branch, buffers, (q,), kwargs)
            return call_preserving_buffers(branch, q, kwargs)
