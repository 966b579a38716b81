"""What is run: plain data that a fresh process can be told, and the branches, schemes and networks made from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revode
from revode.bench.methods import BUDGETS, COMPILED, DEFAULT, PEERS, Wrap
from revode.engine import ReversibleSequence
from revode.fields import SymmetricField
from revode.files import unknown
from revode.networks.classifier import Stage
from revode.schemes import AdditiveCoupling, Momentum, Scheme

H = 0.1
SEED = 0
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network and a batch, as data.

    Args:
        name: what its rows say.
        title: the same in words.
        kind: which of ``KINDS`` makes it.
        batch: samples in a step.
        options: what that maker is given.
        methods: those worth running on it by default.
        quick: those that ``--quick`` runs on it; if none, it leaves the workload out.
        extra: those that ``--extra`` adds.
        in_bfloat16: options that bfloat16 replaces: batch norm, with which networks are trained there.
        dtype: ``"float32"``, or ``"bfloat16"`` for branches under autocast.
    """

    name: str
    title: str
    kind: str
    batch: int
    options: dict[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = DEFAULT
    quick: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    in_bfloat16: dict[str, Any] = field(default_factory=dict)
    dtype: str = DTYPES[0]

    def with_batch(self, batch: int) -> Workload:
        """The same with another batch."""
        return dataclasses.replace(self, batch=batch)

    def with_dtype(self, dtype: str) -> Workload:
        """The same in another precision. Without peers in bfloat16: on a CPU none restores autocast in backward."""
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
        if dtype == self.dtype:
            return self
        ways = {name: tuple(m for m in getattr(self, name) if m not in PEERS) for name in ("methods", "quick")}
        return dataclasses.replace(self, dtype=dtype, options=self.options | self.in_bfloat16, **ways)


@dataclass
class Subject:
    """A workload with fresh weights, always the same ones, before a method is chosen.

    Args:
        scheme: what its branches are run by; None if they are not reversible.
        shape: of one sample.
        build: makes the module, given how to wrap a sequence.
        parameters: in an order that all methods share.
        differentiable_input: whether the input has a gradient, as it does in the middle of a network.
        num_branches: in all its sequences.
    """

    scheme: Scheme | None
    shape: tuple[int, ...]
    build: Callable[[Wrap], nn.Module]
    parameters: list[nn.Parameter]
    differentiable_input: bool
    num_branches: int


def subject(workload: Workload) -> Subject:
    """The workload with its weights, from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return KINDS[workload.kind](**workload.options)


def samples(shape: tuple[int, ...], batch: int, dtype: torch.dtype, layout: str) -> Tensor:
    """A seeded batch; in channels_last if asked and if there are channels."""
    generator = torch.Generator().manual_seed(SEED + 1)
    x = torch.randn(batch, *shape, generator=generator).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" and x.dim() == 4 else x


def _sequence(fields: list[nn.Module], scheme: Scheme, shape: tuple[int, ...], split_dim: int = 1) -> Subject:
    parameters = [parameter for branch in fields for parameter in branch.parameters()]
    return Subject(scheme, shape, lambda wrap: wrap(fields, scheme, split_dim, False), parameters, True, len(fields))


def _symmetric(channels: int, h: float, **options: Any) -> SymmetricField:
    """The paper's branch with h in its weights: √h K'σ(√h K y + b), so that nobody needs to multiply by h."""
    branch = SymmetricField(channels, **options)
    with torch.no_grad():
        branch.operator.weight.mul_(math.sqrt(h))
    return branch


def stage(channels: int, size: int, depth: int, norm: str = "none") -> Subject:
    """Blocks of a Hamiltonian unit as additive couplings, which every peer can run without a further operation.

    Couplings that only add grow the state with the time h * depth, so that is bounded by 1.
    """
    h = min(H, 1 / depth)
    fields: list[nn.Module] = [
        _symmetric(channels // 2, h, leading=norm == "none", norm=norm) for _ in range(2 * depth)
    ]
    return _sequence(fields, AdditiveCoupling(), (channels, size, size))


def momentum(channels: int, size: int, depth: int, norm: str = "none") -> Subject:
    """Momentum residual steps, the scheme of momentumnet."""
    fields: list[nn.Module] = [_symmetric(channels, 1.0, norm=norm) for _ in range(depth)]
    return _sequence(fields, Momentum(gamma=0.9), (channels, size, size))


class Attention(nn.Module):
    """Norm, multi-head self-attention, projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.inward(self.norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return self.outward(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width))


def _perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def attention(width: int, tokens: int, pairs: int, heads: int) -> Subject:
    """Attention and perceptron in turn; each half of the state has the full width, as in a Reformer."""
    fields: list[nn.Module] = []
    for _ in range(pairs):
        fields += [Attention(width, heads), _perceptron(width)]
    return _sequence(fields, AdditiveCoupling(), (tokens, 2 * width), split_dim=2)


def network(name: str, **options: Any) -> Subject:
    """A named network; its sequences are what the methods replace."""
    model = revode.create_model(name, **options)
    sequences = [cast(ReversibleSequence, part.sequence) for part in model.sequences()]
    parameters = list(model.parameters())

    def build(wrap: Wrap) -> nn.Module:
        for module in model.stages:
            body = cast(Stage, module).body
            if isinstance(body, ReversibleSequence):
                pair = cast(Stage, module).passes_pair
                module.body = wrap(list(body.fields), body.scheme, body.split_dim or 1, pair)
        return model

    size = model.config.image_size
    scheme = sequences[0].scheme if sequences else None
    num_branches = sum(len(sequence.fields) for sequence in sequences)
    return Subject(scheme, (model.config.in_channels, size, size), build, parameters, False, num_branches)


TINY: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": ("Linear(8, 8)", lambda: nn.Linear(8, 8), (16,)),
    "convolution": (
        "Conv, BatchNorm, ReLU",
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        (8, 4, 4),
    ),
    "perceptron": (
        "LayerNorm, MLP, dropout",
        lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)),
        (32,),
    ),
}
"""Branches so small that a step is bookkeeping: what they are, and the shape of a sample."""


def tiny(branch: str, depth: int) -> Subject:
    """Couplings of tiny branches, with weights that keep the state small."""
    _, make, shape = TINY[branch]
    fields = [make() for _ in range(depth)]
    for parameter in nn.ModuleList(fields).parameters():
        parameter.detach().mul_(H)
    return _sequence(fields, AdditiveCoupling(), shape)


KINDS: dict[str, Callable[..., Subject]] = {
    "stage": stage,
    "momentum": momentum,
    "attention": attention,
    "network": network,
    "tiny": tiny,
}

_WITHOUT_PEERS = tuple(name for name in DEFAULT if name not in PEERS)


DEPTHS = {"depth-10": 10, "depth-100": 100, "depth-1000": 1000}
"""The workloads that differ in nothing but their blocks."""
STAGES = {"stage-32x32": (32, 32), "stage-16x16": (64, 16), "stage-8x8": (112, 8)}
"""The units of hamiltonian-74: channels and edge."""
BOOKKEEPING = tuple(f"tiny-{branch}" for branch in TINY)
"""The workloads of tiny branches."""
NUM_TINY = 64
_BATCH_NORM = {"norm": "batch"}


def _network(name: str, batch: int, **choice: Any) -> Workload:
    return Workload(name=name, title="whole network", kind="network", batch=batch, options={"name": name}, **choice)


_ALL = [
    *(
        Workload(
            name=name,
            title=f"8 blocks of hamiltonian-74, {channels} channels at {size}x{size}",
            kind="stage",
            batch=64,
            options={"channels": channels, "size": size, "depth": 8},
            quick=DEFAULT,
            extra=COMPILED,
            in_bfloat16=_BATCH_NORM,
        )
        for name, (channels, size) in STAGES.items()
    ),
    _network(
        "hamiltonian-74", 100, quick=_WITHOUT_PEERS, extra=(*BUDGETS, *COMPILED), in_bfloat16={**_BATCH_NORM, "h": 0.3}
    ),
    _network("leapfrog-26", 100, in_bfloat16=_BATCH_NORM),
    _network("midpoint-26", 100, in_bfloat16=_BATCH_NORM),
    _network("hamiltonian-1202", 32, methods=_WITHOUT_PEERS),
    Workload(
        name="attention-12",
        title="12 pairs of attention and perceptron, width 256, 128 tokens",
        kind="attention",
        batch=8,
        options={"width": 256, "tokens": 128, "pairs": 12, "heads": 8},
    ),
    Workload(
        name="momentum-8",
        title="8 momentum steps, 32 channels at 32x32",
        kind="momentum",
        batch=64,
        options={"channels": 32, "size": 32, "depth": 8},
        quick=DEFAULT,
        in_bfloat16=_BATCH_NORM,
    ),
    *(
        Workload(
            name=name,
            title=f"{depth} blocks, 32 channels at 16x16",
            kind="stage",
            batch=16,
            options={"channels": 32, "size": 16, "depth": depth},
            methods=DEFAULT if depth < 1000 else _WITHOUT_PEERS,
            in_bfloat16=_BATCH_NORM,
        )
        for name, depth in DEPTHS.items()
    ),
    *(
        Workload(
            name=name,
            title=f"bookkeeping of {NUM_TINY} tiny branches: {TINY[branch][0]}",
            kind="tiny",
            batch=2,
            options={"branch": branch, "depth": NUM_TINY},
            methods=("store", "checkpoint-branches", "minimal", "revode", "revode-exact"),
        )
        for name, branch in zip(BOOKKEEPING, TINY, strict=True)
    ),
]
WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}


def find(names: Iterable[str]) -> list[Workload]:
    """The workloads of these names, in the registry's order; a wrong name is refused with the choices."""
    wanted = list(names)
    for name in wanted:
        if name not in WORKLOADS:
            raise unknown("workload", name, WORKLOADS)
    return [workload for workload in _ALL if workload.name in wanted]
