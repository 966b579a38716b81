"""Settings of torch that decide the numbers of a call: recorded in forward, restored for the recomputation.

They belong to the process or to a thread, and a backward pass may run later, on another thread, under others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._device
from torch import Tensor


class Autocast:
    """The autocast state of a device type at construction, to be entered again later.

    The weight cache is off inside: a cast made without gradient tracking must not be found by code that needs one.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.available = torch.amp.is_autocast_available(device_type)
        self.enabled = self.available and torch.is_autocast_enabled(device_type)
        self.dtype = torch.get_autocast_dtype(device_type) if self.available else torch.float32

    def compute_dtype(self, q: Tensor) -> torch.dtype:
        """Return the dtype of convolutions of q."""
        return self.dtype if self.enabled and q.dtype != torch.float64 else q.dtype

    def differs(self) -> bool:
        """Return True if a recomputation must enter or leave autocast here and now."""
        return self.enabled or (self.available and torch.is_autocast_enabled(self.device_type))

    def restore(self) -> contextlib.AbstractContextManager[Any]:
        if not self.differs():
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)

    def disabled(self) -> contextlib.AbstractContextManager[Any]:
        """Disable autocast inside, under which the backward pass may be called."""
        if not (self.available and torch.is_autocast_enabled(self.device_type)):
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, enabled=False)


Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Functions that read and write one setting."""


def _all_settings() -> dict[str, Setting]:
    """Return by name the settings that choose between kernels of different bits. One that implies others stands before them."""
    c: Any = torch._C
    found: dict[str, Setting] = {
        "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "num_threads": (torch.get_num_threads, torch.set_num_threads),
        "deterministic_algorithms": (
            lambda: (c._get_deterministic_algorithms(), c._get_deterministic_algorithms_warn_only()),
            lambda value: c._set_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
    }
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        found[f"{kind}_sdp"] = getattr(c, f"_get_{kind}_sdp_enabled"), getattr(c, f"_set_sdp_use_{kind}")
    flags = "cudnn_enabled cudnn_benchmark cudnn_deterministic mkldnn_enabled mkldnn_deterministic sdp_priority_order"
    flags += " math_sdp_allow_fp16_bf16_reduction cublas_allow_fp16_accumulation"
    for name in flags.split():
        if hasattr(c, f"_get_{name}"):
            found[name] = getattr(c, f"_get_{name}"), getattr(c, f"_set_{name}")
    for kind in ("fp16", "bf16"):
        name = f"cublas_allow_{kind}_reduced_precision_reduction"
        found[name] = getattr(c, f"_get_{name}"), functools.partial(_apply, getattr(c, f"_set_{name}"))
    for name in ("cudnn_allow_tf32", "cublas_allow_tf32", "float32_matmul_precision"):
        found[name] = functools.partial(_or_none, getattr(c, f"_get_{name}")), getattr(c, f"_set_{name}")
    if hasattr(c, "_get_fp32_precision_getter"):
        precisions = (
            f"{backend} {what}" for backend in ("cuda", "mkldnn") for what in ("all", "matmul", "conv", "rnn")
        )
        for name in ("generic all", *precisions):
            read = functools.partial(c._get_fp32_precision_getter, *name.split())
            found[name] = read, functools.partial(c._set_fp32_precision_setter, *name.split())
    return found


def _apply(write: Callable[..., Any], value: Any) -> None:
    write(*value) if isinstance(value, tuple) else write(value)


def _or_none(read: Callable[[], Any]) -> Any:
    """Return the result of `read`, or None where torch refuses, since a newer setting that implies this one was used."""
    try:
        return read()
    except RuntimeError:
        return None


SETTINGS = _all_settings()
"""Functions that read and write each setting, by its name."""
_READERS = [read for read, _ in SETTINGS.values()]


class Settings:
    """The settings of torch at construction, and the default device, to be entered again later."""

    def __init__(self) -> None:
        self.values = [read() for read in _READERS]
        self.device = _default_device()
        self._same_in = -1
        """The backward pass that was found to run under the same settings."""

    def restore(self) -> contextlib.AbstractContextManager[None]:
        """Restore the settings inside, and those of the caller afterwards."""
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass == self._same_in != -1:
            return _NOTHING
        other_device = self.device != _default_device()
        outside = [read() for read in _READERS]
        if outside != self.values or other_device:
            return self._restored(outside, other_device)
        self._same_in = backward_pass
        return _NOTHING

    @contextlib.contextmanager
    def _restored(self, outside: list[Any], other_device: bool) -> Iterator[None]:
        _write(self.values)
        try:
            with torch.device(self.device or "cpu") if other_device else _NOTHING:
                yield
        finally:
            _write(outside)


_NOTHING = contextlib.nullcontext()


def _default_device() -> torch.device | None:
    """Return the device that ``with torch.device(...)`` or ``torch.set_default_device`` have set on this thread."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = torch.overrides._get_current_function_mode_stack()
    return next((mode.device for mode in modes if isinstance(mode, torch.utils._device.DeviceContext)), None)


def _write(values: list[Any]) -> None:
    for (read, write), value in zip(SETTINGS.values(), values, strict=True):
        if value is not None and read() != value:
            write(value)
