"""Images of the user, brought to one size: folders of classes, and .npz files.

    folder:PATH[@EDGE[,resize]]    a folder for each class, or such folders in train/ and test/
    npz:FILE[@EDGE[,resize]]       arrays images and labels; or train_images, train_labels, test_images, test_labels;
                                   or x_train, y_train, x_test, y_test

The shorter edge of an image is scaled to EDGE (32 unless given) and the centre is cut out; with ``resize`` the whole image is
squeezed into the square. Without test images a fifth of each class is held out for testing, always the same. What was read lies
below the data root in one array, which is memory-mapped: images need not fit into memory, and are read once. Files that change
are read anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from PIL import Image, ImageOps, UnidentifiedImageError

from revode.files import write_atomically
from revode_lab.data.catalogue import data_root, own_images
from revode_lab.data.sets import Dataset, Split, hold_out
from revode_lab.system import human_bytes, read_json

EDGE, TEST_SHARE = 32, 0.2
_IMAGES, _FACTS = "images.npy", "facts.json"
_SPELLINGS = (
    {"": ("images", "labels")},
    {"train": ("train_images", "train_labels"), "test": ("test_images", "test_labels")},
    {"train": ("x_train", "y_train"), "test": ("x_test", "y_test")},
)
"""Names of the arrays in a .npz file, by split."""
_GREY = ("1", "L", "LA")
_QUIET_SECONDS, _CHUNK = 5.0, 1_000_000


@dataclass(frozen=True)
class _Source:
    """Images to be read: name, class and split of each, and the images in that order, or the error of each."""

    names: Sequence[str]
    labels: Sequence[str]
    splits: Sequence[str]
    channels: int
    images: Iterable[Image.Image | Exception]


def load(name: str, root: str | os.PathLike[str] | None = None) -> Dataset:
    """Return the images called ``folder:PATH`` or ``npz:FILE``, read before or now.

    Raises:
        ValueError: Files that cannot be read, all of them named; nothing is kept then. Or too few classes or images.
    """
    found = own_images(name)
    assert found is not None, name
    kind, path, edge, resize = found
    edge = edge or EDGE
    if not (path.is_dir() if kind == "folder" else path.is_file()):
        raise ValueError(f"there is no {'folder' if kind == 'folder' else 'file'} {path}; check --dataset {name}")
    files = sorted(_files(path)) if kind == "folder" else [path]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    seen = hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    key = hashlib.sha256(json.dumps([kind, str(path), edge, resize]).encode()).hexdigest()[:16]
    folder = data_root(root) / "own" / key
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # other processes of a training wait, and find it read
        facts = read_json(folder / _FACTS)
        if facts is None or facts["seen"] != seen:
            (folder / _FACTS).unlink(missing_ok=True)
            source = _folder(path, files, edge) if kind == "folder" else _npz(path)
            facts = {"seen": seen, "source": name, **_read(source, folder / _IMAGES, edge, resize, path)}
            write_atomically(folder / _FACTS, json.dumps(facts) + "\n")
        whole = _mapped(folder / _IMAGES, facts["labels"])
    train, test = _split(whole, facts["splits"])
    return Dataset(
        name=path.name if kind == "folder" else path.stem, class_names=tuple(facts["classes"]),
        channels=whole.images.shape[1], image_size=edge,
        mean=tuple(facts["mean"]), std=tuple(facts["std"]), pad=max(1, edge // 8), flip=True,
        num_train=len(train), num_test=len(test), train=train, test=test,
    )  # fmt: skip


def _mapped(path: Path, labels: Sequence[int]) -> Split:
    """Return all images, of which memory holds only what is in use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: not writable; nobody writes into a data set
        images = torch.from_numpy(np.load(path, mmap_mode="r"))
    return Split(images=images, labels=torch.tensor(labels), rows=torch.arange(len(labels)))


def _split(whole: Split, splits: Sequence[str]) -> tuple[Split, Split]:
    """Return the images for training and for testing: as they were given, or a fifth of each class held out."""
    if "test" not in splits:
        return hold_out(whole, TEST_SHARE, seed=0)
    is_test = torch.tensor([split == "test" for split in splits])
    return whole.part((~is_test).nonzero().flatten()), whole.part(is_test.nonzero().flatten())


def _read(source: _Source, target: Path, edge: int, resize: bool, path: Path) -> dict[str, Any]:
    """Write all images into one array and return the facts; refuse if any cannot be read."""
    classes = _classes(source, path)
    shape = (len(source.names), source.channels, edge, edge)
    if shutil.disk_usage(target.parent).free < 1.1 * math.prod(shape):
        raise ValueError(
            f"{target.parent} lacks {human_bytes(math.prod(shape))} for the images of {path}; give another data root"
        )
    part = target.with_suffix(".part")
    array = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=shape)
    bad, said = [], time.monotonic()
    for index, (name, found) in enumerate(zip(source.names, source.images, strict=True)):
        if isinstance(found, Exception):
            bad.append(f"{name} ({_reason(found)})")
        else:
            square = found.resize((edge, edge), Image.Resampling.BILINEAR) if resize else _centre(found, edge)
            array[index] = np.asarray(square).reshape(edge, edge, -1).transpose(2, 0, 1)
        if time.monotonic() - said > _QUIET_SECONDS:
            said = time.monotonic()
            print(f"reading images: {index + 1:,} of {len(source.names):,}", file=sys.stderr, flush=True)
    if bad:
        part.unlink()
        raise ValueError(
            f"{len(bad)} of {len(source.names):,} files of {path} cannot be read, so nothing was: {'; '.join(bad)}. "
            "Repair or remove them"
        )
    array.flush()
    labels = [classes.index(label) for label in source.labels]
    train, _ = _split(_mapped(part, labels), source.splits)
    part.replace(target)
    return {"classes": classes, "labels": labels, "splits": list(source.splits)} | _statistics(train)


def _centre(image: Image.Image, edge: int) -> Image.Image:
    """Return the centre of an image whose shorter edge is scaled to `edge`."""
    return ImageOps.fit(image, (edge, edge), Image.Resampling.BILINEAR)


def _reason(error: Exception) -> str:
    return "no image" if isinstance(error, UnidentifiedImageError) else str(error).partition("\n")[0]


def _classes(source: _Source, path: Path) -> list[str]:
    """Return the classes in order; refuse what no classifier can be trained on."""
    train = [label for label, split in zip(source.labels, source.splits, strict=True) if split != "test"]
    classes = sorted(set(train), key=lambda label: (not label.isdigit(), int(label) if label.isdigit() else 0, label))
    if len(classes) < 2:
        raise ValueError(
            f"{path} has {len(classes)} classes with training images; expected a folder or label for each of two"
        )
    if unseen := sorted(set(source.labels) - set(classes)):
        raise ValueError(f"{path} has test images of classes without training images: {', '.join(unseen)}")
    if "test" not in source.splits and (alone := [label for label in classes if train.count(label) < 2]):
        raise ValueError(
            f"{path} has one image of {', '.join(alone)}: none is left to test on; give two, or train/ and test/"
        )
    return classes


def _statistics(train: Split) -> dict[str, Any]:
    """Return mean and deviation of each channel, pixels scaled to [0, 1]."""
    total = square = torch.zeros(train.images.shape[1], dtype=torch.float64)
    for indices in torch.arange(len(train)).split(max(1, _CHUNK // train.images[0].numel())):
        pixels = train.take(indices).images.double() / 255
        total, square = total + pixels.sum((0, 2, 3)), square + pixels.square().sum((0, 2, 3))
    count = len(train) * train.images.shape[2] * train.images.shape[3]
    mean = total / count
    std = (square / count - mean.square()).clamp(min=0).sqrt()
    std = torch.where(std > 1e-4, std, 1.0)  # a channel of one value
    return {"mean": [round(x, 5) for x in mean.tolist()], "std": [round(x, 5) for x in std.tolist()]}


def _files(path: Path) -> Iterator[Path]:
    """Yield the images below a folder: files that are called so, and not hidden."""
    endings = Image.registered_extensions()
    for file in path.rglob("*"):
        hidden = any(piece.startswith(".") for piece in file.relative_to(path).parts)
        if file.suffix.lower() in endings and not hidden and file.is_file():
            yield file


def _folder(path: Path, files: list[Path], edge: int) -> _Source:
    names = [file.relative_to(path) for file in files]
    in_split = [name.parts[0] in ("train", "test") and len(name.parts) > 2 for name in names]
    split_up = any(in_split)
    if loose := [str(n) for n, inside in zip(names, in_split, strict=True) if len(n.parts) < 2 or inside != split_up]:
        raise ValueError(
            f"{path} has images that are in no class: {', '.join(loose[:5])}{', …' if len(loose) > 5 else ''}; "
            f"expected {'train/CLASS/ and test/CLASS/' if split_up else 'CLASS/'} for each"
        )
    modes = set()
    for file in files:
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(Exception), Image.open(file) as image:
            modes.add(image.mode)
    channels = 1 if modes and modes <= set(_GREY) else 3
    return _Source(
        [str(name) for name in names],
        [name.parts[split_up] for name in names],
        [name.parts[0] if split_up else "" for name in names],
        channels,
        (_decode(file, channels, edge) for file in files),
    )


def _decode(file: Path, channels: int, edge: int) -> Image.Image | Exception:
    mode = "L" if channels == 1 else "RGB"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as image:
                if image.mode.startswith(("I", "F")):
                    raise ValueError(f"pixels of mode {image.mode}: convert them to 8 bits")
                image.draft(mode, (edge, edge))  # a JPEG is decoded no larger than needed
                return ImageOps.exif_transpose(image).convert(mode)
    except Exception as error:  # Pillow's decoders raise whatever they stumble on
        return error


def _npz(path: Path) -> _Source:
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no whole .npz file")
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            names = set(arrays.files)
            spelling = next((s for s in _SPELLINGS if all({*pair} <= names for pair in s.values())), None)
            if spelling is None:
                expected = "; or ".join(", ".join(name for pair in s.values() for name in pair) for s in _SPELLINGS)
                raise ValueError(f"it has the arrays {', '.join(sorted(names)) or 'none'}; expected {expected}")
            labels = {split: np.asarray(arrays[pair[1]]) for split, pair in spelling.items()}
        shapes = {}
        for split, pair in spelling.items():
            with zipfile.ZipFile(path) as archive, archive.open(f"{pair[0]}.npy") as stream:
                shapes[split] = _header(stream, pair[0])
        for split, shape in shapes.items():
            if labels[split].size != shape[0] or labels[split].dtype.kind not in "iuU":
                found = f"{labels[split].dtype} of shape {labels[split].shape}"
                raise ValueError(
                    f"{spelling[split][1]} is {found}; expected a whole number or name for each of {shape[0]} images"
                )
        kinds = {_channels(shape) for shape in shapes.values()}
        if len(kinds) != 1:
            raise ValueError(f"its images have {' and '.join(map(str, kinds))} channels; expected the same everywhere")
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"cannot read images from {path}: {error}") from error
    return _Source(
        [f"{spelling[split][0]}[{index}]" for split, shape in shapes.items() for index in range(shape[0])],
        [str(label) for own in labels.values() for label in own.flatten().tolist()],
        [split for split, shape in shapes.items() for _ in range(shape[0])],
        kinds.pop(),
        (image for split in spelling for image in _stream(path, spelling[split][0])),
    )


def _channels(shape: tuple[int, ...]) -> int:
    return 1 if len(shape) == 3 else shape[3] if shape[3] in (1, 3) else shape[1]


def _header(stream: Any, name: str) -> tuple[int, ...]:
    """Read the header of an array of bytes in a .npz file and return its shape."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype != np.uint8 or fortran or len(shape) not in (3, 4) or _channels(shape) not in (1, 3):
        raise ValueError(
            f"{name} is {dtype} of shape {shape}; expected uint8 of shape (N, H, W), (N, H, W, C) or (N, C, H, W), C = 1 or 3"
        )
    return shape


def _stream(path: Path, name: str) -> Iterator[Image.Image]:
    """Yield the images of an array one by one: all of them may be larger than memory."""
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as stream:
        shape = _header(stream, name)
        for _ in range(shape[0]):
            try:
                pixels = np.frombuffer(stream.read(math.prod(shape[1:])), np.uint8).reshape(shape[1:])
            except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                raise ValueError(f"cannot read images from {path}: {error}") from error
            pixels = pixels.transpose(1, 2, 0) if len(shape) == 4 and shape[3] not in (1, 3) else pixels
            yield Image.fromarray(np.ascontiguousarray(pixels.squeeze(2) if pixels.shape[2:] == (1,) else pixels))
