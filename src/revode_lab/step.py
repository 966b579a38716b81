"""A training step without its optimizer: its bytes kept, its time, and the peak memory of its process."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import revode
from revode.engine import ReversibleSequence
from revode.memory import SavedTensors, graph_nodes
from revode_lab.baselines import BASELINES, replace_sequences
from revode_lab.system import peak, reset_peak

SEED = 0


def clock(action: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Step:
    """Forward and backward of the mean square of a module's output, on seeded random inputs.

    Args:
        module: A sequence gets an input that needs a gradient, as in the middle of a network.
        shape: Shape of a sample.
        autocast: Run under autocast to bfloat16, beside parameters in float32.
        wrap: Replaces the module after its parameters were listed, so that all wrappings share their order.
    """

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...],
        batch: int,
        *,
        dtype: torch.dtype = torch.float32,
        autocast: bool = False,
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    ) -> None:
        self.shape, self.dtype, self.autocast = shape, dtype, autocast
        self.has_gradient_of_input = isinstance(module, ReversibleSequence)
        self.parameters = list(module.parameters())
        self.module = wrap(module).to(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.inputs = self.batch_of(batch)

    def batch_of(self, batch: int) -> Tensor:
        """Return so many samples, the first ones of any larger batch."""
        x = torch.randn(batch, *self.shape, generator=torch.Generator().manual_seed(SEED + 1)).to(self.dtype)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x.requires_grad_(self.has_gradient_of_input)

    def loss(self, x: Tensor | None = None) -> Tensor:
        """Return the mean square of the output."""
        x = self.inputs if x is None else x
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            return self.module(x).square().mean()

    def __call__(self, x: Tensor | None = None) -> None:
        """Run forward and backward with fresh gradients."""
        self.clear()
        self.loss(x).backward()

    def clear(self) -> None:
        """Forget gradients."""
        self.inputs.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def saved_bytes(self) -> int:
        """Return the bytes kept for backward by one forward pass, besides parameters and input.

        What custom Functions keep as attributes counts, too: other libraries hide tensors there.
        """
        self.clear()
        with SavedTensors([*self.module.parameters(), *self.module.buffers(), self.inputs]) as kept:
            for node in graph_nodes(self.loss()):
                for value in pytree.tree_leaves(list(getattr(node, "__dict__", {}).values())):
                    if isinstance(value, Tensor):
                        kept.count(value)
        return kept.num_bytes

    def cost(self, num_timed: int = 1, *, warm_up: Tensor | None = None) -> dict[str, Any]:
        """Return parameters, bytes kept for backward, seconds, and the growth of this process's peak.

        A step of one sample, or of `warm_up`, comes first: it loads code, fills caches and makes room for gradients. The
        footprint is the peak of the real steps above the resident size then.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self(self.batch_of(1) if warm_up is None else warm_up)
            before = reset_peak()
            times = [clock(self) for _ in range(num_timed)]
            grown = max(0, peak() - before)
            return {
                "params": sum(parameter.numel() for parameter in self.parameters),
                "saved_bytes": self.saved_bytes(),
                "peak_bytes": grown,
                "seconds_per_step": statistics.median(times),
            }


def network_cost(
    name: str,
    options: dict[str, Any],
    batch: int,
    strategy: str,
    threads: int,
    num_timed: int = 1,
    autocast: bool = False,
) -> dict[str, Any]:
    """Return the cost of a step of a named network in this process, ``reversible`` or by one of `BASELINES`."""
    torch.set_num_threads(threads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = revode.create_model(name, **options)
    if strategy != "reversible":
        replace_sequences(model, BASELINES[strategy])
    return Step(model, model.config.image_shape(), batch, autocast=autocast).cost(num_timed)
