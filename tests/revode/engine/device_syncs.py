"""Print, as JSON, where steps of several sequences would make a device wait.

The device is that of ``pretended_device``, which is registered for the whole process: run this in one of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from pretended_device import Everywhere, OnDevice, moved, pretend_device, waits
from torch import Tensor, nn

from revode import (
    AdditiveCoupling,
    AntisymmetricField,
    Leapfrog,
    MidPoint,
    Momentum,
    ReversibleSequence,
    SymmetricField,
    Verlet,
    check,
)


def convolution(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


def dropping(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Dropout(0.1))


class Masked(nn.Module):
    """A module that nothing is known of, with a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.register_buffer("mask", torch.ones(width, 1, 1))

    def forward(self, q: Tensor) -> Tensor:
        return self.mix(q) * self.mask


BRANCHES: dict[str, Callable[[int], nn.Module]] = {
    "convolution": convolution,
    "dropout": dropping,
    "unknown with a buffer": Masked,
    "symmetric": SymmetricField,
    "symmetric, batch norm": lambda width: SymmetricField(width, norm="batch"),
    "antisymmetric": AntisymmetricField,
}
SCHEMES = {
    "additive": AdditiveCoupling(),
    "verlet": Verlet(h=0.1),
    "midpoint": MidPoint(h=0.1),
    "leapfrog": Leapfrog(h=0.1),
    "momentum": Momentum(0.9),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"backprop": "store"},
    {"backprop": "checkpoint"},
    {"exact": True},
    {"exact": True, "backprop": "store"},
    {"anchor_every": 2},
    {"verify": False},
]


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """Every branch with one scheme, every scheme with a field and with a module, and every option with all of these."""
    pairs = {("leapfrog", branch) for branch in BRANCHES}
    pairs |= {(scheme, branch) for scheme in SCHEMES for branch in ("convolution", "symmetric, batch norm")}
    found = itertools.product(sorted(pairs), OPTIONS)
    return [(*pair, how) for pair, how in found if SCHEMES[pair[0]].invertible_exactly or not how.get("exact")]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    pretend_device()
    with Everywhere():
        OnDevice(torch.ones(2)).sum().item()
    found: dict[str, dict[str, int]] = {"control": dict(waits)}
    for scheme_name, branch_name, options in cases():
        scheme = SCHEMES[scheme_name]
        waits.clear()
        fields = [BRANCHES[branch_name](4 if scheme.splits else 8) for _ in range(4)]
        sequence = ReversibleSequence(fields, scheme, **options)
        for parameter in sequence.parameters():
            parameter.detach().mul_(0.3)  # so that no combination grows its states and is refused
        moved(sequence)
        with Everywhere():
            for _ in range(2):
                sequence(OnDevice(torch.randn(2, 8, 6, 6))).sum().backward()
        found[f"{scheme_name}, {branch_name}, {options}"] = dict(waits)
        check()
    json.dump(found, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # autograd's thread for the device may still hold tensors, and would abort an interpreter that ends


if __name__ == "__main__":
    main()
