"""From the last features to class scores."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn


class LinearHead(nn.Module):
    """Global average pool and a linear map, uniform ±sqrt(3 / fan_in) at first with bias 0."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, num_classes)
        bound = math.sqrt(3.0 / channels)
        nn.init.uniform_(self.linear.weight, -bound, bound)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(dim=(2, 3)))


class NormHead(LinearHead):
    """Batch norm, ReLU, global average pool, linear."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__(channels, num_classes)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.relu(self.norm(x)))
