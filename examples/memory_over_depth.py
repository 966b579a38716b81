"""Saved activations over depth under each strategy, and how far gradients are from the stored ones.

    python examples/memory_over_depth.py [--figure docs/figures/memory.svg]

Counts the bytes that autograd keeps after a forward pass of a Hamiltonian sequence (32 channels, 8x8, batch 4, fp32).
"""

import argparse

import torch

from revode import ReversibleSequence, SymmetricField, Verlet
from revode.engine.accounting import SavedTensors

DEPTHS = (10, 32, 100, 316, 1000)
STRATEGIES = ("store", "checkpoint", "reversible")


def build(num_blocks: int, backprop: str, exact: bool = False) -> ReversibleSequence:
    torch.manual_seed(0)
    fields = [SymmetricField(16) for _ in range(2 * num_blocks)]
    return ReversibleSequence(fields, Verlet(h=1.0 / num_blocks), backprop=backprop, exact=exact)


def saved_bytes(net: ReversibleSequence, x: torch.Tensor) -> int:
    with SavedTensors(exclude=[x, *net.parameters()]) as saved:
        net(x)
    return saved.num_bytes


def gradients(net: ReversibleSequence, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", help="write the figure to this file (needs matplotlib)")
    figure = parser.parse_args().figure
    torch.set_num_threads(1)  # small tensors: a second thread only waits
    x = torch.randn(4, 32, 8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()

    print("blocks  layers " + "".join(f"{name:>13}" for name in STRATEGIES) + "   MB of saved activations")
    table = {depth: [saved_bytes(build(depth, name), x) / 1e6 for name in STRATEGIES] for depth in DEPTHS}
    for depth, row in table.items():
        print(f"{depth:6d} {4 * depth:7d} " + "".join(f"{value:13.2f}" for value in row))

    same = []
    for depth in (10, 100, 1000):
        stored, walked = (gradients(build(depth, name, exact=True), x) for name in ("store", "reversible"))
        same.append(
            f"{depth} blocks: {sum(torch.equal(a, b) for a, b in zip(stored, walked, strict=True))}/{len(stored)}"
        )
    print("exact=True, gradients equal to the stored ones bit for bit: " + ", ".join(same))
    if figure:
        draw(table, figure)


def draw(table: dict[int, list[float]], path: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "revode"
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for i, (name, colour, marker) in enumerate(zip(STRATEGIES, ("#D55E00", "#E69F00", "#0072B2"), "s^o", strict=True)):
        axes.loglog(list(table), [row[i] for row in table.values()], color=colour, marker=marker, label=name)
        axes.annotate(name, (1000, table[1000][i]), xytext=(8, -3), textcoords="offset points", color=colour)
    axes.set(xlabel="blocks", ylabel="saved activations (MB)", xlim=(8, 3000), title="Depth is free in memory")
    axes.set_xticks(list(table), [str(depth) for depth in table])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
