"""One workload by one method: a training step without its optimizer, its gradient, its bytes and its operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from methods import METHODS, Method
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import Workload

from revode.engine import ReversibleSequence
from revode.networks import StagedClassifier
from revode_lab.baselines import replace_sequences
from revode_lab.step import SEED, Step

GRADIENT_BATCH = 4
"""Samples for the gradient error: the fp64 reference of 1202 layers is slow."""
COPIES = 2
"""Sets of arguments that a replay uses in turn, so that not all of them are in the nearest cache."""
aten = torch.ops.aten
HEAVY = {
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
"""Convolutions and matrix products: called alone on tensors of the same shapes and strides, they are the floor of a step."""


@dataclass(frozen=True)
class _Kind:
    """Size, strides and dtype of a recorded tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        return made.normal_() if self.dtype.is_floating_point else made.zero_()


class Recorder(TorchDispatchMode):
    """Count aten operations, and the heavy ones by the shapes, strides and options of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if func in HEAVY:
            leaves, form = pytree.tree_flatten((args, kwargs or {}))
            kinds = [_Kind(tuple(t.shape), t.stride(), t.dtype) if isinstance(t, Tensor) else t for t in leaves]
            self.calls[func, tuple(kinds), form] += 1
        return func(*args, **(kwargs or {}))


def replay(call: Any) -> Callable[[], object]:
    """Return a function that makes one recorded call on random tensors of the recorded kinds."""
    func, kinds, form = call
    sets = [
        pytree.tree_unflatten([kind.tensor() if isinstance(kind, _Kind) else kind for kind in kinds], form)
        for _ in range(COPIES)
    ]
    turn = 0

    def run() -> object:
        nonlocal turn
        turn += 1
        args, kwargs = sets[turn % COPIES]
        return func(*args, **kwargs)

    return run


def sequences(module: nn.Module) -> list[ReversibleSequence]:
    """Return the sequences in a module, itself included."""
    return [part for part in module.modules() if isinstance(part, ReversibleSequence)]


class Case(Step):
    """A workload made ready by a method.

    Args:
        workload: the workload. Under bfloat16, branches run under autocast, states and parameters stay in float32.
        method: the method.
        dtype: of parameters and input.
    """

    def __init__(self, workload: Workload, method: Method, dtype: torch.dtype = torch.float32) -> None:
        self.workload, self.method = workload, method
        made, shape = workload.build()
        self.num_branches = sum(len(sequence.fields) for sequence in sequences(made))
        lower = workload.dtype == "bfloat16" and dtype == torch.float32
        super().__init__(
            made,
            shape,
            workload.batch,
            dtype=dtype,
            autocast=lower,
            wrap=lambda module: replace_sequences(module, method.wrap),
        )
        if method.budget is not None:
            self._keep_within(method.budget)

    def gradient(self, batch: int) -> Tensor:
        """Return all gradients of a smaller batch, flattened, in fp64; dropout draws the same numbers by every method."""
        x = self.batch_of(batch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self(x)
        tensors = [*self.parameters, *([x] if x.requires_grad else [])]
        found = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors]
        self.clear()
        return torch.cat([gradient.double().flatten() for gradient in found])

    def record(self) -> tuple[Counter[Any], tuple[float, float]]:
        """Return the heavy calls of a second step, and its operations for each branch, forward and backward."""
        self()
        self.clear()
        with Recorder() as forward:
            loss = self.loss()
        with Recorder() as backward:
            loss.backward()
        branches = max(1, self.num_branches)  # a ResNet has none
        return forward.calls + backward.calls, (forward.operations / branches, backward.operations / branches)

    def _keep_within(self, share: int) -> None:
        """Set the memory budget to a share of the way from ``revode`` to ``store``."""
        least, most = (Case(self.workload, METHODS[name], self.dtype).saved_bytes() for name in ("revode", "store"))
        budget = least + (most - least) * share // 100
        if isinstance(self.module, StagedClassifier):
            self.module.config = self.module.config.with_options(memory_budget=budget)
        else:
            self.module = cast(ReversibleSequence, self.module).with_strategy(memory_budget=budget)


def gradient_errors(workload: Workload, cases: list[Case]) -> dict[str, float]:
    """Return |g - g64| / |g64| for each method, g64 being the stored gradient in fp64."""
    batch = min(workload.batch, GRADIENT_BATCH)
    reference = Case(replace(workload, batch=batch), METHODS["store"], torch.float64).gradient(batch)
    size = reference.norm()
    return {case.method.name: float((case.gradient(batch) - reference).norm() / size) for case in cases}


def measure_step(workload: Workload, method: str, threads: int) -> dict[str, Any]:
    """Return the cost of a step in this process."""
    torch.set_num_threads(threads)
    case = Case(workload, METHODS[method])
    # A compiled step is specialised to its shapes, so it must be warmed up on the real batch.
    return case.cost(warm_up=case.inputs if case.method.compiled else None)
