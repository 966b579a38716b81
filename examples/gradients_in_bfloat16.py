"""How far reversing moves the gradient when branches run in bfloat16, and that the exact grid moves it by nothing.

.venv/bin/python examples/gradients_in_bfloat16.py     (about a minute)

A state that is rebuilt with an error in its last bit can round another way in bfloat16. Batch norm makes more of it: behind a
transition half of the channels are zero, and what is left of a zero after reversing is scaled by up to 1/√ε = 316.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

import revode

NETWORKS = {
    "biases, h = 0.1": {},
    "batch norm, h = 0.1": {"norm": "batch"},
    "batch norm, h = 0.3": {"norm": "batch", "h": 0.3},
}


def gradient(images: Tensor, labels: Tensor, backprop: str, precision: str, **options: object) -> Tensor:
    torch.manual_seed(0)
    network = revode.create_model("hamiltonian-74", backprop=backprop, **options)
    network.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        loss = F.cross_entropy(network(images).float(), labels)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def distance(reversed_: Tensor, stored: Tensor) -> str:
    if torch.equal(reversed_, stored):
        return "0, bit for bit"
    return f"{float((reversed_ - stored).norm() / stored.norm()):.1e}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 3, 32, 32, generator=generator).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (64,), generator=generator)
    rows = []
    for name, options in NETWORKS.items():
        for precision in ("float32", "bfloat16"):
            cells = [name, precision]
            for exact in (False, True):
                stored, reversed_ = (
                    gradient(images, labels, way, precision, exact=exact, **options) for way in ("store", "reversible")
                )
                cells.append(distance(reversed_, stored))
            rows.append(cells)
    header = ["hamiltonian-74 with", "branches in", "reversible to stored", "the same, exact=True"]
    for row in [header, ["---", "---:", "---:", "---:"], *rows]:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
