"""How a Hamiltonian network and a ResNet move points in the plane, layer by layer: two spirals, and a ring around a disc.

    python examples/plane.py [--figure docs/figures/plane.png]

Both networks have 20 layers of 16 hidden units, the same step size, and a linear classifier that sees the plane. Each point has
two more coordinates that begin at zero and are not drawn: the momentum of the Hamiltonian network. That one is trained
reversibly on the exact grid, and its last column is the input found back from the last state. Half a minute on one core.
"""

import argparse

import torch
from torch import Tensor, nn

from revode import ReversibleSequence, SymmetricField, Verlet

LAYERS, HIDDEN, H, STEPS, NUM_POINTS = 20, 16, 0.3, 300, 400
SHOWN = (0, 5, 10, 15, 20)


def raised(x: Tensor) -> Tensor:
    """Points of the plane with two more coordinates."""
    return nn.functional.pad(x, (0, 2))


def spirals(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two arms that wind around each other one and a half times."""
    label = torch.arange(NUM_POINTS) % 2
    along = torch.rand(NUM_POINTS, generator=generator).sqrt()
    angle = 3 * torch.pi * along + torch.pi * label
    points = torch.stack([angle.cos(), angle.sin()], 1) * along[:, None] * 1.5
    return points + 0.03 * torch.randn(points.shape, generator=generator), label


def rings(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A disc, and a ring around it."""
    label = torch.arange(NUM_POINTS) % 2
    radius = torch.rand(NUM_POINTS, generator=generator).sqrt() * 0.6 + label * 0.9
    angle = 2 * torch.pi * torch.rand(NUM_POINTS, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], 1) * radius[:, None], label


class Hamiltonian(nn.Module):
    """Positions y and momenta z: y += h K1'σ(K1 z + b1), z -= h K2'σ(K2 y + b2)."""

    def __init__(self) -> None:
        super().__init__()
        fields = [SymmetricField(2, HIDDEN, activation="tanh", ndim=0) for _ in range(2 * LAYERS)]
        self.body = ReversibleSequence(fields, Verlet(H), exact=True)
        self.head = nn.Linear(2, 2)

    def states(self, x: Tensor) -> list[Tensor]:
        """The points after each layer."""
        pairs = list(self.body.states(raised(x)))
        return [pair[0] for pair in pairs[::2]]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(raised(x))[:, :2])

    def back(self, x: Tensor) -> Tensor:
        """The points, walked through all layers and back."""
        _, state = self.body(raised(x), return_state=True)
        return self.body.inverse(state)[:, :2]


class ResNet(nn.Module):
    """Y += h F(Y), with F = W2 σ(W1 Y + b1) + b2."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(4, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 4)) for _ in range(LAYERS)
        )
        self.head = nn.Linear(2, 2)

    def states(self, x: Tensor) -> list[Tensor]:
        y, shown = raised(x), [x]
        for branch in self.body:
            y = y + H * branch(y)
            shown.append(y[:, :2])
        return shown

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.states(x)[-1])


def train(model: nn.Module, points: Tensor, labels: Tensor) -> float:
    """Fit the points, and say which share of them is on its side."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float((model(points).argmax(1) == labels).float().mean())


def draw(rows: list[tuple[str, nn.Module, Tensor, Tensor]], path: str) -> None:
    from matplotlib.figure import Figure

    from revode_lab.charts import COLOURS, INK, chart_style

    with chart_style():
        figure = Figure(figsize=(11.5, 1.95 * len(rows)))
        grid = figure.subplots(len(rows), len(SHOWN) + 1)
        for axes, (name, model, points, labels) in zip(grid, rows, strict=True):
            with torch.no_grad():
                states = model.states(points)
                columns = [states[layer] for layer in SHOWN] + ([model.back(points)] if hasattr(model, "back") else [])
            for place, shown in enumerate(columns):
                size = 1.1 * float(shown.abs().max())
                colours = [COLOURS[(4, 0)[int(label)]] for label in labels]
                axes[place].scatter(*shown.T.tolist(), s=5, c=colours, linewidths=0)
                axes[place].set(xlim=(-size, size), ylim=(-size, size), xticks=[], yticks=[], aspect="equal")
            boundary(axes[len(SHOWN) - 1], model.head, INK)
            axes[0].set_ylabel(name)
            for unused in axes[len(columns) :]:
                unused.set_axis_off()
                unused.text(0.5, 0.5, "no way back", ha="center", va="center", transform=unused.transAxes)
        for axes, title in zip(grid[0], ["input", *(f"layer {n}" for n in SHOWN[1:]), "walked back"], strict=True):
            axes.set_title(title)
        figure.savefig(path, dpi=90, metadata={"Software": None})


def boundary(axes, head: nn.Linear, colour: str) -> None:
    """The line on which both classes have the same score."""
    weight, bias = head.weight.detach(), head.bias.detach()
    (a, b), c = (weight[1] - weight[0]).tolist(), float(bias[1] - bias[0])
    scale = -c / (a * a + b * b)
    axes.axline((scale * a, scale * b), (scale * a - b, scale * b + a), color=colour, linewidth=1, linestyle="--")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", help="write the figure to this file (needs matplotlib)")
    figure = parser.parse_args().figure
    torch.set_num_threads(1)
    rows = []
    print("| points | network | on the right side | input found back, largest error |\n|---|---|---:|---:|")
    for name, make in {"spirals": spirals, "rings": rings}.items():
        points, labels = make(torch.Generator().manual_seed(0))
        points = torch.round(points * 2**14) / 2**14
        for kind in (Hamiltonian, ResNet):
            torch.manual_seed(0)
            model = kind()
            right = train(model, points, labels)
            with torch.no_grad():
                error = f"{float((model.back(points) - points).abs().max()):.1g}" if kind is Hamiltonian else "–"
            print(f"| {name} | {kind.__name__} | {right:.1%} | {error} |", flush=True)
            rows.append((f"{name},\n{kind.__name__}", model, points, labels))
    if figure:
        draw(rows, figure)


if __name__ == "__main__":
    main()
