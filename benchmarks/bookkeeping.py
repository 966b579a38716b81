"""What a branch costs beyond its arithmetic: microseconds and operations for tiny branches, beside torch's checkpoint.

python benchmarks/bookkeeping.py
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from revode import AdditiveCoupling, ReversibleSequence

DEPTH, ROUNDS = 64, 15
BRANCHES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear(8, 8)": (lambda: nn.Linear(8, 8), (2, 16)),
    "Conv, BatchNorm, ReLU": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        (2, 8, 4, 4),
    ),
    "LayerNorm, MLP, dropout": (
        lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)),
        (2, 32),
    ),
}


class Checkpointed(nn.Module):
    """The same coupling, each branch under torch's checkpoint."""

    def __init__(self, fields: list[nn.Module]) -> None:
        super().__init__()
        self.fields = nn.ModuleList(fields)

    def forward(self, x: Tensor) -> Tensor:
        p, q = x.chunk(2, 1)
        for field in self.fields:
            p, q = q, p + checkpoint(field, q, use_reentrant=False)
        return torch.cat((p, q), 1)


class Operations(TorchDispatchMode):
    """Counts the aten operations that run inside."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def operations(module: nn.Module, x: Tensor) -> tuple[float, float]:
    """Operations a branch in forward and in backward; those at both ends of a sequence are few at this depth."""
    module(x).sum().backward()
    module.zero_grad()
    with Operations() as forward:
        loss = module(x).sum()
    with Operations() as backward:
        loss.backward()
    return forward.number / DEPTH, backward.number / DEPTH


def main() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    print(f"{'a branch, forward and backward':<25}{'us':>16}{'/ checkpoint':>14}{'operations':>14}")
    for name, (make, shape) in BRANCHES.items():
        x = 0.1 * torch.randn(shape)
        ways: dict[str, nn.Module] = {
            "checkpoint": Checkpointed([make() for _ in range(DEPTH)]),
            **{
                way: ReversibleSequence([make() for _ in range(DEPTH)], AdditiveCoupling(), **options)
                for way, options in {"reversible": {}, "exact": {"exact": True}, "store": {"backprop": "store"}}.items()
            },
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS + 2):
            for way in random.sample(list(ways), len(ways)):
                start = time.perf_counter()
                ways[way](x).sum().backward()
                times[way].append(time.perf_counter() - start)
                ways[way].zero_grad()
        print(name)
        for way, module in ways.items():
            median = statistics.median(times[way][2:])
            ratio = median / statistics.median(times["checkpoint"][2:])
            forward, backward = operations(module, x)
            print(f"  {way:<23}{1e6 * median / DEPTH:16.0f}{ratio:14.2f}{forward:8.1f} /{backward:5.1f}")


if __name__ == "__main__":
    main()
