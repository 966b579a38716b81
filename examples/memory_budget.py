"""Between O(1) and O(N): bytes kept, branches recomputed and time of a step as the memory budget grows.

    python examples/memory_budget.py

A Leapfrog sequence of 32 convolution + BatchNorm + ReLU branches (32 channels, 16x16, batch 32, fp32).
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from revode import Leapfrog, ReversibleSequence
from revode.memory import SavedTensors


class Counted(nn.Module):
    """A branch that counts its evaluations."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.num_calls = 0

    def forward(self, q: Tensor) -> Tensor:
        self.num_calls += 1
        return self.body(q)


def build(budget: int | None, backprop: str = "reversible") -> ReversibleSequence:
    torch.manual_seed(0)
    fields = [Counted(32) for _ in range(32)]
    return ReversibleSequence(fields, Leapfrog(h=0.1), backprop=backprop, memory_budget=budget)


def kept_bytes(net: ReversibleSequence, x: Tensor) -> int:
    with SavedTensors(exclude=[x, *net.parameters()]) as saved:
        net(x)
    return saved.num_bytes


def recomputed(net: ReversibleSequence, x: Tensor) -> int:
    y = net(x)
    for field in net.fields:
        field.num_calls = 0
    y.sum().backward()
    return sum(field.num_calls for field in net.fields)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    x = torch.randn(32, 32, 16, 16)
    most = kept_bytes(build(None, "store"), x)
    nets = {None: build(None)}
    nets |= {share: build(int(share * most)) for share in (0.1, 0.25, 0.5, 0.75, 1.1)}
    seconds: dict[float | None, list[float]] = {share: [] for share in nets}
    for _ in range(8):  # interleaved, the first round is warm-up
        for share, net in nets.items():
            start = time.perf_counter()
            net(x).sum().backward()
            seconds[share].append(time.perf_counter() - start)
    print(f"store keeps {most / 1e6:.1f} MB")
    print("   budget       kept   recomputed   median of a step")
    for share, net in nets.items():
        budget = "none" if share is None else f"{share * most / 1e6:.1f} MB"
        milliseconds = 1000 * statistics.median(seconds[share][1:])
        print(f"{budget:>9} {kept_bytes(net, x) / 1e6:7.1f} MB {recomputed(net, x):9d} / 32 {milliseconds:11.0f} ms")


if __name__ == "__main__":
    main()
