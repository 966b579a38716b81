"""Print, as JSON, where steps of several sequences would make a device wait.

A tensor subclass pretends to live on a device of its own and computes on the CPU. Whatever needs a number on the host
(reading a scalar, comparing tensors, a copy that blocks) is written down with the line of ours that asked.
It uses private names of torch, and registers a device for the whole process: run it in one of its own.
"""

from __future__ import annotations

import collections
import json
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.backend_registration as registration
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from revode import (
    AdditiveCoupling,
    AntisymmetricField,
    Leapfrog,
    MidPoint,
    Momentum,
    ReversibleSequence,
    SymmetricField,
    Verlet,
    check,
)

NAME = "pretended"
WAITS = {"aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.is_nonzero", "aten.item"}
waits: collections.Counter[str] = collections.Counter()


def register() -> None:
    registration._setup_privateuseone_for_python_backend(NAME)
    module: Any = getattr(torch, NAME, None) or types.ModuleType(NAME)
    answers: dict[str, Callable[..., Any]] = {
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=0: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=0: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }
    for name, answer in answers.items():
        setattr(module, name, answer)
    if not hasattr(torch, NAME):
        torch._register_device_module(NAME, module)


class OnDevice(Tensor):
    """A tensor of the pretended device around one of the CPU."""

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnDevice:
        return Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(f"{NAME}:0"),
        )

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def line_of_ours() -> str:
    ours = [frame for frame in traceback.extract_stack() if "/revode/" in frame.filename]
    return f"{ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].lineno}" if ours else "elsewhere"


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU; its results are on the pretended device if its arguments, or its ``device``, are."""
    kwargs = dict(kwargs)
    name = str(func).rsplit(".", 1)[0]
    here = any(isinstance(leaf, OnDevice) for leaf in pytree.tree_leaves((args, kwargs)))
    stays = here
    if kwargs.get("device") is not None:
        stays = torch.device(kwargs["device"]).type == NAME
        kwargs["device"] = torch.device("cpu")
        if here and not stays and not kwargs.get("non_blocking"):
            waits[f"{name} to the host, {line_of_ours()}"] += 1
    if here and name in WAITS:
        waits[f"{name}, {line_of_ours()}"] += 1
    if here and name == "aten.copy_" and not isinstance(args[0], OnDevice) and not (len(args) > 2 and args[2]):
        waits[f"{name} to the host, {line_of_ours()}"] += 1
    wrappers: dict[int, OnDevice] = {}

    def bare(leaf: Any) -> Any:
        if isinstance(leaf, OnDevice):
            wrappers[id(leaf.raw)] = leaf
            return leaf.raw
        return leaf

    results = func(*pytree.tree_map(bare, args), **pytree.tree_map(bare, kwargs))

    def dressed(leaf: Any) -> Any:
        if id(leaf) in wrappers:
            return wrappers[id(leaf)]
        return OnDevice(leaf) if stays and isinstance(leaf, Tensor) else leaf

    return results if name in WAITS else pytree.tree_map(dressed, results)


class Everywhere(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def moved(module: nn.Module) -> nn.Module:
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                # Small, so that no combination grows its states and is refused: what is counted here are waits.
                part._parameters[name] = nn.Parameter(OnDevice(0.3 * parameter.detach()))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = OnDevice(buffer)
    return module


def convolution(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


def dropping(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Dropout(0.1))


class Masked(nn.Module):
    """A module that nothing is known of, with a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.register_buffer("mask", torch.ones(width, 1, 1))

    def forward(self, q: Tensor) -> Tensor:
        return self.mix(q) * self.mask


BRANCHES: dict[str, Callable[[int], nn.Module]] = {
    "convolution": convolution,
    "dropout": dropping,
    "unknown with a buffer": Masked,
    "symmetric": SymmetricField,
    "symmetric, batch norm": lambda width: SymmetricField(width, norm="batch"),
    "antisymmetric": AntisymmetricField,
}
SCHEMES = {
    "additive": AdditiveCoupling(),
    "verlet": Verlet(h=0.1),
    "midpoint": MidPoint(h=0.1),
    "leapfrog": Leapfrog(h=0.1),
    "momentum": Momentum(0.9),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"backprop": "store"},
    {"backprop": "checkpoint"},
    {"exact": True},
    {"exact": True, "backprop": "store"},
    {"anchor_every": 2},
    {"verify": False},
]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    register()
    with Everywhere():
        OnDevice(torch.ones(2)).sum().item()
    found: dict[str, dict[str, int]] = {"control": dict(waits)}
    for scheme_name, scheme in SCHEMES.items():
        for branch_name, make in BRANCHES.items():
            for options in OPTIONS:
                if options.get("exact") and not scheme.invertible_exactly:
                    continue
                waits.clear()
                fields = [make(4 if scheme.splits else 8) for _ in range(4)]
                sequence = moved(ReversibleSequence(fields, scheme, **options))
                with Everywhere():
                    for _ in range(2):
                        sequence(OnDevice(torch.randn(2, 8, 6, 6))).sum().backward()
                found[f"{scheme_name}, {branch_name}, {options}"] = dict(waits)
                check()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
