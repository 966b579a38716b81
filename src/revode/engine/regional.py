"""Regional compilation: compiled functions for each kind of branch, called by every branch of that kind.

A field that gives its own VJP is compiled as functions of tensors: its value with a record for the VJP, the VJP, and the
coupling. All strategies call the first two, so that their bits agree. The walk back gets the batch statistics of forward (a
kilobyte a branch), so that they are not summed up twice. Every other branch is compiled by ``torch.compile``, which reuses code
for branches of one kind. Compile time does not grow with depth.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from revode.engine.call import Autocast, with_strides
from revode.engine.grid import Grid
from revode.fields import KnownField, Normalize, Record, Statistics, batch_norm
from revode.operators import Bias, along_channels
from revode.schemes import Coupling, is_number


def compile_branches(branches: Sequence[nn.Module]) -> None:
    """Have ``torch.compile`` compile each branch at its first call, as one graph where branches are of one kind.

    Dynamo gives up, and runs eagerly, after eight variants of one piece of code. Kinds of branches are such variants. So is
    every branch that reads a number of its own (an index of its layer), unless such numbers are variables of the graph.
    """
    import torch._dynamo.config as dynamo

    dynamo.allow_unspec_int_on_nn_module = True
    dynamo.recompile_limit = max(dynamo.recompile_limit, 8 + 2 * len(branches))
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 32 * len(branches))
    compiled = torch.compile(_call)
    for branch in branches:
        if branch._compiled_call_impl is None:
            branch._compiled_call_impl = functools.partial(compiled, branch)


def _call(branch: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a branch. Dynamo compiles no frame of torch.nn itself, such as that of ``nn.Sequential``, but inlines it here."""
    return branch._call_impl(*args, **kwargs)


class CompiledField:
    """A known field in one call, run by the compiled functions of its kind, on states like q."""

    def __init__(self, field: KnownField, q: Tensor, dtype: torch.dtype) -> None:
        norms = [norm for norm in field.norms() if not isinstance(norm, Bias)]
        if norms and q.numel() == q.shape[1]:
            raise ValueError(f"batch norm needs more than 1 value per channel in training, got shape {tuple(q.shape)}")
        self.tensors = field.tensors()
        self.running = [statistic for norm in norms if _counts(norm) for statistic in _running(norm)]
        self.kind = _kind_of(field, (q, *self.tensors, *self.running), dtype)
        self.statistics: Sequence[Tensor] = ()

    def step(self, p: Tensor | None, q: Tensor, coupling: Coupling, grid: Grid | None) -> Sequence[Tensor]:
        """Return the next state, and on the grid its magnitude; keep statistics for ``back`` and update the running ones."""
        coupled, self.statistics = self.kind.step(p, q, self.tensors, self.running, coupling, grid)
        return coupled

    def back(
        self, q: Tensor, q_next: Tensor | None, gp: Tensor | None, gq: Tensor, coupling: Coupling, grid: Grid | None
    ) -> tuple[Tensor | None, Tensor, Sequence[Tensor]]:
        """Return the state before if the next one is given, the co-state of q, and gradients by each of the field's tensors."""
        return self.kind.back(q, q_next, gp, gq, self.tensors, self.statistics, coupling, grid)

    def stored(self, q: Tensor, counts: bool = True) -> Tensor:
        """Return F(q) as a node of autograd's graph, if there is one; `counts` updates the running statistics."""
        return _Stored.apply(self, q, counts, *self.tensors)  # type: ignore[return-value]


class _Stored(torch.autograd.Function):
    """A compiled field with its record kept by autograd."""

    @staticmethod
    def forward(ctx: Any, field: CompiledField, q: Tensor, counts: bool, *tensors: Tensor) -> Tensor:
        u, *record = field.kind.linearize(q, tensors, running=field.running if counts else ())
        ctx.kind = field.kind
        ctx.save_for_backward(q, *tensors, *record)
        return u.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True (a gradient of the gradient) cannot pass a compiled field: "
                "build this ReversibleSequence with compile=False and backprop='store'"
            )
        q, *saved = ctx.saved_tensors
        gq, *grads = ctx.kind.product(q, with_strides(grad_outputs[0], q.stride()), saved)
        return None, gq, None, *grads


class _Kind:
    """The compiled functions of one kind of field, made at their first call. Records are flat lists here."""

    def __init__(self, field: KnownField, dtype: torch.dtype) -> None:
        self._template = copy.deepcopy(field)
        self._template.activation = field.activation  # which may be a module, and is known by its identity
        self._dtype = dtype
        self._num_tensors = len(field.tensors())
        self._is_one_graph = field.ends_in_convolution
        self._spec: Any = None
        self._statistics_at: list[int] = []
        self._compiled: dict[Any, Callable[..., Sequence[Tensor]]] = {}
        self._numbers: dict[float, Tensor] = {}

    def step(
        self,
        p: Tensor | None,
        q: Tensor,
        tensors: Sequence[Tensor],
        running: Sequence[Tensor],
        coupling: Coupling,
        grid: Grid | None,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return q', on the grid its magnitude, and the batch statistics, which are counted among the running ones."""
        n = self._num_tensors

        def couple(q: Tensor, p: Tensor | None, gain: Tensor, u: Tensor) -> list[Tensor]:
            q_next = replace(coupling, gain=gain).step(p, q, u.to(q.dtype), grid and grid.round)
            return [q_next] if grid is None else [q_next, q_next.abs().amax()]

        def advance(q: Tensor, p: Tensor | None, gain: Tensor, *rest: Tensor) -> list[Tensor]:
            u, *record = self._linearize(q, rest[:n], (), rest[n:])
            return [*couple(q, p, gain, u), *self.statistics_in(record)]

        key = (p is None, coupling.carry, coupling.keep, grid and grid.bits)
        given = q, p, self._number(coupling.gain, q)
        if self._is_one_graph:
            found = self._call(("advance", *key), advance, *given, *tensors, *running)
            num_states = 1 if grid is None else 2
            return found[:num_states], found[num_states:]
        u, *record = self.linearize(q, tensors, running=running)
        return self._call(("couple", *key), couple, *given, u), self.statistics_in(record)

    def back(
        self,
        q: Tensor,
        q_next: Tensor | None,
        gp: Tensor | None,
        gq: Tensor,
        tensors: Sequence[Tensor],
        statistics: Sequence[Tensor],
        coupling: Coupling,
        grid: Grid | None,
    ) -> tuple[Tensor | None, Tensor, Sequence[Tensor]]:
        """Return p if q' is given, and the VJPs; gp of the older co-state is added as the coupling says."""
        n = self._num_tensors

        def uncouple(q: Tensor, q_next: Tensor, gain: Tensor, u: Tensor) -> list[Tensor]:
            return [replace(coupling, gain=gain).reverse(q, q_next, u.to(q.dtype), grid and grid.round)]

        def product(q: Tensor, gp: Tensor | None, gq: Tensor, gain: Tensor, *rest: Tensor) -> list[Tensor]:
            g, *grads = self._product(q, gq * gain, *rest)
            if not is_number(coupling.keep, 0.0):
                gp = gq * coupling.keep if gp is None else gp + gq * coupling.keep
            return [g if gp is None else gp + g, *grads]

        def retreat(
            q: Tensor, q_next: Tensor | None, gp: Tensor | None, gq: Tensor, gain: Tensor, *rest: Tensor
        ) -> list[Tensor]:
            u, *record = self._linearize(q, rest[:n], rest[n:], ())
            products = product(q, gp, gq, gain, *rest[:n], *record)
            return products if q_next is None else [*uncouple(q, q_next, gain, u), *products]

        gain = self._number(coupling.gain, q)
        key = (q_next is None, gp is None, coupling.carry, coupling.keep, grid and grid.bits)
        p: Tensor | None = None
        if self._is_one_graph:
            found = list(self._call(("retreat", *key), retreat, q, q_next, gp, gq, gain, *tensors, *statistics))
            if q_next is not None:
                p = found.pop(0)
            return p, found[0], found[1:]
        u, *record = self.linearize(q, tensors, statistics)
        if q_next is not None:
            p = self._call(("uncouple", *key), uncouple, q, q_next, gain, u)[0]
        g, *grads = self._call(("product", *key), product, q, gp, gq, gain, *tensors, *record)
        return p, g, grads

    def linearize(
        self, q: Tensor, tensors: Sequence[Tensor], statistics: Sequence[Tensor] = (), running: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Return F(q) and the record, with these statistics; or with the batch's own, counted among the running ones."""
        n, m = self._num_tensors, self._num_tensors + len(statistics)

        def linearize(q: Tensor, *rest: Tensor) -> list[Tensor]:
            return self._linearize(q, rest[:n], rest[n:m], rest[m:])

        key = ("linearize", bool(statistics), bool(running))
        found = list(self._call(key, linearize, q, *tensors, *statistics, *running))
        for place, statistic in zip(self._statistics_at, statistics, strict=False):
            found[1 + place] = statistic
        return found

    def product(self, q: Tensor, g: Tensor, tensors_and_record: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the VJPs of g, from a record."""
        return self._call("product", self._product, q, g, *tensors_and_record)

    def statistics_in(self, record: Sequence[Tensor]) -> list[Tensor]:
        return [record[place] for place in self._statistics_at]

    def _linearize(
        self, q: Tensor, tensors: Sequence[Tensor], statistics: Sequence[Tensor], running: Sequence[Tensor]
    ) -> list[Tensor]:
        _lend(self._template, tensors)
        u, record = self._template.linearize(q, self._dtype, _normalize_by(statistics, running))
        assert u is not None
        leaves, self._spec = pytree.tree_flatten(record)
        places = pytree.tree_unflatten(list(range(len(leaves))), self._spec)
        self._statistics_at = [*places.get("lead", ()), *places.get("norm", ())]
        return [u, *leaves]

    def _product(self, q: Tensor, g: Tensor, *rest: Tensor) -> list[Tensor]:
        _lend(self._template, rest[: self._num_tensors])
        record: Record = pytree.tree_unflatten(list(rest[self._num_tensors :]), self._spec)
        gq, grads = self._template.product(q, g, record)
        return [gq, *grads]

    def _number(self, value: float, q: Tensor) -> Tensor:
        """Return a number as a tensor, so that one compiled function serves all of its values."""
        if value not in self._numbers:
            dtype = torch.promote_types(q.dtype, torch.float32)
            self._numbers[value] = torch.full((), value, dtype=dtype, device=q.device)
        return self._numbers[value]

    def _call(self, key: Any, function: Callable[..., list[Tensor]], *inputs: Tensor | None) -> Sequence[Tensor]:
        given = [tensor for tensor in inputs if tensor is not None]
        compiled = self._compiled.get(key)
        if compiled is None:
            present = [tensor is not None for tensor in inputs]

            def of_given(*given: Tensor) -> list[Tensor]:
                remaining = iter(given)
                return function(*(next(remaining) if here else None for here in present))

            with _compiling:
                compiled = self._compiled[key] = self._compiled.get(key) or _compile(of_given, given)
        with Autocast(given[0].device.type).disabled():  # it casts by itself
            return compiled(*given)


def _compile(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Return a function of tensors, compiled for inputs like these."""
    from torch._inductor import compile as compile_graph
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        inputs = [tensor.detach() for tensor in inputs]
        # Layouts and roundings stay as they are written: chosen by what else a graph holds, they would choose the bits.
        # No buffer is written in place: where a row of channels is half a vector, a load would wait for the store before it.
        options = {"layout_optimization": False, "emulate_precision_casts": True, "inplace_buffers": False}
        return compile_graph(make_fx(function, tracing_mode="fake")(*inputs), inputs, options)  # type: ignore[return-value]


def _lend(field: KnownField, tensors: Sequence[Tensor]) -> None:
    for (parameters, name), tensor in zip(field.slots(), tensors, strict=True):
        parameters[name] = tensor


def _counts(norm: nn.Module) -> bool:
    """Return True for a batch norm that counts the statistics of a batch among its running ones."""
    return isinstance(norm, _BatchNorm) and norm.track_running_stats and norm.running_mean is not None


def _running(norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


def _normalize_by(statistics: Sequence[Tensor], running: Sequence[Tensor]) -> Normalize:
    """Return how to apply a norm, in operations that the compiler makes one pass of.

    With these statistics; or with the batch's own, which are then counted among the running ones, if those are given.
    """
    given, counted = list(statistics), list(running)

    def normalize(norm: Any, x: Tensor) -> tuple[Tensor, Statistics]:
        if isinstance(norm, Bias):
            return norm(x), ()
        wide = x.to(torch.promote_types(batch_norm(norm).weight.dtype, torch.float32))
        if given:
            mean, inverse_std = given.pop(0), given.pop(0)
        else:
            # Sums of differences from the mean of a sixteenth: little more than one pass, as precise as two. (A single value as
            # the origin could be an outlier, whose square then swallows the variance.)
            dims = (0, *range(2, x.dim()))
            origin = wide[: -(-len(x) // 16)].mean(dims)
            away = wide - along_channels(origin, x, 1)
            offset = away.mean(dims)
            variance = away.square().mean(dims) - offset.square()
            inverse_std = torch.rsqrt(variance + norm.eps)
            mean = origin + offset
            if counted and _counts(norm):
                places = x.numel() // x.shape[1]
                running_mean, running_var, num_batches = counted.pop(0), counted.pop(0), counted.pop(0)
                num_batches.add_(1)
                share = 1.0 / num_batches if norm.momentum is None else norm.momentum
                running_mean.lerp_(mean.to(running_mean.dtype), share)
                running_var.lerp_((variance * (places / (places - 1))).to(running_var.dtype), share)
        scale, centre, shift = (along_channels(v, x, 1) for v in (norm.weight * inverse_std, mean, norm.bias))
        return ((wide - centre) * scale + shift).to(x.dtype), (mean, inverse_std)

    return normalize


_kinds: dict[Any, _Kind] = {}
_compiling = threading.RLock()
"""A lock held while a function is traced and compiled: tracing lends tensors to a template, inductor is not thread-safe."""


def _kind_of(field: KnownField, tensors: Sequence[Tensor], dtype: torch.dtype) -> _Kind:
    """Return the kind of this field, on a state and tensors like these. (Compiled code is for one number of threads.)"""
    children = tuple(
        (type(child), *(getattr(child, name, None) for name in ("eps", "padding", "momentum")), _counts(child))
        for child in field._modules.values()
        if child is not None
    )
    own = {name: value for name, value in vars(field).items() if isinstance(value, bool | int | float | str)}
    numbers = frozenset(own.items() - {("training", field.training)})
    shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
    key = (type(field), field.activation, numbers, children, shapes, tensors[0].device, dtype, torch.get_num_threads())
    with _compiling:
        if key not in _kinds:
            _kinds[key] = _Kind(field, dtype)
        return _kinds[key]
