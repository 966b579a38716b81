"""The paper's additions to the loss: weight smoothness in time, and weight decay on kernels only.

Over all blocks j that run one after the other (paper, "Regularization"),

    R_h(K) = h Σ_j Σ_k ‖(K_{j+1,k} - K_{j,k}) / h‖²,

where k counts the kernels within a block. The paper's sum knows no units: a unit's last block and the next unit's first are
neighbours where both run at one width (``pool_pad``). A transition ends the sum, since kernels behind it have other shapes or
act on pixels of another distance. All functions take a network of `create_model`, a `ReversibleSequence`, or a module that
contains some.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revode.engine import ReversibleSequence


class KernelChain(NamedTuple):
    """Kernels of one shape and one place k in successive blocks, and the step size between them.

    >>> chain = KernelChain((nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))), h=0.1)
    """

    kernels: tuple[nn.Parameter, ...]
    h: float


def kernel_chains(model: nn.Module) -> list[KernelChain]:
    """Return the chains over which R_h sums. A kernel that two branches share is in one chain only.

    >>> [len(chain.kernels) for chain in kernel_chains(create_model("hamiltonian-14"))]
    [2, 2]
    """
    seen: set[int] = set()
    chains = []
    for unit in model.modules():
        if not isinstance(unit, ReversibleSequence):
            continue
        per_block = unit.scheme.fields_per_step
        for k in range(per_block):
            for kernels in _by_name(list(unit.fields)[k::per_block]):
                fresh = [kernel for kernel in kernels if id(kernel) not in seen]
                seen.update(map(id, fresh))
                chains.extend(KernelChain(run, unit.scheme.h) for run in _runs_of_equal_shape(fresh) if len(run) > 1)
    return chains


def smoothness(model: nn.Module) -> Tensor:
    """Return R_h of all units, differentiable. The graph keeps no tensors but the kernels themselves.

    >>> model = create_model("hamiltonian-14")
    >>> (2e-4 * smoothness(model)).backward()
    """
    value = _like_parameters(model)
    for chain in kernel_chains(model):
        for pair in itertools.pairwise(chain.kernels):
            value = value + checkpoint(_distance, *pair, chain.h, use_reentrant=False, preserve_rng_state=False)
    return value


@torch.no_grad()
def smoothness_gradient_(model: nn.Module, weight: float) -> Tensor:
    """Add weight · ∇R_h to the ``.grad`` of every kernel; return R_h, for the log.

    The gradient is that of ``(weight * smoothness(model)).backward()``, without a graph: one difference at a time. The paper's
    weight is 2e-4 for CIFAR and 3e-4 for STL-10.

    >>> penalty = smoothness_gradient_(create_model("hamiltonian-14"), weight=2e-4)
    """
    if not (isinstance(weight, int | float) and 0.0 <= weight < math.inf):
        raise ValueError(f"weight must be a number that is not negative, got {weight!r}")
    value = _like_parameters(model)
    for chain in kernel_chains(model):
        for kernel in chain.kernels:
            if kernel.grad is None and kernel.requires_grad:
                kernel.grad = torch.zeros_like(kernel)
        for first, second in itertools.pairwise(chain.kernels):
            difference = second - first
            value += _square(difference) / chain.h
            if first.grad is not None and first.requires_grad:
                first.grad.sub_(difference, alpha=2.0 * weight / chain.h)
            if second.grad is not None and second.requires_grad:
                second.grad.add_(difference, alpha=2.0 * weight / chain.h)
    return value


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: kernels and linear weights decay; biases and norms do not.

    >>> optimizer = torch.optim.SGD(decay_groups(create_model("hamiltonian-14"), weight_decay=2e-4), lr=0.1)
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _by_name(fields: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the kernels of these branches, sorted by the name they have in the branch."""
    found: dict[str, list[nn.Parameter]] = {}
    for field in fields:
        for name, parameter in field.named_parameters():
            if parameter.dim() >= 2:
                found.setdefault(name, []).append(parameter)
    return list(found.values())


def _runs_of_equal_shape(kernels: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, ...]]:
    runs: list[list[nn.Parameter]] = []
    for kernel in kernels:
        if runs and runs[-1][-1].shape == kernel.shape:
            runs[-1].append(kernel)
        else:
            runs.append([kernel])
    return [tuple(run) for run in runs]


def _distance(first: Tensor, second: Tensor, h: float) -> Tensor:
    """Return h ‖(K_{j+1} - K_j) / h‖²."""
    return _square(second - first) / h


def _square(difference: Tensor) -> Tensor:
    flat = difference.reshape(-1)
    return flat.dot(flat)


def _like_parameters(model: nn.Module) -> Tensor:
    """Return zero, with the dtype and device of the parameters."""
    parameter = next(model.parameters(), None)
    return torch.zeros(()) if parameter is None else parameter.detach().new_zeros(())
