"""Run under torchrun with two processes: gradients of distributed steps against those of one process, as JSON.

Each case prints the relative error of all gradients in norm, or the error that it raised.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from revode import AdditiveCoupling, Leapfrog, ReversibleSequence, SymmetricField, Verlet

NUM_BLOCKS = 20


def branch(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(1, channels), nn.GELU())


def sequence(kind: str) -> ReversibleSequence:
    if kind == "fields":
        return ReversibleSequence([SymmetricField(4) for _ in range(2 * NUM_BLOCKS)], Verlet(h=0.1))
    if kind == "exact":
        return ReversibleSequence([branch(8) for _ in range(NUM_BLOCKS)], Leapfrog(h=0.1), exact=True)
    if kind == "tied":
        shared = branch(4)
        return ReversibleSequence([shared, branch(4)] * NUM_BLOCKS, AdditiveCoupling(damping=0.05))
    return ReversibleSequence([branch(8) for _ in range(NUM_BLOCKS)], Leapfrog(h=0.1))


def network(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        sequence(kind),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).double()


def batches() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, 5, (8,))


def single_process(model: nn.Module) -> dict[str, Tensor]:
    x, labels = batches()
    nn.functional.cross_entropy(model(x), labels).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def step(model: nn.Module, num_micro: int, without_sync: Callable[[], contextlib.AbstractContextManager]) -> None:
    x, labels = (t.chunk(2)[dist.get_rank()] for t in batches())
    micro = list(zip(x.chunk(num_micro), labels.chunk(num_micro), strict=True))
    for index, (images, targets) in enumerate(micro):
        with without_sync() if index + 1 < num_micro else contextlib.nullcontext():
            (nn.functional.cross_entropy(model(images), targets) / num_micro).backward()


def relative_error(model: nn.Module, reference: dict[str, Tensor]) -> float:
    difference = scale = 0.0
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        expected = reference[name.removeprefix("module.")]
        difference += float((grad - expected).double().square().sum())
        scale += float(expected.double().square().sum())
    return (difference / scale) ** 0.5


def ddp(kind: str, num_micro: int, **options: bool) -> float:
    model = network(kind)
    reference = single_process(copy.deepcopy(model))
    wrapped = DistributedDataParallel(model, **options)
    step(wrapped, num_micro, wrapped.no_sync)
    return relative_error(model, reference)


def fsdp(kind: str, num_micro: int, shard: Callable[[nn.Sequential], None]) -> float:
    model = network(kind)
    reference = single_process(copy.deepcopy(model))
    shard(model)

    @contextlib.contextmanager
    def without_sync() -> Iterator[None]:
        sharded = [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        yield
        for module in sharded:
            module.set_requires_gradient_sync(True, recurse=False)

    step(model, num_micro, without_sync)
    return relative_error(model, reference)


def shard_unit(model: nn.Sequential) -> None:
    fully_shard(model[1])
    fully_shard(model)


def shard_sequence(model: nn.Sequential) -> None:
    fully_shard(model[1])
    for layer in (model[0], model[4]):
        fully_shard(layer)


def shard_whole(model: nn.Sequential) -> None:
    fully_shard(model)


def shard_branches(model: nn.Sequential) -> None:
    for branch in model[1].fields:
        fully_shard(branch)
    fully_shard(model)


def shard_one_branch(model: nn.Sequential) -> None:
    fully_shard(model[1].fields[3])
    fully_shard(model)


def shard_inside_a_branch(model: nn.Sequential) -> None:
    fully_shard(model[1].fields[3][0])
    fully_shard(model)


def _attribute(module: Any, path: str) -> Any:
    """A parameter by its name, sharded or whole."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def memory() -> dict[str, Any]:
    """How many branches have their whole parameters while one of them runs, and when each is reduced."""
    model = network("modules")
    branches = list(model[1].fields)
    shard_branches(model)
    x, labels = (t.chunk(2)[dist.get_rank()] for t in batches())
    return watched_backward(
        branches, [branch[0] for branch in branches], lambda: nn.functional.cross_entropy(model(x), labels)
    )


def watched_backward(
    blocks: list[nn.Module], inside: list[nn.Module], make_loss: Callable[[], Tensor]
) -> dict[str, Any]:
    """Run a step of a model with sharded blocks; note how many of these are whole at a time, and when each is reduced.

    Args:
        blocks: the modules that are sharded.
        inside: a module in each of them, whose calls are noted.
        make_loss: runs the forward pass.
    """
    names = [[name for name, _ in block.named_parameters()] for block in blocks]
    whole: list[int] = []
    order: list[str] = []

    def look(number: int) -> None:
        now = [[_attribute(b, name) for name in some] for b, some in zip(blocks, names, strict=True)]
        whole.append(sum(any(not isinstance(p, DTensor) for p in parameters) for parameters in now))
        order.append(f"run {number}")

    for number, inner in enumerate(inside):
        inner.register_forward_pre_hook(lambda *_, number=number: look(number))
    reduce = param_group.foreach_reduce

    def noted(*args: Any, **kwargs: Any) -> Any:
        order.append("reduce")
        return reduce(*args, **kwargs)

    param_group.foreach_reduce = noted
    try:
        loss = make_loss()
        forward = whole.copy()
        whole.clear()
        order.clear()
        loss.backward()
    finally:
        param_group.foreach_reduce = reduce
    shards = [p for block in blocks for p in block.parameters() if isinstance(p, DTensor)]
    return {
        "forward": max(forward),
        "backward": max(whole),
        "order": order,
        "shards": sum(p.to_local().numel() for p in shards),
        "parameters": sum(p.numel() for p in shards),
    }


def overlap() -> dict[str, Any]:
    """At which branch of the walk back each bucket of DDP is reduced, from the second step on."""
    model = network("modules")
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.004)
    order: list[str] = []

    def hook(state: Any, bucket: Any) -> Any:
        order.append("reduce")
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0] / 2)

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    wrapped.register_comm_hook(None, hook)
    step(wrapped, 1, wrapped.no_sync)
    for number, inner in enumerate(model[1].fields):
        inner[0].register_forward_pre_hook(lambda *_, number=number: order.append(f"run {number}"))
    x, labels = (t.chunk(2)[dist.get_rank()] for t in batches())
    loss = nn.functional.cross_entropy(wrapped(x), labels)
    order.clear()
    loss.backward()
    return {"order": order}


CASES: dict[str, dict[str, Callable[[], Any]]] = {
    "order": {"fsdp": memory, "ddp": overlap},
    "ddp": {
        "modules": lambda: ddp("modules", 1),
        "fields": lambda: ddp("fields", 1),
        "exact": lambda: ddp("exact", 1),
        "tied, anchors": lambda: ddp("tied", 1),
        "two micro-batches": lambda: ddp("modules", 2),
        "two micro-batches, fields": lambda: ddp("fields", 2),
        "static graph": lambda: ddp("modules", 1, static_graph=True),
        "unused parameters sought": lambda: ddp("modules", 1, find_unused_parameters=True),
        "gradients as views of buckets": lambda: ddp("fields", 2, gradient_as_bucket_view=True),
    },
    "fsdp": {
        "a unit inside a model": lambda: fsdp("modules", 1, shard_unit),
        "a unit inside a model, fields": lambda: fsdp("fields", 1, shard_unit),
        "a unit inside a model, exact": lambda: fsdp("exact", 1, shard_unit),
        "the sequence": lambda: fsdp("modules", 1, shard_sequence),
        "the whole model": lambda: fsdp("tied", 1, shard_whole),
        "two micro-batches": lambda: fsdp("modules", 2, shard_unit),
        "two micro-batches, fields": lambda: fsdp("fields", 2, shard_unit),
        "each branch": lambda: fsdp("modules", 1, shard_branches),
        "each branch, fields": lambda: fsdp("fields", 1, shard_branches),
        "each branch, exact": lambda: fsdp("exact", 1, shard_branches),
        "each branch, two micro-batches": lambda: fsdp("modules", 2, shard_branches),
        "a single branch": lambda: fsdp("modules", 1, shard_one_branch),
        "inside a branch": lambda: fsdp("modules", 1, shard_inside_a_branch),
    },
}


def run(cases: dict[str, dict[str, Callable[[], Any]]]) -> None:
    """Run all cases in this process and its peer; the first one prints what they return."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, dict[str, Any]] = {kind: {} for kind in cases}
    for kind, some in cases.items():
        for name, case in some.items():
            try:
                results[kind][name] = case()
            except Exception as error:
                results[kind][name] = f"{type(error).__name__}: {error}"
    if dist.get_rank() == 0:
        print("RESULTS" + json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo that outlive the group can abort an orderly exit


if __name__ == "__main__":
    run(CASES)
