"""One workload by one method: a training step without its optimizer, and the gradient it gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from revode.bench.methods import METHODS, Method
from revode.bench.workloads import Workload, samples, subject
from revode.engine import ReversibleSequence
from revode.engine.accounting import SavedTensors, graph_nodes
from revode.networks.classifier import StagedClassifier

GRADIENT_BATCH = 4
"""Samples that the gradient error is measured on: the fp64 reference of 1202 layers is slow."""


class KeptTensors(SavedTensors):
    """`SavedTensors` that also counts what custom Functions keep as attributes: two of the peers hide tensors there."""

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def add_contexts(self, output: Tensor) -> None:
        """Count what Python Functions in the graph of `output` keep as attributes."""
        for node in graph_nodes(output):
            for tensor in _tensors(list(getattr(node, "__dict__", {}).values())):
                self._pack(tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _tensors(member)


class Case:
    """A workload made ready by a method.

    Args:
        workload: what to run.
        method: by which way.
        dtype: of parameters and input.
        layout: ``"contiguous"`` or ``"channels_last"``, of kernels, and of the images or features that come in.
    """

    def __init__(
        self,
        workload: Workload,
        method: Method,
        dtype: torch.dtype = torch.float32,
        layout: str = "channels_last",
    ) -> None:
        self.workload, self.method, self.dtype, self.layout = workload, method, dtype, layout
        self.subject = subject(workload)
        self.module: nn.Module = self.subject.build(method.wrap).to(dtype)
        if layout == "channels_last":
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.parameters = self.subject.parameters
        self.inputs = self.batch_of(workload.batch)
        if method.budget is not None:
            self._keep_within(method.budget)

    def batch_of(self, batch: int) -> Tensor:
        """The first samples of the workload."""
        x = samples(self.subject.shape, batch, self.dtype, self.layout)
        return x.requires_grad_(self.subject.differentiable_input)

    def loss(self, x: Tensor | None = None) -> Tensor:
        """The mean square of the output."""
        return self.module(self.inputs if x is None else x).square().mean()

    def step(self, x: Tensor | None = None) -> None:
        """Forward and backward, gradients fresh."""
        self.clear()
        self.loss(x).backward()

    def clear(self) -> None:
        """Forget gradients."""
        self.inputs.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def gradient(self, batch: int) -> Tensor:
        """All gradients of a smaller batch, end to end, in fp64."""
        x = self.batch_of(batch)
        self.step(x)
        tensors = [*self.parameters, *([x] if x.requires_grad else [])]
        found = torch.cat([_filled(tensor).double().flatten() for tensor in tensors])
        self.clear()
        return found

    def saved_bytes(self) -> int:
        """Bytes kept for backward by one forward pass, besides parameters and input."""
        self.clear()
        with self.keeping() as kept:
            kept.add_contexts(self.loss())
        return kept.num_bytes

    def keeping(self) -> KeptTensors:
        """A context that counts what is kept besides parameters and input."""
        return KeptTensors([*self.module.parameters(), *self.module.buffers(), self.inputs])

    def _keep_within(self, share: int) -> None:
        """Set the memory budget to a share of the way from ``revode`` to ``store``."""
        least, most = (
            Case(self.workload, METHODS[name], self.dtype, self.layout).saved_bytes() for name in ("revode", "store")
        )
        budget = least + (most - least) * share // 100
        if isinstance(self.module, StagedClassifier):
            self.module.config = self.module.config.with_options(memory_budget=budget)
        else:
            self.module = cast(ReversibleSequence, self.module).with_strategy(memory_budget=budget)


def _filled(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def gradient_errors(workload: Workload, cases: list[Case]) -> dict[str, float]:
    """|g - g64| / |g64| for each method, g64 being the stored gradient in fp64."""
    batch = min(workload.batch, GRADIENT_BATCH)
    reference = Case(workload.with_batch(batch), METHODS["store"], torch.float64).gradient(batch)
    size = reference.norm()
    return {case.method.name: float((case.gradient(batch) - reference).norm() / size) for case in cases}
