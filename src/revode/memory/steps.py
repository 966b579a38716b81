"""The report on one training step of a model: bytes kept, their peak and time, as it is and in other ways."""

from __future__ import annotations

import contextlib
import functools
import inspect
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from revode.conversion import blocks_of, conversions_in, convert, lists_like_the_longest, revert
from revode.engine import ReversibleSequence
from revode.memory.counters import PeakActivations, SavedTensors, graph_bytes

Way = Callable[[], contextlib.AbstractContextManager[None]]
"""A function to a context in which the model runs in some way."""
STORED, CHECKPOINTED, REVERSIBLE = "stored", "checkpoint of each block", "reversible"
_NOISY = 1.5
"""The factor between steps of one way from which on their times are called noisy."""
_WORTHWHILE = 0.1
"""The share of a step's memory that must be saved for a change to be advised."""


@dataclass(frozen=True)
class Cost:
    """The cost of a training step in one way.

    Args:
        kept: bytes of activations that forward leaves for backward.
        peak: the most bytes of activations alive for backward at any time of the step.
        seconds: of forward and backward together.
    """

    kept: int
    peak: int
    seconds: float


@dataclass(frozen=True)
class MemoryReport:
    """The memory of a training step, without that of the optimizer; ``print`` shows it as a table.

    Args:
        parameters: bytes of all parameters.
        gradients: bytes of the gradients of trained parameters.
        costs: by the way in which activations are kept.
        remarks: measurements that failed, and why.
    """

    parameters: int
    gradients: int
    costs: dict[str, Cost]
    remarks: tuple[str, ...]

    def total(self, way: str) -> int:
        """Return the bytes of parameters, gradients and activations together."""
        return self.parameters + self.gradients + self.costs[way].peak

    @property
    def advice(self) -> str:
        """Return one sentence on whether reversible blocks are worth their time here."""
        if STORED not in self.costs:
            way = next((name for name in self.costs if name.startswith(REVERSIBLE)), None)
            rest = "" if way is None else f"; with reversible blocks it takes {_bytes(self.total(way))}"
            return f"a stored step does not fit into this machine's memory{rest}"
        stored, share = self.total(STORED), self.costs[STORED].peak / max(1, self.total(STORED))
        told = f"activations are {share:.0%} of this step's {_bytes(stored)} without the optimizer"
        way = next((name for name in self.costs if name.startswith(REVERSIBLE)), None)
        if way is None:
            return f"{told}; no reversible blocks to compare with: `revode.convert` the model, if it can be, and report again"
        saved, slower = stored - self.total(way), self.costs[way].seconds / self.costs[STORED].seconds
        if saved < _WORTHWHILE * stored:
            return f"do not use reversible blocks here: {told}, and they save {max(0, saved) / stored:.0%}"
        told = f"{told}: reversible blocks save {saved / stored:.0%} and take {slower:.2f} times as long"
        other = self.costs.get(CHECKPOINTED)
        if other is not None and other.peak - self.costs[way].peak < _WORTHWHILE * stored:
            return f"{told}; a checkpoint of each block saves {(stored - self.total(CHECKPOINTED)) / stored:.0%}"
        return told

    def __str__(self) -> str:
        width = max(map(len, self.costs))
        lines = [
            f"parameters {_bytes(self.parameters)}, gradients {_bytes(self.gradients)}; activations:",
            f"{'':{width}}  {'kept':>9}  {'peak':>9}  {'step':>9}",
        ]
        for way, cost in self.costs.items():
            lines.append(
                f"{way:{width}}  {_bytes(cost.kept):>9}  {_bytes(cost.peak):>9}  {1000 * cost.seconds:>6.3g} ms"
            )
        return "\n".join([*lines, *self.remarks, self.advice])


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def measure(model: nn.Module, batch: Any, loss: Callable[[Any], Any] | None, repeats: int) -> MemoryReport:
    """Return the report on `model`; see `revode.memory.report`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"report takes a module and a batch, got {type(model).__name__}")
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(f"no parameter of {type(model).__name__} requires a gradient, so no step can be measured")
    ways, blocks, remarks = _ways_of(model)
    step = functools.partial(_step, model, batch, loss)
    counts: dict[str, tuple[int, int]] = {}
    with _unchanged(model), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, way in list(ways.items()):
            try:
                with way():
                    step()
                    counts[name] = _count(step, parameters)
            except (RuntimeError, TypeError, ValueError) as error:
                if name == STORED and not _is_out_of_memory(error):
                    raise
                remarks.append(f"{name}: {'does not fit' if _is_out_of_memory(error) else error}")
                del ways[name]
        if not ways:
            raise RuntimeError("no step fits into this machine's memory: give report a smaller batch")
        largest = _largest_graph(blocks, step, parameters) if {STORED, CHECKPOINTED} <= counts.keys() else 0
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(max(1, repeats)):
            for name, way in ways.items():
                with way():
                    step()  # after a change of ways, plans and memory are made anew
                    times[name].append(_seconds(step))
    if blocks and CHECKPOINTED in counts:  # torch's checkpoint hides from our hooks what it computes again
        kept, peak = counts[CHECKPOINTED]
        counts[CHECKPOINTED] = kept, peak + largest
        if STORED not in counts:
            remarks.append(f"{CHECKPOINTED}: its peak lacks the activations of one block")
    remarks += dict.fromkeys(str(warning.message) for warning in caught)
    noise = max(max(found) / min(found) for found in times.values())
    if noise > _NOISY:
        remarks.append(
            f"steps of one way differ by a factor of {noise:.1f} in time: give more repeats on an idle machine"
        )
    costs = {name: Cost(*counts[name], statistics.median(times[name])) for name in ways}
    own = {id(parameter): parameter for parameter in parameters}.values()
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in own]
    return MemoryReport(
        sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained), costs, tuple(remarks)
    )


def _ways_of(model: nn.Module) -> tuple[dict[str, Way], list[nn.Module], list[str]]:
    """Return the ways in which the model can run by name, its blocks if it is plain, and why it cannot run in some way."""
    holders = _holders(model)
    if holders:
        named = {STORED: "store", CHECKPOINTED: "checkpoint", REVERSIBLE: None}
        return {name: functools.partial(_with_backprop, holders, backprop) for name, backprop in named.items()}, [], []
    ways: dict[str, Way] = {STORED: contextlib.nullcontext}
    try:
        paths = lists_like_the_longest(model)
    except ValueError as error:
        return ways, [], [f"only stored: {error}"]
    blocks = [block for path in paths for block in blocks_of(model, path)[0]]
    given = paths if len(paths) > 1 else repr(paths[0])
    ways[CHECKPOINTED] = functools.partial(_checkpointed, blocks)
    ways[f"{REVERSIBLE}, convert(model, {given})"] = functools.partial(_converted, model, paths)
    return ways, blocks, []


def _holders(model: nn.Module) -> list[Any]:
    """Return the modules and conversions that have a strategy."""
    sequences = [module for module in model.modules() if isinstance(module, ReversibleSequence)]
    return [*sequences, *conversions_in(model)]


@contextlib.contextmanager
def _with_backprop(holders: list[Any], backprop: str | None) -> Iterator[None]:
    """Compute gradients in this way inside; None: reversibly, as they are set."""
    before = [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(holder).items()}
        for holder in holders
    ]
    try:
        for holder in holders:
            wanted = backprop or "reversible"
            if holder.strategy.backprop != wanted:
                holder.strategy = holder.strategy.replace(backprop=wanted)
        yield
    finally:
        for holder, then in zip(holders, before, strict=True):
            holder.__dict__.update(then)


@contextlib.contextmanager
def _checkpointed(blocks: list[nn.Module]) -> Iterator[None]:
    own = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        block.__dict__["forward"] = functools.partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            del block.__dict__["forward"]
            if forward is not None:
                block.__dict__["forward"] = forward


@contextlib.contextmanager
def _converted(model: nn.Module, paths: list[str]) -> Iterator[None]:
    convert(model, paths)
    try:
        yield
    finally:
        revert(model)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and RNG states afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, then in buffers:
                    buffer.copy_(then)


def _step(model: nn.Module, batch: Any, loss: Callable[[Any], Any] | None, backward: bool = True) -> None:
    """Run forward, and backward unless told otherwise."""
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch if isinstance(batch, tuple) else (batch,), {})
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{error}: batch is what the model is called with, and labels belong into loss") from None
    with torch.enable_grad():
        value = _loss_of(model(*args, **kwargs), loss)
        if backward:
            value.backward()
    for parameter in model.parameters():
        parameter.grad = None


def _loss_of(output: Any, loss: Callable[[Any], Any] | None) -> Tensor:
    value = getattr(output, "loss", None) if loss is None else loss(output)
    if value is None:
        leaves = pytree.tree_leaves(_plain(output))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        value = sum((tensor.float().square().mean() for tensor in tensors), start=torch.zeros(()))
    if not isinstance(value, Tensor) or not value.requires_grad or value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"a loss must be a tensor of one element with a gradient, got {found}"
            + (" without one" if isinstance(value, Tensor) and not value.requires_grad else "")
            + ": give report the model's loss, as in report(model, batch, lambda output: output.square().mean())"
        )
    return value


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _plain(output: Any) -> Any:
    """Return a dict in place of a class of Hugging Face's, which torch may not know as a nest of tensors."""
    return dict(output) if isinstance(output, dict) else output


def _count(step: Callable[..., None], parameters: list[nn.Parameter]) -> tuple[int, int]:
    with SavedTensors(exclude=parameters) as saved:
        step(backward=False)
    with PeakActivations(exclude=parameters) as peak:
        step()
    return saved.num_bytes, max(saved.num_bytes, peak.num_bytes)


def _largest_graph(blocks: list[nn.Module], step: Callable[..., None], parameters: list[nn.Parameter]) -> int:
    """Return the most bytes that the graph of one block keeps, between its arguments and its value."""
    sizes = [0]

    def look(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(_plain(output)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        sizes.append(sum(graph_bytes(tensor, given, parameters) for tensor in made[:1]))

    hooks = [block.register_forward_hook(look, with_kwargs=True) for block in blocks]
    try:
        if blocks:
            step(backward=False)
    finally:
        for hook in hooks:
            hook.remove()
    return max(sizes)


def _seconds(step: Callable[[], None]) -> float:
    synchronize = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    synchronize()
    begin = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - begin
