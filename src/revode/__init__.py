"""revode: residual networks of any depth in the activation memory of one block.

Names are loaded on first use, so that ``import revode`` and ``revode --help`` do not pay for what they do not touch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from revode.conversion import convert as convert
    from revode.conversion import revert as revert
    from revode.engine import BranchError as BranchError
    from revode.engine import DriftWarning as DriftWarning
    from revode.engine import OutOfRange as OutOfRange
    from revode.engine import ReversalError as ReversalError
    from revode.engine import ReversibleSequence as ReversibleSequence
    from revode.engine import Strategy as Strategy
    from revode.engine import Walk as Walk
    from revode.engine import check as check
    from revode.engine import check_branch as check_branch
    from revode.engine import keep as keep
    from revode.fields import AntisymmetricField as AntisymmetricField
    from revode.fields import OneLayerField as OneLayerField
    from revode.fields import SymmetricField as SymmetricField
    from revode.networks.files import load as load
    from revode.networks.files import save as save
    from revode.networks.refinement import coarsen as coarsen
    from revode.networks.refinement import refine as refine
    from revode.networks.zoo import create_model as create_model
    from revode.networks.zoo import list_models as list_models
    from revode.networks.zoo import register_model as register_model
    from revode.ode import odeint as odeint
    from revode.operators import AntisymmetricConv as AntisymmetricConv
    from revode.operators import Conv as Conv
    from revode.operators import Dense as Dense
    from revode.schemes import BDIA as BDIA
    from revode.schemes import AdditiveCoupling as AdditiveCoupling
    from revode.schemes import Leapfrog as Leapfrog
    from revode.schemes import MidPoint as MidPoint
    from revode.schemes import Momentum as Momentum
    from revode.schemes import Verlet as Verlet

_HOMES = {
    "convert": "revode.conversion",
    "revert": "revode.conversion",
    "BranchError": "revode.engine",
    "DriftWarning": "revode.engine",
    "OutOfRange": "revode.engine",
    "ReversalError": "revode.engine",
    "ReversibleSequence": "revode.engine",
    "check": "revode.engine",
    "check_branch": "revode.engine",
    "keep": "revode.engine",
    "Strategy": "revode.engine",
    "Walk": "revode.engine",
    "AntisymmetricField": "revode.fields",
    "OneLayerField": "revode.fields",
    "SymmetricField": "revode.fields",
    "coarsen": "revode.networks.refinement",
    "create_model": "revode.networks.zoo",
    "list_models": "revode.networks.zoo",
    "register_model": "revode.networks.zoo",
    "load": "revode.networks.files",
    "refine": "revode.networks.refinement",
    "save": "revode.networks.files",
    "odeint": "revode.ode",
    "AntisymmetricConv": "revode.operators",
    "Conv": "revode.operators",
    "Dense": "revode.operators",
    "AdditiveCoupling": "revode.schemes",
    "BDIA": "revode.schemes",
    "Leapfrog": "revode.schemes",
    "MidPoint": "revode.schemes",
    "Momentum": "revode.schemes",
    "Verlet": "revode.schemes",
}

_MODULES = ("engine", "errors", "fields", "files", "memory", "networks", "operators", "regularizers", "schemes")
"""Public modules: their names without an underscore are public, too."""

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"revode.{name}")
    raise AttributeError(f"module 'revode' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
