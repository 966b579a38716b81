"""A neural ODE on a spiral: memory over steps, and the error of gradients, beside torchdiffeq's two ways.

    python examples/ode.py --out results/ode-cpu   # a few minutes on one core
    python examples/ode.py --smoke                 # a few steps of everything

A small network learns the field of a spiral from noisy points of it. Its gradient is computed four ways: by revode, by
torchdiffeq with everything stored, by torchdiffeq's adjoint, and by revode with two states kept for each step. Memory is
what is saved for backward, without parameters. Then the gradient by a of x' = a x sin z, where z' = -5 (z - cos t) settles:
the adjoint solves z backwards, and loses it. Errors are relative to a gradient at a tolerance of 1e-11.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import revode
from revode.memory import SavedTensors
from revode_lab.system import write_json

WAYS = {
    "torchdiffeq, stored": ("odeint", {}),
    "torchdiffeq, adjoint": ("odeint_adjoint", {}),
    "revode, checkpoint": (None, {"gradient": "checkpoint"}),
    "revode": (None, {}),
}
"""Name -> function of torchdiffeq, if it is one; keyword arguments."""


class Field(nn.Module):
    """dy/dt of a spiral, by a network of y cubed; counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        self.count = [0]

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.count[0] += 1
        return self.net(y**3)


def spiral(points: int) -> tuple[Tensor, Tensor]:
    """Times, and noisy points of y' = A y³ from (2, 0)."""
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    t = torch.linspace(0, 8, points)
    with torch.no_grad():
        y = revode.odeint(lambda t, y: y**3 @ matrix, torch.tensor([[2.0, 0.0]]), t, rtol=1e-6, atol=1e-7)
    return t, y + 0.03 * torch.randn(y.shape, generator=torch.Generator().manual_seed(0))


def train(field: Field, t: Tensor, data: Tensor, steps: int) -> list[float]:
    """Fit short pieces of the spiral; return the losses."""
    optimizer, losses, length = torch.optim.Adam(field.parameters(), lr=0.01), [], 8
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        begin = torch.randint(len(t) - length, (32,), generator=generator)
        pieces = torch.stack([data[begin + i, 0] for i in range(length)])
        found = revode.odeint(field, pieces[0], t[:length], method="rk4")
        loss = (found - pieces).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def solver(way: str) -> Callable[..., Tensor]:
    """Return how to call one of the ways."""
    name, kwargs = WAYS[way]
    if name is None:
        return lambda *given, **more: revode.odeint(*given, **kwargs, **more)
    import torchdiffeq

    return getattr(torchdiffeq, name)


class Driven(nn.Module):
    """x' = a x sin z, and z is pulled to cos t."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.count = nn.Parameter(torch.ones((), dtype=torch.float64)), [0]

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.count[0] += 1
        x, z = y.unbind(-1)
        return torch.stack([self.a * x * torch.sin(z), -5 * (z - torch.cos(t))], -1)


def gradient(way: str, func: Any, y0: Tensor, end: float, **kwargs: Any) -> tuple[Tensor, dict[str, float]]:
    """Return the gradient of the squares of the first elements at the end by all parameters, and what it cost."""
    leaf, func.count[0] = y0.clone().requires_grad_(), 0
    began = time.perf_counter()
    with SavedTensors(func.parameters()) as saved:
        solution = solver(way)(func, leaf, torch.tensor([0.0, end], dtype=y0.dtype), **kwargs)
    grads = torch.autograd.grad(solution[-1, ..., 0].square().sum(), list(func.parameters()))
    seconds = time.perf_counter() - began
    cost = {"bytes": saved.num_bytes, "evaluations": func.count[0], "seconds": seconds}
    return torch.cat([grad.reshape(-1) for grad in grads]), cost


def measure(field: Field, smoke: bool) -> dict[str, Any]:
    """Return costs over the number of steps, and errors over the step size."""
    field, y0 = field.double(), torch.randn(256, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    over_steps: dict[str, dict[int, Any]] = {way: {} for way in WAYS}
    for number in (10, 20) if smoke else (10, 32, 100, 316, 1000):
        for way in WAYS:
            options = {"method": "rk4", "options": {"step_size": 4.0 / number}}
            over_steps[way][number] = gradient(way, field, y0, 4.0, **options)[1]
    start, end = torch.ones(2, dtype=torch.float64), 1.0 if smoke else 8.0
    exact, _ = gradient("torchdiffeq, stored", Driven(), start, end, rtol=1e-11, atol=1e-13)
    errors: dict[str, dict[float, float]] = {way: {} for way in WAYS}
    for size in (0.1,) if smoke else (0.1, 0.05, 0.025, 0.0125):
        for way in WAYS:
            found, _ = gradient(way, Driven(), start, end, method="rk4", options={"step_size": size})
            errors[way][size] = float((found - exact).norm() / exact.norm())
    return {"over_steps": over_steps, "errors": errors}


def draw(field: Field, t: Tensor, data: Tensor, result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    from revode_lab.charts import COLOURS, MARKERS, chart_style, standalone, svg

    with torch.no_grad():
        fit = revode.odeint(field, data[0].double(), torch.linspace(0, float(t[-1]), 400, dtype=torch.float64))[:, 0]
    with chart_style():
        figure = Figure(figsize=(11.0, 3.5))
        left, middle, right = figure.subplots(1, 3)
        left.plot(*data[:, 0].T.tolist(), ".", color=COLOURS[1], markersize=4)
        left.plot(*fit.T.tolist(), color=COLOURS[0])
        left.set(title="points, and the network's spiral", aspect="equal")
        colours = (COLOURS[4], COLOURS[2], COLOURS[1], COLOURS[0])
        for way, colour, marker in zip(WAYS, colours, MARKERS, strict=False):
            costs, errors = result["over_steps"][way], result["errors"][way]
            style = {"color": colour, "marker": marker, "markersize": 4, "label": way}
            middle.loglog([int(n) for n in costs], [row["bytes"] / 1e6 for row in costs.values()], **style)
            right.loglog(list(errors), list(errors.values()), **style)
        middle.set(title="kept for backward, MB", xlabel="steps of rk4")
        right.set(title="error of a gradient", xlabel="step of rk4, z settles")
        right.set_xticks(list(errors), [f"{size:g}" for size in errors])
        right.minorticks_off()
        right.legend(loc="center left", bbox_to_anchor=(0.0, 0.68))
        path.write_text(standalone(svg(figure)), encoding="utf-8")


def table(result: dict[str, Any]) -> str:
    """Return the tables of the page."""
    over_steps, errors = result["over_steps"], result["errors"]
    numbers, sizes = list(over_steps["revode"]), list(errors["revode"])
    lines = ["| kept, kB | " + " | ".join(f"{n} steps" for n in numbers) + " | evaluations | seconds |"]
    lines.append("|---|" + "---:|" * (len(numbers) + 2))
    for way, costs in over_steps.items():
        last = costs[numbers[-1]]
        kept = " | ".join(f"{row['bytes'] / 1e3:,.1f}" for row in costs.values())
        lines.append(f"| {way} | {kept} | {last['evaluations']:,} | {last['seconds']:.1f} |")
    lines += [
        "",
        "Evaluations of the network, and seconds on a machine that did other things, too, are those of the most steps.",
    ]
    lines += ["", "| error of the gradient by a | " + " | ".join(f"step {size:g}" for size in sizes) + " |"]
    lines.append("|---|" + "---:|" * len(sizes))
    lines += [
        f"| {way} | " + " | ".join(f"{error:.1e}" for error in row.values()) + " |" for way, row in errors.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/ode"), help="write ode.json, ode.svg and ode.md to this folder"
    )
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything, in seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    t, data = spiral(50 if args.smoke else 400)
    field = Field()
    losses = train(field, t, data, 3 if args.smoke else 300)
    result = {"loss": {"first": losses[0], "last": sum(losses[-20:]) / len(losses[-20:])}, **measure(field, args.smoke)}
    print(text := table(result))
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "ode.json", result)
    draw(field, t, data, result, args.out / "ode.svg")
    page = f"# A neural ODE beside torchdiffeq\n\n{__doc__.split(chr(10) * 2)[-1].strip()}\n"
    command = "Regenerate this page with `.venv/bin/python examples/ode.py --out results/ode-cpu`."
    (args.out / "ode.md").write_text(f"{page}\n{text}\n\n![The spiral, memory, errors](ode.svg)\n\n{command}\n")


if __name__ == "__main__":
    main()
