"""What the laboratory needs of the system: installed packages, JSON files, folders and locks, memory, units, the machine.

Nothing heavy is imported at the top, so that ``--help`` answers at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from revode.files import write_atomically

_LOCK = ".lock"

_PACKAGES = ("filelock", "jinja2", "matplotlib", "onnx", "onnxscript", "scipy", "yaml")
"""Modules that show whether the extra ``lab`` is installed."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""


def require() -> None:
    """Refuse a command if the packages of the laboratory are not installed; the first thing that it does."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"not installed: {', '.join(missing)}; run: pip install 'revode[lab]' (in a clone: pip install '.[lab]')"
        )


def write_json(path: Path, values: Any) -> None:
    """Write `values` as indented JSON, atomically."""
    write_atomically(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the values in `path`, or None if it does not exist."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run the command again") from error


def read_json_lines(path: Path) -> list[Any]:
    """Return the values in a file with one JSON value a line; a line cut short by a crash is left out, no file has no lines."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def check_folder(path: str | None) -> None:
    """Refuse a folder for results that cannot be one, before the work that would be lost."""
    if path is None:
        return
    nearest = next((place for place in (Path(path), *Path(path).parents) if place.exists()), Path())
    if not nearest.is_dir():
        raise ValueError(f"--out is {path}, but {nearest} is a file; give a directory")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ValueError(
            f"--out is {path}, but {nearest} cannot be written ({error.strerror}); give another"
        ) from error


class Taken(ValueError):
    """Another process writes a folder."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create `folder` and be its only writer until the end. The lock dies with the process, however that ends.

    Raises:
        Taken: Another process writes it.
        ValueError: It cannot be written.
    """
    from filelock import FileLock, Timeout

    path = folder / _LOCK
    lock = FileLock(path, timeout=0, mode=0o666 & ~umask())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        owner = path.read_text(errors="replace").strip()
        raise Taken(
            f"another process{f' ({owner})' if owner else ''} is working in {folder}; wait for it, stop it, "
            "or choose another directory"
        ) from error
    except OSError as error:
        raise ValueError(f"cannot write to {folder} ({error.strerror}); choose another directory") from error
    try:
        with contextlib.suppress(OSError):
            path.write_text(str(os.getpid()))
        yield
    finally:
        lock.release()


def umask() -> int:
    """Return the process's file mode mask; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def use_threads(number: int) -> None:
    """Set the number of CPU threads; 0 leaves torch's choice."""
    import torch

    from revode_lab.training.config import MOST_THREADS

    if not 0 <= number <= MOST_THREADS:
        raise ValueError(f"--threads is {number}; expected 0 to {MOST_THREADS}")
    if number:
        torch.set_num_threads(number)


def keep_freed_memory() -> None:
    """Have the C library keep the memory of freed tensors for the next ones, up to a gigabyte.

    By default glibc gives it back at every step, and the system hands it out again page by page. Other C libraries, and
    tensors above 32 MB, which have pages of their own, stay as they are.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(_TRIM_THRESHOLD, 1 << 30)


def reset_peak() -> int:
    """Give back free memory, restart the peak where the system allows it, and return the peak."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
    return peak()


def peak() -> int:
    """Return the peak resident set in bytes: of this program where the system tells (``VmHWM``).

    ``ru_maxrss``, which stands in elsewhere, begins at the peak of the program that started this one.
    """
    with contextlib.suppress(OSError), open("/proc/self/status") as stream:
        for line in stream:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on every system

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def human_bytes(count: float) -> str:
    """Return a number of bytes with three digits, as B, kB, MB, GB or TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def human_time(seconds: float) -> str:
    """Return a duration as s, min or h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def human_range(seconds: float) -> str:
    """Return an estimate of a duration, which other programs and other networks may miss by a factor of 1.5."""
    return f"{human_time(seconds / 1.5)} to {human_time(1.5 * seconds)}"


def versions() -> dict[str, str]:
    """Return name -> version of the packages that compute."""
    import numpy
    import torch

    import revode

    return {
        "revode": revode.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def machine(device: Any = "cpu") -> dict[str, Any]:
    """Return the hardware that computes on `device`, in words and numbers."""
    import torch

    found = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def processor() -> str:
    """Return the CPU's name, its widest vector instructions and the memory, as far as the system tells."""
    import torch

    name, memory = platform.processor() or platform.machine(), ""
    with contextlib.suppress(OSError, ValueError):
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        memory = f", {pages * size / 1e9:.0f} GB of memory"
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} ({torch.backends.cpu.get_cpu_capability()}){memory}"


def commit() -> str | None:
    """Return the commit of this source tree, with ``-dirty`` if files differ from it; None outside a repository."""
    here = Path(__file__).resolve()
    try:
        # An installed copy may lie in some other project's repository, whose commit would say nothing about it.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or None
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
