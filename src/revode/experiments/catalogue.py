"""The items by name; needs no torch, so that ``revode reproduce --help`` is quick."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from revode.experiments.item import Item

ITEMS = {
    "table-1": ("table_1", "all networks on CIFAR-10 and CIFAR-100"),
    "table-2": ("table_2", "96x96 networks on STL-10"),
    "fig-cifar-subset": ("cifar_subset", "Hamiltonian against ResNet on a few per cent of CIFAR-10"),
    "fig-stl-subset": ("stl_subset", "Hamiltonian against ResNet on parts of STL-10"),
    "depth-1202": ("depth_1202", "1,202 layers: loss, memory, gradients over depth"),
    "memory": ("memory", "memory over depth under every gradient strategy"),
    "stability": ("stability", "the theory's claims, measured: eigenvalues, growth, step sizes"),
    "quick-74": ("quick_74", "hamiltonian-74 with batch norm, CIFAR-10, recipe quick"),
}
"""Name -> module in this room, one line of help."""

BUDGETS = {
    "smoke": "under a minute on the embedded digits; shows that everything works, and nothing else",
    "cpu": "what two cores can do in minutes to hours; not the paper's schedule",
    "paper": "the paper's own schedule",
}


def find_item(name: str) -> Item:
    """The item called `name`; an unknown name lists the choices and the nearest one."""
    if name not in ITEMS:
        near = difflib.get_close_matches(name, ITEMS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown item {name!r}; choose one of {', '.join(ITEMS)}{hint}")
    return importlib.import_module(f"revode.experiments.{ITEMS[name][0]}").ITEM
