"""Models that exist already, run reversibly: `convert` and `revert`.

A converted block is an instance of a subclass of its own class that overrides ``forward``: each call is one step of a walk, one
autograd node, made inside the module's call, so that module hooks (FSDP2's among them) stay outside. Nothing is changed in the
model's loop. A block goes on with a walk if its input is, by autograd and by storage, what that walk handed out last. Otherwise
it starts a new one.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import warnings
import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from revode.engine.branch import Arguments, Context, Replayed, tensor_leaves
from revode.engine.grid import DEFAULT_BITS, Grid, magnitude
from revode.engine.path import Path
from revode.engine.replay import is_replaying, version_of
from revode.engine.step import Step, advance
from revode.engine.strategy import Strategy
from revode.engine.tracing import compilation_is_possible, eagerly
from revode.engine.walk import entered
from revode.errors import unknown
from revode.memory import adds
from revode.schemes import BDIA, Coupling, Scheme

Model = TypeVar("Model", bound=nn.Module)
_log = logging.getLogger("revode")
_HEADROOM = 8.0
"""How much larger than those of the first batch states may become before they leave the grid."""


class Conversion:
    """What the converted blocks of a model share.

    Args:
        scheme: how they run.
        strategy: how gradients are computed.
        num_blocks: how many they are.
        chooses_bits: whether the grid's bits are chosen from the states of the first batch.
    """

    def __init__(self, scheme: Scheme, strategy: Strategy, num_blocks: int, chooses_bits: bool) -> None:
        self.scheme = scheme
        self.strategy = strategy
        self.num_blocks = num_blocks
        self.chooses_bits = chooses_bits
        self.magnitudes: dict[int, float] = {}
        """The largest magnitude of a state behind each block, until the bits are chosen."""
        self.num_calls = 0
        self.warned: set[str] = set()
        self.looks_for_skip = True

    def warn(self, topic: str, text: str) -> None:
        """Warn once of a topic."""
        if topic not in self.warned:
            self.warned.add(topic)
            warnings.warn(text, stacklevel=6)

    def grid(self) -> Grid | None:
        """Return the grid of a walk that begins now; None while states are measured."""
        if self.chooses_bits and len(self.magnitudes) == self.num_blocks:
            largest = max(self.magnitudes.values())
            bits = DEFAULT_BITS
            if largest * _HEADROOM >= 2.0 ** (24 - bits):
                bits = max(1, 24 - math.ceil(math.log2(largest * _HEADROOM)))
            self.chooses_bits, self.strategy = False, self.strategy.replace(exact=bits)
            _log.info("states of the first batch reach %.3g: converted blocks run with exact=%d", largest, bits)
        return None if self.chooses_bits else self.strategy.grid


class Head:
    """Where a walk can go on: owned by the tensor that was handed out, so that nothing lives longer than that.

    Args:
        path: the steps so far; None where no gradients were recorded.
        p: the older state of the pair.
        q: the newer state.
        handed: what was handed out: a copy of q in the model's dtype.
        index: the number of steps so far.
        grid: the grid of the walk.
    """

    def __init__(self, path: Path | None, p: Tensor, q: Tensor, handed: Tensor, index: int, grid: Grid | None) -> None:
        self.path, self.p, self.q, self.index, self.grid = path, p, q, index, grid
        self.handed, self.version = handed.detach(), version_of(handed)

    def fits(self, x: Tensor) -> bool:
        """Return whether x is what was handed out, as it was."""
        then = self.handed
        same = (then.shape, then.stride(), self.version) == (x.shape, x.stride(), version_of(x))
        return same and (torch.compiler.is_compiling() or then.data_ptr() == x.data_ptr())


_ALIASES = ("AliasBackward0", "ViewBackward0", "RegisterPostBackwardFunctionBackward")
"""Nodes that hand a tensor on as it is; the last one is FSDP2's, around the input of a sharded module."""


def _head_of(x: Tensor) -> Head | None:
    """Return the head that x continues, if x is what a walk handed out last."""
    if x.grad_fn is None:
        head = getattr(x, "_revode_head", None)
        head = head if head is not None and head.path is None else None
    else:
        node: Any = x.grad_fn
        while node is not None and type(node).__name__ in _ALIASES:
            node = node.next_functions[0][0]
        head = getattr(node, "head", lambda: None)()
    return head if head is not None and head.fits(x) else None


class _HandOut(torch.autograd.Function):
    """A copy of the newest state in the model's dtype: a loop may change it, and the walk keeps its own."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = q.dtype
        return q.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0].to(ctx.dtype), None


class _TakeBack(torch.autograd.Function):
    """The state q of which x is the copy that was handed out in a lower precision.

    The gradient goes both ways: rounded through x, which hooks on x see, and what rounding leaves through q.
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
    conversion: Conversion
    is_whole = False
    """Whether the step is the plain q + F(q), which is block(q) to the bit."""
    kind: Any = None
    """What the block returns: None for a tensor, or the type of its tuple or list."""

    def call(self, q: Tensor, kwargs: dict[str, Any]) -> Any:
        return self.inner(q.to(self.dtype), *kwargs["args"], **kwargs["kwargs"])

    def taken(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs

    def conform(self, q: Tensor, u: Any) -> tuple[Tensor, Any]:
        y, rest = u, ()
        if isinstance(u, tuple | list) and u:
            y, *rest = u
            self.kind = type(u)
        if not isinstance(y, Tensor) or y.shape != q.shape:
            found = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"{self.name} makes {found} of a state of shape {tuple(q.shape)}: leave out blocks that change the shape, as "
                "in revode.convert(..., blocks=slice(1, None))"
            )
        self.handed_dtype = y.dtype
        if self.conversion.looks_for_skip and y.requires_grad and q.requires_grad:
            self.conversion.looks_for_skip = False
            if not adds(y, q, lambda name: not name.startswith(_MIXING)):
                self.conversion.warn(
                    "no skip",
                    f"{self.name} has no skip connection: if the model adds it, as in x = x + block(x), the converted model "
                    "computes something else; put the addition into the block, or use ReversibleSequence",
                )
        y = y.to(q.dtype)
        u = y if self.is_whole else y - q.to(self.dtype).to(q.dtype)
        return super().conform(q, (u, tuple(rest)))


_MIXING = ("Convolution", "MkldnnConvolution", "Mm", "Addmm", "Bmm", "Baddbmm", "Linear", "MkldnnLinear", "ScaledDot")
"""Operations that no skip connection goes through, as their nodes in a graph begin."""


class Converted:
    """Mixed into the class of a converted block: its forward is a step of a walk."""

    _converted_from: type[nn.Module]
    _revode: Any
    """(the `Conversion`, the block's name, its number, its own ``forward`` if the instance had one)"""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        conversion = self._revode[0]
        conversion.num_calls += 1
        training: bool = self.training  # type: ignore[attr-defined]
        scheme = conversion.scheme if training else conversion.scheme.in_eval()
        if scheme.carry == 0.0 and scheme.coupling(0).is_plain:
            return _inner(self)(*args, **kwargs)  # BDIA in eval mode: the plain network, by ordinary autograd
        step = eagerly(_step) if torch.is_grad_enabled() and compilation_is_possible() else _step
        return step(self, scheme, args, kwargs)

    def extra_repr(self) -> str:
        inner = super().extra_repr()  # type: ignore[misc]
        return (
            f"{inner}, reversible by {self._revode[0].scheme!r}"
            if inner
            else f"reversible by {self._revode[0].scheme!r}"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restore, (self._converted_from,), self.__dict__


@functools.cache
def _converted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of converted blocks of a kind, under the name of that kind."""
    members = {"_converted_from": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (Converted, kind), members)


def _restore(kind: type[nn.Module]) -> nn.Module:
    """Make a converted block to be filled, for pickle and copy."""
    return object.__new__(_converted_class(kind))


def _inner(block: Any) -> Any:
    """Return the ``forward`` that the block had before."""
    own = block._revode[3]
    return functools.partial(block._converted_from.forward, block) if own is None else own


def _step(block: Any, scheme: Scheme, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a converted block returns, with the state behind its step of a walk in place of its own."""
    conversion, name, number, _ = block._revode
    x, args, kwargs = _state_of(block, args, kwargs)
    given = _without_caches(conversion, name, {"args": args, "kwargs": kwargs})
    if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled() and not is_replaying():
        raise RuntimeError(
            f"{name} is called inside a backward pass, as torch's checkpoint with use_reentrant=True does: its walk would "
            "start anew there; use use_reentrant=False, or no checkpoint around converted blocks"
        )
    head = _head_of(x)
    if head is None:
        _begin(conversion, name, number, x, scheme)
        grid = conversion.grid() if scheme.shift is not None else None
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
            measures = conversion.chooses_bits and scheme.shift is not None
            length = 1 if measures else conversion.strategy.segment_length(scheme, 0) or None
            path = path or Path(length, conversion.strategy.verify)
            (p, q), rest, evaluation = path.run_here(make, p, q)
        else:
            step = make()
            u, rest = step.evaluation.evaluate(q, given, step.evaluation.call)
            evaluation, path, (p, q) = step.evaluation, None, (q, advance(context, step.coupling, number, p, q, u))
            context.note(q, f"after {name}")
        if conversion.chooses_bits:
            conversion.magnitudes[number] = max(conversion.magnitudes.get(number, 0.0), float(magnitude(q)))
    finally:
        context.close()
    assert isinstance(evaluation, _BlockEvaluation)
    handed: Any = _HandOut.apply(q, evaluation.handed_dtype)
    if head is not None:
        head.path = head.p = head.q = None  # type: ignore[assignment]  # nobody can go on from there
    handed._revode_head = Head(path, p, q, handed, index + 1, grid)
    if handed.grad_fn is not None:
        handed.grad_fn.head = weakref.ref(handed._revode_head)
    return handed if evaluation.kind is None else evaluation.kind((handed, *rest))


def _make_step(block: Any, context: Context, coupling: Coupling, given: Any, dtype: torch.dtype) -> Step:
    conversion, name, number, _ = block._revode
    evaluation = _BlockEvaluation(context, number, block, Arguments(given), name)
    evaluation.inner, evaluation.dtype, evaluation.conversion = _inner(block), dtype, conversion
    if coupling.is_plain:
        evaluation.is_whole, coupling = True, Coupling(0.0, 0.0, 1.0)
    return Step(evaluation, coupling)


def _state_of(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any, dict[str, Any]]:
    """Return the state that a block is given, first or by its name, and its other arguments."""
    if args:
        return args[0], args[1:], kwargs
    name = next(iter(inspect.signature(_inner(block)).parameters), "")
    if name not in kwargs:
        raise TypeError(f"{block._revode[1]} is called without its first argument {name!r}")
    return kwargs[name], args, {key: value for key, value in kwargs.items() if key != name}


def _begin(conversion: Conversion, name: str, number: int, x: Any, scheme: Scheme) -> None:
    """Warn of a walk that begins at another block than the first, or refuse it where it would be another network."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        found = f"dtype {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} is given {found} as its state; converted blocks take a floating-point tensor first")
    if number == 0:
        return
    reason = (
        f"the input of {name} is not what the converted block before it returned (changed, detached, or skipped to)"
    )
    if not scheme.draws:
        raise ValueError(
            f"{reason}, and {scheme!r} cannot start in the middle without being another network: use BDIA, or convert only the "
            "blocks that follow each other"
        )
    if torch.is_grad_enabled():
        num_bytes = 2 * 4 * x.numel()
        conversion.warn("new walk", f"{reason}: a new walk starts there, which keeps {num_bytes:,} more bytes")


def _without_caches(conversion: Conversion, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without an empty cache of keys and values, which a recomputation would fill a second time.

    The cache that is left out raises when something is put into it later, so that nobody goes on from an empty one.
    """
    if not torch.is_grad_enabled():
        return given

    def without(value: Any) -> Any:
        if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
            return value
        if value.get_seq_length():
            raise ValueError(
                f"{name} cannot go on from a filled cache where gradients are recorded: give the whole input, or call the "
                "model under torch.no_grad()"
            )
        conversion.warn(
            "cache", "converted blocks leave out the cache where gradients are recorded: give use_cache=False"
        )
        value.update = _refuse_update
        return None

    return {
        "args": tuple(map(without, given["args"])),
        "kwargs": {key: without(value) for key, value in given["kwargs"].items()},
    }


def _refuse_update(*_: Any, **__: Any) -> Any:
    raise ValueError("this cache was left empty by converted blocks that recorded gradients: make a new one")


class _Watch:
    """A forward hook of the model: warn of a training step that passes through no converted block."""

    def __init__(self, conversion: Conversion) -> None:
        self.conversion, self.num_calls = conversion, 0

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        before, self.num_calls = self.num_calls, self.conversion.num_calls
        if before == self.num_calls and module.training and torch.is_grad_enabled():
            self.conversion.warn(
                "not called",
                f"{type(module).__name__} ran a training step without calling its converted blocks, so nothing is saved: does "
                "it call their forward by another way?",
            )


def convert(
    model: Model, path: str | None = None, scheme: Scheme | None = None, *, blocks: slice = slice(None), **options: Any
) -> Model:
    """Run residual blocks of a model reversibly; return the model, which is changed.

    Parameters, the keys of the ``state_dict``, the model's own loop and its hooks stay. With `BDIA` the model in eval mode is
    the unconverted one, bit for bit. With other schemes it is another network with the same weights, to be fine-tuned.

    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    >>> model = convert(nn.TransformerEncoder(layer, 12, enable_nested_tensor=False))
    >>> model(torch.randn(2, 5, 16)).sum().backward()

    Args:
        model: the model.
        path: of its ``nn.ModuleList`` or ``nn.Sequential`` of blocks, as in ``"transformer.h"``; ``""`` is the model itself.
            Without it, the longest list of blocks of one class is taken.
        scheme: how to run them: a scheme on one tensor; ``BDIA(blend=1/16)`` by default.
        blocks: which of them, if some change the shape.
        options: of `Strategy`: ``backprop``, ``exact``, ``anchor_every``, ``verify``. A blend below 1/2 implies ``exact``:
            unless given, its bits are chosen from the states of the first batch, in which each block keeps its input.
    """
    container, path = _container(model, path)
    chosen = [_target(block) for block in container.children()][blocks]
    if blocks.step not in (None, 1) or not chosen:
        raise ValueError(
            f"blocks must be a slice without step that chooses some of {len(container)} blocks, got {blocks}"
        )
    scheme = BDIA(blend=1 / 16, batch_dim=_batch_dim(chosen[0])) if scheme is None else scheme
    if not isinstance(scheme, Scheme) or scheme.splits:
        raise ValueError(f"convert takes a scheme that keeps the state whole, as BDIA() or MidPoint(), got {scheme!r}")
    strategy = Strategy().replace(**options)
    strategy.check_scheme(scheme)
    if strategy.memory_budget is not None or strategy.compile:
        raise ValueError("convert takes no memory_budget and does not compile: use ReversibleSequence")
    names = [f"{path}.{i}".lstrip(".") for i in range(len(container))][blocks]
    for block, name in zip(chosen, names, strict=True):
        if isinstance(block, Converted):
            raise ValueError(f"{name} is converted already: revode.revert the model first")
        if isinstance(block, torch.jit.ScriptModule):
            raise ValueError(f"{name} is TorchScript code, which cannot be converted: give the module it was made from")
    amplifies = 0.0 < abs(scheme.carry) < 0.5  # rounding, by 1 / |carry| at each step back
    chooses_bits = (
        amplifies and scheme.shift is not None and "exact" not in options and strategy.backprop == "reversible"
    )
    distinct = list({id(block): (block, name) for block, name in zip(chosen, names, strict=True)}.values())
    conversion = Conversion(scheme, strategy, len(distinct), chooses_bits)
    for number, (block, name) in enumerate(distinct):
        block.__dict__["_revode"] = (
            conversion,
            f"the converted block {name}",
            number,
            block.__dict__.pop("forward", None),
        )
        block.__class__ = _converted_class(type(block))
    if type(model).forward is not nn.Module.forward and not isinstance(model, Converted):
        model.register_forward_hook(_Watch(conversion))
    kind = type(distinct[0][0]).__name__
    _log.info("converted %d blocks %s of %r, %r", len(distinct), kind, path, scheme)
    return model


def revert(model: Model) -> Model:
    """Undo `convert`: the blocks run as before; return the model, which is changed.

    >>> revert(convert(nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(3)]), ""))[0](torch.ones(4)).shape
    torch.Size([4])
    """
    found: list[Any] = [module for module in model.modules() if isinstance(module, Converted)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no converted blocks to revert")
    for block in found:
        own = block.__dict__.pop("_revode")[3]
        if own is not None:
            block.__dict__["forward"] = own
        block.__class__ = block._converted_from
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, _Watch):
                del module._forward_hooks[key]
    return model


def _target(block: Any) -> Any:
    """Return the module to convert: that inside of ``torch.compile(block)``."""
    return getattr(block, "_orig_mod", block)


def _batch_dim(block: nn.Module) -> int:
    """Return the dimension that counts the samples: 1 for torch's attention on (time, batch, width)."""
    attentions = [module for module in block.modules() if isinstance(module, nn.MultiheadAttention)]
    return 1 if attentions and not attentions[0].batch_first else 0


def _container(model: nn.Module, path: str | None) -> tuple[Any, str]:
    """Return the list of blocks at `path`, or the longest one, and its path."""
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    if not lists:
        raise ValueError(f"{type(model).__name__} has no nn.ModuleList or nn.Sequential of blocks to convert")
    if path is not None:
        if path not in lists:
            choices = f"choose one of {', '.join(map(repr, lists))}"  # '' is the model itself
            raise unknown(f"list of blocks in {type(model).__name__}", path, lists, choices)
        return lists[path], path
    alike = {
        name: module
        for name, module in lists.items()
        if len(module) > 1
        and len({type(_target(child)) for child in module}) == 1
        and any(True for _ in module.parameters())
    }
    longest = max(map(len, alike.values()), default=0)
    candidates = [name for name, module in alike.items() if len(module) == longest]
    if len(candidates) != 1:
        names = ", ".join(map(repr, candidates)) or "none"
        raise ValueError(
            f"{type(model).__name__} does not tell which blocks to convert; lists of equal blocks: {names}. Give one as path"
        )
    return alike[candidates[0]], candidates[0]


def blocks_of(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the path of the blocks that `convert` would take, and the blocks."""
    container, path = _container(model, None)
    return path, list(container)


def conversions_in(model: nn.Module) -> list[Conversion]:
    """Return what the converted blocks of a model share, once each."""
    shared = {id(block._revode[0]): block._revode[0] for block in model.modules() if isinstance(block, Converted)}
    return list(shared.values())
