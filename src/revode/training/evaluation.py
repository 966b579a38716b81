"""Scoring: loss, accuracy and confusion matrix of a network on a split, over all processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revode.data import DatasetInfo, Split, evaluation_batches, standardise
from revode.training.distributed import Group


@dataclass(frozen=True)
class Score:
    """What a network does on a split.

    Attributes:
        loss: Mean cross-entropy.
        accuracy: Fraction of images whose class scores highest.
        confusion: Counts, true classes down, predicted classes across.
    """

    loss: float
    accuracy: float
    confusion: Tensor


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: Split,
    info: DatasetInfo,
    group: Group,
    *,
    batch_size: int,
    memory_format: torch.memory_format = torch.contiguous_format,
    should_stop: Callable[[], bool] = lambda: False,
) -> Score | None:
    """Score `model` on every image of `split` once; None if `should_stop` said so on the way.

    Every process makes the same number of calls, since a sharded network answers only if all ask, and with the same
    statistics, those of rank 0.
    """
    group.share_buffers(model)
    was_training = model.training
    model.eval()
    dtype = torch.float32 if group.device.type == "mps" else torch.float64  # which MPS does not have
    confusion = torch.zeros(info.num_classes, info.num_classes, dtype=dtype, device=group.device)
    loss = torch.zeros((), dtype=dtype, device=group.device)
    shares = list(evaluation_batches(len(split), batch_size, rank=group.rank, world_size=group.world_size))
    try:
        for index in range(group.largest(len(shares))):
            if group.largest(int(should_stop())):
                return None
            batch = split.take(shares[index] if index < len(shares) else torch.zeros(1, dtype=torch.int64))
            scores = model(standardise(batch.images, info, memory_format=memory_format)).float()
            if index < len(shares):
                loss += F.cross_entropy(scores, batch.labels, reduction="sum")
                cells = batch.labels * info.num_classes + scores.argmax(1)
                confusion += torch.bincount(cells, minlength=info.num_classes**2).view_as(confusion)
    finally:
        model.train(was_training)
        if hasattr(model, "reshard"):
            model.reshard()  # type: ignore[operator]  # without a backward pass, FSDP2 leaves the root whole
    confusion, loss = group.sum(confusion).cpu(), group.sum(loss)
    correct = float(confusion.diagonal().sum())
    return Score(float(loss) / len(split), correct / len(split), confusion.to(torch.int64))
