"""The schemes written out in ordinary PyTorch, to compare the library with.

Nothing of the engine is used, so that agreement with it means something and a comparison with it is fair.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revode.engine import ReversibleSequence
from revode.networks import StagedClassifier
from revode.schemes import AdditiveCoupling, Leapfrog, MidPoint, Momentum, Scheme, State, Verlet

Wrap = Callable[[ReversibleSequence, bool], nn.Module]
"""(sequence, return the final pair or not) -> module that runs its branches."""


# One step of each scheme, from pair to pair; the first of a scheme on one tensor goes from (None, y).


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
    """A scheme with its default start and no damping, stored by autograd or recomputed in segments by ``torch.utils.checkpoint``.

    `pair` returns the final pair of a splitting scheme instead of joining it; `num_segments` gives the checkpointed segments for
    a number of blocks, None stores everything.
    """

    def __init__(
        self, sequence: ReversibleSequence, pair: bool, num_segments: Callable[[int], int] | None = None
    ) -> None:
        super().__init__()
        scheme = sequence.scheme
        if scheme.damping or (scheme.starts and scheme.start != scheme.starts[0]):
            raise ValueError(f"the plain baseline knows default starts without damping, got {scheme!r}")
        self.fields = nn.ModuleList(sequence.fields)
        self.scheme, self.split_dim, self.pair = scheme, sequence.split_dim or 1, pair
        self.num_segments = num_segments

    def forward(self, x: Tensor | State) -> Tensor | State:
        state: Any = x
        if isinstance(x, Tensor):
            state = x.chunk(2, dim=self.split_dim) if self.scheme.splits else (None, x)
        width, fields = self.scheme.fields_per_step, list(self.fields)
        blocks = [fields[i : i + width] for i in range(0, len(fields), width)]
        if self.num_segments is None:
            state = self._run(blocks, *state)
        else:
            count = self.num_segments(len(blocks))
            for a, b in itertools.pairwise(round(i * len(blocks) / count) for i in range(count + 1)):
                # No branch of these draws random numbers: keeping the generator's state would only slow the baseline down.
                state = checkpoint(self._run, blocks[a:b], *state, use_reentrant=False, preserve_rng_state=False)
        if self.scheme.splits and not self.pair:
            return torch.cat(state, dim=self.split_dim)
        return state if self.pair else state[1]

    def _run(self, blocks: Sequence[Sequence[nn.Module]], p: Tensor | None, q: Tensor) -> State:
        state: Any = (p, q)
        for branches in blocks:
            state = STEPS[type(self.scheme)](self.scheme, branches, *state)
        return state


BASELINES: dict[str, Wrap] = {
    "store": PlainSequence,
    "checkpoint": partial(PlainSequence, num_segments=lambda num_blocks: num_blocks),
    "checkpoint-sqrt": partial(PlainSequence, num_segments=lambda num_blocks: max(1, round(math.sqrt(num_blocks)))),
}
"""Name -> module in the place of a sequence."""


def replace_sequences(module: nn.Module, wrap: Wrap) -> nn.Module:
    """Put modules made by `wrap` in the place of a network's sequences, or of a sequence itself."""
    if isinstance(module, ReversibleSequence):
        return wrap(module, False)
    assert isinstance(module, StagedClassifier)
    for stage in module.stages:
        if isinstance(stage.body, ReversibleSequence):
            stage.body = wrap(stage.body, bool(stage.passes_pair))
    return module
