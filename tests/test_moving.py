"""docs/howto/moving.md is true: three other libraries compute the same map, and their weights are carried over."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from revode import AdditiveCoupling, ReversibleSequence

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv" / "benchmark-peers"


def library(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the library, which `make bench` installs beside the environment."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(PEERS)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip(f"{name} is not installed: `make bench` installs it")


def theirs(name: str, found: Any, branches: list[nn.Module]) -> nn.Module:
    pairs = list(zip(branches[::2], branches[1::2], strict=True))
    if name == "memcnn":
        return nn.Sequential(*[found.InvertibleModuleWrapper(found.AdditiveCoupling(f, g)) for f, g in pairs])
    if name == "revtorch":
        return found.ReversibleSequence(nn.ModuleList([found.ReversibleBlock(f, g) for f, g in pairs]))
    return found.ReversibleSequential(*branches)


def branches() -> list[nn.Module]:
    return [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()) for _ in range(6)]


def gradients(net: nn.Module, own: list[nn.Module], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = net(x * 1.0)  # memcnn frees what it is given
    result = y.detach().clone()
    y.square().sum().backward()
    assert x.grad is not None
    return [result, x.grad, *(p.grad for module in own for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["memcnn", "revtorch", "revlib"])
@pytest.mark.filterwarnings("ignore")
def test_another_library_computes_the_same_and_its_weights_are_carried_over(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = library(name, monkeypatch)
    own, x = branches(), torch.randn(2, 8, 5, 5)
    old = theirs(name, found, own)
    expected = gradients(old, own, x)
    page: dict[str, Any] = {}
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/howto/moving.md").read_text(), re.DOTALL)
    exec("\n".join(code), page)
    fresh = branches()
    new = ReversibleSequence(fresh, AdditiveCoupling())
    new.load_state_dict(page["renamed"](old.state_dict(), name))
    for ours, other in zip(gradients(new, fresh, x), expected, strict=True):
        torch.testing.assert_close(ours, other)
