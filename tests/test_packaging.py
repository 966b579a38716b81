"""The wheel and the source archive, as a stranger meets them: a fresh environment, with and without the extras.

Nothing is fetched. torch, numpy and safetensors are lent to the environment, package by package; so are the extras' packages.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TINY = "--max-steps 2 --batch-size 16 --train-fraction 0.1 --validation 0 --threads 1 --options blocks=[1,1],channels=[4,8]"

COMMANDS: list[tuple[str, bool, int]] = [
    ("--version", False, 0),
    ("models", False, 0),
    ("models hamiltonian-digits --json", False, 0),
    ("data get digits", False, 0),
    ("data check digits", False, 0),
    ("train --print-config", True, 0),
    (f"train --out run {TINY}", True, 0),
    ("train --out run", True, 2),
    ("eval run --json", True, 0),
    ("eval hamiltonian-74 --pretrained nothing", True, 2),
    ("report run", True, 0),
    ("export run --onnx", True, 0),
    ("analyze hamiltonian-digits --num-images 1 --options blocks=[1,1],channels=[4,8] --json", True, 0),
    ("analyze run --num-images 1 --out stability", True, 0),
    ("reproduce memory --budget smoke --dry-run", True, 0),
    ("reproduce memory --budget smoke --processes 0", True, 2),
]
"""Words of a command, whether it needs the extra ``lab``, its exit code where that is installed."""

WALK = """
import contextlib, io, json, sys, traceback
import revode_lab.cli
import revode
found = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = revode_lab.cli.main(words.split())
        except SystemExit as error:
            code = error.code
        except BaseException:
            code = traceback.format_exc()
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps([revode.__file__, found]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the source archive, built from a copy of the tree."""
    if not (ROOT / ".git").exists():
        pytest.skip("not in the repository: these tests build the archives from it")
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    build = f"import setuptools.build_meta as b; b.build_wheel({str(out)!r}); b.build_sdist({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return out


def closure(names: Iterable[str]) -> set[str]:
    """The packages and all that they require, without any extras."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another system, or not needed here
            continue
        found.add(name)
        waiting += [re.split(r"[^\w.-]", line)[0] for line in requires if "extra ==" not in line]
    return found


def extra_packages(extra: str) -> set[str]:
    """What pyproject.toml lists for an extra, and what that requires."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    own = [line for line in lines if not line.startswith("revode[")]
    nested = [name for line in lines if line.startswith("revode[") for name in line[7:-1].split(",")]
    return closure(re.split(r"[^\w.-]", line)[0] for line in own).union(*map(extra_packages, nested))


def lend(packages: Iterable[str], folder: Path) -> Path:
    """A folder with links to these packages' files, and to nothing else."""
    folder.mkdir()
    for name in packages:
        distribution = importlib.metadata.distribution(name)
        for top in {Path(str(file)).parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (folder / top).exists():
                (folder / top).symlink_to(source)
    return folder


class Environment:
    """A fresh virtual environment with the wheel in it."""

    def __init__(self, home: Path, wheel: Path) -> None:
        self.home = home
        venv.create(home / "env", symlinks=True)
        self.python = home / "env" / "bin" / "python"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.python),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
        ]
        subprocess.run([*pip, str(wheel)], check=True, timeout=240)
        site = next((home / "env" / "lib").glob("*/site-packages"))
        (site / "lent.pth").write_text(f"{lend(extra_packages(''), home / 'lent')}\n")

    def run(self, words: list[str], cwd: Path, extras: str = "") -> subprocess.CompletedProcess[str]:
        paths = []
        for extra in extras.split():
            paths.append(self.home / extra)
            if not paths[-1].exists():
                lend(extra_packages(extra), paths[-1])
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "REVODE", "VIRTUAL"))
        }
        clean |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
        return subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("fresh"), next(built.glob("*.whl")))


@pytest.mark.parametrize("extra", ["", pytest.param("lab", marks=pytest.mark.slow)])
def test_no_command_ends_in_a_traceback_whatever_is_installed(
    extra: str, environment: Environment, tmp_path: Path
) -> None:
    commands = [words for words, _, _ in COMMANDS]
    done = environment.run([str(environment.python), "-c", WALK, json.dumps(commands)], tmp_path, extra)
    assert done.returncode == 0, done.stderr
    place, found = json.loads(done.stdout.splitlines()[-1])
    assert Path(place).is_relative_to(environment.home), "revode was not imported from the wheel"
    for (words, needs_lab, expected), (code, out, err) in zip(COMMANDS, found, strict=True):
        if extra or not needs_lab:
            assert code == expected, (words, code, out, err)
        else:
            assert code == 2, (words, code, out, err)
            assert re.search(r"not installed: .*; run: pip install 'revode\[lab\]'", err), (words, err)
        assert "Traceback" not in out + err, (words, out, err)


def test_the_console_script_answers_without_any_extra(environment: Environment, tmp_path: Path) -> None:
    done = environment.run([str(environment.home / "env" / "bin" / "revode"), "--version"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("revode ")


def test_the_description_stands_without_the_repository(environment: Environment) -> None:
    metadata = next((environment.home / "env" / "lib").glob("*/site-packages/revode-*.dist-info/METADATA")).read_text()
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert links
    assert all(link.startswith("https://") for link in links), links
    for line in ("Author:", "License-Expression:", "Requires-Python:", "Summary:", "Classifier:", "Project-URL:"):
        assert f"\n{line}" in metadata, line
    block = re.findall(r"```python\n(.*?)```", metadata, flags=re.DOTALL)[0]
    exec(compile(block, "DESCRIPTION.md", "exec"), {})


def test_the_tests_of_the_source_archive_run(built: Path, tmp_path: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = next(tmp_path.iterdir())
    for name in (
        "Makefile",
        "constraints.txt",
        "README.md",
        "docs/engine.md",
        "tests/revode_lab/frozen/behaviour.json",
    ):
        assert (tree / name).is_file(), name
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:xdist",
        "tests/revode/test_schemes.py",
        "tests/revode_lab/test_help.py",
    ]
    words += ["-k", "repr or help"]
    paths = {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tree, env={**os.environ, **paths}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b\d+ passed", done.stdout)
