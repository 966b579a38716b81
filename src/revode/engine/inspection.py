"""Inspect a branch once, and again when it changes: its modules, parameters, buffers and generators.

`KNOWN` lists the classes whose calls are fully known from their type: which of them draw random numbers, and that they touch
no RNG of Python or NumPy. Nothing is known of any other module, so the engine records every RNG state around it.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from revode.engine.call import compilation_is_possible, holds_compiled
from revode.engine.randomness import Stream, held_by, held_streams, is_generator
from revode.fields import AntisymmetricField, OneLayerField, SymmetricField
from revode.operators import (
    AntisymmetricConv,
    AntisymmetricDense,
    Bias,
    Conv,
    Conv3d,
    Dense,
    DroppedActivation,
    TVNorm,
)

evaluating = threading.RLock()
"""A lock held while a branch is evaluated. A recomputation lends it tensors and modes that no other thread may see."""

_STATISTICS_ONLY = {_BatchNorm.forward, SyncBatchNorm.forward, _InstanceNorm.forward}
"""Forwards whose output in training mode does not depend on the buffers they update."""

_MIND_GRADIENTS = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that take other kernels, which give other bits, if no gradient is wanted."""


_OF_TORCH = {value for value in vars(nn).values() if isinstance(value, type)}
KNOWN: set[type] = {
    *_OF_TORCH,
    NonDynamicallyQuantizableLinear,  # in nn.MultiheadAttention
    *(SymmetricField, AntisymmetricField, OneLayerField),
    *(Conv, AntisymmetricConv, Conv3d, Dense, AntisymmetricDense, Bias, TVNorm, DroppedActivation),
}
"""Classes whose calls draw only from torch's RNG, and only as `_draws` says. A subclass is not known by its base."""
_NUM_OF_TORCH = len(vars(nn.Module()))
"""The number of attributes that every module begins with."""


def own_attributes(module: nn.Module) -> Iterator[Any]:
    """Return the values of the attributes that `module` has beside those of every module."""
    return itertools.islice(module.__dict__.values(), _NUM_OF_TORCH, None)


class Slot(NamedTuple):
    """A place in a module that holds a tensor."""

    home: dict[str, Any]
    key: str
    name: str

    @property
    def tensor(self) -> Tensor:
        return self.home[self.key]


def collects_statistics(module: nn.Module) -> bool:
    """Return True if `module` is a norm that in training mode updates its buffers and does not use them."""
    return isinstance(module, _BatchNorm | _InstanceNorm) and type(module).forward in _STATISTICS_ONLY


def _is_known(module: nn.Module) -> bool:
    """Return True if the type of this module tells all that its call does."""
    kind = getattr(type(module), "_converted_from", type(module))
    if kind not in KNOWN or "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    activation = getattr(module, "activation", None)  # of a transformer layer or of our fields: any callable
    if activation is None or isinstance(activation, nn.Module):  # one of its modules, which is judged by itself
        return True
    return getattr(activation, "__module__", "").startswith("torch")


def _draws(module: nn.Module) -> bool:
    """Return True if a module of ``torch.nn`` draws random numbers in its present mode."""
    if isinstance(module, _DropoutNd):
        return module.training and module.p > 0.0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.training and module.dropout > 0.0
    if _is_sequence(module):
        return cast(Any, module).scheme_now().draws
    return module.training if isinstance(module, nn.RReLU) else True


def _is_sequence(module: nn.Module) -> bool:
    """Return True for a `ReversibleSequence`, which keeps its own records."""
    return hasattr(type(module), "scheme_now")


_DRAWING = (
    _DropoutNd,
    nn.RReLU,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


class Contents:
    """The modules, parameters, buffers and generators of one branch, and the facts known of them.

    Contents live in a cache for as long as their branch does, so they hold the branch itself only weakly.
    """

    def __init__(self, branch: nn.Module) -> None:
        self._branch = weakref.ref(branch)
        self._inner = list(branch.modules())[1:]
        self._shape = self._measure()
        self.parameters: list[Slot] = []
        self._statistics: list[tuple[int, list[Slot]]] = []
        self.buffers: list[Slot] = []
        """All buffers but running statistics."""
        self.changing: set[str] | None = None
        """Names of the large buffers that calls were seen to change; None before the first call."""
        self._find_tensors(branch)
        modules = self.modules
        self._unknown = [i for i, module in enumerate(modules) if not _is_known(module)]
        self.is_known = not self._unknown
        self._drawing = [i for i, module in enumerate(modules) if isinstance(module, _DRAWING) or _is_sequence(module)]
        self.minds_precision = any(type(module).__module__.startswith("transformer_engine") for module in modules)
        """True if the branch holds modules of Transformer Engine, which may compute in FP8."""
        self.minds_gradients = any(isinstance(module, _MIND_GRADIENTS) for module in modules)
        self.generators: list[Stream] = [] if self.is_known else self._find_generators()
        self.holds_state = bool(self.buffers or self._statistics)
        """True if the branch has buffers of any kind."""
        self.is_compiled = compilation_is_possible() and holds_compiled(branch)
        """True if the branch, or a part of it, was compiled on its own."""
        self.unsuitable = _unsuitable(modules)
        """The reason why the branch cannot be recomputed on lent tensors, or None."""
        self.takes = keywords_of(branch)
        """Names of the keyword arguments that ``forward`` takes; None if it takes any."""
        self.has_skip: bool | None = None
        """True if the branch adds its own input; None before the first backward pass."""

    @property
    def branch(self) -> nn.Module:
        branch = self._branch()
        assert branch is not None
        return branch

    @property
    def modules(self) -> list[nn.Module]:
        return [self.branch, *self._inner]

    @property
    def unknown(self) -> list[nn.Module]:
        """Return the modules of which nothing is known."""
        modules = self.modules if self._unknown else []
        return [modules[i] for i in self._unknown]

    @property
    def statistics(self) -> list[tuple[nn.Module, list[Slot]]]:
        """Return norms, with the slots of the running statistics that they collect in training mode and read otherwise."""
        modules = self.modules if self._statistics else []
        return [(modules[i], slots) for i, slots in self._statistics]

    def _measure(self) -> list[Any]:
        """Return a key that changes when modules, parameters, buffers, generators or attributes come or go, or are tied.

        Running statistics do not count: a recomputation around this one may have lent None for them.
        """
        measure: list[Any] = []
        for module in self.modules:
            kind, attributes = type(module), module.__dict__
            parameters, buffers = module._parameters, module._buffers
            hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
            measure += (kind, len(attributes), len(parameters), len(buffers), hooks)
            if parameters:
                measure += map(id, parameters.values())
            if buffers and not collects_statistics(module):
                measure += [buffer is None for buffer in buffers.values()]
            if module._modules:
                measure += module._modules.values()
            if kind not in KNOWN:
                measure += [id(value) for value in own_attributes(module) if is_generator(value)]
        return measure

    def fits(self) -> bool:
        """Return True if the branch still holds the same things."""
        return self._measure() == self._shape

    def _find_tensors(self, branch: nn.Module) -> None:
        seen: set[int] = set()
        for index, (prefix, module) in enumerate(branch.named_modules()):
            start = f"{prefix}." if prefix else ""
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.parameters.append(Slot(module._parameters, key, start + key))
            slots = [Slot(module._buffers, key, start + key) for key, _ in module._buffers.items()]
            if collects_statistics(module):
                self._statistics.append((index, slots))
            else:
                self.buffers.extend(slot for slot in slots if slot.tensor is not None)

    def held(self) -> list[list[int]]:
        """Return the identities of the attributes of modules of unknown classes, also in plain containers."""
        found = []
        for module in self.unknown:
            own = list(own_attributes(module))
            found.append([*map(id, own)])
            for value in own:
                if type(value) in (dict, list):
                    found.append([*map(id, value.values() if type(value) is dict else value)])
        return found

    def tensors_held(self) -> dict[int, Tensor]:
        """Return the tensors among the objects of ``held``."""
        found: dict[int, Tensor] = {}
        for module in self.unknown:
            for value in own_attributes(module):
                inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
                found.update((id(item), item) for item in inside if isinstance(item, Tensor))
        return found

    def _find_generators(self) -> list[Stream]:
        return held_streams(value for module in self.unknown for value in held_by(module))

    def named_parameters(self, where: str) -> dict[str, Tensor]:
        """Return the present parameters by name."""
        found: dict[str, Tensor] = {}
        for home, key, name in self.parameters:
            parameter = home[key]
            if type(parameter) is UninitializedParameter:
                raise ValueError(
                    f"{where} has the uninitialised (lazy) parameter {name!r}: "
                    "run the sequence once under torch.no_grad() before training it"
                )
            assert parameter is not None
            found[name] = parameter
        return found

    def buffers_to_read(self) -> list[Slot]:
        """Return the slots of all buffers that a call may depend on now."""
        read = [slot for module, slots in self.statistics if not module.training for slot in slots]
        return [*self.buffers, *(slot for slot in read if slot.tensor is not None)]

    def modes(self) -> list[bool]:
        return [module.training for module in self.modules]

    def draws_only_from_torch(self) -> bool:
        """Return True if a call can move no RNG state but torch's."""
        return self.is_known and not _hooks_on_all_modules()

    def draws_from_torch(self) -> bool:
        """Return True if a call draws from torch's RNG, provided that it draws from no other."""
        modules = self.modules if self._drawing else []
        return any(_draws(modules[i]) for i in self._drawing)


def is_sharded(branch: nn.Module) -> bool:
    """Return True if FSDP2 (``fully_shard``) shards this very module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(branch, fsdp.FSDPModule)


def _unsuitable(modules: list[nn.Module]) -> str | None:
    """Return why a branch of these modules, itself first, cannot be recomputed on lent tensors, or None."""
    if any(isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.buffers()) for module in modules):
        return "holds TorchScript code with buffers, which cannot be set back: give the module it was made from"
    if getattr(modules[0], "_is_replica", False):
        return "is a replica made by nn.DataParallel, whose parameters are copies: use DistributedDataParallel"
    if any(is_sharded(module) for module in modules[1:]):
        return "holds a module that is sharded by itself (fully_shard): shard the branch, the sequence or a module around it"
    return None


def _hooks_on_all_modules() -> bool:
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def hooks_hear_every_module() -> bool:
    """Return True if hooks are registered on all modules at once (``register_module_forward_hook`` and its like)."""
    backward = torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
    return _hooks_on_all_modules() or bool(backward)


def keywords_of(branch: nn.Module) -> frozenset[str] | None:
    try:
        parameters = list(inspect.signature(branch.forward).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    behind_the_state = parameters[1:]
    return frozenset(p.name for p in behind_the_state if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


_found: weakref.WeakKeyDictionary[nn.Module, Contents] = weakref.WeakKeyDictionary()


def contents_of(branch: nn.Module) -> Contents:
    """Return the contents of `branch`, inspected once and again after a change."""
    contents = _found.get(branch)
    if contents is None or not contents.fits():
        with evaluating:  # another thread may have lent the branch something just now
            contents = _found.get(branch)
            if contents is None or not contents.fits():
                contents = _found[branch] = Contents(branch)
    return contents
