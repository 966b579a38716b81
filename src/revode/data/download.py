"""Download over HTTP with resume and checksum, and unpack an official archive."""

from __future__ import annotations

import hashlib
import http.client
import os
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

from revode.data.layouts import Layout
from revode.data.writing import make_folder, write_errors, write_verified

TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as lost."""

_CHUNK = 1 << 20
_MAX_RESUMES = 20

Report = Callable[[str], None]


class DownloadError(ValueError):
    """The source could not be reached or gave something else than the official file; another source may do."""


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
            report(f"connection lost after {_megabytes(_size(part))} MB; resuming")
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
                report(f"{part.stem}: {_megabytes(received)} of {_megabytes(total)} MB")
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
    kept = f"; {_megabytes(_size(part))} MB are kept and the next try resumes" if _size(part) else ""
    return f"cannot download {url} ({reason}){kept}; check the network connection"


def _md5(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f}"
