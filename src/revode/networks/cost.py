"""The cost of a network before training, part by part: FLOPs, and bytes kept for backward under each strategy.

A forward pass on two and one on three images is counted under every strategy; bytes are affine in the batch. A tensor that
several parts keep counts for the first of them.

One memory budget for a whole network is shared among its units. Stem, transitions and head keep what they must, each unit at
least its final pair and the graph of one branch. The rest goes to the units whose branches cost most FLOPs for a byte kept,
which are the later ones.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from revode.engine import ReversibleSequence
from revode.memory import SavedTensors
from revode.networks.blocks import join
from revode.networks.config import NetworkConfig


@dataclass(frozen=True)
class PartCost:
    """The cost of one part of a network.

    ``flops`` are those of one image, ``saved`` are bytes of the whole batch by strategy. ``branches`` are the bytes of the
    graphs of the single branches of a reversible unit.
    """

    name: str
    num_blocks: int
    shape: tuple[int, ...]
    num_parameters: int
    flops: int
    saved: dict[str, int]
    branches: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Description:
    """The parts of a network in order (stem, units, transitions, head), and the cost of a training step.

    >>> describe("hamiltonian-14").num_parameters
    30170
    """

    config: NetworkConfig
    image_shape: tuple[int, ...]
    batch_size: int
    parts: tuple[PartCost, ...]

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def num_parameters(self) -> int:
        return sum(part.num_parameters for part in self.parts)

    @property
    def flops(self) -> int:
        """Return the floating-point operations of one forward pass of one image; a multiply-add counts as two."""
        return sum(part.flops for part in self.parts)

    def bytes_kept(self, strategy: str) -> int:
        """Return the bytes of activations kept for backward."""
        return sum(part.saved[strategy] for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.config.name,
            "family": self.config.family,
            "layers": self.config.num_layers,
            "config": self.config.to_dict(),
            "image_shape": list(self.image_shape),
            "batch_size": self.batch_size,
            "params": self.num_parameters,
            "flops_per_image": self.flops,
            "activation_bytes": {strategy: self.bytes_kept(strategy) for strategy in self.config.strategies},
            "stages": [
                {
                    "name": part.name,
                    "blocks": part.num_blocks,
                    "shape": list(part.shape),
                    "params": part.num_parameters,
                    "flops_per_image": part.flops,
                    "activation_bytes": part.saved,
                }
                for part in self.parts
            ],
        }


class _Step(NamedTuple):
    """One part of a pass: its output shape, FLOPs, and bytes saved up to the end of each of its branches and its own."""

    shape: tuple[int, ...]
    flops: int
    saved: list[int]


def measure_parts(model: Any, image_shape: tuple[int, ...], batch: int | Fraction) -> list[PartCost]:
    """Return the cost of stem, units with the transitions between them, and head, in the model's mode, dtype and device."""

    def extrapolated(two: int, three: int) -> int:
        return round(two + (batch - 2) * (three - two))

    paths = _paths(model)
    walks = {
        strategy: [_walk(model, list(paths.values()), strategy, num_images, image_shape) for num_images in (2, 3)]
        for strategy in model.config.strategies
    }
    found, seen = [], set()
    for index, (name, path) in enumerate(paths.items()):
        module = model.get_submodule(path)
        new = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in seen}
        seen.update(new)
        steps = {strategy: [walk[index] for walk in pair] for strategy, pair in walks.items()}
        saved = {strategy: extrapolated(*(sum(step.saved) for step in pair)) for strategy, pair in steps.items()}
        branches = tuple(map(extrapolated, *(step.saved[:-1] for step in steps["store"])))
        small = steps["store"][0]
        part = PartCost(name, _num_blocks(module), small.shape, sum(new.values()), small.flops // 2, saved, branches)
        found.append(part)
    return found


def _paths(model: Any) -> dict[str, str]:
    paths = {"stem": "stem"}
    for index, stage in enumerate(model.stages):
        if stage.body is not None:
            paths[f"unit {index + 1}"] = f"stages.{index}.body"
        if not isinstance(stage.transition, nn.Identity):
            name = f"to unit {index + 2}" if index + 1 < len(model.stages) else "connector"
            paths[name] = f"stages.{index}.transition"
    return paths | {"head": "head"}


def _walk(model: Any, paths: list[str], strategy: str, batch: int, image_shape: tuple[int, ...]) -> list[_Step]:
    """Run one forward pass under a strategy, on zeros, part by part.

    A tensor that is saved twice is counted where it is saved first. Running statistics stay as they are.
    """
    twin, parameter = model.with_strategy(strategy), next(model.parameters())
    x = torch.zeros(batch, *image_shape, dtype=parameter.dtype, device=parameter.device)
    buffers = {name: buffer.clone() for name, buffer in twin.named_buffers()}
    steps: list[_Step] = []
    marks = [0]  # bytes at the end of the part before, and of each branch since
    with ExitStack() as hooks, torch.enable_grad(), SavedTensors(model.parameters()) as saved:
        counter = hooks.enter_context(FlopCounterMode(display=False))

        def end_part(module: nn.Module, _: Any, output: Any) -> None:
            marks.append(saved.num_bytes)
            y = output[0] if isinstance(module, ReversibleSequence) or isinstance(output, list) else output
            shape = tuple(join(y if isinstance(y, Tensor) else y[:2]).shape[1:])
            flops = counter.get_total_flops() - sum(step.flops for step in steps)
            steps.append(_Step(shape, flops, [last - first for first, last in itertools.pairwise(marks)]))
            del marks[:-1]

        for module in map(twin.get_submodule, paths):
            for field in module.fields if isinstance(module, ReversibleSequence) else ():
                hook = field.register_forward_hook(lambda *_: marks.append(saved.num_bytes))
                hooks.callback(hook.remove)
            hooks.callback(module.register_forward_hook(end_part).remove)
        functional_call(twin, buffers, (x,))
    return steps


def _num_blocks(module: nn.Module) -> int:
    if isinstance(module, ReversibleSequence):
        return len(module.fields) // module.scheme.fields_per_step
    return len(module) if isinstance(module, nn.Sequential) else 0


def share(budget: int, parts: list[PartCost], batch: int) -> list[int]:
    """Return the bytes for each reversible unit among `parts`, in order; with everything else they stay within `budget`."""
    units = [part for part in parts if part.branches]
    shares = [unit.saved["reversible"] + max(unit.branches) for unit in units]
    minimum = sum(shares) + sum(part.saved["reversible"] for part in parts if not part.branches)
    if budget < minimum:
        raise ValueError(
            f"memory_budget={budget} is too small for a batch of {batch}: stem, transitions, head and the smallest "
            f"possible units (a pair and one branch each) need {minimum} bytes"
        )
    left = budget - minimum
    for index, unit in sorted(enumerate(units), key=lambda item: -item[1].flops / max(1, sum(item[1].branches))):
        extra = min(left, sum(unit.branches) - max(unit.branches))
        shares[index] += extra
        left -= extra
    return shares


class LiveTensors(TorchDispatchMode):
    """A context that counts the bytes of the tensors made inside it: ``alive`` now, and at the ``peak``.

    Workspace that an operation takes and frees inside itself is no tensor.
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in exclude}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)):
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self.alive)
        return made

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.alive -= num_bytes


def step_bytes(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Run a training step under bfloat16 autocast; return the bytes of tensors alive before backward, and at the peak.

    Parameters, gradients, buffers and `x` are left out. Under ``FakeTensorMode`` nothing is computed, whatever the size:

    >>> import revode
    >>> with torch._subclasses.FakeTensorMode():
    ...     kept, peak = step_bytes(revode.create_model("unet-3d"), torch.zeros(1, 1, 160, 192, 160))
    >>> f"{kept / 1e9:.2f} GB, {peak / 1e9:.2f} GB"
    '1.06 GB, 2.04 GB'
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with LiveTensors([*model.parameters(), *model.buffers(), *grads, x]) as live:
        with torch.autocast(x.device.type, torch.bfloat16):
            scores = model(x)
        kept = live.alive
        torch.stack([each.float().square().mean() for each in pytree.tree_leaves(scores)]).sum().backward()
    return kept, live.peak
