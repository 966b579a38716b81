"""Memory of a training step over depth, and an image found back from the features of 1,000 blocks.

    python examples/memory_over_depth.py [--figure docs/figures/memory.svg]

A Hamiltonian network on one image of 128x128 pixels, as 48 channels of 32x32, in float32. Memory is the peak of what torch's
allocator holds during forward and backward, without what is as small as parameters and their gradients.
"""

import argparse
import math

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.utils.checkpoint import checkpoint

from revode import ReversibleSequence, SymmetricField, Verlet

DEPTHS = (10, 32, 100, 316, 1000)
STRATEGIES = {
    "store everything": "store",
    "checkpoint each block": "checkpoint",
    "checkpoint √N blocks": "sqrt",
    "revode": "reversible",
}


def photograph() -> Tensor:
    """Grace Hopper, as matplotlib brings her along (public domain), on the grid of multiples of 1/256."""
    from matplotlib import cbook
    from PIL import Image

    with cbook.get_sample_data("grace_hopper.jpg") as stream:
        image = Image.open(stream).convert("RGB").crop((100, 20, 420, 340)).resize((128, 128), Image.Resampling.LANCZOS)
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)[None] / 256


def build(num_blocks: int, backprop: str = "reversible", exact: bool = False) -> ReversibleSequence:
    torch.manual_seed(0)
    fields = [SymmetricField(24, activation="tanh") for _ in range(2 * num_blocks)]
    return ReversibleSequence(fields, Verlet(h=0.05), backprop=backprop, exact=exact)


class SqrtCheckpoint(nn.Module):
    """√N parts of √N blocks, each recomputed as a whole by torch's checkpoint."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(build(num_blocks, "store").split(round(math.sqrt(num_blocks))))

    def forward(self, x: Tensor) -> Tensor:
        y, state = x, x
        for part in self.parts:
            y, state = checkpoint(part, state, use_reentrant=False, return_state=True)
        return y


def peak_bytes(net: nn.Module, x: Tensor) -> int:
    """The most that is allocated at one time in a step, in tensors of at least half of the features."""
    with profile(profile_memory=True) as found:
        net(x).square().mean().backward()
    events = [(e.start_ns(), e.nbytes()) for e in found.kineto_results.events() if e.name() == "[memory]"]
    sizes = [size for _, size in sorted(events, key=lambda event: event[0]) if abs(size) >= x.nbytes // 2]
    return int(numpy.cumsum(sizes).max())


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", help="write the figure to this file")
    figure = parser.parse_args().figure
    torch.set_num_threads(1)  # small tensors: a second thread only waits
    image = photograph()
    features = F.pixel_unshuffle(image, 4)

    print(f"{'blocks':<8}" + "".join(f"{name:>23}" for name in STRATEGIES) + "   (peak of a step, MB)")
    memory: dict[int, list[float]] = {}
    for depth in DEPTHS:
        nets = [SqrtCheckpoint(depth) if how == "sqrt" else build(depth, how) for how in STRATEGIES.values()]
        memory[depth] = [peak_bytes(net, features) / 1e6 for net in nets]
        print(f"{depth:<8}" + "".join(f"{value:23.2f}" for value in memory[depth]))

    for depth in (10, 100, 1000):
        stored, walked = (gradients(build(depth, how, exact=True), features) for how in ("store", "reversible"))
        same = sum(torch.equal(a, b) for a, b in zip(stored, walked, strict=True))
        print(f"exact=True, {depth} blocks: {same} of {len(stored)} gradients equal the stored ones bit for bit")

    with torch.no_grad():
        exact, floating = build(1000, exact=True), build(1000)
        last, state = exact(features, return_state=True)
        found = exact.inverse(state)
        error = (floating.inverse(floating(features, return_state=True)[1]) - features).norm() / features.norm()
    equal = int((found == features).sum())
    print(
        f"walking back through 1,000 blocks finds {equal:,} of {features.numel():,} pixels bit for bit with exact=True;"
    )
    print(f"in floating point the image comes back to a relative error of {error:.0e}")
    if figure:
        draw(memory, [image, F.pixel_shuffle(last, 4), F.pixel_shuffle(found, 4)], figure)


def draw(memory: dict[int, list[float]], images: list[Tensor], path: str) -> None:
    from matplotlib.figure import Figure

    from revode_lab.charts import COLOURS, INK, chart_style, standalone, svg

    with chart_style():
        figure = Figure(figsize=(10.4, 3.3))
        grid = figure.add_gridspec(1, 4, width_ratios=(2.2, 1, 1, 1))
        axes = figure.add_subplot(grid[0])
        for i, (name, colour) in enumerate(
            zip(STRATEGIES, (COLOURS[4], COLOURS[1], COLOURS[2], COLOURS[0]), strict=True)
        ):
            axes.loglog(list(memory), [row[i] for row in memory.values()], color=colour, marker="o", markersize=4)
            text = f"{name}, {memory[DEPTHS[-1]][i]:.3g} MB"
            axes.annotate(text, (DEPTHS[-1], memory[DEPTHS[-1]][i]), (8, -4), textcoords="offset points", color=colour)
        axes.set(xlabel="blocks", title="memory of a training step, MB", xlim=(8, 40_000))
        axes.set_xticks(DEPTHS, [str(depth) for depth in DEPTHS])
        axes.set_yticks((1, 10, 100), ("1", "10", "100"))
        axes.minorticks_off()
        titles = ("an image", "after 1,000 blocks", "walked back:\nthe image, bit for bit")
        for place, (image, title) in enumerate(zip(images, titles, strict=True), 1):
            pixels = image[0].permute(1, 2, 0)
            if place == 2:  # features have no range of their own
                pixels = 0.5 + (pixels - pixels.mean()) / (5 * pixels.std())
            shown = figure.add_subplot(grid[place])
            shown.imshow(pixels.clamp(0, 1).numpy(), interpolation="nearest")
            shown.set_axis_off()
            shown.set_title(title, fontsize=11, color=INK)
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(standalone(svg(figure)))


if __name__ == "__main__":
    main()
