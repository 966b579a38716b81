"""Memory of a training step: counted while it runs, and reported for a model of yours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from revode.memory.counters import PeakActivations as PeakActivations
from revode.memory.counters import SavedTensors as SavedTensors
from revode.memory.counters import adds as adds
from revode.memory.counters import graph_bytes as graph_bytes
from revode.memory.counters import graph_leaves as graph_leaves
from revode.memory.counters import graph_nodes as graph_nodes
from revode.memory.counters import watching as watching

if TYPE_CHECKING:
    from revode.memory.steps import MemoryReport


def report(model: nn.Module, batch: Any, loss: Callable[[Any], Any] | None = None, *, repeats: int = 3) -> MemoryReport:
    """Return bytes and time of a training step of `model`: stored, with a checkpoint of each block, and reversible.

    A model without reversible or converted blocks is shown as `revode.convert` would run it, if that finds its blocks. The
    model's weights, gradients, buffers and RNG states stay as they are.

    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(12)])
    >>> print(report(model, torch.randn(256, 32), repeats=1))  # doctest: +ELLIPSIS
    parameters ..., gradients ...

    Args:
        model: the model, in training or eval mode.
        batch: one argument, a tuple of arguments, or a dict of keyword arguments of the model.
        loss: makes a scalar of the model's output. By default the output's attribute ``loss`` if there is one, else the mean
            square of all floating-point tensors in the output.
        repeats: how often each way is timed, after a step that is not.
    """
    from revode.memory.steps import measure  # the engine counts with this package, and the report needs the engine

    return measure(model, batch, loss, repeats)
