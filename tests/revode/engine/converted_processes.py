"""Run under torchrun with two processes: converted models, sharded or replicated, against one process, as JSON.

Each process draws signs of its own, so the reference runs both halves of the batch with the seeds of both. Each case prints the
relative error of all gradients in norm, or the error that it raised.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_processes import relative_error, run, watched_backward

import revode
from revode import BDIA, MidPoint
from revode.schemes import Scheme

NUM_BLOCKS = 8
SCHEMES = {"BDIA": BDIA(), "MidPoint": MidPoint(0.5, blend=0.5)}


class Block(nn.Module):
    """A residual perceptron with dropout, which returns a tuple as blocks of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x))))), None


class Model(nn.Module):
    """Blocks in a loop, with a loss on a state in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x, states = self.enter(x), []
        for block in self.blocks:
            x, _ = block(x)
            states.append(x)
        return self.leave(x).square().mean() + 0.1 * states[3].square().mean()


def model(dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def batch(rank: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(10 + rank)
    x = torch.randn(6, 3, dtype=torch.float64).to(dtype)
    torch.manual_seed(20 + rank)  # of the signs and of dropout
    return x


def reference(scheme: Scheme | None, dtype: torch.dtype, autocast: bool = False, **options: Any) -> dict[str, Tensor]:
    """Return the mean gradient of both halves in one process, by ordinary autograd."""
    single = model(dtype)
    if scheme is not None:
        revode.convert(single, "blocks", scheme, backprop="store", **options)
    found: dict[str, Tensor] = {}
    for rank in range(2):
        single.zero_grad()
        x = batch(rank, dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            single(x).backward()
        for name, p in single.named_parameters():
            assert p.grad is not None
            found[name] = found.get(name, 0) + p.grad.double() / 2
    return found


def shard(module: Model, policy: MixedPrecisionPolicy) -> None:
    for block in module.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(module, mp_policy=policy)


def sharded(
    scheme: Scheme, dtype: torch.dtype, *, first: str, policy: MixedPrecisionPolicy | None = None, **options: Any
) -> Model:
    ours, policy = model(dtype), policy or MixedPrecisionPolicy(reduce_dtype=torch.promote_types(dtype, torch.float32))
    if first == "shard":
        shard(ours, policy)
    revode.convert(ours, "blocks", scheme, **options)
    if first == "convert":
        shard(ours, policy)
    return ours


def fsdp(scheme: Scheme, dtype: torch.dtype, *, first: str, **options: Any) -> float:
    ours = sharded(scheme, dtype, first=first, **options)
    ours(batch(dist.get_rank(), dtype)).backward()
    return relative_error(ours, reference(scheme, dtype, **options))


def mixed_precision(scheme: Scheme, *, first: str) -> dict[str, float]:
    """The error of float32 parameters that are gathered in bfloat16, beside that of the plain model, sharded so."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours, plain = sharded(scheme, torch.float32, first=first, policy=policy, exact=True), model(torch.float32)
    ours(batch(dist.get_rank(), torch.float32)).backward()
    shard(plain, policy)
    plain(batch(dist.get_rank(), torch.float32)).backward()
    return {
        "ours": relative_error(ours, reference(scheme, torch.float32, exact=True)),
        "plain": relative_error(plain, reference(None, torch.float32)),
    }


def ddp(scheme: Scheme, **options: bool) -> float:
    ours = revode.convert(model(torch.float64), "blocks", scheme)
    wrapped = DistributedDataParallel(ours, **options)
    wrapped(batch(dist.get_rank(), torch.float64)).backward()
    return relative_error(ours, reference(scheme, torch.float64))


def two_micro_batches(scheme: Scheme) -> float:
    """Gradients of two equal micro-batches, reduced with the second one, are twice those of one."""
    ours = sharded(scheme, torch.float64, first="convert")
    for last in (False, True):
        for module in (*ours.blocks, ours):
            module.set_requires_gradient_sync(last, recurse=False)  # type: ignore[operator]
        (ours(batch(dist.get_rank(), torch.float64)) / 2).backward()
    return relative_error(ours, reference(scheme, torch.float64))


def order(scheme: Scheme) -> dict[str, Any]:
    """How many blocks have their whole parameters while one of them runs, and when each is reduced."""
    ours = sharded(scheme, torch.float64, first="convert")
    x = batch(dist.get_rank(), torch.float64)
    return watched_backward(list(ours.blocks), [block.norm for block in ours.blocks], lambda: ours(x))


def per_scheme(case: Callable[..., Any], **options: Any) -> dict[str, Callable[[], Any]]:
    return {name: lambda scheme=scheme: case(scheme, **options) for name, scheme in SCHEMES.items()}


CASES: dict[str, dict[str, Callable[[], Any]]] = {
    "order": per_scheme(order),
    "float64, shard first": per_scheme(fsdp, dtype=torch.float64, first="shard"),
    "float64, convert first": per_scheme(fsdp, dtype=torch.float64, first="convert"),
    "float64, accumulated": per_scheme(two_micro_batches),
    "float64, ddp": per_scheme(ddp),
    "float64, ddp, static graph": per_scheme(ddp, static_graph=True),
    "float32": per_scheme(fsdp, dtype=torch.float32, first="shard", exact=True),
    "bfloat16": per_scheme(fsdp, dtype=torch.bfloat16, first="convert", exact=True),
    "mixed precision": per_scheme(mixed_precision, first="convert"),
}


if __name__ == "__main__":
    warnings.simplefilter("error")
    run(CASES)
