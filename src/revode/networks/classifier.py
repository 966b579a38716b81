"""The staged classifier: stem, stages, head; and its wholly invertible form."""

from __future__ import annotations

import dataclasses
import math
from functools import singledispatch
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode.engine.regional import compile_branches
from revode.networks.blocks import Features, PadStem, join
from revode.networks.config import NetworkConfig
from revode.networks.cost import PartCost, measure_parts, share
from revode.operators import LinearOperator
from revode.schemes import State


class NamedSequence(NamedTuple):
    """A reversible sequence of a network."""

    name: str
    sequence: ReversibleSequence
    num_blocks: int


class Unit(NamedTuple):
    """The branches of one of the paper's units in order, ``fields_per_block`` to a block, and their step size."""

    name: str
    fields: tuple[nn.Module, ...]
    fields_per_block: int
    h: float


class Stage(nn.Module):
    """A sequence of blocks at one width and resolution, and the transition behind it.

    >>> stage = create_model("resnet-14").stages[1]
    >>> stage(torch.randn(1, 16, 8, 8)).shape
    torch.Size([1, 32, 4, 4])

    Args:
        body: the sequence; any module from tensor to tensor if it is not reversible, and may be absent.
        passes_pair: whether the transition gets the pair of the scheme, or its newest state.
    """

    def __init__(self, body: nn.Module | None, transition: nn.Module, *, passes_pair: bool = False) -> None:
        super().__init__()
        self.body = body
        self.transition = transition
        self.passes_pair = passes_pair

    def forward(self, x: Features) -> Features:
        return self.transition(self.run_body(x))

    def run_body(self, x: Features) -> Features:
        """Return the input of the transition."""
        if isinstance(self.body, ReversibleSequence):
            # What a U-Net has set aside is carried past the blocks.
            entering, aside = (x, ()) if isinstance(x, Tensor) else (x[:2], x[2:])
            # The newest state itself, not the readout: that is a copy, and the unit has saved the state anyway.
            state = self.body(entering, return_state=True)[1]
            x = (*state, *aside) if self.passes_pair else state[1]
        elif self.body is not None:
            x = self.body(x)
        return x

    def inverse(self, x: Features, return_state: bool) -> Features:
        """Return the input of a stage that passes pairs on: a pair, or the tensor that the pair was made of."""
        if not isinstance(self.transition, nn.Identity):
            x = cast(Any, self.transition).inverse(x)
        found = cast(ReversibleSequence, self.body).inverse(cast(State, x[:2]), return_state=return_state)
        return (*found, *x[2:]) if return_state else found


class StagedClassifier(nn.Module):
    """A network from images to class scores, through units of blocks at falling resolution.

    >>> model = create_model("hamiltonian-14")
    >>> model(torch.randn(2, 3, 32, 32)).shape, model.num_layers
    (torch.Size([2, 10]), 14)
    """

    def __init__(self, config: NetworkConfig, stem: nn.Module, stages: list[Stage], head: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.reduction = config.reduction
        self.stem = stem
        self.stages = nn.ModuleList(stages)
        self.head = head
        self._shares: dict[Any, list[int]] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.readout(self.run_stages(x)))

    def features(self, x: Tensor) -> Tensor:
        """Return the last features: the head's input, or with squeeze transitions the pair that `readout` reads it from."""
        return join(self.run_stages(x))

    def readout(self, x: Features) -> Tensor:
        """Return the head's input from the last features."""
        return join(x)

    def run_stages(self, x: Tensor) -> Features:
        """Run stem and stages; the pair is not yet joined."""
        self.check_image(x)
        if self.config.memory_budget and torch.is_grad_enabled():
            self._share_budget(x, self.config.memory_budget)
        y: Features = self.stem(x)
        for stage in self.stages:
            y = stage(y)
        return y

    def check_image(self, x: Tensor) -> None:
        """Raise unless x is a batch of images with the right channels, large enough for the units."""
        smallest = self.reduction
        if x.dim() != 4 or x.shape[1] != self.config.in_channels or min(x.shape[2:]) < smallest:
            raise ValueError(
                f"{self.config.name} takes images of shape (batch, {self.config.in_channels}, height, width) with edges "
                f"of at least {smallest}, got {tuple(x.shape)}"
            )

    def with_strategy(self, backprop: str, **changes: Any) -> StagedClassifier:
        """Return a network of the same parts and parameters, under another strategy and without a memory budget."""
        stages = []
        for stage in cast(list[Stage], self.stages):
            body = stage.body
            if isinstance(body, ReversibleSequence):
                body = body.with_strategy(backprop=backprop, memory_budget=None, **changes)
            stages.append(Stage(body, stage.transition, passes_pair=stage.passes_pair))
        return self._of_parts(dataclasses.replace(self.config, memory_budget=None), self.stem, stages, self.head)

    def _of_parts(self, *parts: Any) -> StagedClassifier:
        return type(self)(*parts)

    def measure(self, image_shape: tuple[int, ...], batch: int) -> list[PartCost]:
        """Return the cost of stem, units, transitions and head for a batch of images of this shape."""
        return measure_parts(self, image_shape, batch)

    def _share_budget(self, x: Tensor, budget: int) -> None:
        """Give each sequence its part of the memory budget for a batch like x; measure once for each kind of call."""
        autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        kind = (budget, x.shape, x.dtype, self.training, *autocast)
        if kind not in self._shares:
            if torch.compiler.is_compiling():
                raise ValueError(
                    "memory_budget is shared among the units by measuring them, which torch.compile cannot do: "
                    "call the uncompiled network once on images of this shape first"
                )
            self._shares[kind] = share(budget, self.measure(tuple(x.shape[1:]), len(x)), len(x))
        for (_, sequence, _), part in zip(self.sequences(), self._shares[kind], strict=True):
            if sequence.backprop == "reversible":  # not a twin that stores
                sequence.strategy = sequence.strategy.replace(memory_budget=max(1, part))

    @property
    def num_layers(self) -> int:
        """Return the number of layers as the paper counts them: convolutions in the blocks, the stem and the linear map."""
        return self.config.num_layers

    def sequences(self) -> list[NamedSequence]:
        """Return the reversible sequences in order, with a name and their depth in blocks; none for a ResNet."""
        found = []
        for index, stage in enumerate(self.stages):
            body = cast(Stage, stage).body
            if isinstance(body, ReversibleSequence):
                num_blocks = len(body.fields) // body.scheme.fields_per_step
                found.append(NamedSequence(f"unit {index + 1}", body, num_blocks))
        return found

    def units(self) -> list[Unit]:
        """Return the branches of the reversible blocks, by the unit they belong to as the paper counts; none for a ResNet."""
        sequences = [sequence for _, sequence, _ in self.sequences()]
        if not sequences:
            return []
        fields = iter([field for sequence in sequences for field in sequence.fields])
        per_block = sequences[0].scheme.fields_per_step
        counts = self.config.blocks if self.config.passage.keeps_units else self.config.stage_blocks
        units = []
        for index, num_blocks in enumerate(counts):
            own = tuple(next(fields) for _ in range(num_blocks * per_block))
            units.append(Unit(f"unit {index + 1}", own, per_block, self.config.step_size(index)))
        return units

    def extra_repr(self) -> str:
        return self.config.name


class InvertibleClassifier(StagedClassifier):
    """A classifier with `Squeeze` transitions: from its last features the image can be computed.

    >>> model = create_model("hamiltonian-14", transition="squeeze").eval()
    >>> x = torch.randn(1, 3, 32, 32)
    >>> torch.allclose(model.inverse(model.features(x)), x, atol=1e-4)
    True
    """

    def check_image(self, x: Tensor) -> None:
        super().check_image(x)
        factor = self.config.reduction
        if any(edge % factor for edge in x.shape[2:]):
            raise ValueError(
                f"transition='squeeze' halves images exactly: their edges must be multiples of {factor}, got {tuple(x.shape)}"
            )

    def readout(self, x: Features) -> Tensor:
        """Return the halves joined, or the newest of two states."""
        sequence = self.sequences()[-1].sequence
        return sequence.scheme.readout(cast(State, x), 1)

    def inverse(self, features: Tensor) -> Tensor:
        """Return the image of these `features`: both members of the last pair, joined along the channels."""
        channels = self.config.pair_channels
        if features.dim() != 2 + self.config.ndim or features.shape[1] != channels:
            raise ValueError(f"inverse takes features of shape (batch, {channels}, …), got {tuple(features.shape)}")
        x: Features = features.chunk(2, dim=1)
        for stage in reversed(cast(list[Stage], self.stages)):
            x = stage.inverse(x, return_state=stage is not self.stages[0])
        return cast(PadStem, self.stem).inverse(cast(Tensor, x))


@singledispatch
def build(config: NetworkConfig) -> StagedClassifier:
    """Return the network that `config` describes, with fresh weights.

    >>> build(model_config("hamiltonian-14", num_classes=100)).config.num_classes
    100
    """
    return assemble(config, InvertibleClassifier if config.passage.carries_pair else StagedClassifier)


def assemble(config: NetworkConfig, kind: type[StagedClassifier]) -> StagedClassifier:
    """Return a network of this kind: stem, stages, head."""
    # The seed of smooth kernels is drawn before anything else, so that it does not depend on the depth.
    seed = int(torch.randint(2**62, (), device="cpu")) if config.init == "smooth" else None
    model = kind(
        config,
        config.passage.stem(config),
        _make_stages(config),
        config.passage.head(config.head_channels, config.num_classes),
    )
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for _, sequence, _ in model.sequences():
            smooth_in_time_(sequence, generator)
    return model


def _make_stages(config: NetworkConfig) -> list[Stage]:
    passage, last = config.passage, config.num_units - 1
    pair = config.splits or passage.carries_pair
    return [
        Stage(
            make_body(config, unit),
            (passage.between if unit < last else passage.behind)(config, unit),
            passes_pair=pair,
        )
        for unit in range(config.num_units)
    ]


def make_body(config: NetworkConfig, unit: int) -> nn.Module | None:
    """Return the blocks at the width of this unit, or None if there are none."""
    row, scheme = config.row, cast(Any, config.row.scheme)
    options: dict[str, Any] = {"activation": config.activation, "norm": config.norm, "ndim": config.ndim}
    options |= config.branch_options(unit)
    entrance = {} if scheme else {"in_channels": config.channels[max(0, unit - 1)], "stride": 2 if unit else 1}
    fields: list[nn.Module] = []
    for index in range(config.stage_blocks[unit]):
        special = entrance if index == 0 else {}
        fields += row.block(config.stage_channels[unit], unit == index == 0, **options, **special)
    if scheme is None:
        if config.compile:
            compile_branches(fields)
        return nn.Sequential(*fields)
    time = {"h": config.step_size(unit), "start": config.start} if row.integrates else {}
    given = {name: value for name, value in (time | {"damping": config.damping}).items() if value}
    if not fields:
        return None
    return ReversibleSequence(
        fields,
        scheme(**given),
        backprop=config.backprop,
        exact=config.exact,
        anchor_every=config.anchor_every,
        split_dim=1,
        verify=config.verify,
        compile=config.compile,
    )


def smooth_in_time_(sequence: ReversibleSequence, generator: torch.Generator) -> None:
    """Overwrite the kernels of a sequence by ones that vary smoothly in time.

    The ODE view has no limit for independent kernels in every block. Here the kernels of N blocks are samples of one curve for
    each position within a block,

        K_j = cos(θ_j) A + sin(θ_j) B,    θ_j = (π/2) (j + 1/2) / N,

    with A and B drawn as the paper draws a kernel, independently of N. Every K_j has the paper's distribution, neighbours
    differ by O(1/N), and with h = T/N the network converges as N grows.
    """
    per_step = sequence.scheme.fields_per_step
    done: set[int] = set()
    for position in range(per_step):
        operators = [cast(LinearOperator, field.operator) for field in sequence.fields[position::per_step]]
        if id(operators[0].weight) in done:  # the second layer of a block that shares its kernel
            continue
        done.update(id(operator.weight) for operator in operators)
        start, end = operators[0].draw(generator), operators[0].draw(generator)
        for j, operator in enumerate(operators):
            angle = 0.5 * math.pi * (j + 0.5) / len(operators)
            with torch.no_grad():
                operator.weight.copy_(math.cos(angle) * start + math.sin(angle) * end)
