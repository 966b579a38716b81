"""Workloads: plain data that a fresh process can be told, and the branches and networks made from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from methods import BUDGETS, COMPILED, DEFAULT, PEERS
from torch import Tensor, nn

import revode
from revode.engine import ReversibleSequence
from revode.fields import SymmetricField
from revode.schemes import AdditiveCoupling
from revode_lab.step import SEED

H = 0.1
DTYPES = ("float32", "bfloat16")
Made = tuple[nn.Module, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network and a batch, as data.

    Args:
        make: makes a network of ours, or a sequence, and gives the shape of a sample.
        options: arguments of `make`.
        quick: methods under ``--quick``; none leaves the workload out.
        extra: methods that ``--extra`` adds.
        in_bfloat16: options that replace others under bfloat16: batch norm, with which networks are trained there.
        dtype: ``"float32"``, or ``"bfloat16"`` for branches under autocast.
    """

    name: str
    title: str
    make: Callable[..., Made]
    batch: int
    options: dict[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = DEFAULT
    quick: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    in_bfloat16: dict[str, Any] = field(default_factory=dict)
    dtype: str = DTYPES[0]

    def build(self) -> Made:
        """Return the network with seeded fresh weights, before a method is chosen, and the shape of a sample."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.make(**self.options)

    def with_dtype(self, dtype: str) -> Workload:
        """Return this workload in another precision; in bfloat16 without peers, none of which restores autocast on a CPU."""
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
        if dtype == self.dtype:
            return self
        ways = {name: tuple(m for m in getattr(self, name) if m not in PEERS) for name in ("methods", "quick")}
        return dataclasses.replace(self, dtype=dtype, options=self.options | self.in_bfloat16, **ways)


def stage(channels: int, size: int, depth: int, norm: str = "none") -> Made:
    """Make a Hamiltonian unit of additive couplings with h in the weights, √h K'σ(√h K y + b), as every peer can run it.

    Couplings that only add grow the state with the time h * depth, so h * depth is at most 1.
    """
    branches = [SymmetricField(channels // 2, leading=norm == "none", norm=norm) for _ in range(2 * depth)]
    for branch in branches:
        branch.operator.weight.detach().mul_(math.sqrt(min(H, 1 / depth)))
    return ReversibleSequence(branches, AdditiveCoupling()), (channels, size, size)


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


def attention(width: int, tokens: int, pairs: int, heads: int) -> Made:
    """Make pairs of attention and perceptron; each half of the state has the full width, as in a Reformer."""
    fields = [make() for _ in range(pairs) for make in (lambda: Attention(width, heads), lambda: _perceptron(width))]
    return ReversibleSequence(fields, AdditiveCoupling(), split_dim=2), (tokens, 2 * width)


def network(name: str, **options: Any) -> Made:
    """Make a named network; methods replace its sequences."""
    model = revode.create_model(name, **options)
    return model, model.config.image_shape()


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
"""Branches so small that a step is bookkeeping: description, factory, shape of a sample."""


def tiny(branch: str, depth: int) -> Made:
    """Make couplings of tiny branches, with weights that keep the state small."""
    _, make, shape = TINY[branch]
    fields = [make() for _ in range(depth)]
    for parameter in nn.ModuleList(fields).parameters():
        parameter.detach().mul_(H)
    return ReversibleSequence(fields, AdditiveCoupling()), shape


_WITHOUT_PEERS = tuple(name for name in DEFAULT if name not in PEERS)
DEPTHS = {"depth-10": 10, "depth-100": 100, "depth-1000": 1000}
STAGES = {"stage-32x32": (32, 32), "stage-16x16": (64, 16), "stage-8x8": (112, 8)}
"""The units of hamiltonian-74: channels and image size."""
BOOKKEEPING = tuple(f"tiny-{branch}" for branch in TINY)
NUM_TINY = 64
_BATCH_NORM = {"norm": "batch"}


def _network(name: str, batch: int, **choice: Any) -> Workload:
    return Workload(name=name, title="whole network", make=network, batch=batch, options={"name": name}, **choice)


_ALL = [
    *(
        Workload(
            name=name,
            title=f"8 blocks of hamiltonian-74, {channels} channels at {size}x{size}",
            make=stage,
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
    _network("hamiltonian-1202", 32, methods=_WITHOUT_PEERS),
    Workload(
        name="attention-12",
        title="12 pairs of attention and perceptron, width 256, 128 tokens",
        make=attention,
        batch=8,
        options={"width": 256, "tokens": 128, "pairs": 12, "heads": 8},
    ),
    *(
        Workload(
            name=name,
            title=f"{depth} blocks, 32 channels at 16x16",
            make=stage,
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
            make=tiny,
            batch=2,
            options={"branch": branch, "depth": NUM_TINY},
            methods=("store", "checkpoint-branches", "revode", "revode-exact"),
        )
        for name, branch in zip(BOOKKEEPING, TINY, strict=True)
    ),
]
WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}
