"""The items by name; needs no torch, so that ``revode reproduce --help`` is quick."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from revode.files import unknown

if TYPE_CHECKING:
    from revode.reproduce.item import Item

ITEMS = {
    "table-1": ("accuracy", "all networks on CIFAR-10 and CIFAR-100"),
    "table-2": ("accuracy", "96x96 networks on STL-10"),
    "fig-cifar-subset": ("subsets", "Hamiltonian against ResNet on a few per cent of CIFAR-10"),
    "small-data": ("small_data", "4 per cent of CIFAR-10: both networks, batch norm and biases"),
    "fig-stl-subset": ("subsets", "Hamiltonian against ResNet on parts of STL-10"),
    "depth-1202": ("depth", "1,202 layers: loss, memory, gradients over depth"),
    "memory": ("memory", "memory over depth under every gradient strategy"),
    "stability": ("stability", "the theory's claims, measured: eigenvalues, growth, step sizes"),
    "quick-74": ("accuracy", "hamiltonian-74 with batch norm, CIFAR-10, recipe quick"),
}
"""Name -> module in this room that lists it in its ``ITEMS``, one line of help."""

BUDGETS = {
    "smoke": "under a minute on the embedded digits; shows that everything works, and nothing else",
    "cpu": "what two cores can do in minutes to hours; not the paper's schedule",
    "paper": "the paper's own schedule",
}


def find_item(name: str) -> Item:
    """The item called `name`; an unknown name lists the choices and the nearest one."""
    if name not in ITEMS:
        raise unknown("item", name, ITEMS)
    module = importlib.import_module(f"revode.reproduce.{ITEMS[name][0]}")
    return next(item for item in module.ITEMS if item.name == name)
