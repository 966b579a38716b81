"""Converted blocks.

A converted block is an instance of a subclass of its own class that overrides ``forward``. Each call is one step of a walk: one
autograd node, made inside the module's call, so that module hooks (FSDP2's among them) stay outside. The model's loop is not
changed. A block continues a walk if its input is, by autograd and by storage, the tensor that the walk handed out last.
Otherwise it begins one.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revode.conversion.hugging_face import Collector, is_cache, is_filled, refuse_updates
from revode.engine.branch import Context, Replayed
from revode.engine.call import (
    Arguments,
    alias,
    compilation_is_possible,
    eagerly,
    gradient_in_strides,
    tensor_leaves,
    version_of,
)
from revode.engine.grid import DEFAULT_BITS, Grid, magnitude
from revode.engine.path import Path, entered
from revode.engine.replay import is_replaying
from revode.engine.step import Step, advance
from revode.engine.strategy import Strategy
from revode.memory import adds
from revode.schemes import Coupling, Scheme

_log = logging.getLogger("revode")


@dataclass
class Conversion:
    """The scheme, strategy and counts that the converted blocks of a model share."""

    scheme: Scheme
    strategy: Strategy
    chooses_bits: bool
    """True if the grid's bits are chosen from the states of the first batch."""
    magnitudes: dict[int, float] = field(default_factory=dict)
    """The largest magnitude of a state behind each block, until the bits are chosen."""
    num_calls: int = 0
    num_calls_before: int = 0
    warned: set[str] = field(default_factory=set)
    leaves_out_cache: bool = False
    is_trained: bool = False
    """True if gradients were recorded in a call."""

    def warn(self, topic: str, text: str) -> None:
        if topic not in self.warned:
            self.warned.add(topic)
            warnings.warn(text, stacklevel=6)

    def grid(self, number: int, scheme: Scheme) -> Grid | None:
        """Return the grid of a walk that begins at this block now; None while states are measured."""
        if self.chooses_bits and number in self.magnitudes:
            largest = max(self.magnitudes.values()) or 1.0
            size = math.floor(math.log2(largest))
            bits = max(
                1, min(23, 20 - size, max(DEFAULT_BITS, 13 - size))
            )  # 8 times as large in range, 2^10 if below 1
            self.chooses_bits, self.strategy = False, self.strategy.replace(exact=bits)
            _log.info("states of the first batch reach %.3g: converted blocks run with exact=%d", largest, bits)
        return None if self.chooses_bits else self.strategy.grid_for(scheme)

    def watch(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Warn if the model trained past its blocks; raise if it misses a cache that was asked for. (A hook of the model.)"""
        before, left_out, name = self.num_calls_before, self.leaves_out_cache, type(model).__name__
        self.num_calls_before, self.leaves_out_cache = self.num_calls, False
        if left_out and (kwargs.get("use_cache") or any(map(is_cache, kwargs.values()))):
            raise ValueError(f"{name} was asked for a cache, which its converted blocks do not fill with gradients")
        if before == self.num_calls and model.training and torch.is_grad_enabled():
            self.warn(
                "not called",
                f"{name} ran a training step without calling its converted blocks, so nothing is saved: does it call their "
                "forward by another way?",
            )


@dataclass(eq=False)
class Head:
    """A point from which a walk can continue. The tensor that was handed out owns it, so that nothing outlives that tensor."""

    path: Path | None
    """The steps so far; None where no gradients were recorded."""
    p: Tensor | None
    q: Tensor
    index: int
    """The number of steps so far."""
    grid: Grid | None
    handed: Tensor
    """The tensor that was handed out: a copy of q in the model's dtype. Detached."""
    version: int | None
    is_used: bool = False

    def fits(self, x: Tensor) -> bool:
        """Return True if x is the tensor that was handed out, unchanged."""
        then = self.handed
        same = (then.shape, then.stride(), self.version) == (x.shape, x.stride(), version_of(x))
        return same and (torch.compiler.is_compiling() or then.data_ptr() == x.data_ptr())


_ALIASES = ("AliasBackward0", "ViewBackward0", "RegisterPostBackwardFunctionBackward")
"""Nodes that hand a tensor on as it is; the last one is FSDP2's, around the input of a sharded module."""


def _head_of(x: Tensor) -> Head | None:
    """Return the head that x continues, or None."""
    if x.grad_fn is None:
        head = getattr(x, "_revode_head", None)
        head = head if head is not None and head.path is None else None
    else:
        node: Any = x.grad_fn
        while node is not None and type(node).__name__ in _ALIASES:
            node = node.next_functions[0][0]
        head = None if node is None else node.metadata.get("revode", lambda: None)()
    return head if head is not None and not head.is_used and head.fits(x) else None


class _TakeBack(torch.autograd.Function):
    """The state q of which x is the copy that was handed out in a lower precision.

    Hooks on x see the rounded gradient; the rest of the gradient goes to q.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return torch.ops.aten.alias(q)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (g,) = grad_outputs
        rounded = g.to(ctx.dtype)
        return g - rounded.to(g.dtype), rounded


class _BlockEvaluation(Replayed):
    """The branch block(q) - q of a converted block, called without the module's hooks; its other outputs are its aux."""

    inner: Any
    dtype: torch.dtype
    handed_dtype: torch.dtype
    is_whole = False
    """True if the step is the plain q + F(q), which is block(q) to the bit."""
    kind: Any = None
    """The type of the tuple or list that the block returns; None for a tensor."""
    collector: Collector

    def call(self, q: Tensor, kwargs: dict[str, Any]) -> Any:
        return self.collector.call(lambda: self.inner(q.to(self.dtype), *kwargs["args"], **kwargs["kwargs"]))

    def taken(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs

    def stored(self, q: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """Return u and aux as ordinary autograd sees them; on the grid, gradients must be the engine's to the bit."""
        if self.context.grid is None or not torch.is_grad_enabled():
            return self.evaluate(q, kwargs, self.call)
        u, aux = self.evaluate(alias(q), pytree.tree_map(alias, kwargs), self.call)
        return gradient_in_strides(u), aux

    def conform(self, q: Tensor, u: Any) -> tuple[Tensor, Any]:
        u, collected = u
        y, rest = u, ()
        if isinstance(u, tuple | list) and u:
            y, *rest = u
            self.kind = type(u)
        if not isinstance(y, Tensor):
            raise ValueError(f"{self.name} returns {type(y).__name__}, not a tensor or a tuple that begins with one")
        if y.shape != q.shape:
            raise ValueError(
                f"{self.name} makes shape {tuple(y.shape)} of a state of shape {tuple(q.shape)}: leave out blocks that change "
                "the shape, as by blocks=slice(1, None), or give the path of another list"
            )
        self.handed_dtype = y.dtype
        looks = y.requires_grad and q.requires_grad and self.context.warns_of("skip")
        if looks and not adds(y, q, lambda name: not name.startswith(_MIXING)):
            warnings.warn(
                f"{self.name} has no skip connection: if the model adds it, as in x = x + block(x), the converted model "
                "computes something else; put the addition into the block, or use ReversibleSequence",
                stacklevel=2,
            )
        y = y.to(q.dtype)
        u = y if self.is_whole else y - q.to(self.dtype).to(q.dtype)
        return super().conform(q, (u, (tuple(rest), collected)))


_MIXING = ("Convolution", "MkldnnConvolution", "Mm", "Addmm", "Bmm", "Baddbmm", "Linear", "MkldnnLinear", "ScaledDot")
"""Operations that no skip connection goes through, by the beginning of their nodes' names."""


class Converted:
    """A mixin for the class of a converted block, whose forward is a step of a walk."""

    _converted_from: type[nn.Module]
    _revode: Any
    """(the `Conversion`, the block's name, its number, its own ``forward`` if the instance had one)"""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if "_revode" not in self.__dict__:  # reverted, and called by a hook that had wrapped it before (accelerate's)
            return type(self).forward(self, *args, **kwargs)
        conversion = self._revode[0]
        training: bool = self.training  # type: ignore[attr-defined]
        scheme = conversion.scheme if training else conversion.scheme.in_eval()
        if scheme.carry == 0.0 and scheme.coupling(0).is_plain:
            return _inner(self)(*args, **kwargs)  # BDIA in eval mode: the plain network, by ordinary autograd
        step = eagerly(_step) if torch.is_grad_enabled() and compilation_is_possible() else _step
        return step(self, scheme, args, kwargs)

    def extra_repr(self) -> str:
        inner = super().extra_repr()  # type: ignore[misc]
        return f"{inner}{', ' if inner else ''}reversible by {self._revode[0].scheme!r}, {self._revode[0].strategy!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restore, (self._converted_from,), self.__dict__


@functools.cache
def converted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of converted blocks of a kind, under the name of that kind."""
    members = {"_converted_from": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (Converted, kind), members)


def _restore(kind: type[nn.Module]) -> nn.Module:
    """Make an empty converted block, for pickle and copy."""
    return object.__new__(converted_class(kind))


def _inner(block: Any) -> Any:
    """Return the ``forward`` that the block had before."""
    own = block._revode[3]
    return functools.partial(block._converted_from.forward, block) if own is None else own


def _step(block: Any, scheme: Scheme, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the block's own outputs, with the state behind its step of a walk in place of the first."""
    conversion, name, number, _ = block._revode
    conversion.num_calls += 1
    x, args, kwargs = _state_of(block, args, kwargs)
    if torch.is_grad_enabled():
        kwargs = _without_caches(conversion, name, kwargs)
        args = tuple(_without_caches(conversion, name, dict(enumerate(args))).values())
    given = {"args": args, "kwargs": kwargs}
    if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled() and not is_replaying():
        raise RuntimeError(
            f"{name} is called inside a backward pass, where its walk would start anew, as torch's checkpoint does with "
            "use_reentrant=True, or with backprop='store': use no checkpoint around converted blocks, which need none"
        )
    head = _head_of(x)
    if head is None:
        _begin(conversion, name, number, x, scheme)
        grid = conversion.grid(number, scheme)
        p, q, path, index = None, entered(x.float() if x.dtype.itemsize < 4 else x, grid), None, 0
    else:
        p, path, index, grid = head.p, head.path, head.index, head.grid
        q = head.q if x.dtype != head.q.dtype else x
        if q is not x and torch.is_grad_enabled() and x.requires_grad:
            q = _TakeBack.apply(head.q, x)
    (coupling,) = scheme.couplings(1, q, p is not None, index)
    context = Context(q.device, grid, keeps_aux=True, warned=conversion.warned)
    make = functools.partial(_make_step, block, context, coupling, given, x.dtype)
    records = torch.is_grad_enabled() and conversion.strategy.backprop != "store"
    try:
        if records and any(t.requires_grad for t in [q, *block.parameters(), *tensor_leaves(given)]):
            conversion.is_trained = True
            length = 1 if conversion.chooses_bits else conversion.strategy.segment_length(scheme, 0) or None
            path = path or Path(length, conversion.strategy.verify)
            (p, q), rest, evaluation = path.run_here(make, p, q)
        else:
            step: Any = make()
            u, rest = step.evaluation.stored(q, given)
            evaluation, path, (p, q) = step.evaluation, None, (q, advance(context, step.coupling, number, p, q, u))
            context.note(q, f"after {name}")
        if conversion.chooses_bits:
            conversion.magnitudes[number] = max(conversion.magnitudes.get(number, 0.0), float(magnitude(q)))
    finally:
        context.close()
    assert isinstance(evaluation, _BlockEvaluation)
    handed: Any = q.to(evaluation.handed_dtype, copy=True)  # the loop may change its copy; the walk keeps q
    if head is not None:  # only one block may continue from there
        head.is_used, head.path, head.p, head.q = True, None, None, head.handed
    handed._revode_head = Head(path, p, q, index + 1, grid, handed.detach(), version_of(handed))
    if handed.grad_fn is not None:
        handed.grad_fn.metadata["revode"] = weakref.ref(handed._revode_head)
    rest, collected = rest
    evaluation.collector.give_back(collected)
    return handed if evaluation.kind is None else evaluation.kind((handed, *rest))


def _make_step(block: Any, context: Context, coupling: Coupling, given: Any, dtype: torch.dtype) -> Step:
    _, name, number, _ = block._revode
    evaluation = _BlockEvaluation(context, number, block, Arguments(given), name)
    evaluation.inner, evaluation.dtype, evaluation.collector = _inner(block), dtype, Collector()
    if coupling.is_plain:
        evaluation.is_whole, coupling = True, Coupling(0.0, 0.0, 1.0)
    return Step(evaluation, coupling)


def _state_of(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any, dict[str, Any]]:
    """Return the state that a block is given, first or by its name, and its other arguments."""
    if not args:
        name = next(iter(inspect.signature(_inner(block)).parameters), "")
        if name not in kwargs:
            raise TypeError(f"{block._revode[1]} is called without its first argument {name!r}")
        args, kwargs = (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}
    if not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        found = str(args[0].dtype) if isinstance(args[0], Tensor) else type(args[0]).__name__
        raise ValueError(f"{block._revode[1]} is given {found} as its state: it takes a floating-point tensor first")
    return args[0], args[1:], kwargs


def _begin(conversion: Conversion, name: str, number: int, x: Tensor, scheme: Scheme) -> None:
    """Warn of a walk that begins at another block than the first, or refuse it where it would be another network."""
    if number == 0:
        return
    reason = f"the input of {name} is not what the converted block before it returned (changed, detached or skipped)"
    if not scheme.draws:
        raise ValueError(
            f"{reason}, and {scheme!r} cannot start in the middle without being another network: use BDIA, or convert only the "
            "blocks that follow each other"
        )
    if torch.is_grad_enabled():
        conversion.warn("new walk", f"{reason}: a new walk starts there, which keeps {8 * x.numel():,} more bytes")


def _without_caches(conversion: Conversion, name: str, values: dict[Any, Any]) -> dict[Any, Any]:
    """Return arguments without an empty cache of keys and values, which a recomputation would fill a second time."""
    for key, cache in [(key, value) for key, value in values.items() if is_cache(value)]:
        if is_filled(cache):
            raise ValueError(
                f"{name} cannot use a filled cache where gradients are recorded: give the whole input and use_cache=False, or "
                "call the model under torch.no_grad()"
            )
        conversion.warn("cache", "converted blocks leave out the cache where gradients are recorded: use_cache=False")
        conversion.leaves_out_cache = True
        refuse_updates(cache)
        values = {**values, key: None}
    return values
