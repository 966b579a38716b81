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
    """A Hamiltonian network whose weights are always the same."""
    torch.manual_seed(0)
    fields = [SymmetricField(24, activation="tanh") for _ in range(2 * num_blocks)]
    return ReversibleSequence(fields, Verlet(h=0.05), backprop=backprop, exact=exact)


class SqrtCheckpoint(nn.Module):
    """√N parts of √N blocks, each recomputed as a whole by torch's checkpoint."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        num_parts = round(math.sqrt(num_blocks))
        sizes = [num_blocks // num_parts + (i < num_blocks % num_parts) for i in range(num_parts)]
        self.parts = nn.ModuleList(build(size, "store") for size in sizes)

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
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS, help="numbers of blocks; default: %(default)s")
    args = parser.parse_args()
    depths, figure = args.depths, args.figure
    torch.set_num_threads(1)  # small tensors: a second thread only waits
    image = photograph()
    features = F.pixel_unshuffle(image, 4)

    print(f"{'blocks':<8}" + "".join(f"{name:>23}" for name in STRATEGIES) + "   (peak of a step, MB)")
    memory: dict[int, list[float]] = {}
    for depth in depths:
        nets = [SqrtCheckpoint(depth) if how == "sqrt" else build(depth, how) for how in STRATEGIES.values()]
        memory[depth] = [peak_bytes(net, features) / 1e6 for net in nets]
        print(f"{depth:<8}" + "".join(f"{value:23.2f}" for value in memory[depth]))

    for depth in depths[::2]:
        stored, walked = (gradients(build(depth, how, exact=True), features) for how in ("store", "reversible"))
        same = sum(torch.equal(a, b) for a, b in zip(stored, walked, strict=True))
        print(f"exact=True, {depth} blocks: {same} of {len(stored)} gradients equal the stored ones bit for bit")

    deepest = max(depths)
    with torch.no_grad():
        exact, floating = build(deepest, exact=True), build(deepest)
        last, state = exact(features, return_state=True)
        found = exact.inverse(state)
        error = (floating.inverse(floating(features, return_state=True)[1]) - features).norm() / features.norm()
    equal = int((found == features).sum())
    print(
        f"{deepest:,} blocks, exact=True: {equal:,} of {features.numel():,} pixels of the image are found bit for bit;"
    )
    print(f"in floating point the image comes back to a relative error of {error:.0e}")
    if figure:
        draw(memory, [image, F.pixel_shuffle(last, 4), F.pixel_shuffle(found, 4)], figure)


def draw(memory: dict[int, list[float]], images: list[Tensor], path: str) -> None:
    from matplotlib.figure import Figure

    from revode_lab.charts import COLOURS, INK, chart_style, standalone, svg

    deepest = max(memory)
    with chart_style():
        figure = Figure(figsize=(5.2, 4.9))  # as wide as a phone's screen, so that its text is read there
        grid = figure.add_gridspec(2, 3, height_ratios=(1.5, 1))
        axes = figure.add_subplot(grid[0, :])
        for i, (name, colour) in enumerate(
            zip(STRATEGIES, (COLOURS[4], COLOURS[1], COLOURS[2], COLOURS[0]), strict=True)
        ):
            axes.loglog(list(memory), [row[i] for row in memory.values()], color=colour, marker="o", markersize=4)
            text = f"{name}, {memory[deepest][i]:.3g} MB"
            axes.annotate(text, (deepest, memory[deepest][i]), (8, -4), textcoords="offset points", color=colour)
        axes.set(xlabel="blocks", title="memory of a training step, MB", xlim=(8, 60 * deepest), ylim=(0.7, None))
        axes.set_xticks(list(memory), [str(depth) for depth in memory])
        axes.set_yticks((1, 10, 100), ("1", "10", "100"))
        axes.minorticks_off()
        titles = ("an image", f"after {deepest:,} blocks", "walked back,\nbit for bit")
        for place, (image, title) in enumerate(zip(images, titles, strict=True), 1):
            pixels = image[0].permute(1, 2, 0)
            if place == 2:  # features have no range of their own
                pixels = 0.5 + (pixels - pixels.mean()) / (5 * pixels.std())
            shown = figure.add_subplot(grid[1, place - 1])
            shown.imshow(pixels.clamp(0, 1).numpy(), interpolation="nearest")
            shown.set_axis_off()
            shown.set_title(title, fontsize=10.5, color=INK)
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(standalone(svg(figure)))


if __name__ == "__main__":
    main()
