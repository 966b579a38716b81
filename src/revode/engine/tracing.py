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
    for code in _whole_or_eager:
        torch._dynamo.eval_frame.skip_code(code)  # type: ignore[attr-defined]
    return True


_whole_or_eager: list[Any] = []


def whole_or_eager(function: Any) -> Any:
    """Mark `function`: dynamo may trace it as a part of a graph, but where a graph breaks it runs as it is.

    Inside a frame that dynamo compiles by itself, ``torch.compiler.is_compiling()`` is true even where the frame then calls
    things for real; code that trusts the answer would leave out what only a whole graph can do without.
    """
    _whole_or_eager.append(function.__code__)
    return function


def compilation_is_possible() -> bool:
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
        return bool(_argument(2, name, True, args, kwargs)) and _argument(1, "p", 0.5, args, kwargs) != 0.0
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


def refuse_unrepeatable() -> bool:
    """Raise if what has been traced of the current graph cannot be computed again; runs while dynamo is tracing.

    The mode does not see every call (dynamo rewrites some, as ``torch.rand_like``, before it asks); the graph has them all.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    if getattr(output, "random_calls", None):  # Python's random: dynamo hands the numbers in from outside
        _refuse_random()
    for node in output.current_tracer.graph.nodes:
        if _node_draws(node):
            _refuse_random()
        if _node_writes_to_input(node):
            raise ValueError(
                "a branch updates a buffer of its own (spectral norm?), which a reversible sequence compiled as a whole "
                "cannot set back in backward: use compile=True, or backprop='store'"
            )
    return True


def _node_draws(node: Any) -> bool:
    """Whether a node of dynamo's graph draws random numbers."""
    if node.op == "call_method":
        return node.target in _DRAWING_METHODS
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    seeded = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    if seeded and "dropout" in str(target):
        return _argument(2, "train", True, node.args, node.kwargs) is not False
    numpy_draws = any("random" in getattr(part, "__module__", "") for part in (target, getattr(target, "f", None)))
    return seeded or numpy_draws or _draws(node.target, node.args, node.kwargs)


def _node_writes_to_input(node: Any) -> bool:
    """Whether a node writes over a tensor that comes from outside the graph."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    written = [node.kwargs.get("out")]
    if node.op in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__") and node.args:
        written.append(node.args[0])
    inputs = [target for target in written if getattr(target, "op", None) in ("placeholder", "get_attr")]
    return any("num_batches_tracked" not in target.name for target in inputs)


def _refuse_random() -> None:
    raise ValueError(
        "a branch draws random numbers (dropout?), which a reversible sequence compiled as a whole cannot draw again in "
        "backward: compile the branches themselves (torch.compile(branch)), or build it with backprop='store'"
    )


# Dynamo runs these for real while it traces. It is what torch.compiler.assume_constant_result does, without importing
# dynamo for everyone.
allow_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]
refuse_unrepeatable._dynamo_marked_constant = True  # type: ignore[attr-defined]
_refuse_random._dynamo_marked_constant = True  # type: ignore[attr-defined]
