"""The documentation is true where a test can tell: examples run as printed, links lead somewhere, numbers have a command."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from revode.networks import families, zoo

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def python_blocks(page: str) -> list[str]:
    """The ```python blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def wanted(page: str, what: str) -> str | None:
    """What a page says of its examples in a comment: ``<!-- needs: lightning -->``."""
    found = re.search(rf"<!-- {what}: (.*?) -->", (ROOT / page).read_text())
    return found[1] if found else None


def runs_here(page: str) -> object:
    """A page whose examples take long, or more than one process, runs with the slow tests."""
    slow = wanted(page, "slow") or wanted(page, "run with")
    return pytest.param(page, marks=pytest.mark.slow) if slow else page


@pytest.mark.parametrize("page", [runs_here(page) for page in PAGES if python_blocks(page)])
def test_the_examples_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if package := wanted(page, "needs"):
        pytest.importorskip(package, reason=f"{package} is not installed")
        warnings.simplefilter("default")  # of that package; pytest sets the filters back
    monkeypatch.chdir(tmp_path)
    if launcher := wanted(page, "run with"):
        return run_scripts(page, launcher, tmp_path)
    monkeypatch.setattr(zoo, "_RECIPES", dict(zoo._RECIPES))  # a network that a page registers is gone after it
    known = dict(families.FAMILIES)
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        for number, block in enumerate(python_blocks(page)):
            torch.manual_seed(number)
            exec(compile(block, f"{page}, block {number}", "exec"), namespace)
    finally:
        families.FAMILIES.clear()
        families.FAMILIES.update(known)


@pytest.mark.parametrize("number", range(len(python_blocks("README.md"))))
def test_a_block_of_the_readme_runs_alone(number: int) -> None:
    torch.manual_seed(0)
    exec(compile(python_blocks("README.md")[number], f"README.md, block {number}", "exec"), {"__name__": "__main__"})


def test_the_readme_begins_with_code_that_runs() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    install = next(number for number, line in enumerate(lines) if line.startswith("pip install"))
    ends = [number for number, line in enumerate(lines) if line == "```" and number > install + 1]
    assert ends[0] - install <= 15


OTHERS = "architectures benchmarks unet monai nnunet"
"""Pages that are generated."""


@pytest.mark.parametrize("page", [page for page in PAGES if Path(page).stem.split("-")[0] not in OTHERS.split()])
def test_a_page_is_short_and_wrapped(page: str) -> None:
    text = re.sub(r"^<!-- \w+: .*?<!-- end -->$", "", without_code(page), flags=re.MULTILINE | re.DOTALL)
    assert len((ROOT / page).read_text().splitlines()) <= 250
    prose = [line for line in text.splitlines() if not line.startswith(("|", "![", "    "))]
    assert [line for line in prose if len(line) > 120] == []


def run_scripts(page: str, launcher: str, folder: Path) -> None:
    """Each block is a script of its own, started as the page says."""
    for number, block in enumerate(python_blocks(page)):
        script = folder / f"block{number}.py"
        script.write_text(block)
        words = [sys.executable, "-m", *launcher.replace("torchrun", "torch.distributed.run").split(), str(script)]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stderr


LINKED = [
    *PAGES,
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("results/*/*.md")),
]


def without_code(page: str) -> str:
    """A page without its blocks of code, in which a bracket is no link and a number no measurement."""
    return re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(str(page.relative_to(ROOT))), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"`[^`\n]*\]\([^`\n]*`", "", without_code(page))  # blocks[i](x) is no link
    targets = re.findall(r"\]\(([^()\s]+)\)", text) + re.findall(r'\b(?:src|srcset|href)="([^"]+)"', text)
    for target in targets:
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        place = (ROOT / page).parent / path if path else ROOT / page
        assert place.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(place.resolve()), f"{page} links to {target}"


MEASURED = re.compile(r"\d (%|ms|s|min|h|MB|GB|kB|images/s)(?!\w)|\d\.\d+e[-+]\d")
COMMAND = re.compile(
    r"`[^`]*\b(revode (train|eval|analyze|reproduce|models|data)|make [a-z]|python\S* \S+\.py|pytest \S|test_\w+\.py)"
    r"|^ *(revode|make|pytest|\.venv/bin/python|python) \S",
    flags=re.MULTILINE,
)


@pytest.mark.parametrize("page", PAGES)
def test_a_section_with_measurements_names_a_command(page: str) -> None:
    """Which command gave which number no test can tell; that a section with percents, bytes or times has one, it can."""
    text = re.sub(r"^```python.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    if "Regenerate this page with `" in text:
        return
    for section in re.split(r"^(?=#)", text, flags=re.MULTILINE):
        if number := MEASURED.search(section):
            assert COMMAND.search(section), f"{section.splitlines()[0]!r} of {page} has {number[0]!r} and no command"


def commands(page: str) -> list[str]:
    """The commands of a page, in blocks of code and in its sentences."""
    programs = r"(?:revode|make|pytest|torchrun|\S*python) "
    text = re.sub(r"^```python.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    blocks = "".join(re.findall(r"^(?:```\w*\n.*?^```$|(?:    .*\n)+)", text, flags=re.MULTILINE | re.DOTALL))
    printed = re.findall(rf"^ *({programs}.*)$", blocks.replace("\\\n", " "), flags=re.MULTILINE)
    spoken = re.findall(rf"`({programs}[^`]+)`", re.sub(r"\s+", " ", without_code(page)))
    return [re.sub(r"\s+#.*", "", command) for command in printed + spoken]


@pytest.mark.parametrize("page", [page for page in [*PAGES, "CONTRIBUTING.md"] if commands(page)])
def test_the_commands_of_a_page_are_understood(page: str) -> None:
    """Flags and names exist, scripts and targets are there; what a command does, other tests show."""
    from revode_lab import cli

    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for command in commands(page):
        program, *words = shlex.split(re.sub(r"\bN\b", "1", command))
        if program == "make":
            assert words[0] in targets, command
        elif program == "revode" and not re.search(r"[\[|]", command):  # brackets: a synopsis
            with contextlib.suppress(SystemExit) if "--help" in words else contextlib.nullcontext():
                cli.parse(words)
        for script in re.findall(r"\S+\.py\b", command):
            assert (ROOT / script).exists() or script == "train.py", command


def test_the_reference_has_every_public_name() -> None:
    import revode

    text = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    missing = [name for name in revode.__all__ if not re.search(rf"^\.\. auto\w+:: revode\.{name}$", text, flags=re.M)]
    assert missing == ["__version__"]


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "docs" / "site" / "contents.md").read_text().splitlines()
    missing = [page for page in PAGES[1:] if page.removesuffix(".md") not in contents]
    assert missing == ["docs/site/contents.md"]


def test_a_new_scheme_takes_less_than_thirty_lines() -> None:
    first = python_blocks("docs/adding-a-scheme.md")[0]
    assert "Scheme)" in first
    assert len(first.splitlines()) < 30


def test_the_new_scheme_of_the_docs_trains_like_store() -> None:
    """What the page builds is held to the promises that the schemes of the library keep."""
    from revode import ReversibleSequence
    from revode.schemes import SCHEMES, Scheme

    namespace: dict[str, object] = {}
    known = dict(SCHEMES)
    try:
        exec(python_blocks("docs/adding-a-scheme.md")[0], namespace)
    finally:
        SCHEMES.clear()
        SCHEMES.update(known)
    kinds = [
        v
        for v in namespace.values()
        if isinstance(v, type) and issubclass(v, Scheme) and v.__module__ != "revode.schemes"
    ]
    kinds = [kind for kind in kinds if kind is not Scheme and kind not in SCHEMES.values()]
    assert kinds
    for kind in kinds:
        scheme = kind()
        fields = [torch.nn.Linear(2 if scheme.splits else 4, 2 if scheme.splits else 4).double() for _ in range(8)]
        x = torch.randn(3, 4, dtype=torch.float64)
        grads = []
        for backprop in ("reversible", "store"):
            leaf = x.clone().requires_grad_()
            sequence = ReversibleSequence(fields, scheme, backprop=backprop)
            sequence.zero_grad()
            y, state = sequence(leaf, return_state=True)
            y.square().sum().backward()
            grads.append([leaf.grad, *(p.grad.clone() for p in sequence.parameters())])
            torch.testing.assert_close(sequence.inverse(state), x)
        for ours, stored in zip(*grads, strict=True):
            torch.testing.assert_close(ours, stored, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "path",
    sorted([*ROOT.glob("examples/**/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/**/*_script.py")]),
    ids=lambda p: p.name,
)
def test_what_a_script_imports_is_there(path: Path) -> None:
    """Nobody runs all examples and scripts every day, so that a moved module would be noticed late."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module.partition(".")[0] in ("monai", "nnunetv2"):
                pytest.importorskip(node.module, reason=f"{node.module} is absent (pip install --no-deps)")
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.slow
def test_the_picture_of_the_gallery_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = ROOT / "examples" / "plane.py"
    module: dict[str, object] = {"__name__": "plane"}
    exec(compile(path.read_text(), str(path), "exec"), module)
    module["STEPS"] = 2  # in place of 300
    monkeypatch.setattr(sys, "argv", ["plane.py", "--figure", str(tmp_path / "plane.png")])
    module["main"]()  # type: ignore[operator]
    assert (tmp_path / "plane.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert printed.count("| Hamiltonian |") == printed.count("% | 0 |") == 2  # the input comes back, bit for bit
