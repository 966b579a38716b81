"""What a network costs before it is trained, part by part: FLOPs, and bytes kept for backward under each strategy.

A forward pass on two and one on three images is counted under every strategy; bytes are affine in the batch, so that says
what any batch keeps. A tensor that several parts keep counts for the first of them.

One memory budget for a whole network is shared among its units: stem, transitions and head keep what they must, each unit at
least its final pair and the graph of one branch. The rest goes where it spares most recomputation: to the units whose branches
cost most FLOPs for a byte kept, which are the later ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from revode.engine import ReversibleSequence
from revode.engine.accounting import SavedTensors
from revode.networks.blocks import Features, join


@dataclass(frozen=True)
class Bytes:
    """Bytes kept for a batch: fixed + batch * per_image."""

    fixed: int = 0
    per_image: int = 0

    def of(self, batch: int) -> int:
        """The bytes for so many images."""
        return self.fixed + batch * self.per_image

    def times(self, ratio: Fraction) -> Bytes:
        """The same for images that hold so many times as many points."""
        return Bytes(self.fixed, round(self.per_image * ratio))


@dataclass(frozen=True)
class PartCost:
    """One row of a network's bill; ``branches`` are the graphs of the single branches of a reversible unit."""

    name: str
    num_blocks: int
    shape: tuple[int, ...]
    num_parameters: int
    flops: int
    saved: dict[str, Bytes]
    branches: tuple[Bytes, ...] = ()

    def enlarged(self, small: Sequence[int], large: Sequence[int]) -> PartCost:
        """The bill for edges `large`, from that for edges `small`: all but what is fixed grows with the number of points."""
        ratio = Fraction(math.prod(large), math.prod(small))
        edges = (edge * new // old for edge, old, new in zip(self.shape[1:], small, large, strict=True))
        return replace(
            self,
            shape=(self.shape[0], *edges),
            flops=round(self.flops * ratio),
            saved={strategy: kept.times(ratio) for strategy, kept in self.saved.items()},
            branches=tuple(branch.times(ratio) for branch in self.branches),
        )


_BATCHES = (2, 3)


class _Part(NamedTuple):
    """A part of one pass: the module, its output's shape, bytes saved by it and by each of its branches, FLOPs."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    num_bytes: int
    branch_bytes: list[int]
    flops: int


def measure_parts(model: Any, image_shape: tuple[int, ...]) -> list[PartCost]:
    """Stem, units with the transitions between them, head.

    Args:
        model: a `StagedClassifier`; its mode, dtype and device are those that are measured.
        image_shape: channels and edges.
    """
    walks = {
        strategy: [list(_walk(model, strategy, batch, image_shape)) for batch in _BATCHES]
        for strategy in model.config.strategies
    }
    found, seen = [], set()
    for index, part in enumerate(walks["store"][0]):
        new = {id(parameter): parameter.numel() for parameter in part.module.parameters() if id(parameter) not in seen}
        seen.update(new)
        saved = {name: _affine(*(walk[index].num_bytes for walk in pair)) for name, pair in walks.items()}
        branches = map(_affine, *(walk[index].branch_bytes for walk in walks["store"]))
        found.append(
            PartCost(
                part.name, _num_blocks(part.module), part.shape, sum(new.values()), part.flops, saved, tuple(branches)
            )
        )
    return found


def _walk(model: Any, strategy: str, batch: int, image_shape: tuple[int, ...]) -> Iterator[_Part]:
    """One forward pass under a strategy, on zeros; a tensor that is saved twice is counted where it is saved first."""
    parameter = next(model.parameters())
    y: Any = torch.zeros(batch, *image_shape, dtype=parameter.dtype, device=parameter.device)
    with torch.enable_grad(), SavedTensors(model.parameters()) as saved:
        for name, module, call in _parts(model, strategy):
            before, marks = saved.num_bytes, [saved.num_bytes]
            fields = module.fields if isinstance(module, ReversibleSequence) else []
            hooks = [field.register_forward_hook(lambda *_, m=marks: m.append(saved.num_bytes)) for field in fields]
            with FlopCounterMode(display=False) as counter:
                y = _call(call, y)
            for hook in hooks:
                hook.remove()
            newest = isinstance(module, ReversibleSequence) and not module.scheme.splits and not isinstance(y, Tensor)
            shape = tuple((y[1] if newest else join(y if isinstance(y, Tensor) else y[:2])).shape[1:])
            branches = [last - first for first, last in itertools.pairwise(marks)]
            yield _Part(name, module, shape, saved.num_bytes - before, branches, counter.get_total_flops() // batch)


def _parts(model: Any, strategy: str) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Name, module, and the module as `strategy` runs it."""
    yield "stem", model.stem, model.stem
    for number, stage in enumerate(model.stages, start=1):
        body = stage.body
        if isinstance(body, ReversibleSequence):
            twin = body.with_strategy(backprop=strategy, memory_budget=None)
            yield f"unit {number}", body, type(stage)(twin, nn.Identity(), passes_pair=stage.passes_pair)
        elif body is not None:
            yield f"unit {number}", body, body
        if not isinstance(stage.transition, nn.Identity):
            name = f"to unit {number + 1}" if number < len(model.stages) else "connector"
            yield name, stage.transition, stage.transition
    yield "head", model.head, _Head(model)


class _Head(nn.Module):
    """The head with what it sees of the last features."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.head, self.readout = model.head, model.readout

    def forward(self, x: Features) -> Tensor:
        return self.head(self.readout(x))


def _call(module: nn.Module, x: Features) -> Features:
    """module(x) on copies of its buffers, so that running statistics stay where they are."""
    return functional_call(module, {name: buffer.clone() for name, buffer in module.named_buffers()}, (x,))


def _affine(two: int, three: int) -> Bytes:
    """The bytes of any batch from those of two and of three images."""
    return Bytes(3 * two - 2 * three, three - two)


def _num_blocks(module: nn.Module) -> int:
    if isinstance(module, ReversibleSequence):
        return len(module.fields) // module.scheme.fields_per_step
    return len(module) if isinstance(module, nn.Sequential) else 0


@dataclass(frozen=True)
class Need:
    """What a unit can use: at least `minimum` bytes, at most `full`; `worth` is the FLOPs spared by a byte."""

    minimum: int
    full: int
    worth: float


def unit_need(part: PartCost, batch: int) -> Need:
    """The need of a reversible unit for a batch of this size: its pairs, and one or all graphs of its branches."""
    graphs = [branch.of(batch) for branch in part.branches]
    pairs = part.saved["reversible"].of(batch)
    return Need(pairs + max(graphs), pairs + sum(graphs), part.flops * batch / max(1, sum(graphs)))


def share(budget: int, parts: list[PartCost], batch: int) -> list[int]:
    """The bytes for each reversible unit among `parts`, in order; with everything else they stay within `budget`."""
    needs = [unit_need(part, batch) for part in parts if part.branches]
    elsewhere = sum(part.saved["reversible"].of(batch) for part in parts if not part.branches)
    minimum = elsewhere + sum(need.minimum for need in needs)
    if budget < minimum:
        raise ValueError(
            f"memory_budget={budget} is too small for a batch of {batch}: stem, transitions, head and the smallest "
            f"possible units (a pair and one branch each) need {minimum} bytes"
        )
    shares = [need.minimum for need in needs]
    left = budget - minimum
    for index in sorted(range(len(needs)), key=lambda index: -needs[index].worth):
        extra = min(left, needs[index].full - needs[index].minimum)
        shares[index] += extra
        left -= extra
    return shares
