"""Tiny data sets in the official layouts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from revode_lab.data.catalogue import INFOS, LAYOUTS, DataFile, Layout

IMAGES_PER_FILE = 20


def contents_of(name: str, file: DataFile) -> bytes:
    """Random contents for a file of the data set, in its official layout, with every class present where it fits."""
    generator = np.random.default_rng(list(file.name.encode()))
    layout = LAYOUTS[name]
    if layout.encoding == "stl":
        if "_y" in file.name:
            return (1 + np.arange(IMAGES_PER_FILE) % 10).astype(np.uint8).tobytes()
        return generator.bytes(IMAGES_PER_FILE * 3 * 96 * 96)
    pixels = generator.integers(0, 256, (IMAGES_PER_FILE, 3072), dtype=np.uint8)
    classes = (np.arange(IMAGES_PER_FILE) % min(10, INFOS[name].num_classes)).astype(np.uint8)[:, None]
    labels = [classes // 5, classes][-len(layout.label_keys) :]
    return np.concatenate([*labels, pixels], axis=1).tobytes()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Layout, dict[str, bytes]]]:
    """Replaces the layout of a data set by a tiny one; returns it with the contents of its files."""

    def shrink(name: str) -> tuple[Layout, dict[str, bytes]]:
        layout = LAYOUTS[name]
        contents = {file.name: contents_of(name, file) for file in layout.files}

        def describe(file: DataFile) -> DataFile:
            data = contents[file.name]
            algorithm = {40: hashlib.sha1, 32: hashlib.md5}[len(file.digest)]
            return DataFile(file.name, len(data), algorithm(data).hexdigest())

        small = dataclasses.replace(
            layout, train=tuple(map(describe, layout.train)), test=tuple(map(describe, layout.test))
        )
        monkeypatch.setitem(LAYOUTS, name, small)
        return small, contents

    return shrink


@pytest.fixture
def laid_out(tmp_path: Path, tiny: Callable[[str], tuple[Layout, dict[str, bytes]]]) -> Callable[[str], Path]:
    """Writes a tiny data set into a data root and returns the root."""

    def write(name: str) -> Path:
        layout, contents = tiny(name)
        folder = tmp_path / layout.folder
        folder.mkdir()
        for file, data in contents.items():
            (folder / file).write_bytes(data)
        return tmp_path

    return write
