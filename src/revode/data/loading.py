"""`load`: from a name to images in memory."""

from __future__ import annotations

import os
from dataclasses import asdict

from revode.data.catalogue import describe
from revode.data.cifar import read_cifar
from revode.data.digits import read_digits
from revode.data.layouts import LAYOUTS, data_root
from revode.data.splits import Dataset
from revode.data.stl import read_stl

_READERS = {"cifar10": read_cifar, "cifar100": read_cifar, "stl10": read_stl}


def load(name: str, root: str | os.PathLike[str] | None = None) -> Dataset:
    """The data set called `name`, read from the data root and verified byte by byte.

    Args:
        name: ``digits``, ``cifar10``, ``cifar100`` or ``stl10``.
        root: Data root; see `data_root` for the default. The digits are embedded and need none.

    Raises:
        ValueError: The name is unknown, or a file is damaged.
        FileNotFoundError: A file is missing. Both errors name the file and the command that gets it.
    """
    info = describe(name)
    if name == "digits":
        train, test = read_digits()
    else:
        train, test = _READERS[name](name, LAYOUTS[name], data_root(root))
    return Dataset(**asdict(info), train=train, test=test)
