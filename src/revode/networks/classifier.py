"""The staged classifier: stem, stages, head; and its wholly invertible form."""

from __future__ import annotations

from functools import singledispatch
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode.engine.regional import compile_branches
from revode.networks import blocks
from revode.networks.blocks import Features, join
from revode.networks.config import NetworkConfig, OdeConfig, ReversibleConfig
from revode.networks.cost import PartCost, measure_parts, share
from revode.networks.initialization import smooth_in_time_
from revode.schemes import Scheme, State


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

    Args:
        body: the sequence; anything from tensor to tensor if it is not reversible, and may be absent.
        transition: what follows it.
        passes_pair: whether the transition gets the pair of the scheme, or its newest state.
    """

    def __init__(self, body: nn.Module | None, transition: nn.Module, *, passes_pair: bool = False) -> None:
        super().__init__()
        self.body = body
        self.transition = transition
        self.passes_pair = passes_pair

    def run_body(self, x: Features) -> Features:
        """What the transition gets."""
        if self.body is None:
            return x
        if not isinstance(self.body, ReversibleSequence):
            return self.body(x)
        # The newest state itself, not the readout: that is a copy, and the unit has saved the state anyway.
        state = self.body(x, return_state=True)[1]
        return state if self.passes_pair else state[1]

    def forward(self, x: Features) -> Features:
        return self.transition(self.run_body(x))


class StagedClassifier(nn.Module):
    """Images to class scores through units of blocks at falling resolution.

    Args:
        config: all there is to know.
        stem: image to features.
        stages: the units.
        head: features to scores.
    """

    def __init__(self, config: NetworkConfig, stem: nn.Module, stages: list[Stage], head: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.smallest_edge = config.reduction
        self.stem = stem
        self.stages = nn.ModuleList(stages)
        self.head = head
        self._shares: dict[Any, list[int]] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.readout(self.run_stages(x)))

    def features(self, x: Tensor) -> Tensor:
        """The features behind the last unit, which the head sees."""
        return join(self.run_stages(x))

    def readout(self, x: Features) -> Tensor:
        """What the head sees of the last features."""
        return join(x)

    def run_stages(self, x: Tensor) -> Features:
        """Stem and stages, the pair not yet joined."""
        self.check_image(x)
        if isinstance(self.config, ReversibleConfig) and self.config.memory_budget and torch.is_grad_enabled():
            self._share_budget(x, self.config.memory_budget)
        y: Features = self.stem(x)
        for stage in self.stages:
            y = stage(y)
        return y

    def check_image(self, x: Tensor) -> None:
        """Refuse what is not a batch of images with the right channels, large enough for the units."""
        smallest = self.smallest_edge
        if x.dim() != 4 or x.shape[1] != self.config.in_channels or min(x.shape[2:]) < smallest:
            raise ValueError(
                f"{self.config.name} takes images of shape (batch, {self.config.in_channels}, height, width) with edges "
                f"of at least {smallest}, got {tuple(x.shape)}"
            )

    def measure(self, image_shape: tuple[int, ...]) -> list[PartCost]:
        """What stem, units, transitions and head cost for images of this shape."""
        return measure_parts(self, image_shape)

    def _share_budget(self, x: Tensor, budget: int) -> None:
        """Give each sequence its part of the memory budget for a batch like x; measured once for each kind of call."""
        autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        kind = (budget, x.shape, x.dtype, self.training, *autocast)
        if kind not in self._shares:
            if torch.compiler.is_compiling():
                raise ValueError(
                    "memory_budget is shared among the units by measuring them, which torch.compile cannot do: "
                    "call the uncompiled network once on images of this shape first"
                )
            self._shares[kind] = share(budget, self.measure(tuple(x.shape[1:])), x.shape[0])
        for (_, sequence, _), part in zip(self.sequences(), self._shares[kind], strict=True):
            sequence.memory_budget = part

    @property
    def num_layers(self) -> int:
        """Layers as the paper counts them: convolutions in the blocks, the stem and the linear map."""
        return self.config.num_layers

    def sequences(self) -> list[NamedSequence]:
        """The reversible sequences in order, with a name and their depth in blocks; none for a ResNet."""
        found = []
        for index, stage in enumerate(self.stages):
            body = cast(Stage, stage).body
            if isinstance(body, ReversibleSequence):
                num_blocks = len(body.fields) // body.scheme.fields_per_step
                found.append(NamedSequence(f"unit {index + 1}", body, num_blocks))
        return found

    def units(self) -> list[Unit]:
        """The branches of the reversible blocks, sorted by the unit they belong to as the paper counts; none for a ResNet."""
        sequences = [sequence for _, sequence, _ in self.sequences()]
        if not sequences:
            return []
        fields = iter([field for sequence in sequences for field in sequence.fields])
        per_block = sequences[0].scheme.fields_per_step
        config = cast(ReversibleConfig, self.config)
        counts = config.blocks if config.passage.keeps_units else config.stage_blocks
        units = []
        for index, num_blocks in enumerate(counts):
            own = tuple(next(fields) for _ in range(num_blocks * per_block))
            units.append(Unit(f"unit {index + 1}", own, per_block, config.step_size(index)))
        return units

    def extra_repr(self) -> str:
        return self.config.name


class InvertibleClassifier(StagedClassifier):
    """A classifier with `Squeeze` transitions: from its last features the image can be computed."""

    def check_image(self, x: Tensor) -> None:
        super().check_image(x)
        factor = self.smallest_edge
        if any(edge % factor for edge in x.shape[2:]):
            raise ValueError(
                f"transition='squeeze' halves images exactly: their edges must be multiples of {factor}, got {tuple(x.shape)}"
            )

    def readout(self, x: Features) -> Tensor:
        """The halves joined, or the newest of two states."""
        sequence = self.sequences()[-1].sequence
        return sequence.scheme.readout(cast(State, x), 1)

    def inverse(self, features: Tensor) -> Tensor:
        """The image whose `features` these are.

        Args:
            features: both members of the last pair, joined along the channels, as `features` returns them.
        """
        config = cast(ReversibleConfig, self.config)
        channels = config.channels[-1] * (1 if config.splits else 2)
        if features.dim() != 4 or features.shape[1] != channels:
            raise ValueError(f"inverse takes features of shape (batch, {channels}, …), got {tuple(features.shape)}")
        state = cast(State, features.chunk(2, dim=1))
        first, *later = (sequence for _, sequence, _ in self.sequences())
        for sequence in reversed(later):
            state = sequence.inverse(state, return_state=True)
            state = blocks.unsqueeze(state[0]), blocks.unsqueeze(state[1])
        return cast(blocks.PadStem, self.stem).inverse(first.inverse(state))


@singledispatch
def build(config: NetworkConfig) -> StagedClassifier:
    """The network that `config` describes, with fresh weights."""
    invertible = config.passage.carries_pair
    seed = draw_seed(config)
    reversible = isinstance(config, ReversibleConfig)
    stages = [] if reversible else _make_stages(config)  # seeds draw a ResNet's stem after its units, others' before
    stem = (blocks.PadStem if invertible else blocks.ConvStem)(config.in_channels, config.channels[0])
    stages = stages or _make_stages(config)
    head = blocks.NormHead if config.passage.normed_head else blocks.LinearHead
    kind = InvertibleClassifier if invertible else StagedClassifier
    return with_smooth_kernels(kind(config, stem, stages, head(config.head_channels, config.num_classes)), seed)


def draw_seed(config: NetworkConfig) -> int | None:
    """A seed for kernels smooth in time, drawn before anything else so that it does not depend on the depth; or None."""
    return int(torch.randint(2**62, ())) if isinstance(config, OdeConfig) and config.init == "smooth" else None


def with_smooth_kernels(model: StagedClassifier, seed: int | None) -> StagedClassifier:
    """The network, its kernels drawn smooth in time if there is a seed."""
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for _, sequence, _ in model.sequences():
            smooth_in_time_(sequence, generator)
    return model


def _make_stages(config: NetworkConfig) -> list[Stage]:
    return [_make_stage(config, unit) for unit in range(config.num_units)]


def _make_stage(config: NetworkConfig, unit: int) -> Stage:
    """Blocks and transition of one unit."""
    body = make_sequence(config, unit) if isinstance(config, ReversibleConfig) else _make_residual(config, unit)
    last = unit == config.num_units - 1
    following = config.channels[unit] if last else config.channels[unit + 1]
    make_transition = config.passage.behind if last else config.passage.between
    transition = make_transition(config.channels[unit], following, config.norm, config.activation)
    pair = isinstance(config, ReversibleConfig) and (config.splits or config.passage.carries_pair)
    return Stage(body, transition, passes_pair=pair)


def _make_blocks(config: NetworkConfig, unit: int, **first_block: Any) -> list[nn.Module]:
    """The branches that run at the width of this unit; `first_block` are options of the first block only."""
    options = {"activation": config.activation, "norm": config.norm, "ndim": config.ndim}
    found = []
    for index in range(config.stage_blocks[unit]):
        extra = first_block if index == 0 else {}
        found += config.row.block(config.stage_channels[unit], unit == index == 0, **options, **extra)
    return found


def _make_residual(config: NetworkConfig, unit: int) -> nn.Sequential:
    """The blocks of a network that is not reversible; the first of a later unit halves the resolution."""
    before = config.channels[max(0, unit - 1)]
    blocks = _make_blocks(config, unit, in_channels=before, stride=2 if unit else 1)
    if config.compile:
        compile_branches(blocks)
    return nn.Sequential(*blocks)


def make_sequence(config: ReversibleConfig, unit: int) -> ReversibleSequence | None:
    """The blocks at the width of this unit, or None if there are none."""
    fields = _make_blocks(config, unit)
    if not fields:
        return None
    return ReversibleSequence(
        fields,
        _make_scheme(config, unit),
        backprop=config.backprop,
        exact=config.exact,
        anchor_every=config.anchor_every,
        split_dim=1,
        verify=config.verify,
        compile=config.compile,
    )


def _make_scheme(config: ReversibleConfig, unit: int) -> Scheme:
    """The integrator of the unit at this index."""
    kind: Any = config.row.scheme
    if isinstance(config, OdeConfig) and config.row.integrates:
        return kind(config.step_size(unit), start=config.start, damping=config.damping)
    return kind(damping=config.damping)
