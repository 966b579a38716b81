"""What a network costs before it is run: FLOPs, and bytes kept for backward under each strategy.

Every kind of branch, transition, stem and head is run once on two and on three images; bytes are affine in the batch, so
that says what any batch keeps. What a sequence keeps follows from the engine's rules:

    store       the graph of every branch
    checkpoint  the input of every branch
    reversible  the final pair (one for each anchored segment)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from revode.engine import STRATEGIES, ReversibleSequence, states_kept
from revode.engine.accounting import SavedTensors
from revode.networks.stages import Stage
from revode.networks.transitions import Features, join


@dataclass(frozen=True)
class Bytes:
    """Bytes kept for a batch: fixed + batch * per_image."""

    fixed: int = 0
    per_image: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.fixed + other.fixed, self.per_image + other.per_image)

    def __mul__(self, times: int) -> Bytes:
        return Bytes(self.fixed * times, self.per_image * times)

    def of(self, batch: int) -> int:
        """The bytes for so many images."""
        return self.fixed + batch * self.per_image


@dataclass(frozen=True)
class PartCost:
    """One row of a network's bill.

    ``branches`` are the graphs of the single branches, and ``pair`` the final pair, of a reversible sequence.
    """

    name: str
    num_blocks: int
    shape: tuple[int, ...]
    num_parameters: int
    flops: int
    saved: dict[str, Bytes]
    branches: tuple[Bytes, ...] = ()
    pair: Bytes = Bytes()


_BATCHES = (2, 3)


class Meter:
    """Walks a network part by part with zeros for images.

    Args:
        model: a `StagedClassifier`; its mode, dtype and device are those that are measured.
        image_shape: channels, height and width.
    """

    def __init__(self, model: nn.Module, image_shape: tuple[int, ...]) -> None:
        self.model: Any = model
        self.image_shape = image_shape
        self.seen: set[int] = set()
        self.memo: dict[Any, tuple[Bytes, bool, int]] = {}

    def parts(self) -> list[PartCost]:
        """Stem, units with the transitions between them, head."""
        parameter = next(self.model.parameters())
        images = [torch.zeros(n, *self.image_shape, dtype=parameter.dtype, device=parameter.device) for n in _BATCHES]
        y, stem = self._plain("stem", self.model.stem, images)
        found = [stem]
        last = len(self.model.stages)
        kept = getattr(self.model.stem, "keeps_output", False)
        in_head: dict[str, int] = {}
        for number, stage in enumerate(self.model.stages, start=1):
            y, parts, in_head = self._stage(number, last, stage, y, kept)
            kept = False
            found.extend(parts)
        _, head = self._plain("head", self.model.head, [self.model.readout(x) for x in y], in_head)
        return [*found, head]

    def _stage(
        self, number: int, last: int, stage: Stage, x: list[Any], input_kept: bool
    ) -> tuple[list[Any], list[PartCost], dict[str, int]]:
        """Blocks and transition; `input_kept` says whether what comes in is counted already, the last value what goes out."""
        found = []
        body = stage.body
        kept: dict[str, int] = {}
        if isinstance(body, ReversibleSequence):
            x, unit, kept = self._sequence(f"unit {number}", body, x, stage.hands_on_pair)
            found.append(unit)
        elif isinstance(body, nn.Sequential):
            x, unit = self._residual(f"unit {number}", body, x, input_kept)
            found.append(unit)
        if not isinstance(stage.transition, nn.Identity):
            name = f"to unit {number + 1}" if number < last else "connector"
            x, transition = self._plain(name, stage.transition, x, kept)
            return x, [*found, transition], {}
        return x, found, {} if stage.hands_on_pair else kept

    def _sequence(
        self, name: str, body: ReversibleSequence, x: list[Any], hands_on_pair: bool
    ) -> tuple[list[Any], PartCost, dict[str, int]]:
        """A reversible unit; also how many members of the pair it hands on are kept already, by strategy."""
        states = [_zeros_like_state(value, body.scheme.splits) for value in x]
        costs = [self._branch(field, states) for field in body.fields]
        branches = tuple(cost for cost, _, _ in costs)
        state = Bytes(0, _bytes(states[0]) // _BATCHES[0])
        segment = _segment_length(body)
        saved = {
            "reversible": state * states_kept(len(body.fields), segment),
            "checkpoint": state * len(body.fields),
            "store": sum(branches, Bytes()),
        }
        kept = {"reversible": 2, "checkpoint": 1, "store": int(costs[-1][1])} if hands_on_pair else {"reversible": 1}
        if segment == 1:
            kept["reversible"] = kept["checkpoint"] if hands_on_pair else 0
        output = [(q, q.clone()) if hands_on_pair else q for q in states]
        shape = tuple(join(output[0]).shape[1:]) if body.scheme.splits else tuple(states[0].shape[1:])
        flops = sum(flops for _, _, flops in costs)
        num_blocks = len(body.fields) // body.scheme.fields_per_step
        part = PartCost(name, num_blocks, shape, self._count(body), flops, saved, branches, state * 2)
        return output, part, kept

    def _residual(self, name: str, body: nn.Sequential, x: list[Any], input_kept: bool) -> tuple[list[Any], PartCost]:
        """A unit of a ResNet: stored whatever the strategy."""
        saved, flops = Bytes(0, -_bytes(x[0]) // _BATCHES[0] if input_kept else 0), 0
        for block in body:
            cost, _, block_flops = self._branch(block, x)
            saved, flops = saved + cost, flops + block_flops
            if block is body[0]:
                x = [_detach(_call(block, value)) for value in x]
        strategies: dict[str, Bytes] = {}
        strategies.update(dict.fromkeys(STRATEGIES, saved))
        return x, PartCost(name, len(body), tuple(x[0].shape[1:]), self._count(body), flops, strategies)

    def _branch(self, field: nn.Module, states: list[Tensor]) -> tuple[Bytes, bool, int]:
        """Bytes of the graph of one branch, whether its input is among them, and FLOPs; once for each kind."""
        shapes = tuple((name, parameter.shape) for name, parameter in field.named_parameters())
        key = (type(field), shapes, getattr(field, "transposed", None), states[0].shape)
        if key not in self.memo:
            everything, flops, _ = _measure(field, states)
            without, _, _ = _measure(field, states, 1)
            self.memo[key] = everything, everything != without, flops
        return self.memo[key]

    def _plain(
        self, name: str, module: nn.Module, x: list[Any], kept: dict[str, int] | None = None
    ) -> tuple[list[Any], PartCost]:
        """Stem, transition or head, in addition to the members of its input that are kept anyway."""
        saved = {strategy: _measure(module, x, (kept or {}).get(strategy, 0))[0] for strategy in STRATEGIES}
        _, flops, output = _measure(module, x)
        shape = tuple(join(output[0]).shape[1:])
        return output, PartCost(name, 0, shape, self._count(module), flops, saved)

    def _count(self, module: nn.Module) -> int:
        """Parameters, each counted where it is met first."""
        new = [parameter for parameter in module.parameters() if id(parameter) not in self.seen]
        self.seen.update(map(id, new))
        return sum(parameter.numel() for parameter in new)


def _measure(module: nn.Module, inputs: list[Any], num_kept: int = 0) -> tuple[Bytes, int, list[Any]]:
    """Bytes that `module` keeps besides the first `num_kept` members of its input, FLOPs for one image, outputs."""
    counts, outputs, flops = [], [], 0
    for value in inputs:
        value = _require_grad(value)
        exclude: Iterable[Tensor] = [*module.parameters(), *_members(value)[:num_kept]]
        with torch.enable_grad(), FlopCounterMode(display=False) as counter, SavedTensors(exclude) as saved:
            output = _call(module, value)
        counts.append(saved.num_bytes)
        outputs.append(_detach(output))
        flops = counter.get_total_flops() // len(_members(value)[0])
    per_image = (counts[1] - counts[0]) // (_BATCHES[1] - _BATCHES[0])
    return Bytes(counts[0] - _BATCHES[0] * per_image, per_image), flops, outputs


def _segment_length(body: ReversibleSequence) -> int:
    """Branches between two pairs that the reversible strategy keeps."""
    return body.segment_length() if body.backprop == "reversible" else len(body.fields)


def _call(module: nn.Module, x: Features) -> Features:
    """module(x) on copies of its buffers, so that running statistics stay where they are."""
    return functional_call(module, {name: buffer.clone() for name, buffer in module.named_buffers()}, (x,))


def _zeros_like_state(x: Features, splits: bool) -> Tensor:
    """A state of the sequence that `x` enters."""
    first = _members(x)[0]
    if splits and isinstance(x, Tensor):
        first = first[:, : first.shape[1] // 2]
    return torch.zeros_like(first)


def _members(x: Features) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x)


def _detach(x: Features) -> Features:
    return x.detach() if isinstance(x, Tensor) else (x[0].detach(), x[1].detach())


def _require_grad(x: Features) -> Features:
    if isinstance(x, Tensor):
        return x.detach().requires_grad_()
    return x[0].detach().requires_grad_(), x[1].detach().requires_grad_()


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
