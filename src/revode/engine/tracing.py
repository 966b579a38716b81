"""What ``torch.compile`` needs from us, and what it must not be given.

Nothing here imports dynamo: it takes as long to import as torch itself, and most runs never compile.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def allow_tracing() -> bool:
    """Let dynamo trace ``torch.autograd.grad``, which the engine's backward calls; runs while dynamo is tracing."""
    config: Any = torch._dynamo.config  # type: ignore[attr-defined]
    if not hasattr(config, "trace_autograd_ops"):
        raise RuntimeError(
            f"torch {torch.__version__} cannot compile the backward pass of a reversible sequence: compile its branches "
            "(torch.compile(branch)), build it with backprop='store', or use torch 2.13"
        )
    config.trace_autograd_ops = True
    return True


def dynamo_is_about() -> bool:
    """Whether anything may be compiled in this process."""
    return "torch._dynamo" in sys.modules


@functools.cache
def eagerly(function: Any) -> Any:
    """`function`, whose frames dynamo leaves alone (what was compiled on its own still runs compiled)."""
    return torch.compiler.disable(function)


def holds_compiled(branch: nn.Module) -> bool:
    """Whether `branch`, or something in it, was compiled on its own."""
    from torch._dynamo import OptimizedModule

    return any(
        isinstance(module, OptimizedModule) or module._compiled_call_impl is not None for module in branch.modules()
    )


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


_DRAWING_METHODS = frozenset(
    "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_ uniform_".split()
)


def refuse_random_nodes() -> bool:
    """Raise if what has been traced of the current graph draws random numbers; runs while dynamo is tracing.

    The mode does not see every call (dynamo rewrites some, as ``torch.rand_like``, before it asks); the graph has them all.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        graph = InstructionTranslator.current_tx().output.current_tracer.graph
    except AttributeError:  # behind a graph break, code runs for real and the mode sees every call
        return True
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        by_function = node.op == "call_function" and (
            torch.Tag.nondeterministic_seeded in tags or _draws(node.target, node.args, node.kwargs)
        )
        if by_function or (node.op == "call_method" and node.target in _DRAWING_METHODS):
            _refuse_random()
    return True


def _refuse_random() -> None:
    raise ValueError(
        "a branch draws random numbers (dropout?), which a reversible sequence compiled as a whole cannot draw again in "
        "backward: compile the branches themselves (torch.compile(branch)), or build it with backprop='store'"
    )


# Dynamo runs these for real while it traces. It is what torch.compiler.assume_constant_result does, without importing
# dynamo for everyone.
allow_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]
refuse_random_nodes._dynamo_marked_constant = True  # type: ignore[attr-defined]
_refuse_random._dynamo_marked_constant = True  # type: ignore[attr-defined]
