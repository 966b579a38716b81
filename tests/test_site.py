"""The site builds without a warning, and a browser shows it offline: no complaint, no request, and a search that finds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import Visit

ROOT = Path(__file__).parents[1]
SHOWN = [
    "README.html",
    "docs/results.html",
    "docs/benchmarks.html",
    "docs/gallery.html",
    "docs/howto/out-of-memory.html",
    "docs/reference/engine.html",
    "results/memory-cpu/memory.html",
]
PROBE = """<script>onload = () => {
    const hidden = [...document.querySelectorAll("html, .main, .content, article")].map(e => e.scrollWidth - e.clientWidth)
    parent.postMessage(Math.max(...hidden), "*")
}</script>"""
FRAME = """<body style="margin: 0"><script>onmessage = event => (document.body.dataset.hidden = event.data)</script>
<iframe src="{name}" style="border: 0; width: {width}px; height: 2000px"></iframe>"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="sphinx is not installed: pip install 'revode[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "-d", str(folder / "trees")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*words, ".", str(folder / "html")], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_pages_refer_to_nothing_outside(site: Path) -> None:
    """But for links that a reader follows: nothing that a browser would fetch by itself."""
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|img|link|source|iframe)\b[^>]*?\b(?:src|href|srcset)=\"([^\"]+)\"", page.read_text()
        )
        assert [address for address in fetched if re.match(r"(https?:)?//", address)] == [], page


def test_the_root_leads_to_the_first_page(site: Path) -> None:
    assert "url=README.html" in (site / "index.html").read_text()
    assert (site / "README.html").exists()


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("page", SHOWN)
def test_a_browser_shows_a_page_without_errors_or_requests(page: str, dark: bool, site: Path) -> None:
    width = 390 if dark else 1280
    probe, frame = ((site / page).with_suffix(f".{name}.html") for name in ("probe", "frame"))
    probe.write_text((site / page).read_text() + PROBE)
    frame.write_text(FRAME.format(name=probe.name, width=width))  # a window cannot be as narrow as a phone
    visit = Visit(frame, f"{max(width, 500)},2000", dark=dark, seconds=2)
    assert visit.console == []
    assert visit.requests == []
    hidden = re.findall(r'data-hidden="(\d+)"', visit.document)
    assert [int(pixels) <= 8 for pixels in hidden] == [True], (
        "the page is wider than its window"
    )  # headings stand out by 8


@pytest.mark.browser
def test_the_search_finds_a_name_and_a_page(site: Path) -> None:
    visit = Visit(site / "search.html", query="?q=leapfrog", seconds=5)
    assert visit.console == []
    assert visit.requests == []
    assert 'href="docs/reference/engine.html#revode.Leapfrog"' in visit.document
    assert 'href="docs/map.html"' in visit.document
