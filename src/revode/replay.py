"""Evaluating a branch a second time so that it computes what it computed the first time, and nothing else moves.

Three things around a branch can differ between forward and backward: the autocast state, the random numbers it draws, and
the buffers it updates. `Replay` records them in forward and puts them back for the recomputation.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode


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


def call_preserving_buffers(
    branch: nn.Module, q: Tensor, kwargs: dict[str, Any], instead: dict[str, Tensor] | None = None
) -> Any:
    """branch(q) on copies of its buffers, so that running statistics stay where they are; on `instead` where given."""
    buffers = training_buffers(branch) | (instead or {})
    if not buffers:
        return branch(q, **kwargs)
    copies = {name: buffer.clone() for name, buffer in buffers.items()}
    return functional_call(branch, copies, (q,), kwargs)


def _named(names: str, owner: Any) -> set[Any]:
    return {getattr(owner, name) for name in names.split() if hasattr(owner, name)}


_ALWAYS_RANDOM = (
    _named(
        "rand randn randint randperm normal bernoulli multinomial poisson binomial rand_like randn_like randint_like "
        "native_dropout",
        torch,
    )
    | _named(
        "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_ uniform_",
        torch.Tensor,
    )
    | _named("gumbel_softmax fractional_max_pool2d fractional_max_pool3d", nn.functional)
)
_DROPOUTS = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"
_DROPOUTS_IN_TRAINING = _named(_DROPOUTS, nn.functional) | _named(
    "dropout dropout_ alpha_dropout feature_dropout", torch
)
_RRELU_IN_TRAINING = _named("rrelu rrelu_", nn.functional) | _named("rrelu rrelu_", torch)


def _argument(place: int, name: str, default: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _draws(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers."""
    if function in _DROPOUTS_IN_TRAINING:
        name = "train" if function in (torch.dropout, torch.feature_dropout) else "training"
        return bool(_argument(2, name, True, args, kwargs))
    if function in _RRELU_IN_TRAINING:
        return bool(_argument(3, "training", False, args, kwargs))
    if function is nn.functional.scaled_dot_product_attention:
        return _argument(4, "dropout_p", 0.0, args, kwargs) > 0.0
    if function is nn.functional.multi_head_attention_forward:
        training = _argument(13, "training", True, args, kwargs)
        return bool(training) and _argument(10, "dropout_p", 0.0, args, kwargs) > 0.0
    return function in _ALWAYS_RANDOM


class RefuseRandom(TorchFunctionMode):
    """Stop tracing, with an error, at a call that draws random numbers: a compiled graph would draw others in backward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _draws(func, args, kwargs):
            _refuse_random()
        return func(*args, **kwargs)


def _refuse_random() -> None:
    raise ValueError(
        "a branch draws random numbers (dropout?), which a reversible sequence compiled as a whole cannot draw again in "
        "backward: compile the branches themselves (torch.compile(branch)), or build it with backprop='store'"
    )


def allow_tracing() -> bool:
    """Let dynamo trace ``torch.autograd.grad``, which the engine's backward calls; runs while dynamo is tracing."""
    torch._dynamo.config.trace_autograd_ops = True  # type: ignore[attr-defined]
    return True


# Dynamo runs these two for real while it traces. It is what torch.compiler.assume_constant_result does, without importing
# dynamo for everyone.
allow_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]
_refuse_random._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _holds_compiled(branch: nn.Module) -> bool:
    """Whether `branch`, or something in it, was compiled on its own."""
    from torch._dynamo import OptimizedModule

    return any(
        isinstance(module, OptimizedModule) or module._compiled_call_impl is not None for module in branch.modules()
    )


def _call(branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
    return branch(q, **kwargs)


@functools.cache
def _eagerly(function: Any) -> Any:
    """`function`, whose frames dynamo leaves alone (what was compiled on its own still runs compiled)."""
    return torch.compiler.disable(function)


def _call_as_recomputed(branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
    """branch(q) in forward, by the very code that the recomputation will run.

    Compiled code draws other random numbers than eager code, and compiled without gradients other ones than with them. So
    when dynamo is about, frames are not compiled behind our back, and a branch compiled on its own tracks gradients.
    """
    if "torch._dynamo" not in sys.modules:
        return branch(q, **kwargs)
    if not _holds_compiled(branch):
        return _eagerly(_call)(branch, q, kwargs)
    with torch.enable_grad():
        return branch(q.detach().requires_grad_(), **kwargs).detach()


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
            with RefuseRandom():
                return branch(q, **kwargs)
        steering = _steering_buffers(branch, training_buffers(branch))
        before = {name: (buffer._version, buffer.clone()) for name, buffer in steering.items()}
        drawn = random_state(self.device)
        with self.autocast.restore():
            u = _call_as_recomputed(branch, q, kwargs)
        if any(not torch.equal(a, b) for a, b in zip(drawn, random_state(self.device), strict=True)):
            self.random[index] = drawn
        changed = {name: copy for name, (version, copy) in before.items() if steering[name]._version != version}
        if changed:
            self.buffers[index] = changed
        return u

    def again(self, index: int, branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Any:
        """branch(q) as it was, with gradient tracking as the caller has it; buffers and generators stay untouched."""
        with self.autocast.restore():
            if torch.compiler.is_compiling():
                return call_preserving_buffers(branch, q, kwargs)
            call = _eagerly(call_preserving_buffers) if "torch._dynamo" in sys.modules else call_preserving_buffers
            with _random_numbers(self.device, self.random.get(index)):
                return call(branch, q, kwargs, self.buffers.get(index))
