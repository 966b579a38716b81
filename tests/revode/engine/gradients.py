"""What a training step leaves behind, and how two of them are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from revode import ReversibleSequence

Record = dict[str, Tensor | None]


def weighted_sum(tensors: Any) -> Tensor:
    """A loss with a different derivative at every element of every tensor, the same at every call."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    total = torch.zeros((), dtype=torch.float64)
    for k, y in enumerate(tensors):
        weights = torch.cos(torch.arange(y.numel(), dtype=torch.float64) * 0.7 + k).view(y.shape)
        total = total + (y.double() * weights).sum() + 0.5 * (y.double() ** 2).mean()
    return total


def training_step(
    sequence: nn.Module,
    x: Tensor,
    *,
    loss: Callable[[Any], Tensor] = weighted_sum,
    seed: int = 1,
    kwargs: dict[str, Any] | None = None,
    call: Callable[..., Any] | None = None,
) -> Record:
    """Output, gradients, buffers and the position of the random stream after one forward and backward."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    kwargs = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in (kwargs or {}).items()}
    sequence.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    y = (sequence if call is None else call)(x, **kwargs)
    loss(y).backward()
    outputs = [y] if isinstance(y, Tensor) else list(y)
    record: Record = {f"output {k}": output.detach().clone() for k, output in enumerate(outputs)}
    record["grad of input"] = x.grad
    record |= {f"grad of {name}": p.grad for name, p in sequence.named_parameters()}
    record |= {f"grad of argument {name}": v.grad for name, v in kwargs.items() if v.requires_grad}
    record |= {f"buffer {name}": buffer.clone() for name, buffer in sequence.named_buffers()}
    record["random stream"] = torch.get_rng_state()
    return record


def relative_error(a: Tensor | None, b: Tensor | None, floor: float = 1e-300) -> float:
    """‖a - b‖ / max(‖b‖, floor); infinite if only one exists."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if torch.equal(a, b):
        return 0.0
    if not b.is_floating_point():
        return float("inf")
    a, b = a.double(), b.double()
    error = float((a - b).norm() / max(float(b.norm()), floor))
    return error if error == error else float("inf")


def assert_agree(ours: Record, reference: Record, tolerance: float = 1e-10) -> None:
    """Every entry within `tolerance`, relative in norm.

    A gradient that is zero but for round-off (of a bias before a batch norm) is measured against a thousandth of the largest.
    """
    assert ours.keys() == reference.keys()
    grads = [value for value in reference.values() if value is not None and value.is_floating_point()]
    floor = 1e-3 * max(float(grad.double().norm()) for grad in grads)
    errors = {name: relative_error(ours[name], reference[name], floor) for name in reference}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"differ by more than {tolerance:g}: {wrong}"


def assert_bitwise(ours: Record, reference: Record) -> None:
    """Every entry equal to the last bit."""
    assert_agree(ours, reference, 0.0)


def compare_with_store(
    make: Callable[..., ReversibleSequence],
    x: Tensor,
    *,
    tolerance: float = 1e-10,
    prepare: Callable[[ReversibleSequence], None] = lambda sequence: None,
    **step: Any,
) -> None:
    """Two sequences from the same seed, one of them storing everything, take the same step."""
    records = []
    for strategy in ({}, {"backprop": "store", "anchor_every": None, "memory_budget": None}):
        torch.manual_seed(0)
        sequence = make(**strategy)
        prepare(sequence)
        records.append(training_step(sequence, x, **step))
    assert any(name.startswith("grad") and grad is not None for name, grad in records[1].items())
    assert_agree(*records, tolerance)
