"""A page in headless Chromium: what it made of it, and whether anything was asked of the network."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest


def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on this machine: install Debian's package chromium to run this test")


class Visit:
    """A page seen once: its document, its console, and what the page asked the network for.

    Args:
        page: the file.
        size: of the window, ``"width,height"``.
        query: behind the address, ``"?q=word"``.
        dark: whether the reader prefers dark pages.
        picture: a PNG to write.
        seconds: how long scripts have, in the page's own time.
    """

    def __init__(
        self,
        page: Path,
        size: str = "1200,900",
        *,
        query: str = "",
        dark: bool = False,
        picture: Path | None = None,
        seconds: int = 0,
    ) -> None:
        flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --disable-background-networking --no-first-run"
        with tempfile.TemporaryDirectory() as profile:
            words = [browser(), *flags.split(), f"--user-data-dir={profile}", f"--window-size={size}"]
            words += ["--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"]
            words += [f"--log-net-log={profile}/net.json", "--dump-dom"]
            words += [f"--virtual-time-budget={1000 * seconds}"] * bool(seconds)
            words += ["--blink-settings=preferredColorScheme=0"] * dark + [f"--screenshot={picture}"] * bool(picture)
            done = subprocess.run([*words, f"file://{page}{query}"], capture_output=True, text=True, timeout=240)
            log = Path(profile, "net.json").read_text(errors="replace")
        assert done.returncode == 0, done.stderr
        self.document = done.stdout
        self.console = re.findall(r"CONSOLE.*", done.stderr)
        # The browser's own requests have no origin; those of a page from a file have the origin "null".
        self.requests = re.findall(r'"initiator":"null"', log)
