"""A device without one: a tensor subclass pretends to live on it and computes on the CPU.

Whatever needs a number on the host is written down with the line of ours that asked. This uses private names of torch, and
registers the device for the whole process.
"""

from __future__ import annotations

import collections
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "pretended"
WAITS = {"aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.is_nonzero", "aten.item"}
waits: collections.Counter[str] = collections.Counter()
"""What made the pretended device wait -> how often."""
_AUTOCAST = torch.library.Library("_", "IMPL")


def pretend_device() -> None:
    """Register the device in this process."""
    import torch.utils.backend_registration as registration

    registration._setup_privateuseone_for_python_backend(DEVICE)  # type: ignore[attr-defined]
    module: Any = getattr(torch, DEVICE, None) or types.ModuleType(DEVICE)
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
    if not hasattr(torch, DEVICE):
        torch._register_device_module(DEVICE, module)
    # Autocast is on and off there as elsewhere, but casts nothing: torch has no list of operations for such a device.
    _AUTOCAST.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


class OnDevice(Tensor):
    """A tensor of the pretended device around one of the CPU."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnDevice:
        place = {"storage_offset": raw.storage_offset(), "dtype": raw.dtype, "device": torch.device(f"{DEVICE}:0")}
        made = Tensor._make_wrapper_subclass(cls, raw.size(), strides=raw.stride(), **place)  # type: ignore[attr-defined]
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Everywhere(TorchDispatchMode):
    """Inside, tensors that are made for the pretended device live on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU; its results are on the pretended device if its arguments, or its ``device``, are."""
    kwargs, name = dict(kwargs), str(func).rsplit(".", 1)[0]
    here = stays = any(isinstance(leaf, OnDevice) for leaf in pytree.tree_leaves((args, kwargs)))
    blocks = name in WAITS
    if kwargs.get("device") is not None:
        stays = torch.device(kwargs["device"]).type == DEVICE
        kwargs["device"] = torch.device("cpu")
        blocks |= not stays and not kwargs.get("non_blocking")
    if name == "aten.copy_":
        blocks |= not isinstance(args[0], OnDevice) and not (len(args) > 2 and args[2])
    if here and blocks:
        ours = [frame for frame in traceback.extract_stack() if "/src/revode" in frame.filename]
        line = f"{ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].lineno}" if ours else "elsewhere"
        waits[f"{name}, {line}"] += 1
    wrappers: dict[int, OnDevice] = {}

    def bare(leaf: Any) -> Any:
        if isinstance(leaf, OnDevice):
            wrappers[id(leaf.raw)] = leaf
            return leaf.raw
        return leaf

    def dressed(leaf: Any) -> Any:
        if id(leaf) in wrappers:
            return wrappers[id(leaf)]
        return OnDevice(leaf) if stays and isinstance(leaf, Tensor) else leaf

    results = func(*pytree.tree_map(bare, args), **pytree.tree_map(bare, kwargs))
    return results if name in WAITS else pytree.tree_map(dressed, results)


def moved(module: nn.Module) -> nn.Module:
    """The module with its parameters and buffers on the pretended device."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(OnDevice(parameter.detach()))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = OnDevice(buffer)
    return module
