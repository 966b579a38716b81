"""What a call of branches is made with, recorded in forward and given again in the recomputation.

These are keyword arguments, and the settings of torch that decide numbers: autocast, kernels, threads. Settings belong to the
process or to a thread, and a backward pass may run later, on another thread, under others. Nothing here imports dynamo, which
takes as long to import as torch itself.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._device
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree


def tensor_leaves(tree: Any) -> list[Tensor]:
    """Return the tensors in a nest of dicts, lists and tuples."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class Template:
    """A nest of dicts, lists and tuples without its tensors, to be filled with others."""

    def __init__(self, tree: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(tree)
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def __len__(self) -> int:
        return len(self._places)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return the nest around these tensors, which come in the order of ``tensor_leaves``."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self._spec)


class Arguments:
    """The keyword arguments of a call, for a branch in forward and again in backward."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.given = bool(kwargs)
        self.tensors: list[Tensor] = []
        """The tensors among the arguments, detached, for the walk to keep."""
        self.trained: list[Tensor] = []
        """The tensors that require a gradient, until the walk has nodes for them."""
        if kwargs:
            self._template, leaves = Template(kwargs), tensor_leaves(kwargs)
            self.trained = [leaf for leaf in leaves if leaf.requires_grad]
            self._at = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
            self.tensors = [leaf.clone() if leaf.is_inference() else leaf.detach() for leaf in leaves]
            self.versions = [version_of(tensor) for tensor in self.tensors]

    def detached(self) -> dict[str, Any]:
        return self._template.fill(self.tensors) if self.given else {}

    def tracked(self, wanted: bool) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the keyword arguments around new leaves, and the leaves to differentiate for."""
        if not self.given:
            return {}, []
        tensors = list(self.tensors)
        for i in self._at:
            tensors[i] = tensors[i].detach().requires_grad_(wanted)
        return self._template.fill(tensors), [tensors[i] for i in self._at]

    def check_unchanged(self) -> None:
        """Raise if a tensor among the arguments is no longer that of forward."""
        if self.given and [version_of(tensor) for tensor in self.tensors] != self.versions:
            raise RuntimeError(
                "a keyword argument of a reversible branch was modified in place between forward and backward: its gradient "
                "would be that of another input; call backward first, or pass a copy"
            )


def alias(leaf: Any) -> Any:
    """Return the same tensor behind a node of its own. (``view_as`` would change the strides of a batch of one.)"""
    return leaf[...] if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return x in these strides, copied if necessary: kernels may give other bits on another layout."""
    if x.stride() == strides:
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)


class _GradientInStrides(torch.autograd.Function):
    """The identity on x, with the gradient laid out as x is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.ops.aten.alias(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.strides = inputs[0].stride()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return with_strides(grad_outputs[0], ctx.strides)


def gradient_in_strides(x: Tensor) -> Tensor:
    """Return x, with its gradient in the strides of x, as the engine gives it to a branch."""
    return _GradientInStrides.apply(x)  # type: ignore[return-value]


_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Generator)


def objects_in(value: Any) -> list[Any]:
    """Return an object and everything in it, at any depth, except the contents of modules and classes."""
    found, met = [value], set[int]()
    for each in found:  # the list grows meanwhile
        if id(each) not in met and not isinstance(each, (Tensor, nn.Module, type, *_PLAIN)):
            met.add(id(each))
            found.extend(_held_by(each))
    return found


def _held_by(value: Any) -> list[Any]:
    inside = value if isinstance(value, dict | list | tuple | set) else getattr(value, "__dict__", ())
    return list(inside.values() if isinstance(inside, dict) else inside)


def look_into(kwargs: dict[str, Any]) -> list[Any]:
    """Return the parts that a branch could change in the objects it is given: tensors and sizes inside them."""
    found = objects_in(kwargs)
    return [
        (id(x), version_of(x)) if isinstance(x, Tensor) else x if isinstance(x, _PLAIN) else len(_held_by(x))
        for x in found
    ]


def version_of(tensor: Tensor) -> int | None:
    """Return how often `tensor` was modified in place, or None if that is not known."""
    if type(tensor) is UninitializedParameter:
        return None
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode
        return None


def versions_of(tensors: Iterable[Tensor]) -> list[int | None]:
    try:
        return [None if type(tensor) is UninitializedParameter else tensor._version for tensor in tensors]
    except RuntimeError:  # one was made in inference mode
        return [version_of(tensor) for tensor in tensors]


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
    for kind in ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3"):
        if hasattr(c, f"_get_{kind}_sdp_enabled"):
            found[f"{kind}_sdp"] = getattr(c, f"_get_{kind}_sdp_enabled"), getattr(c, f"_set_sdp_use_{kind}")
    flags = "cudnn_enabled cudnn_benchmark cudnn_deterministic mkldnn_enabled mkldnn_deterministic sdp_priority_order"
    flags += " math_sdp_allow_fp16_bf16_reduction cublas_allow_fp16_accumulation nnpack_enabled miopen_immediate"
    flags += " cpu_allow_fp16_reduced_precision_reduction cudnn_depthwise_kernel"
    flags += " blas_preferred_backend linalg_preferred_backend rocm_fa_preferred_backend"
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


def compilation_is_possible() -> bool:
    """Return True if anything may be compiled in this process."""
    return "torch._dynamo" in sys.modules


@functools.cache
def eagerly(function: Any) -> Any:
    """Return `function` with frames that dynamo leaves alone (separately compiled code in it still runs compiled)."""
    return torch.compiler.disable(function, reason="a reversible walk runs eagerly")


# Dynamo calls it for real while it traces. It is what torch.compiler.assume_constant_result does, without importing dynamo.
eagerly._dynamo_marked_constant = True  # type: ignore[attr-defined]


def holds_compiled(branch: nn.Module) -> bool:
    """Return True if `branch`, or a part of it, was compiled on its own."""
    from torch._dynamo import OptimizedModule

    return any(
        isinstance(module, OptimizedModule) or module._compiled_call_impl is not None for module in branch.modules()
    )
