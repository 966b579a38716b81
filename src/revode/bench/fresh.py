"""What needs a process of its own: the peak memory of a step, and how often it makes a device wait."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import multiprocessing
import resource
import statistics
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from revode.bench.cases import Case, clock
from revode.bench.methods import METHODS
from revode.bench.workloads import Workload


def in_fresh_process(function: Callable[..., Any], workload: Workload, method: str, *how: Any) -> Any:
    """``function(workload, method, *how)`` in a process that has imported everything and run nothing.

    Raises:
        RuntimeError: It raised there, or the process died.
    """
    context = multiprocessing.get_context("forkserver")
    # What checkpointing and exact mode would import at their first call is imported before the fork, too.
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, workload, method, *how), daemon=True)
    process.start()
    sender.close()
    try:
        found, problem = receiver.recv()
    except EOFError:
        found, problem = None, "the process died"
    finally:
        process.kill()  # it has answered, or nobody waits for it any more
        process.join()
        receiver.close()
    if problem:
        raise RuntimeError(f"measuring {workload.name} by {method} failed: {problem}")
    return found


def _answer(sender: Any, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        sender.send((function(*arguments), None))
    except Exception as error:
        sender.send((None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))


def measure_step(
    workload: Workload, method: str, threads: int, layout: str = "channels_last", num_timed: int = 1
) -> dict[str, Any]:
    """The cost of a step in this process: parameters, bytes kept for backward, seconds, and the growth of its peak.

    A step of one sample comes first: it loads code, fills caches and makes room for gradients. The peak of the real step
    above what is resident then is the footprint; what the allocator keeps of that one sample is missing from it.

    Args:
        workload: what to run.
        method: by which way.
        threads: of torch.
        layout: memory format of the input.
        num_timed: steps to take.
    """
    torch.set_num_threads(threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = Case(workload, METHODS[method], layout=layout)
        # A compiled step is specialised to its shapes, so it must be warmed up on the real batch.
        case.step(case.inputs if case.method.compiled else case.batch_of(1))
        before = _reset_peak()
        times = [clock(case.step) for _ in range(num_timed)]
        peak = max(0, _peak() - before)
        return {
            "params": sum(parameter.numel() for parameter in case.parameters),
            "saved_bytes": case.saved_bytes(),
            "peak_bytes": peak,
            "seconds_per_step": statistics.median(times),
        }


def _reset_peak() -> int:
    """Give back free memory, restart the peak where the system allows it, and return the peak."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
    return _peak()


def _peak() -> int:
    """The peak resident set in bytes."""
    with contextlib.suppress(OSError), open("/proc/self/status") as stream:
        for line in stream:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# Waits of a device, without one: a tensor subclass pretends to live on it and computes on the CPU. Whatever needs a number on
# the host is written down with the line of ours that asked. This uses private names of torch, and registers the device for the
# whole process.

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
        ours = [
            frame for frame in traceback.extract_stack() if "/revode/" in frame.filename and frame.filename != __file__
        ]
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


def count_syncs(workload: Workload, method: str) -> int:
    """How often a step of few samples would make a device wait: the second step, which may read what the first left behind."""
    pretend_device()
    case = Case(workload.with_batch(min(workload.batch, 2)), METHODS[method])
    moved(case.module)
    x = OnDevice(case.inputs.detach()).requires_grad_(case.inputs.requires_grad)
    with warnings.catch_warnings(), Everywhere():
        warnings.simplefilter("ignore")
        for _ in range(2):
            waits.clear()
            case.step(x)
    return waits.total()
