"""The order of images and their augmentation, as pure functions of (seed, epoch, index).

Randomness is counter-based: a draw depends on its key and its index alone. There is no generator state, so a draw does not
depend on how many were made before, on the order or grouping in which images are visited, on the number of processes, on the
device, or on the version of torch. The mixing function is the output function of SplitMix64 (Steele, Lea, Flood 2014), in
64-bit integers that wrap around.

Augmentation is the paper's: "padding four zeros around the image, random cropping, random horizontal flipping and image
standardization" (Chang et al.). Two points are open there and settled here. The zeros mean the average colour, not black: the
TF code the authors built on subtracts the mean image before it pads; so here images are standardised first, then padded. And
images are standardised by the mean and deviation of each channel over the training split, not per image, so that an image's
contrast stays part of its information and test images need no statistics of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from revode_lab.data.catalogue import DatasetInfo

_FIELD_BITS = 20
"""Bits of one draw; the remainder modulo 2p + 1 is then uniform to 2.4e-5 even for p = 12."""
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_MASK = (1 << 64) - 1

ORDER, AUGMENTATION, SELECTION, FLIPS, CUTOUT = range(5)
"""Purposes of random numbers, so that the draws of one seed are not correlated between them."""


def _mix(x: int) -> int:
    """Return SplitMix64's output function of one unsigned 64-bit number."""
    for shift, factor in _ROUNDS:
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> _LAST_SHIFT)


def stream_key(seed: int, stream: int, *counters: int) -> int:
    """Return an unsigned 64-bit key for a seed, a purpose and further counters such as the epoch."""
    key = 0
    for word in (seed, stream, *counters):
        key = _mix((key + _GAMMA * (1 + (word & _MASK))) & _MASK)
    return key


def _signed(x: int) -> int:
    """Return the int64 with the same bits as the unsigned `x`."""
    return x - (1 << 64) if x >= 1 << 63 else x


def random_bits(key: int, indices: Tensor) -> Tensor:
    """Return 64 random bits for every index, as int64 on the device of `indices`."""
    x = indices.to(torch.int64) * _signed(_GAMMA) + _signed(key)
    for shift, factor in _ROUNDS:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, _LAST_SHIFT)


def _shifted(x: Tensor, shift: int) -> Tensor:
    """Shift right logically; torch's own shift copies the sign bit."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def permutation(num_items: int, key: int) -> Tensor:
    """Return a random permutation of 0 … num_items - 1: the order of their random bits."""
    return torch.argsort(random_bits(key, torch.arange(num_items)), stable=True)


def num_batches(num_images: int, batch_size: int) -> int:
    """Return the number of full batches in one epoch of training."""
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
    """Return one process's share of the shuffled training batches of one epoch.

    All processes cut the same permutation into the same global batches; process `rank` gets the `rank`-th of
    `world_size` equal slices of each, so the slices in order of rank are exactly the one-process batch. The last,
    incomplete batch is dropped; as every epoch is shuffled anew, no image is left out for good.

    Args:
        num_images: Images in the training split.
        batch_size: Size of the *global* batch; divisible by `world_size`.
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
    """Return one process's share of all images in their order, the last incomplete batch included.

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


def standardise(images: Tensor, info: DatasetInfo) -> Tensor:
    """Return images as float32 with mean 0 and deviation 1 in every channel over the training split: (x/255 - mean)/std."""
    _check_images(images, info)
    mean = torch.tensor(info.mean, dtype=torch.float64)
    std = torch.tensor(info.std, dtype=torch.float64)
    scale = (1 / (255 * std)).to(torch.float32).view(1, -1, 1, 1).to(images.device)
    shift = (-mean / std).to(torch.float32).view(1, -1, 1, 1).to(images.device)
    return images.to(torch.float32).mul_(scale).add_(shift)


def resample(images: Tensor, edge: int) -> Tensor:
    """Return images of this size: each pixel is the mean of the pixels that it touches."""
    return images if images.shape[-1] == edge else F.adaptive_avg_pool2d(images, edge)


def augment(
    images: Tensor,
    indices: Tensor,
    info: DatasetInfo,
    *,
    seed: int,
    epoch: int,
    flips: str = "random",
    cutout: int = 0,
) -> Tensor:
    """Return a random crop of each zero-padded, standardised image, mirrored with probability 1/2 where `info` allows it.

    The draw for an image depends on (seed, epoch, index) alone: not on its place in the batch, on the batch's size, on
    the process or the device.

    Args:
        images: uint8 batch, shape (N, C, H, W).
        indices: The images' positions in the training split, shape (N,).
        info: Statistics, border width and permission to flip; a `Dataset` is one.
        flips: ``"random"``, ``"none"``, or ``"alternating"``: in every second epoch, half of the images in the first (Jordan
            2024).
        cutout: Edge of a square at a random place that becomes the average colour (DeVries & Taylor 2017); 0 is none.
    """
    if indices.shape != images.shape[:1]:
        raise ValueError(
            f"got {len(images)} images and indices of shape {tuple(indices.shape)}; expected one per image"
        )
    if flips not in ("random", "alternating", "none"):
        raise ValueError(f"flips is {flips!r}; expected 'random', 'alternating' or 'none'")
    indices = indices.to(images.device)
    rows, columns, mirrored = draw(indices, info, seed=seed, epoch=epoch)
    if flips == "alternating":
        mirrored = alternate(indices, epoch, seed=seed) & info.flip
    mirrored &= flips != "none"
    padded = F.pad(standardise(images, info), (info.pad,) * 4)
    windows = _crop(padded, info.image_size, rows, columns, mirrored)
    if cutout:
        windows.masked_fill_(squares(indices, info.image_size, cutout, seed=seed, epoch=epoch), 0.0)
    return windows


def alternate(indices: Tensor, epoch: int, *, seed: int) -> Tensor:
    """Return a mask of the images that are mirrored in this epoch: in every second one, from the first or the second on."""
    return ((random_bits(stream_key(seed, FLIPS), indices) + epoch) & 1).bool()


def squares(indices: Tensor, size: int, edge: int, *, seed: int, epoch: int) -> Tensor:
    """Return a mask (N, 1, size, size) with a square of this edge for each image, cut off where its centre is near a border."""
    offsets = torch.arange(size, device=indices.device)
    centres = torch.stack(_draws(stream_key(seed, CUTOUT, epoch), indices)[:2]) % size
    distance = offsets - (centres[..., None] - edge // 2)
    rows, columns = (distance >= 0) & (distance < edge)
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def draw(indices: Tensor, info: DatasetInfo, *, seed: int, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for every index the top row and left column of its crop in the padded image, and a mask of mirrored images."""
    rows, columns, coins = _draws(stream_key(seed, AUGMENTATION, epoch), indices)
    return rows % (2 * info.pad + 1), columns % (2 * info.pad + 1), (coins & 1).bool() & info.flip


def _draws(key: int, indices: Tensor) -> list[Tensor]:
    """Return three independent draws of 20 bits for every index."""
    bits, mask = random_bits(key, indices), (1 << _FIELD_BITS) - 1
    return [(bits >> (place * _FIELD_BITS)) & mask for place in range(3)]


def _crop(padded: Tensor, size: int, rows: Tensor, columns: Tensor, mirrored: Tensor) -> Tensor:
    """Return the size x size window of every image at its row and column, mirrored or not, in one gather."""
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
