"""CIFAR-10 and CIFAR-100 (fine labels).

A record is one image: its labels (CIFAR-10: one byte; CIFAR-100: coarse, then fine), then 3,072 bytes of pixels in the
order (channel, row, column).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from revode.data.layouts import DataFile, Layout
from revode.data.reading import CIFAR_PIXELS, file_reader
from revode.data.splits import Split


def read_cifar(name: str, layout: Layout, root: Path) -> tuple[Split, Split]:
    """The training and test split, every byte verified."""
    read = file_reader(name, layout, root)

    def split(files: tuple[DataFile, ...]) -> Split:
        return _decode([read(file) for file in files], num_labels=len(layout.label_keys))

    return split(layout.train), split(layout.test)


def _decode(parts: list[bytes], num_labels: int) -> Split:
    """Images and classes of the records in `parts`."""
    records = [np.frombuffer(part, np.uint8).reshape(-1, num_labels + CIFAR_PIXELS) for part in parts]
    images = np.concatenate([part[:, num_labels:] for part in records]).reshape(-1, 3, 32, 32)
    classes = np.concatenate([part[:, num_labels - 1] for part in records]).astype(np.int64)
    return Split(images=torch.from_numpy(images), labels=torch.from_numpy(classes))
