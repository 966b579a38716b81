"""The floor of a step: its convolutions and matrix products, called alone on tensors of the same shapes and strides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from revode.bench.cases import Case

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
COPIES = 2
"""Sets of arguments that a replay takes in turn, so that the last call's are not all in the nearest cache."""


class _Shape(tuple):
    """The signature of a tensor: size, stride, dtype."""


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Shape((tuple(value.shape), value.stride(), value.dtype))
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    return value


class Recorder(TorchDispatchMode):
    """Counts the heavy calls of what runs inside, by operation and by the shapes, strides and options they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HEAVY:
            self.calls[func, _signature(args), tuple(sorted((kwargs or {}).items()))] += 1
        return func(*args, **(kwargs or {}))


def record(case: Case) -> tuple[Counter[Any], int]:
    """The heavy calls of one step, counted, and the bytes it keeps for backward."""
    case.clear()
    with Recorder() as recorder:
        with case.keeping() as kept:
            loss = case.loss()
            kept.add_contexts(loss)
        loss.backward()
    return recorder.calls, kept.num_bytes


def replay(call: Any) -> Callable[[], object]:
    """One call alone, on random tensors of the recorded kind, made anew from set to set."""
    func, args, kwargs = call
    sets = [_materialize(args) for _ in range(COPIES)]
    options = dict(kwargs)
    turn = 0

    def run() -> object:
        nonlocal turn
        turn += 1
        return func(*sets[turn % COPIES], **options)

    return run


def _materialize(signature: Any) -> Any:
    if isinstance(signature, _Shape):
        size, stride, dtype = signature
        tensor = torch.empty_strided(size, stride, dtype=dtype)
        return tensor.normal_() if dtype.is_floating_point else tensor.zero_()
    if isinstance(signature, tuple):
        return [_materialize(member) for member in signature]
    return signature


def floor(calls: Counter[Any], seconds: dict[Any, float]) -> float:
    """Seconds that the calls would take alone."""
    return sum(count * seconds[call] for call, count in calls.items())
