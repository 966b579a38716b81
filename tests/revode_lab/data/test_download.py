from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import io
import resource
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from revode_lab.data import DownloadError, load
from revode_lab.data.catalogue import LAYOUTS, Layout
from revode_lab.data.fetch import download, fetch_official, unpack


@dataclasses.dataclass
class Site:
    """A local web site with one file, and the ways in which it may misbehave."""

    body: bytes = b""
    cuts: list[int] = dataclasses.field(default_factory=list)  # bytes after which the next answers break off
    resumes: bool = True
    status: int = 200
    ranges: list[str | None] = dataclasses.field(default_factory=list)  # the Range header of every request
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/archive.tar.gz"


class Handler(http.server.BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        site, asked = self.site, self.headers.get("Range")
        site.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and site.resumes else 0
        status = 206 if start else site.status
        if start >= len(site.body):
            status = 416
        body = site.body[start:] if status < 400 else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: site.cuts.pop(0)] if site.cuts else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    here = Site()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("H", (Handler,), {"site": here})) as server:
        here.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield here
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """Writing a file beyond this size fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def tar_of(members: dict[str, bytes | tarfile.TarInfo]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


BODY = bytes(range(256)) * 40


def quiet(line: str) -> None:
    pass


def test_a_download_appears_complete_and_alone(site: Site, tmp_path: Path) -> None:
    site.body = BODY
    lines: list[str] = []
    download(site.url, tmp_path / "file", md5(BODY), lines.append)
    assert (tmp_path / "file").read_bytes() == BODY
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert site.ranges == [None]
    assert lines == ["file: 10.2 kB of 10.2 kB"]


def test_a_complete_file_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BODY)
    download(site.url, tmp_path / "file", md5(BODY), quiet)
    assert site.ranges == []


@pytest.mark.parametrize("cut", [1, 5000, len(BODY) - 1])
def test_a_broken_connection_resumes_at_once(site: Site, tmp_path: Path, cut: int) -> None:
    site.body, site.cuts = BODY, [cut]
    lines: list[str] = []
    download(site.url, tmp_path / "file", md5(BODY), lines.append)
    assert (tmp_path / "file").read_bytes() == BODY
    assert site.ranges == [None, f"bytes={cut}-"]
    assert any("resuming" in line for line in lines)


def test_a_killed_download_resumes_in_the_next_run(site: Site, tmp_path: Path) -> None:
    site.body = BODY
    (tmp_path / "file.part").write_bytes(BODY[:777])
    download(site.url, tmp_path / "file", md5(BODY), quiet)
    assert (tmp_path / "file").read_bytes() == BODY
    assert site.ranges == ["bytes=777-"]


def test_a_server_that_cannot_resume_is_read_from_the_start(site: Site, tmp_path: Path) -> None:
    site.body, site.resumes = BODY, False
    (tmp_path / "file.part").write_bytes(b"x" * 777)
    download(site.url, tmp_path / "file", md5(BODY), quiet)
    assert (tmp_path / "file").read_bytes() == BODY


def test_a_part_that_is_already_whole_is_accepted(site: Site, tmp_path: Path) -> None:
    site.body = BODY
    (tmp_path / "file.part").write_bytes(BODY)
    download(site.url, tmp_path / "file", md5(BODY), quiet)
    assert (tmp_path / "file").read_bytes() == BODY


def test_a_wrong_checksum_leaves_nothing_behind(site: Site, tmp_path: Path) -> None:
    site.body = BODY[:-1] + b"?"
    with pytest.raises(DownloadError, match=rf"md5 {md5(site.body)} instead of {md5(BODY)}; it was discarded"):
        download(site.url, tmp_path / "file", md5(BODY), quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_part_is_discarded_and_the_next_try_succeeds(site: Site, tmp_path: Path) -> None:
    site.body = BODY
    (tmp_path / "file.part").write_bytes(b"another file")
    with pytest.raises(DownloadError, match="discarded"):
        download(site.url, tmp_path / "file", md5(BODY), quiet)
    download(site.url, tmp_path / "file", md5(BODY), quiet)
    assert (tmp_path / "file").read_bytes() == BODY


def test_no_progress_ends_the_tries_and_keeps_what_is_there(site: Site, tmp_path: Path) -> None:
    site.body, site.cuts = BODY, [500, 0]
    with pytest.raises(DownloadError, match="are kept and the next try resumes"):
        download(site.url, tmp_path / "file", md5(BODY), quiet)
    assert (tmp_path / "file.part").read_bytes() == BODY[:500]


def test_an_endless_stutter_ends(site: Site, tmp_path: Path) -> None:
    site.body, site.cuts = BODY, [1] * 1000
    with pytest.raises(DownloadError, match="broke off 20 times"):
        download(site.url, tmp_path / "file", md5(BODY), quiet)


def test_an_error_of_the_server_is_said_in_words(site: Site, tmp_path: Path) -> None:
    site.body, site.status = BODY, 404
    with pytest.raises(DownloadError, match="HTTP Error 404: Not Found"):
        download(site.url, tmp_path / "file", md5(BODY), quiet)


def test_an_unreachable_server_is_said_in_words(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"cannot download .*refused.*check the network connection"):
        download("http://127.0.0.1:9/file", tmp_path / "file", md5(BODY), quiet)


def test_a_full_disk_keeps_the_part_and_the_next_try_resumes(site: Site, tmp_path: Path) -> None:
    site.body = BODY
    with files_limited_to(4096), pytest.raises(ValueError, match=r"cannot write .*file\.part .*next try resumes.*free"):
        download(site.url, tmp_path / "file", md5(BODY), quiet)
    assert not (tmp_path / "file").exists()
    kept = (tmp_path / "file.part").read_bytes()
    assert kept == BODY[: len(kept)]
    download(site.url, tmp_path / "file", md5(BODY), quiet)
    assert (tmp_path / "file").read_bytes() == BODY


Tiny = Callable[[str], tuple[Layout, dict[str, bytes]]]


def offer(site: Site, layout: Layout, members: dict[str, bytes | tarfile.TarInfo]) -> Layout:
    """Put an archive on the site and return a layout that points there."""
    site.body = tar_of(members)
    return dataclasses.replace(layout, url=site.url, archive_md5=md5(site.body))


def official_members(layout: Layout, contents: dict[str, bytes]) -> dict[str, bytes | tarfile.TarInfo]:
    return {f"{layout.folder}/{name}": data for name, data in contents.items()}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_fetched_files_load(site: Site, tmp_path: Path, tiny: Tiny, name: str) -> None:
    layout, contents = tiny(name)
    members = official_members(layout, contents) | {f"{layout.folder}/readme.html": b"not needed"}
    fetch_official(offer(site, layout, members), tmp_path, quiet)
    assert [path.name for path in tmp_path.iterdir()] == [layout.folder]
    assert {path.name for path in (tmp_path / layout.folder).iterdir()} == set(contents)
    assert load(name, tmp_path).test is not None


def test_a_full_disk_while_unpacking_leaves_no_half_file(site: Site, tmp_path: Path, tiny: Tiny) -> None:
    layout, contents = tiny("cifar10")
    layout = offer(site, layout, official_members(layout, contents))
    archive = tmp_path / "archive.tar.gz"
    archive.write_bytes(site.body)
    with (
        files_limited_to(10_000),
        pytest.raises(ValueError, match=r"data_batch_1.bin .*what was there before is intact"),
    ):
        unpack(archive, layout, tmp_path)
    assert list((tmp_path / layout.folder).iterdir()) == []
    fetch_official(layout, tmp_path, quiet)
    assert site.ranges == []  # the archive was kept and is used
    load("cifar10", tmp_path)


def test_a_wrong_file_in_the_archive_is_not_written(site: Site, tmp_path: Path, tiny: Tiny) -> None:
    layout, contents = tiny("cifar10")
    contents["data_batch_1.bin"] = bytes(len(contents["data_batch_1.bin"]))
    with pytest.raises(ValueError, match=r"fetched data_batch_1.bin has sha1 .*it was not written"):
        fetch_official(offer(site, layout, official_members(layout, contents)), tmp_path, quiet)
    assert list((tmp_path / layout.folder).iterdir()) == []


def test_a_hostile_archive_reaches_nothing(site: Site, tmp_path: Path, tiny: Tiny) -> None:
    layout, contents = tiny("cifar10")
    secret, root = tmp_path / "secret", tmp_path / "root"
    secret.write_bytes(b"untouched")
    link = tarfile.TarInfo(f"{layout.folder}/data_batch_1.bin")
    link.type, link.linkname, link.size = tarfile.SYMTYPE, "test_batch.bin", layout.train[0].size
    members = official_members(layout, contents)
    members[f"{layout.folder}/data_batch_1.bin"] = link
    members["../secret"] = b"overwritten"
    members[str(secret)] = b"overwritten"
    with pytest.raises(DownloadError, match=r"lacks cifar-10-batches-bin/data_batch_1.bin in the official size"):
        fetch_official(offer(site, layout, members), root, quiet)
    assert secret.read_bytes() == b"untouched"
    assert not (root / layout.folder / "data_batch_1.bin").exists()
    assert sorted(tmp_path.iterdir()) == [root, secret]


@pytest.mark.parametrize("body", [b"", b"no archive at all", tar_of({"a": b"b"})[:-20]], ids=["empty", "text", "cut"])
def test_a_damaged_archive_is_said_in_words(site: Site, tmp_path: Path, tiny: Tiny, body: bytes) -> None:
    layout, _ = tiny("cifar10")
    archive = tmp_path / "archive.tar.gz"
    archive.write_bytes(body)
    with pytest.raises(DownloadError, match="delete it and try again"):
        unpack(archive, layout, tmp_path)


def test_a_root_that_cannot_be_made_is_said_in_words(site: Site, tmp_path: Path, tiny: Tiny) -> None:
    layout, contents = tiny("cifar10")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"cannot write .*nothing was fetched; .*--data-root"):
        fetch_official(offer(site, layout, official_members(layout, contents)), tmp_path / "file" / "root", quiet)
