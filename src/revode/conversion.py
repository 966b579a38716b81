"""Models that exist already, run reversibly: `convert` and `revert`.

A converted list of blocks keeps its children, and with them parameters and names. Where the model's own loop iterates over it,
it yields a `Turn` in place of each block. The blocks run together, as branches block(x) - x of a `ReversibleSequence`: at the
first turn, and again at the last if blocks turn out to be given different arguments, from then on at the last turn only. The
other turns hand the state on, and a loop that does anything else with it, or skips a block, is refused.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revode.engine import ReversibleSequence
from revode.engine.accounting import adds, graph_nodes
from revode.engine.chain import ResidualBranch
from revode.engine.randomness import Draws, torch_streams, undo
from revode.engine.replay import version_of
from revode.files import unknown
from revode.schemes import BDIA, Scheme

Model = TypeVar("Model", bound=nn.Module)
Given = tuple[tuple[Any, ...], dict[str, Any]]
"""What a block is given beside the state."""


class _Whole(nn.Module):
    """A block on a state: in the block's dtype, without what it returns beside its tensor."""

    def __init__(self, block: nn.Module, name: str, number: int) -> None:
        super().__init__()
        self.block = block
        self.name = name
        self.number = number
        self.returns_tuple = False
        self.looks_for_skip = False

    def forward(self, q: Tensor, dtype: torch.dtype, given: list[Given], which: tuple[int, ...]) -> Tensor:
        args, kwargs = given[which[self.number]]
        y = self.block(q.to(dtype), *args, **kwargs)
        self.returns_tuple = isinstance(y, tuple)
        if isinstance(y, tuple):
            if any(extra is not None for extra in y[1:]):
                raise ValueError(
                    f"the converted block {self.name} returns {len(y)} values, and only the first can be handed on: ask the "
                    "model for no attentions or other outputs of its blocks, or revode.revert it"
                )
            y = y[0]
        if not isinstance(y, Tensor) or y.shape != q.shape:
            found = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"the converted block {self.name} makes {found} of a state of shape {tuple(q.shape)}: leave out blocks that "
                "change the shape, as in revode.convert(..., blocks=slice(1, None))"
            )
        if self.looks_for_skip and y.requires_grad and q.requires_grad and not torch.compiler.is_compiling():
            self.looks_for_skip = False
            if not adds(y, q, lambda name: not name.startswith(_MIXING)):
                warnings.warn(
                    f"the converted block {self.name} has no skip connection: if the model adds it, as in x = x + block(x), "
                    "the converted model computes something else; put the addition into the block, or use ReversibleSequence",
                    stacklevel=2,
                )
        return y.to(q.dtype)


_MIXING = ("Convolution", "MkldnnConvolution", "Mm", "Addmm", "Bmm", "Baddbmm", "Linear", "MkldnnLinear", "ScaledDot")
"""Operations that no skip connection goes through, as their nodes in a graph begin."""


class Residual(ResidualBranch):
    """The branch block(x) - x of a residual block.

    Args:
        block: takes a state first, and returns one of its shape, alone or first in a tuple.
        name: the block's path, for messages.
        number: its place among the converted ones.
    """

    def __init__(self, block: nn.Module, name: str = "", number: int = 0) -> None:
        super().__init__()
        self.whole = _Whole(block, name, number)

    def forward(self, q: Tensor, dtype: torch.dtype, given: list[Given], which: tuple[int, ...]) -> Tensor:
        return self.whole(q, dtype, given, which) - q.to(dtype).to(q.dtype)


class Run:
    """A run of converted blocks, and what is known of the model's loop over them."""

    def __init__(self, sequence: ReversibleSequence) -> None:
        self.sequence = sequence
        self.has_warned = False
        self.gives_all_the_same = True
        """Whether, as far as we have seen, the loop gives every block the same arguments."""
        self.blocks()[0].looks_for_skip = True

    def blocks(self) -> list[_Whole]:
        return [branch.whole for branch in self.sequence.fields if isinstance(branch, Residual)]

    def turns(self) -> Iterator[Turn]:
        """A turn for each block, in one pass of the model's loop."""
        loop = _Loop(self)
        try:
            for whole in loop.blocks:
                yield Turn(loop, whole)
        except GeneratorExit:
            if 0 < len(loop.calls) < len(loop.blocks):
                warnings.warn(
                    f"the model left its loop before the converted block {loop.blocks[len(loop.calls)].name}: what it has "
                    "computed is not what those before make; revode.revert it",
                    stacklevel=2,
                )
            raise
        if loop.calls:
            loop.require(len(loop.blocks))

    def is_plain(self) -> bool:
        """Whether a call now is the model's own loop, whatever it does between blocks."""
        scheme = self.sequence.scheme_now()
        return not torch.is_grad_enabled() and scheme.carry == 0.0 and scheme.coupling(0).is_plain

    def __call__(self, x: Tensor, calls: list[Given]) -> Tensor:
        """The state behind all blocks, each given its own arguments."""
        _refuse_recording(self.blocks()[0].name)
        given: list[Given] = []
        which = []
        for call in calls:
            same = next((i for i, other in enumerate(given) if _alike(call, other)), len(given))
            given += [call] if same == len(given) else []
            which.append(same)
        if torch.is_grad_enabled():
            given = [
                (
                    tuple(self._without_cache(value) for value in args),
                    {name: self._without_cache(value) for name, value in kwargs.items()},
                )
                for args, kwargs in given
            ]
        half = x.dtype in (torch.float16, torch.bfloat16)
        return self.sequence(x.float() if half else x, dtype=x.dtype, given=given, which=tuple(which)).to(x.dtype)

    def _without_cache(self, value: Any) -> Any:
        """The value, or None for a cache of keys and values: the recomputation would fill it a second time."""
        if not _is_cache(value):
            return value
        if value.get_seq_length():
            raise ValueError(
                "converted blocks cannot go on from a filled cache where gradients are recorded: give the whole input, or call "
                "under torch.no_grad()"
            )
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(
                "converted blocks leave the cache empty where gradients are recorded: use_cache=False", stacklevel=4
            )
        return None


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


class _Loop:
    """One pass of the model's loop over the converted blocks."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.blocks = run.blocks()
        self.is_plain = run.is_plain()
        self.calls: list[Given] = []
        """What blocks were given so far."""
        self._entered: Any = None
        self._handed_on: Any = None
        self._version: int | None = None
        """Of what was handed on, then."""
        self._streams: Draws = []

    def take(self, number: int, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the block at `number` returns to the loop."""
        if self.is_plain:
            return self.blocks[number].block(x, *args, **kwargs)
        self.require(number)
        name = self.blocks[number].name
        if number and (x is not self._handed_on or _version(x) != self._version):
            raise ValueError(
                f"the model changes the state before the converted block {name}, and converted blocks run as one: put that "
                "into a block, or revode.revert the model"
            )
        self.calls.append(pytree.tree_map(lambda value: value, (args, kwargs)))  # the loop may fill its containers anew
        differs = not _alike(self.calls[0], self.calls[number])
        if number == 0:
            self._entered, self._handed_on = x, x if self.run.gives_all_the_same else _marked(x)
        elif differs and _depends(self.calls[number], self._handed_on):
            raise ValueError(
                f"the model gives the converted block {name} an argument that it computes from the state before it, and "
                "converted blocks run as one: compute it in the block, or revode.revert the model"
            )
        run, num_blocks = self.run, len(self.blocks)
        if run.gives_all_the_same and number == 0:
            self._streams = [(stream, stream.read()) for stream in torch_streams(x.device)]
            self._handed_on = run(x, self.calls * num_blocks)
        elif run.gives_all_the_same and differs:
            run.gives_all_the_same = False
            if not torch.is_grad_enabled() and any(map(_is_cache, pytree.tree_leaves(self.calls))):
                raise ValueError(
                    "the model gives its blocks different arguments, which was not known before its cache was filled: call it "
                    "again with an empty one"
                )
        if not run.gives_all_the_same and number == num_blocks - 1:
            undo(self._streams)  # what was drawn in vain
            self._handed_on = run(self._entered, self.calls)
        self._version = _version(self._handed_on)
        return (self._handed_on,) if self.blocks[-1].returns_tuple else self._handed_on

    def require(self, number: int) -> None:
        """Refuse a loop in which it is not the turn of this block."""
        if number != len(self.calls):
            name = self.blocks[min(number, len(self.calls))].name
            raise ValueError(
                f"the model skips or repeats the converted block {name}, and converted blocks run as one: switch off what does "
                "so (layerdrop=0), or revode.revert the model"
            )


class Turn:
    """What the model's loop gets in place of a converted block: to be called as the block; else it is the block."""

    _loop: _Loop
    _whole: _Whole

    def __init__(self, loop: _Loop, whole: _Whole) -> None:
        self.__dict__.update(_loop=loop, _whole=whole)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args:  # the state by its name
            state = next(iter(inspect.signature(self._whole.block.forward).parameters))
            args = (kwargs.pop(state),)
        try:
            return self._loop.take(self._whole.number, args[0], args[1:], kwargs)
        except Exception:
            self._loop.calls.clear()  # nobody has to be told that this loop was left
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole.block, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._whole.block, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._whole.block, name)


def _marked(x: Tensor) -> Tensor:
    """What stands for the state until the last turn: a copy, with a node of its own in the graph to know it by."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not x.is_floating_point():
        return x
    return x.detach().requires_grad_().clone()


def _depends(given: Given, state: Tensor) -> bool:
    """Whether a tensor among arguments was computed from this state."""
    if torch.compiler.is_compiling() or state.grad_fn is None:
        return False
    found = [value for value in pytree.tree_leaves(given) if isinstance(value, Tensor) and value.requires_grad]
    return any(state.grad_fn is node for value in found for node in graph_nodes(value))


def _version(x: Tensor) -> int | None:
    """How often a state was changed in place; a compiler sees that by itself."""
    return None if torch.compiler.is_compiling() else version_of(x)


def _alike(first: Given, second: Given) -> bool:
    """Whether two calls are given the same objects, or equal numbers and words."""
    if first is second:
        return True
    ours, theirs = pytree.tree_flatten(first), pytree.tree_flatten(second)
    return ours[1] == theirs[1] and all(
        a is b or (isinstance(a, _PLAIN) and type(a) is type(b) and a == b)
        for a, b in zip(ours[0], theirs[0], strict=True)
    )


_PLAIN = (bool, int, float, str)


def _refuse_recording(name: str) -> None:
    """Raise if transformers was asked for hidden states or attentions, which it hears of from hooks on the blocks."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is not None and collector.get():
        wanted = ", ".join(sorted(key for key in collector.get() if not key.startswith("_")))
        raise ValueError(
            f"the model was asked for {wanted}, which converted blocks ({name}, ...) do not keep: call it without "
            "output_hidden_states and output_attentions, or revode.revert it"
        )


@dataclass
class _Conversion:
    """What a converted container remembers: how its blocks run, and the runs of the first so many of them."""

    path: str
    scheme: Scheme
    blocks: slice
    options: dict[str, Any]
    runs: dict[int, Run] = field(default_factory=dict)
    num_indexed: int = 0
    has_warned: bool = False


class _Converted:
    """What a converted container does otherwise: it yields turns in place of the blocks that were converted."""

    _modules: dict[str, nn.Module]
    training: bool
    _conversion: _Conversion

    def _converted(self) -> tuple[int, int]:
        """The first of the blocks that were converted, and the one behind their last."""
        first, last, _ = self._conversion.blocks.indices(len(self._modules))
        return first, max(first, last)

    def _run_of(self, blocks: Sequence[nn.Module], first: int) -> Run:
        record = self._conversion
        run = record.runs.get(len(blocks))
        if run is None or any(a is not b.block for a, b in zip(blocks, run.blocks(), strict=True)):
            branches = [Residual(block, f"{record.path}.{first + i}".lstrip("."), i) for i, block in enumerate(blocks)]
            run = record.runs[len(blocks)] = Run(ReversibleSequence(branches, record.scheme, **record.options))
        run.sequence.training = self.training
        return run

    def __iter__(self) -> Iterator[Any]:
        children = list(self._modules.values())
        first, last = self._converted()
        yield from children[:first]
        if first < last:
            yield from self._run_of(children[first:last], first).turns()
        yield from children[last:]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            self._note_index(index)
            return list(self._modules.values())[index]
        if not isinstance(index, slice):
            return self._modules[index]
        start, stop, step = index.indices(len(self._modules))
        if start or step != 1:
            raise ValueError(
                f"converted blocks {self._conversion.path!r} run as one and cannot be sliced [{index.start}:{index.stop}:"
                f"{index.step}], other than from the first on: revode.revert the model"
            )
        first, last = self._converted()
        part: Any = nn.ModuleList(list(self._modules.values())[:stop]).train(self.training)
        part._conversion = replace(self._conversion, blocks=slice(first, min(last, stop)))
        part.__class__ = ConvertedList
        return part

    def _note_index(self, index: int) -> None:
        """Warn, once, where a loop takes one block after the other: they run as they are."""
        record = self._conversion
        own = range(len(self._modules))[record.blocks]
        goes_on = index == own[0] + record.num_indexed
        record.num_indexed = record.num_indexed + 1 if goes_on else int(index == own[0])
        if record.num_indexed == len(own) > 1 and torch.is_grad_enabled() and not record.has_warned:
            record.has_warned = True
            warnings.warn(
                f"the converted blocks {record.path!r} were taken one by one by their index, so they run as before and save "
                "nothing: let the model iterate over them",
                stacklevel=3,
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._modules)} blocks, {self._conversion.scheme!r})"


class ConvertedList(_Converted, nn.ModuleList):
    """A ``ModuleList`` whose blocks run as one."""


class ConvertedSequential(_Converted, nn.Sequential):
    """A ``Sequential`` whose blocks run as one."""


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.ModuleList: ConvertedList, nn.Sequential: ConvertedSequential}


def convert(
    model: Model, path: str, scheme: Scheme | None = None, *, blocks: slice = slice(None), **options: Any
) -> Model:
    """Run residual blocks of a model reversibly, in place of the loop over them; returns the model, which is changed.

    Parameters and the keys of the ``state_dict`` stay. With `BDIA` the model in eval mode is the unconverted one, bit for bit;
    with other schemes it is another network with the same weights, to be fine-tuned. The model must iterate over its blocks,
    or over a slice from the first on: one that takes them by their index runs as before, with a warning.

    Args:
        model: the model.
        path: of its ``nn.ModuleList`` or ``nn.Sequential`` of blocks, as in ``"transformer.h"``; ``""`` is the model itself.
        scheme: how to run them; `BDIA` by default.
        blocks: which of them, if some change the shape.
        options: of `ReversibleSequence`: ``backprop``, ``exact``, ``anchor_every``, ``memory_budget``, ``verify``.
    """
    scheme = BDIA() if scheme is None else scheme
    container = _container(model, path)
    chosen = list(container._modules.values())[blocks]
    if blocks.step not in (None, 1) or not chosen:
        raise ValueError(
            f"blocks must be a slice without step that chooses some of {len(container)} blocks, got {blocks}"
        )
    if isinstance(scheme, Scheme) and scheme.init(torch.empty(1, 2))[1].shape[1] != 2:
        raise ValueError(
            f"{scheme!r} halves the width of the blocks' input; convert takes a scheme that keeps it, as BDIA()"
        )
    # Refuses what is wrong, before anything changes.
    ReversibleSequence([Residual(block) for block in chosen], scheme, **options)
    container._conversion = _Conversion(path, scheme, blocks, options)
    container.__class__ = _KINDS[type(container)]
    return model


def revert(model: Model) -> Model:
    """Undo `convert`: the model's own loop runs its blocks again; returns the model, which is changed."""
    found: list[Any] = [module for module in model.modules() if isinstance(module, _Converted)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no converted blocks to revert")
    for container in found:
        del container._conversion
        container.__class__ = next(plain for plain, kind in _KINDS.items() if kind is type(container))
    return model


def _container(model: nn.Module, path: str) -> Any:
    candidates = [name for name, module in model.named_modules() if type(module) in _KINDS]
    try:
        container = model.get_submodule(path)
    except AttributeError:
        container = None
    if isinstance(container, _Converted):
        raise ValueError(f"{path!r} is converted already: revode.revert the model first")
    if type(container) not in _KINDS:
        raise unknown(f"list of blocks in {type(model).__name__}", path, candidates)
    return container
