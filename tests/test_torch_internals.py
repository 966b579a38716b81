"""docs/torch-internals.md names every private thing of torch that the library uses, and each is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor
import torch._subclasses.fake_tensor
import torch.nn.utils.stateless
import torch.utils._device
import torch.utils._pytree
from torch import nn

from revode.engine.call import SETTINGS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "torch-internals.md").read_text()
NAMES = re.findall(r"`(torch\.[^`]*)`", PAGE.partition("## Names")[2].partition("## Settings")[0])
SOURCES = sorted((ROOT / "src" / "revode").rglob("*.py"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def used() -> dict[str, str]:
    """Return the private names of torch in the library, by the file that uses them."""
    holders: tuple[Any, ...] = (
        torch, torch._C, torch._C._autograd, torch.overrides, torch.utils, torch.ops.aten, torch.autograd.Variable,
        torch.Tensor, nn.Module(), nn.modules.module, nn.modules.batchnorm, nn.modules.dropout, nn.modules.instancenorm,
    )  # fmt: skip
    trees = {path.name: list(ast.walk(ast.parse(path.read_text()))) for path in SOURCES}
    ours = {node.name for tree in trees.values() for node in tree if isinstance(node, ast.FunctionDef)}
    found = {}
    for file, tree in trees.items():
        for node in tree:
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in ours:
                if any(hasattr(holder, node.attr) for holder in holders):
                    found[node.attr] = file
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                for part in [*str(node.module).split("."), *(alias.name for alias in node.names)]:
                    if is_private(part):
                        found[part] = file
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_that_the_library_uses_is_there(name: str) -> None:
    assert eval(name, {"torch": torch}) is not None or name.endswith(("_base", "_hooks", "_compiled_call_impl"))


def test_the_page_has_every_private_name_of_torch_that_the_library_uses() -> None:
    spelled = set(re.findall(r"\w+", PAGE)) | {f"_{kind}_{name}" for kind in ("get", "set") for name in SETTINGS}
    assert {name: file for name, file in used().items() if name not in spelled} == {}
    assert len(used()) > 25


def test_every_setting_of_torch_is_restored_or_named() -> None:
    """A new version of torch that brings a new setting fails here, and not in somebody's gradients."""
    names = {name for name in dir(torch._C) if re.match("_[gs]et_", name)}
    pairs = {name[5:] for name in names if f"_get_{name[5:]}" in names and f"_set_{name[5:]}" in names}
    pairs |= {name[5:] for name in names if name.startswith("_set_sdp_use_")}
    kernels = {f"sdp_use_{name.removesuffix('_sdp')}" for name in SETTINGS if name.endswith("_sdp")}
    assert pairs - set(SETTINGS) - kernels - set(re.findall(r"`(\w+)`", PAGE)) == set()
