"""Data sets as images and labels in memory: loaded by name, divided and sampled."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import resources

import numpy as np
import torch
from torch import Tensor

from revode_lab.data.batches import SELECTION, permutation, stream_key
from revode_lab.data.catalogue import LAYOUTS, DataFile, DatasetInfo, Layout, data_root, describe, own_images
from revode_lab.data.files import CIFAR_PIXELS, file_reader


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Images with their labels, resident as tensors.

    Attributes:
        images: uint8, shape (N, C, H, W).
        labels: int64, shape (N,).
        rows: Where the images lie in `images`, which may hold others and be memory-mapped; None: they are all of them.
    """

    images: Tensor
    labels: Tensor
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise ValueError(
                f"images are {self.images.dtype} of shape {tuple(self.images.shape)}; expected uint8 (N, C, H, W)"
            )
        expected = (self.images if self.rows is None else self.rows).shape[:1]
        if self.labels.dtype != torch.int64 or self.labels.shape != expected:
            raise ValueError(
                f"labels are {self.labels.dtype} of shape {tuple(self.labels.shape)}; "
                f"expected int64 of shape ({expected[0]},), one per image"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Split:
        """Return the images at `indices`, in that order."""
        indices = indices.to(self.labels.device)
        rows = indices if self.rows is None else self.rows[indices]
        return Split(images=self.images[rows], labels=self.labels[indices])

    def part(self, indices: Tensor) -> Split:
        """Return the same as `take`, without reading memory-mapped images."""
        return (
            self.take(indices)
            if self.rows is None
            else self._replaced(self.images, self.labels[indices], self.rows[indices])
        )

    def to(self, device: torch.device | str) -> Split:
        """Return the split on `device`."""
        return self._replaced(self.images.to(device), self.labels.to(device), self.rows)

    def _replaced(self, images: Tensor, labels: Tensor, rows: Tensor | None) -> Split:
        return Split(images=images, labels=labels, rows=None if rows is None else rows.to(images.device))


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset(DatasetInfo):
    """A loaded data set: its facts and its two splits; `test` is None where its files are absent (STL-10 only)."""

    train: Split
    test: Split | None

    def split(self, which: str) -> Split:
        """Return the split called ``"train"`` or ``"test"``; an absent test split is a FileNotFoundError that says so."""
        if which not in ("train", "test"):
            raise ValueError(f"unknown split {which!r}; choose 'train' or 'test'")
        found = self.train if which == "train" else self.test
        if found is None:
            raise FileNotFoundError(
                f"the test split of {self.name} is not in the data root, only its training split; "
                f"get it with `revode data get {self.name}`, or score on images held out of the training split"
            )
        return found

    def to(self, device: torch.device | str) -> Dataset:
        """Return the data set on `device`."""
        return replace(self, train=self.train.to(device), test=None if self.test is None else self.test.to(device))


def load(name: str, root: str | os.PathLike[str] | None = None) -> Dataset:
    """Return the data set called `name`, or images of the user's (`revode_lab.data.own`), verified byte by byte.

    Raises:
        ValueError: The name is unknown, or a file is damaged.
        FileNotFoundError: A file is missing. Both errors name the file and the command that gets it.
    """
    if own_images(name):
        from revode_lab.data import own

        return own.load(name, root)
    info = describe(name)
    if name == "digits":
        train, test = _read_digits(info)
        return Dataset(**asdict(info), train=train, test=test)
    layout, folder = LAYOUTS[name], data_root(root)
    read, decode = file_reader(name, folder), DECODERS[layout.encoding]

    def split(files: tuple[DataFile, ...]) -> Split:
        return decode(layout, [np.frombuffer(read(file), np.uint8) for file in files])

    train = split(layout.train)
    return Dataset(**asdict(info), train=train, test=None if layout.lacks_test(folder) else split(layout.test))


def _decode_cifar(layout: Layout, parts: list[np.ndarray]) -> Split:
    """Decode records of one image each: its labels (CIFAR-100: coarse, then fine), then pixels as (channel, row, column)."""
    num_labels = len(layout.label_keys)
    records = np.concatenate([part.reshape(-1, num_labels + CIFAR_PIXELS) for part in parts])
    images = records[:, num_labels:].reshape(-1, 3, 32, 32)
    return Split(images=torch.from_numpy(images), labels=torch.from_numpy(records[:, num_labels - 1].astype(np.int64)))


def _decode_stl(layout: Layout, parts: list[np.ndarray]) -> Split:
    """Decode images of 3 x 96 x 96 bytes as (channel, column, row); labels of one byte each, counted from 1."""
    pixels, classes = parts
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2))
    return Split(images=torch.from_numpy(images), labels=torch.from_numpy(classes.astype(np.int64) - 1))


DECODERS: dict[str, Callable[[Layout, list[np.ndarray]], Split]] = {"cifar": _decode_cifar, "stl": _decode_stl}
"""``encoding`` of a `Layout` -> function from the bytes of its files to a split."""


def _read_digits(info: DatasetInfo) -> tuple[Split, Split]:
    """Return 1,797 handwritten digits (UCI, CC BY 4.0; see digits.txt), always split alike, a fifth of them for testing.

    The source has no split of its own: scikit-learn's copy, from which these come, is UCI's test part. Counts 0..16 are
    mapped to 0..255.
    """
    with resources.files("revode_lab.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.from_numpy(arrays["images"].astype(np.int64))
        labels = torch.from_numpy(arrays["labels"].astype(np.int64))
    pixels = (images * 255 // 16).to(torch.uint8).unsqueeze(1)
    return hold_out(Split(images=pixels, labels=labels), info.num_test, seed=0)


def hold_out(split: Split, amount: int | float, seed: int) -> tuple[Split, Split]:
    """Divide a split at random into remaining and held-out images, with equal proportions of the classes, each in order.

    `amount` is a number of images (int) or a fraction strictly between 0 and 1 (float).
    """
    if isinstance(amount, float) and not 0 < amount < 1:
        raise ValueError(f"held-out fraction is {amount}; expected a number strictly between 0 and 1, or a whole count")
    count = round(amount * len(split)) if isinstance(amount, float) else amount
    if not 0 < count < len(split):
        raise ValueError(
            f"cannot hold out {count} of {len(split)} images; hold out at least 1 and leave at least 1 for training"
        )
    chosen = _stratified(split.labels, count, seed)
    return split.part((~chosen).nonzero().flatten()), split.part(chosen.nonzero().flatten())


def subset(split: Split, fraction: float, seed: int) -> Split:
    """Return a random fraction of a split in order, with equal proportions of the classes, at least one image of each."""
    if not 0 < fraction <= 1:
        raise ValueError(f"train fraction is {fraction}; expected a number above 0 and at most 1")
    if fraction == 1:
        return split
    chosen = _stratified(split.labels, round(fraction * len(split)), seed)
    sizes = torch.bincount(split.labels)
    kept = torch.bincount(split.labels[chosen], minlength=len(sizes))
    lost = ((sizes > 0) & (kept == 0)).nonzero().flatten().tolist()
    if lost:
        smallest = int(sizes[sizes > 0].min())
        enough = math.ceil(1e4 * math.ceil(len(split) / smallest) / len(split)) / 1e4
        raise ValueError(
            f"train fraction {fraction} of {len(split)} images leaves no image of class {lost[0]} "
            f"and {len(lost)} of {int((sizes > 0).sum())} classes empty; use at least {enough:g}"
        )
    return split.part(chosen.nonzero().flatten())


def _stratified(labels: Tensor, count: int, seed: int) -> Tensor:
    """Return a mask that picks `count` images: from each class its share, at random.

    Shares are rounded by largest remainder, so that they add up to `count`; equal remainders go to the lower class.
    """
    sizes = torch.bincount(labels.cpu())
    # Whole numbers: share = sizes * count / N, without the rounding of floats.
    shares = sizes * count // len(labels)
    remainders = sizes * count % len(labels)
    extra = count - int(shares.sum())
    shares[torch.argsort(remainders, descending=True, stable=True)[:extra]] += 1

    by_chance = permutation(len(labels), stream_key(seed, SELECTION))
    grouped = by_chance[torch.argsort(labels.cpu()[by_chance], stable=True)]
    starts = sizes.cumsum(0) - sizes
    rank_in_class = torch.arange(len(labels)) - starts.repeat_interleave(sizes)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[grouped] = rank_in_class < shares.repeat_interleave(sizes)
    return chosen.to(labels.device)
