"""Models that exist already, run reversibly: `convert` and `revert`.

A converted list of blocks keeps its children, and with them parameters and names. Where the model's own loop iterates over it,
it yields one callable in place of all blocks, which runs them as branches block(x) - x of a `ReversibleSequence`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode.engine.accounting import adds
from revode.engine.chain import ResidualBranch
from revode.files import unknown
from revode.schemes import BDIA, Scheme

Model = TypeVar("Model", bound=nn.Module)


class _Whole(nn.Module):
    """A block on a state: in the block's dtype, without what it returns beside its tensor."""

    def __init__(self, block: nn.Module, name: str) -> None:
        super().__init__()
        self.block = block
        self.name = name
        self.returns_tuple = False
        self.looks_for_skip = False

    def forward(self, q: Tensor, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
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
    """

    def __init__(self, block: nn.Module, name: str = "") -> None:
        super().__init__()
        self.whole = _Whole(block, name)

    def forward(self, q: Tensor, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return self.whole(q, dtype, args, kwargs) - q.to(dtype).to(q.dtype)


class Run:
    """The one callable that stands for a run of converted blocks in the model's own loop."""

    def __init__(self, sequence: ReversibleSequence) -> None:
        self.sequence = sequence
        self.has_warned = False
        self.blocks()[0].looks_for_skip = True

    def blocks(self) -> list[_Whole]:
        return [branch.whole for branch in self.sequence.fields if isinstance(branch, Residual)]

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        blocks = self.blocks()
        if not torch.is_grad_enabled() and self.sequence.scheme_now().carry == 0.0:
            y: Any = x  # the plain network
            for whole in blocks:
                y = whole.block(y[0] if isinstance(y, tuple) else y, *args, **kwargs)
            return y
        _refuse_recording(blocks[0].name)
        if torch.is_grad_enabled():
            args = tuple(self._without_cache(value) for value in args)
            kwargs = {name: self._without_cache(value) for name, value in kwargs.items()}
        half = x.dtype in (torch.float16, torch.bfloat16)
        y = self.sequence(x.float() if half else x, dtype=x.dtype, args=args, kwargs=kwargs).to(x.dtype)
        return (y,) if blocks[-1].returns_tuple else y

    def _without_cache(self, value: Any) -> Any:
        """The value, or None for a cache of keys and values: the recomputation would fill it a second time."""
        if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
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
    """What a converted container remembers: how its blocks run, and the callables that stand for them, by their number."""

    path: str
    scheme: Scheme
    blocks: slice
    options: dict[str, Any]
    runs: dict[int, Run] = field(default_factory=dict)
    num_indexed: int = 0
    has_warned: bool = False


class _Converted:
    """What a converted container does otherwise: it yields one callable for all blocks that were converted."""

    _modules: dict[str, nn.Module]
    training: bool
    _conversion: _Conversion

    def _yields(self, stop: int) -> list[Any]:
        """The blocks before `stop`, those that were converted as one."""
        children = list(self._modules.values())[:stop]
        first, last, _ = self._conversion.blocks.indices(len(self._modules))
        last = min(last, len(children))
        if first >= last:
            return children
        return [*children[:first], self._run_of(children[first:last], first), *children[last:]]

    def _run_of(self, blocks: Sequence[nn.Module], first: int) -> Run:
        record = self._conversion
        run = record.runs.get(len(blocks))
        if run is None or any(a is not b.block for a, b in zip(blocks, run.blocks(), strict=True)):
            branches = [Residual(block, f"{record.path}.{first + i}".lstrip(".")) for i, block in enumerate(blocks)]
            run = record.runs[len(blocks)] = Run(ReversibleSequence(branches, record.scheme, **record.options))
        run.sequence.training = self.training
        return run

    def __iter__(self) -> Iterator[Any]:
        return iter(self._yields(len(self._modules)))

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
        return self._yields(stop)

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
