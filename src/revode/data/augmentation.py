"""Augmentation as in the paper: pad with zeros, crop at random, flip at random, standardise.

Chang et al. list "padding four zeros around the image, random cropping, random horizontal flipping and image
standardization". Two points are open there and settled here. The zeros mean the average colour, not black: the TF code
the authors built on subtracts the mean image before it pads; so here images are standardised first, then padded. And
images are standardised by the mean and deviation of each channel over the training split, not per image, so that an
image's contrast stays part of its information and test images need no statistics of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from revode.data.catalogue import DatasetInfo
from revode.data.counter import AUGMENTATION, random_bits, stream_key

_FIELD_BITS = 20
"""Bits of one draw; the remainder modulo 2p + 1 is then uniform to 2.4e-5 even for p = 12."""


def standardise(
    images: Tensor, info: DatasetInfo, *, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """Images as float32 with mean 0 and deviation 1 in every channel over the training split: (x/255 - mean)/std."""
    _check_images(images, info)
    mean = torch.tensor(info.mean, dtype=torch.float64)
    std = torch.tensor(info.std, dtype=torch.float64)
    scale = (1 / (255 * std)).to(torch.float32).view(1, -1, 1, 1).to(images.device)
    shift = (-mean / std).to(torch.float32).view(1, -1, 1, 1).to(images.device)
    return images.to(torch.float32, memory_format=memory_format).mul_(scale).add_(shift)


def augment(
    images: Tensor,
    indices: Tensor,
    info: DatasetInfo,
    *,
    seed: int,
    epoch: int,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """A random crop of each zero-padded, standardised image, mirrored with probability 1/2 where `info` allows it.

    The draw for an image depends on (seed, epoch, index) alone: not on its place in the batch, on the batch's size, on
    the process or the device.

    Args:
        images: uint8 batch, shape (N, C, H, W).
        indices: The images' positions in the training split, shape (N,).
        info: Statistics, border width and whether to flip; a `Dataset` is one.
        seed: Seed of the run.
        epoch: Which epoch, from 0.
        memory_format: Of the result.

    Returns:
        A float32 batch of the shape of `images`.
    """
    if indices.shape != images.shape[:1]:
        raise ValueError(
            f"got {len(images)} images and indices of shape {tuple(indices.shape)}; expected one per image"
        )
    rows, columns, mirrored = draw(indices.to(images.device), info, seed=seed, epoch=epoch)
    padded = F.pad(standardise(images, info), (info.pad,) * 4)
    return _crop(padded, info.image_size, rows, columns, mirrored).contiguous(memory_format=memory_format)


def draw(indices: Tensor, info: DatasetInfo, *, seed: int, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
    """For every index: top row and left column of its crop in the padded image (int64), and whether it is mirrored."""
    bits = random_bits(stream_key(seed, AUGMENTATION, epoch), indices)
    mask = (1 << _FIELD_BITS) - 1
    rows = (bits & mask) % (2 * info.pad + 1)
    columns = ((bits >> _FIELD_BITS) & mask) % (2 * info.pad + 1)
    mirrored = ((bits >> (2 * _FIELD_BITS)) & 1).bool() & info.flip
    return rows, columns, mirrored


def _crop(padded: Tensor, size: int, rows: Tensor, columns: Tensor, mirrored: Tensor) -> Tensor:
    """The size x size window of every image at its row and column, mirrored or not, in one gather."""
    num_images, channels, _, width = padded.shape
    offsets = torch.arange(size, device=padded.device)
    across = torch.where(mirrored[:, None], size - 1 - offsets, offsets) + columns[:, None]
    down = rows[:, None] + offsets
    pixels = (down[:, :, None] * width + across[:, None, :]).view(num_images, 1, size * size)
    windows = padded.flatten(2).gather(2, pixels.expand(-1, channels, -1))
    return windows.view(num_images, channels, size, size)


def _check_images(images: Tensor, info: DatasetInfo) -> None:
    expected = (info.channels, info.image_size, info.image_size)
    if images.dtype != torch.uint8 or images.shape[1:] != expected:
        raise ValueError(
            f"images of {info.name} are uint8 of shape (N, {', '.join(map(str, expected))}), "
            f"not {images.dtype} of shape {tuple(images.shape)}"
        )
