"""Splitting schemes written out in ordinary PyTorch, to compare the library with.

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
from revode.schemes import AdditiveCoupling, State, Verlet

Wrap = Callable[[ReversibleSequence, bool], nn.Module]
"""(sequence, return the final pair or not) -> module that runs its branches."""


class PlainSequence(nn.Module):
    """Additive or Verlet steps, stored by autograd or recomputed in segments by ``torch.utils.checkpoint``.

    `pair` returns the final pair instead of joining it; `num_segments` gives the checkpointed segments for a number of blocks,
    None stores everything.
    """

    def __init__(
        self, sequence: ReversibleSequence, pair: bool, num_segments: Callable[[int], int] | None = None
    ) -> None:
        super().__init__()
        scheme = sequence.scheme
        if (
            not isinstance(scheme, AdditiveCoupling | Verlet)
            or scheme.damping
            or scheme.start != (*scheme.starts, None)[0]
        ):
            raise ValueError(f"the plain baseline knows default starts of splitting schemes, undamped, got {scheme!r}")
        self.fields = nn.ModuleList(sequence.fields)
        self.h, self.sign = (scheme.h, -1.0) if isinstance(scheme, Verlet) else (1.0, 1.0)
        self.split_dim, self.pair, self.num_segments = sequence.split_dim or 1, pair, num_segments

    def forward(self, x: Tensor | State) -> Tensor | State:
        state: Any = x.chunk(2, dim=self.split_dim) if isinstance(x, Tensor) else x
        blocks = list(zip(self.fields[::2], self.fields[1::2], strict=True))
        if self.num_segments is None:
            state = self._run(blocks, *state)
        else:
            count = self.num_segments(len(blocks))
            for a, b in itertools.pairwise(round(i * len(blocks) / count) for i in range(count + 1)):
                # No branch of these draws random numbers: keeping the generator's state would only slow the baseline down.
                state = checkpoint(self._run, blocks[a:b], *state, use_reentrant=False, preserve_rng_state=False)
        return state if self.pair else torch.cat(state, dim=self.split_dim)

    def _run(self, blocks: Sequence[tuple[nn.Module, nn.Module]], y: Tensor, z: Tensor) -> State:
        for f, g in blocks:
            y = torch.add(y, f(z), alpha=self.h)
            z = torch.add(z, g(y), alpha=self.sign * self.h)
        return y, z


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
