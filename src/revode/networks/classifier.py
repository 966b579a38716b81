"""The staged classifier: stem, stages, head; and its wholly invertible form."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode.networks.baselines import residual_unit
from revode.networks.budget import share
from revode.networks.config import NetworkConfig, OdeConfig, ReversibleConfig
from revode.networks.cost import Meter
from revode.networks.head import LinearHead, NormHead
from revode.networks.initialization import smooth_in_time_
from revode.networks.stages import NamedSequence, Stage, Unit, make_stage, transition_kind, unit_blocks
from revode.networks.stem import ConvStem, PadStem
from revode.networks.transitions import Features, Squeeze, join
from revode.schemes import State

LAYERS_PER_BLOCK = {"hamiltonian": 4, "revnet": 4, "hamiltonian-1layer": 2, "midpoint": 2, "leapfrog": 2, "resnet": 2}
"""Convolutions of a block as the paper counts them (K and K' are two)."""


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
        smallest = 2 ** (self.config.num_units - 1)
        if x.dim() != 4 or x.shape[1] != self.config.in_channels or min(x.shape[2:]) < smallest:
            raise ValueError(
                f"{self.config.name} takes images of shape (batch, {self.config.in_channels}, height, width) with edges "
                f"of at least {smallest}, got {tuple(x.shape)}"
            )

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
            self._shares[kind] = share(budget, Meter(self, tuple(x.shape[1:])).parts(), x.shape[0])
        for (_, sequence, _), part in zip(self.sequences(), self._shares[kind], strict=True):
            sequence.memory_budget = part

    @property
    def num_layers(self) -> int:
        """Layers as the paper counts them: convolutions in the blocks, the stem and the linear map."""
        return LAYERS_PER_BLOCK[self.config.family] * sum(self.config.blocks) + 2

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
        fields = [field for sequence in sequences for field in sequence.fields]
        per_block = sequences[0].scheme.fields_per_step
        config = cast(ReversibleConfig, self.config)
        units, start = [], 0
        for index, num_blocks in enumerate(unit_blocks(config)):
            stop = start + num_blocks * per_block
            h = config.step_size(index) if isinstance(config, OdeConfig) else 1.0
            units.append(Unit(f"unit {index + 1}", tuple(fields[start:stop]), per_block, h))
            start = stop
        return units

    def extra_repr(self) -> str:
        return self.config.name


class InvertibleClassifier(StagedClassifier):
    """A classifier with `Squeeze` transitions: from its last features the image can be computed."""

    def check_image(self, x: Tensor) -> None:
        super().check_image(x)
        factor = 2 ** (self.config.num_units - 1)
        if x.shape[2] % factor or x.shape[3] % factor:
            raise ValueError(
                f"transition='squeeze' halves images exactly: their edges must be multiples of {factor}, got {tuple(x.shape)}"
            )

    def readout(self, x: Features) -> Tensor:
        """The halves joined, or the newest of two states."""
        sequence = self.sequences()[-1].sequence
        return sequence.scheme.readout(cast(State, x), sequence.split_dim)

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
        for stage in reversed(self.stages[1:]):
            state = cast(ReversibleSequence, stage.body).inverse(state, return_state=True)
            state = _UNSQUEEZE.inverse(state)
        first = cast(ReversibleSequence, cast(Stage, self.stages[0]).body)
        return cast(PadStem, self.stem).inverse(first.inverse(state))


_UNSQUEEZE = Squeeze()


def build(config: NetworkConfig) -> StagedClassifier:
    """The network that `config` describes, with fresh weights."""
    if not isinstance(config, ReversibleConfig):
        return _build_resnet(config)
    seed = int(torch.randint(2**62, ())) if isinstance(config, OdeConfig) and config.init == "smooth" else None
    model = _build_reversible(config)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for _, sequence, _ in model.sequences():
            smooth_in_time_(sequence, generator)
    return model


def _build_reversible(config: ReversibleConfig) -> StagedClassifier:
    invertible = transition_kind(config) == "squeeze"
    stem = (PadStem if invertible else ConvStem)(config.in_channels, config.channels[0])
    stages = [make_stage(config, unit) for unit in range(config.num_units)]
    head = LinearHead if transition_kind(config) == "connector" else NormHead
    kind = InvertibleClassifier if invertible else StagedClassifier
    return kind(config, stem, stages, head(config.channels[-1], config.num_classes))


def _build_resnet(config: NetworkConfig) -> StagedClassifier:
    channels = (config.channels[0], *config.channels)
    stages = []
    for unit, num_blocks in enumerate(config.blocks):
        body = residual_unit(
            channels[unit],
            channels[unit + 1],
            num_blocks,
            first=unit == 0,
            norm=config.norm,
            activation=config.activation,
        )
        stages.append(Stage(body, nn.Identity()))
    stem = ConvStem(config.in_channels, config.channels[0])
    return StagedClassifier(config, stem, stages, NormHead(config.channels[-1], config.num_classes))
