"""What the check at the end of the walk back measures, and what it costs.

python tests/revode/engine/arrival_script.py drifts    # distances of clean walks, far below the bounds of the engine
python tests/revode/engine/arrival_script.py cost      # the share of a step that the check takes
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import revode
from revode import AdditiveCoupling, Leapfrog, MidPoint, Momentum, ReversibleSequence, SymmetricField, Verlet
from revode.engine import arrival
from revode.engine.path import Path


class Attention(nn.Module):
    """Pre-norm self-attention."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.mix, self.out, self.heads = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            heads,
        )

    def forward(self, q: Tensor) -> Tensor:
        parts = self.mix(self.norm(q)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def convolution(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


SCHEMES: dict[str, Callable[[], Any]] = {
    "Verlet(0.1)": lambda: Verlet(h=0.1),
    "AdditiveCoupling()": AdditiveCoupling,
    "MidPoint(0.1)": lambda: MidPoint(h=0.1),
    "Leapfrog(0.1)": lambda: Leapfrog(h=0.1),
    "Momentum(0.9)": lambda: Momentum(0.9),
}
BRANCHES: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...], int]] = {
    "attention": (Attention, (2, 16, 32), -1),
    "Conv+BN+ReLU": (convolution, (2, 8, 8, 8), 1),
    "SymmetricField": (lambda width: SymmetricField(width), (2, 8, 8, 8), 1),
}


def measured_distance(sequence: nn.Module, x: Tensor, lower: bool) -> float:
    """The largest distance that the check sees in one step."""
    found: list[float] = []
    original = arrival.judge
    arrival.judge = lambda distances, *_: found.extend(distances)  # type: ignore[assignment]
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=lower):
            loss = sequence(x).square().mean()
        loss.backward()
    finally:
        arrival.judge = original
    return max(found)


def drifts() -> None:
    print("| scheme | branch | blocks | float32 | bfloat16 |\n|---|---|---:|---:|---:|")
    for scheme_name, scheme in SCHEMES.items():
        for branch_name, (make, shape, dim) in BRANCHES.items():
            for blocks in (12, 100, 1000):
                torch.manual_seed(0)
                width = shape[dim] // (2 if scheme().splits else 1)
                number = blocks * scheme().fields_per_step
                if number > 1000:
                    continue
                sequence = ReversibleSequence([make(width) for _ in range(number)], scheme(), split_dim=dim)
                x = torch.randn(*shape)
                row = [measured_distance(sequence, x, lower) for lower in (False, True)]
                print(f"| {scheme_name} | {branch_name} | {blocks} | {row[0]:.1e} | {row[1]:.1e} |", flush=True)


def grid(blocks: int = 100) -> None:
    """The relative distance of float32 gradients from those of float64, on the same weights and input."""
    print("| scheme | floating point | exact=True |\n|---|---:|---:|")
    for name in ("AdditiveCoupling()", "MidPoint(0.1)", "Leapfrog(0.1)"):
        scheme = SCHEMES[name]()
        torch.manual_seed(0)
        width = 8 // (2 if scheme.splits else 1)
        fields = [
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Tanh())
            for _ in range(blocks * scheme.fields_per_step)
        ]
        x = torch.randn(2, 8, 8, 8)

        def gradient(
            dtype: torch.dtype, exact: bool, fields: Any = fields, scheme: Any = scheme, x: Tensor = x
        ) -> Tensor:
            sequence = ReversibleSequence(fields, scheme, exact=exact).to(dtype)
            sequence.zero_grad()
            sequence(x.to(dtype)).square().mean().backward()
            return torch.cat([p.grad.flatten().double() for p in sequence.parameters()])

        true = gradient(torch.float64, False)
        row = [float((gradient(torch.float32, exact) - true).norm() / true.norm()) for exact in (False, True)]
        print(f"| {name} | {row[0]:.1e} | {row[1]:.1e} |")


def attention_pairs(verify: bool) -> tuple[nn.Module, Tensor]:
    fields = [make(64) for _ in range(12) for make in (Attention, perceptron)]
    return ReversibleSequence(fields, AdditiveCoupling(), split_dim=-1, verify=verify), torch.randn(8, 64, 128)


def tiny(verify: bool) -> tuple[nn.Module, Tensor]:
    fields = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(1000)]
    return ReversibleSequence(fields, Leapfrog(h=0.01), verify=verify), torch.randn(4, 8)


def hamiltonian(verify: bool) -> tuple[nn.Module, Tensor]:
    return revode.create_model("hamiltonian-74", verify=verify), torch.randn(32, 3, 32, 32)


def cost(rounds: int = 15) -> None:
    """The time inside the check over the time of the step around it; two steps differ by more than it takes."""
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - start

        return call

    arrival.fingerprint = timed(arrival.fingerprint)
    Path._verify = timed(Path._verify)
    for name, make in (
        ("hamiltonian-74", hamiltonian),
        ("12 attention pairs", attention_pairs),
        ("1000 tiny branches", tiny),
    ):
        module, x = make(True)
        shares, times = [], []
        for _ in range(rounds + 2):
            spent[0], start = 0.0, time.perf_counter()
            module(x).square().mean().backward()
            times.append(time.perf_counter() - start)
            shares.append(spent[0] / times[-1])
        low, middle, high = statistics.quantiles(shares[2:])
        print(
            f"{name}: {1e3 * statistics.median(times[2:]):.1f} ms a step, {100 * middle:.2f} % of it in the check "
            f"(quartiles {100 * low:.2f} to {100 * high:.2f} %)",
            flush=True,
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    {"drifts": drifts, "grid": grid, "cost": cost}[sys.argv[1] if len(sys.argv) > 1 else "drifts"]()
