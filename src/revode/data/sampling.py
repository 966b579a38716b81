"""The order in which images are visited: a pure function of (seed, epoch), shared out over processes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from revode.data.counter import ORDER, permutation, stream_key


def num_batches(num_images: int, batch_size: int) -> int:
    """Full batches in one epoch of training."""
    return num_images // batch_size


def batches(
    num_images: int,
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
    start_step: int = 0,
) -> Iterator[Tensor]:
    """One process's share of the shuffled training batches of one epoch.

    All processes cut the same permutation into the same global batches; process `rank` gets the `rank`-th of
    `world_size` equal slices of each, so the slices in order of rank are exactly the one-process batch. The last,
    incomplete batch is dropped; as every epoch is shuffled anew, no image is left out for good.

    Args:
        num_images: Images in the training split.
        batch_size: Size of the *global* batch; divisible by `world_size`.
        seed: Seed of the run.
        epoch: Which epoch, from 0.
        rank: This process.
        world_size: Number of processes.
        start_step: Batches of this epoch to skip, to resume in mid-epoch.

    Returns:
        An iterator over int64 index tensors of length batch_size / world_size, on the CPU.
    """
    _check_ranks(batch_size, rank, world_size)
    if batch_size % world_size:
        raise ValueError(
            f"batch size {batch_size} does not divide evenly over {world_size} processes; use a multiple of them"
        )
    if num_images < batch_size:
        raise ValueError(
            f"batch size {batch_size} exceeds the {num_images} training images, so no full batch exists; "
            f"use a batch size of at most {num_images}"
        )
    total = num_batches(num_images, batch_size)
    if not 0 <= start_step <= total:
        raise ValueError(f"start step is {start_step}; an epoch of this training has steps 0 to {total}")
    order = permutation(num_images, stream_key(seed, ORDER, epoch))
    shares = order[: total * batch_size].view(total, world_size, batch_size // world_size)[start_step:, rank]
    return iter(shares.unbind())


def evaluation_batches(num_images: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Tensor]:
    """One process's share of all images in their order, the last incomplete batch included.

    Each process gets one contiguous run of images, at most one longer than another's; with fewer images than processes
    some get none. `batch_size` is the size of this process's batches.
    """
    _check_ranks(batch_size, rank, world_size)
    first, last = num_images * rank // world_size, num_images * (rank + 1) // world_size
    indices = torch.arange(first, last)
    return iter(indices.split(batch_size) if len(indices) else ())


def _check_ranks(batch_size: int, rank: int, world_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch size is {batch_size}; expected at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank} of {world_size} processes; expected 0 to {world_size - 1}")
