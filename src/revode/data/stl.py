"""STL-10's labelled splits.

``X`` files hold images of 3 x 96 x 96 bytes in column-major order, that is (channel, column, row); ``y`` files hold one
byte per image, classes counted from 1. The test files may be absent; the training split is then read alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from revode.data.layouts import DataFile, Layout
from revode.data.reading import file_reader
from revode.data.splits import Split

_SIZE = 96


def read_stl(name: str, layout: Layout, root: Path) -> tuple[Split, Split | None]:
    """The training split and, if any of its files is there, the test split; every byte verified."""
    read = file_reader(name, layout, root)

    def split(files: tuple[DataFile, ...]) -> Split:
        pixels, classes = map(read, files)
        return _decode(pixels, classes)

    has_test = any((root / layout.folder / file.name).exists() for file in layout.test)
    return split(layout.train), split(layout.test) if has_test else None


def _decode(pixels: bytes, classes: bytes) -> Split:
    columns_first = np.frombuffer(pixels, np.uint8).reshape(-1, 3, _SIZE, _SIZE)
    images = np.ascontiguousarray(columns_first.transpose(0, 1, 3, 2))
    labels = np.frombuffer(classes, np.uint8).astype(np.int64) - 1
    return Split(images=torch.from_numpy(images), labels=torch.from_numpy(labels))
