"""The baselines: the schemes written out in ordinary PyTorch, with activations stored or checkpointed by torch.

Nothing of the engine is used here, so that agreement with it means something and a comparison with it is fair.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revode.schemes import AdditiveCoupling, Leapfrog, MidPoint, Momentum, Scheme, State, Verlet

Block = Callable[..., State]
"""One step of a scheme, from pair to pair; the first of a scheme on one tensor goes from (None, y)."""


def _additive(scheme: Any, branches: Sequence[nn.Module], y: Tensor, z: Tensor) -> State:
    f, g = branches
    y = y + f(z)
    return y, z + g(y)


def _verlet(scheme: Any, branches: Sequence[nn.Module], y: Tensor, z: Tensor) -> State:
    f, g = branches
    y = torch.add(y, f(z), alpha=scheme.h)
    return y, torch.sub(z, g(y), alpha=scheme.h)


def _midpoint(scheme: Any, branches: Sequence[nn.Module], old: Tensor | None, y: Tensor) -> State:
    (f,) = branches
    if old is None:
        return y, torch.add(y, f(y), alpha=scheme.h)
    return y, torch.add(old, f(y), alpha=2 * scheme.h)


def _leapfrog(scheme: Any, branches: Sequence[nn.Module], old: Tensor | None, y: Tensor) -> State:
    (f,) = branches
    if old is None:
        return y, torch.sub(y, f(y), alpha=scheme.h**2 / 2)
    return y, torch.sub(2 * y - old, f(y), alpha=scheme.h**2)


def _momentum(scheme: Any, branches: Sequence[nn.Module], old: Tensor | None, y: Tensor) -> State:
    (f,) = branches
    drift = y if old is None else torch.lerp(old, y, 1 + scheme.gamma)
    return y, torch.add(drift, f(y), alpha=1 - scheme.gamma)


STEPS: dict[type[Scheme], Callable[..., State]] = {
    AdditiveCoupling: _additive,
    Verlet: _verlet,
    MidPoint: _midpoint,
    Leapfrog: _leapfrog,
    Momentum: _momentum,
}


class PlainSequence(nn.Module):
    """A scheme as anyone would write it, stored by autograd or recomputed in segments by ``torch.utils.checkpoint``.

    Args:
        fields: the branches in order.
        scheme: one of revode's schemes, in its default start and undamped; only its numbers are read.
        split_dim: the dimension that splitting schemes halve.
        pair: whether to return the final pair of a splitting scheme instead of joining it.
        num_segments: checkpointed segments; 0 to store everything.
    """

    def __init__(
        self, fields: Sequence[nn.Module], scheme: Scheme, split_dim: int, pair: bool, num_segments: int = 0
    ) -> None:
        super().__init__()
        if scheme.damping or (scheme.starts and scheme.start != scheme.starts[0]):
            raise ValueError(f"the plain baseline knows default starts without damping, got {scheme!r}")
        self.fields = nn.ModuleList(fields)
        self.scheme, self.split_dim, self.pair, self.num_segments = scheme, split_dim, pair, num_segments

    def forward(self, x: Tensor | State) -> Tensor | State:
        state: Any = x
        if isinstance(x, Tensor):
            state = x.chunk(2, dim=self.split_dim) if self.scheme.splits else (None, x)
        blocks = self._blocks()
        if not self.num_segments:
            state = _run(blocks, *state)
        else:
            for segment in _cut(blocks, self.num_segments):
                # No branch here draws random numbers: keeping the generator's state would only slow the baseline down.
                state = checkpoint(_run, segment, *state, use_reentrant=False, preserve_rng_state=False)
        if self.scheme.splits and not self.pair:
            return torch.cat(state, dim=self.split_dim)
        return state if self.pair else state[1]

    def _blocks(self) -> list[Block]:
        step, width, fields = STEPS[type(self.scheme)], self.scheme.fields_per_step, list(self.fields)
        groups = [fields[i : i + width] for i in range(0, len(fields), width)]
        return [lambda p, q, group=group: step(self.scheme, group, p, q) for group in groups]


def _run(blocks: Sequence[Block], p: Tensor | None, q: Tensor) -> State:
    state: Any = (p, q)
    for block in blocks:
        state = block(*state)
    return state


def _cut(blocks: list[Block], num_segments: int) -> list[list[Block]]:
    """Segments of nearly equal length, at most one for each block."""
    count = min(num_segments, len(blocks))
    bounds = [round(i * len(blocks) / count) for i in range(count + 1)]
    return [blocks[a:b] for a, b in itertools.pairwise(bounds)]


def store(fields: Sequence[nn.Module], scheme: Scheme, split_dim: int, pair: bool) -> nn.Module:
    """Everything kept, as autograd does by itself."""
    return PlainSequence(fields, scheme, split_dim, pair)


def checkpoint_blocks(fields: Sequence[nn.Module], scheme: Scheme, split_dim: int, pair: bool) -> nn.Module:
    """One state kept for each block."""
    return PlainSequence(fields, scheme, split_dim, pair, len(fields))


def checkpoint_sqrt(fields: Sequence[nn.Module], scheme: Scheme, split_dim: int, pair: bool) -> nn.Module:
    """√N segments of √N blocks."""
    num_blocks = len(fields) // scheme.fields_per_step
    return PlainSequence(fields, scheme, split_dim, pair, max(1, round(math.sqrt(num_blocks))))
