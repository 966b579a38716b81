"""The table of growth in docs/stability.md: every family, activation, initialisation and step size, on digits.

python benchmarks/lyapunov_table.py > table.md
"""

from __future__ import annotations

import itertools

import torch

import revode
from revode import ReversibleSequence, SymmetricField, Verlet
from revode_lab import data
from revode_lab.stability import lyapunov_exponents, step_bounds
from revode_lab.stability.bounds import largest_usage

NETWORKS = ("hamiltonian-74", "hamiltonian-1layer-74", "leapfrog-26", "midpoint-26", "revnet-38")
NUM_IMAGES, SIZE, SEED = 8, 16, 0


def digits() -> torch.Tensor:
    dataset = data.load("digits")
    assert dataset.test is not None
    images = data.standardise(dataset.test.images[:NUM_IMAGES], dataset).repeat(1, 3, 1, 1)
    return torch.nn.functional.interpolate(images, (SIZE, SIZE), mode="bilinear", align_corners=False)


def rows(images: torch.Tensor):
    for name, activation in itertools.product(NETWORKS, ("relu", "tanh")):
        settings = [{}] if name.startswith("revnet") else itertools.product(("independent", "smooth"), (0.05, 0.1, 0.5))
        for setting in settings:
            options = dict(zip(("init", "h"), setting, strict=True)) if setting else {}
            torch.manual_seed(SEED)
            model = revode.create_model(name, image_size=SIZE, activation=activation, **options)
            tangent = lyapunov_exponents(model, images, k=2, dtype=torch.float32)
            top = largest_usage(step_bounds(model, images, tolerance=0.05, dtype=torch.float32))
            usage = "–" if top is None else f"{top.usage:.0%}"
            exponents = ", ".join(f"{value:+.3f}" for value in tangent.exponents.tolist())
            yield (
                name, activation, options.get("init", "–"), options.get("h", "–"), usage,
                f"{tangent.growth:.3g}", exponents,
            )  # fmt: skip


def depth_rows(images: torch.Tensor):
    """Growth through N Hamiltonian blocks of 32 channels: weights drawn anew or constant, h fixed or h = T / N."""
    x = torch.nn.functional.interpolate(images[:4, :1], (8, 8)).repeat(1, 32, 1, 1)
    x = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(SEED))
    for activation, weights, rule in itertools.product(("relu", "tanh"), ("new", "constant"), ("h = 0.1", "h = 1 / N")):
        growths = []
        for num_blocks in (10, 100, 1000):
            torch.manual_seed(SEED)
            count = 2 * num_blocks if weights == "new" else 2
            fields = [SymmetricField(16, activation=activation) for _ in range(count)]
            fields = fields * (2 * num_blocks // count)
            scheme = Verlet(0.1 if rule == "h = 0.1" else 1.0 / num_blocks)
            found = lyapunov_exponents(ReversibleSequence(fields, scheme), x, k=1, dtype=torch.float32)
            growths.append(f"{found.growth:.3g}")
        yield activation, weights, rule, *growths


def _print(header: str, table) -> None:
    print(header)
    print("|---" * (header.count("|") - 1) + "|")
    for row in table:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def main() -> None:
    images = digits()
    _print("| network | σ | init | h | h / bound | growth | λ1, λ2 |", rows(images))
    print()
    _print("| σ | weights | step size | 10 blocks | 100 blocks | 1000 blocks |", depth_rows(images))


if __name__ == "__main__":
    main()
