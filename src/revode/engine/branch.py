"""Ways to evaluate a branch: `Replayed` for any module, `Known` for a field that gives its own VJP.

Each has ``value(q)`` for forward and ``vjp(q, g)`` for backward; one is chosen for each branch of a forward pass. (Compiled
fields run together with their coupling, see ``step``.)
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import operator
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from revode.engine.call import Arguments, Autocast, Settings, alias, look_into, tensor_leaves, versions_of, with_strides
from revode.engine.grid import Grid, RangeFlags
from revode.engine.inspection import Contents, contents_of, hooks_hear_every_module, is_sharded, keywords_of
from revode.engine.randomness import Streams
from revode.engine.replay import Call, Record
from revode.fields import KnownField
from revode.memory import adds, graph_leaves
from revode.schemes import Coupling, Factor, is_number, times

_FAILURES = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)


class BranchError(ValueError, RuntimeError):
    """A branch failed, or broke a rule. The message names the branch. Caught as `ValueError` or as torch's `RuntimeError`."""


class BranchTypeError(BranchError, TypeError):
    """A branch was called in a way it does not understand; caught as `TypeError`, too."""


class Context:
    """The things that the branches of one forward pass share.

    Args:
        keeps_aux: whether the aux of branches that return ``(u, aux)`` is wanted.
        compiled: whether fields that give their own VJP run compiled.
        hint: ends the message of a failing branch.
        warned: topics of which the owner of the branches has been warned.
    """

    def __init__(
        self,
        device: torch.device,
        grid: Grid | None = None,
        keeps_aux: bool = False,
        compiled: bool = False,
        hint: str = "",
        warned: set[str] | None = None,
    ) -> None:
        self.grid = grid
        self.keeps_aux = keeps_aux
        self.compiled = compiled
        self.hint = hint
        self.warned = set() if warned is None else warned
        self.traced = torch.compiler.is_compiling()
        self.autocast = Autocast(device.type)
        self.settings: Any = None if self.traced else Settings()
        self.flags = None if grid is None else RangeFlags(grid)

    @functools.cached_property
    def streams(self) -> Streams:
        """Return the RNG states along this pass, which are read once a branch may draw."""
        return Streams()

    def warns_of(self, what: str) -> bool:
        """Return True on the first call with this word only, so that a warning appears once."""
        first = what not in self.warned
        self.warned.add(what)
        return first

    def note(self, state: Tensor | None, where: str) -> None:
        if self.flags is not None and state is not None:
            self.flags.note(state, where)

    def close(self) -> None:
        """Check the range of all states so far, and forget the RNG states of the last branch."""
        if "streams" in vars(self):
            self.streams.forget()
        if self.flags is not None:
            self.flags.close()


def known_field(branch: nn.Module, q: Tensor, context: Context, has_arguments: bool) -> KnownField | None:
    """Return the branch, if it gives its own VJP in this call.

    On the grid a dimension of size 1 rules it out: its stride is ambiguous, and with it the kernel that autograd takes.
    """
    if context.traced or not isinstance(branch, KnownField) or hooks_hear_every_module():
        return None
    ambiguous = context.grid is not None and 1 in q.shape
    return None if has_arguments or ambiguous or not branch.knows_vjp(q.dtype) else branch


def branch_name(index: int, branch: nn.Module) -> str:
    return f"branch {index} ({type(branch).__name__})"


class Evaluation:
    """One branch in one forward pass, evaluated by calling it. Ordinary autograd gives the gradients, if any."""

    def __init__(
        self, context: Context, index: int, branch: nn.Module, arguments: Arguments, name: str | None = None
    ) -> None:
        self.context = context
        self.index = index
        self.branch = branch
        self.arguments = arguments
        self.name = branch_name(index, branch) if name is None else name

    def contents(self) -> Contents:
        try:
            return contents_of(self.branch)
        except ValueError as error:
            raise BranchError(f"{self.name} cannot be recomputed: {error}") from error

    def held(self) -> Iterable[Tensor]:
        return [home[key] for home, key, _ in self.contents().parameters]

    def call(self, q: Tensor, kwargs: dict[str, Any]) -> Any:
        """Return branch(q). Hooks of a module that is sharded by itself ran before, and stay outside."""
        branch = self.branch
        return branch.forward(q, **kwargs) if is_sharded(branch) else branch(q, **kwargs)

    def taken(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return those of the keyword arguments that the branch takes."""
        if not kwargs:
            return kwargs
        takes = keywords_of(self.branch) if self.context.traced else self.contents().takes
        return kwargs if takes is None else {name: value for name, value in kwargs.items() if name in takes}

    def evaluate(self, q: Tensor, kwargs: dict[str, Any], call: Call, *, once: bool = True) -> tuple[Tensor, Any]:
        """Return u = F(q) through `call`, in the state's shape, dtype and strides; and the branch's aux, if any.

        `once` is False if the branch will be evaluated again, so that it must not change its arguments.
        """
        kwargs = self.taken(kwargs)
        if self.context.traced:
            return self.conform(q, call(q, kwargs))
        inputs = [q, *self.held(), *(tensor_leaves(kwargs) if kwargs else ())]
        given = None if once or not kwargs else look_into(kwargs)
        u = self._called(q, kwargs, call, inputs)
        if given is not None and look_into(kwargs) != given:
            raise BranchError(
                f"{self.name} changes an object among its keyword arguments (a cache of keys and values?), which its "
                "recomputation would change again: pass none (use_cache=False), leave out blocks that do so, or use "
                "backprop='store'"
            )
        return self.conform(q, u)

    def _called(self, q: Tensor, kwargs: dict[str, Any], call: Call, inputs: list[Tensor]) -> Any:
        """Return call(q, kwargs); raise an error that names the branch if it fails or changes one of `inputs` in place."""
        versions = versions_of(inputs)
        try:
            u = call(q, kwargs)
        except _FAILURES as error:
            raise self.failure(q, error) from error
        now = versions_of(inputs)
        if now != versions and any(a not in (None, b) for a, b in zip(versions, now, strict=True)):
            raise BranchError(
                f"{self.name} modifies its input or its parameters in place (an inplace=True activation first in "
                "it?): both are needed again, so give it an operation that makes a new tensor"
            )
        return u

    def conform(self, q: Tensor, u: Any) -> tuple[Tensor, Any]:
        """Return (u, aux) in the state's dtype and strides; raise if u is not like the state."""
        u, aux = u if isinstance(u, tuple) and len(u) == 2 else (u, None)
        if not isinstance(u, Tensor):
            raise ValueError(f"{self.name} must return a tensor, or (tensor, aux), got {type(u).__name__}")
        if u.shape != q.shape:
            raise ValueError(
                f"{self.name} changes the shape of its state from {tuple(q.shape)} to {tuple(u.shape)}: "
                "a residual branch must keep it"
            )
        if u.dtype != q.dtype:
            if not self.context.autocast.enabled:
                raise ValueError(
                    f"{self.name} changes the dtype of its state from {q.dtype} to {u.dtype}: "
                    "a residual branch must keep it, except under autocast"
                )
            u = u.to(q.dtype)
        return with_strides(u, q.stride()), aux

    def warn_of_lost_aux(self, aux: Any) -> None:
        if aux is not None and self.branch.training and not self.context.traced and self.context.warns_of("aux"):
            warnings.warn(
                f"{self.name} returned (u, aux), and nobody asked for the aux, so a loss in it trains nothing: call with "
                "return_aux=True, or return u alone",
                stacklevel=2,
            )

    def failure(self, q: Tensor, error: Exception) -> Exception:
        """Return the branch's error with the name of the branch and its state."""
        if isinstance(error, torch.OutOfMemoryError):
            return error
        text = (
            f"{self.name} failed on a state of shape {tuple(q.shape)} and dtype {q.dtype}{self.context.hint}: {error}"
        )
        return (BranchTypeError if isinstance(error, TypeError) else BranchError)(text)

    def stored_call(self, shared: set[int]) -> Call:
        """Return a call of the branch that sums stored gradients in the engine's order: within a branch first, then over depth.

        Each branch sees its own alias of the state, of the keyword arguments and of the parameters in `shared`, whose
        identities these are. Under autocast it casts its weights itself, so that gradients of several uses are added in full
        precision.
        """
        branch, autocast = self.branch, self.context.autocast

        def call(q: Tensor, kwargs: dict[str, Any]) -> Any:
            kwargs = pytree.tree_map(alias, kwargs)
            aliases = {name: alias(p) for name, p in branch.named_parameters() if id(p) in shared} if shared else {}
            lent = _reparametrize_module(branch, aliases, tie_weights=True) if aliases else contextlib.nullcontext()
            with autocast.restore(), lent:
                return branch(alias(q), **kwargs)

        return call


class Replayed(Evaluation):
    """Any module: its recomputation sees what forward saw, and autograd gives its VJP."""

    writes_over_value = False
    """True if nobody else needs the results of ``value`` and ``vjp``, so that they may be written over."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        context, contents = self.context, super().contents()
        reason = contents.unsuitable or (_in_fp8() if contents.minds_precision else None)
        if reason is not None:
            raise BranchError(f"{self.name} {reason}")
        self.parameters = contents.named_parameters(self.name)
        self.trained = [name for name, p in self.parameters.items() if p.requires_grad]
        """Names of the parameters that had a gradient in forward; by the time of backward they may be frozen."""
        self.versions = versions_of(self.parameters.values())
        self.record = Record(contents, context)

    def contents(self) -> Contents:
        return self.record.contents

    def held(self) -> Iterable[Tensor]:
        return self.parameters.values()

    def release(self) -> None:
        """Free the tensors that a recomputation needs."""
        del self.record, self.arguments

    def tensors(self) -> list[Tensor]:
        """Return the tensors that ``vjp`` gives gradients for, in its order."""
        return [*(self.parameters[name] for name in self.trained), *self.arguments.trained]

    def check_unchanged(self) -> None:
        """Raise if parameters or arguments are no longer those of the forward pass."""
        if versions_of(self.parameters.values()) != self.versions:
            raise RuntimeError(
                "a parameter of a reversible sequence was modified in place between forward and backward "
                "(an optimizer step?): its gradient would be that of another network; call backward first"
            )
        self.arguments.check_unchanged()

    def value(self, q: Tensor, recomputed: bool = True) -> tuple[Tensor, Any]:
        """Return u = F(q) and its aux in forward; record RNG states and buffers if the branch will be recomputed."""
        first = self.record.first
        call = self.call
        return self.evaluate(
            q, self.arguments.detached(), lambda q, kwargs: first(q, kwargs, call, recomputed), once=not recomputed
        )

    def again(self, q: Tensor) -> Tensor:
        """Return u = F(q) once more, without gradients."""
        return self._recompute(q, wanted=False)[0].detach()

    def _recompute(self, q: Tensor, wanted: bool) -> tuple[Tensor, Any, list[Tensor]]:
        """Return u, its aux and the leaves of their graph: q, trained parameters, arguments with a gradient."""
        tracked = (
            wanted or self.context.grid is not None
        )  # on the grid, bits must be those of a call that tracks gradients
        leaf = q.detach().requires_grad_(tracked)
        own, lent = self._leaves(wanted)
        kwargs, given = self.arguments.tracked(wanted)
        with torch.set_grad_enabled(tracked):
            inside = alias(leaf)  # as in an ordinary forward, the branch's input is not a leaf
            again = self.record.again
            call = functools.partial(again, call=self.call, lent=lent)
            u, aux = self.conform(inside, self._called(inside, self.taken(kwargs), call, [leaf]))
        return u, aux, [leaf, *own, *given]

    def vjp(
        self, q: Tensor, g: Tensor | None, g_aux: Sequence[Tensor | None], coupling: Coupling, needs_value: bool
    ) -> tuple[Tensor | None, Sequence[Tensor | None], Factor]:
        """Return u = F(q), the VJPs of g through a F by q and by each of ``tensors``, and a factor that the VJPs still lack.

        g is the gradient by q', `g_aux` has those by the tensors of the aux, and a is the gain of `coupling`.
        """
        wanted = g is not None or any(grad is not None for grad in g_aux)
        if not (wanted or needs_value):
            return None, (), 1.0
        u, aux, wrt = self._recompute(q, wanted)
        outputs: list[Tensor] = [u]
        grads: list[Any] = [None if g is None else with_strides(times(g, coupling.gain), q.stride())]
        if g_aux:
            outputs, grads = [u, *tensor_leaves(aux)], [*grads, *g_aux]
        if g_aux or g is None or not u.requires_grad:
            pairs = zip(outputs, grads, strict=True)
            chosen = [(tensor, grad) for tensor, grad in pairs if grad is not None and tensor.requires_grad]
            outputs, grads = [tensor for tensor, _ in chosen], [grad for _, grad in chosen]
        if not outputs:
            return u.detach(), [None] * len(wrt), 1.0
        self._look_at_graph(outputs, wrt, coupling)
        products = self._grad(outputs, grads, wrt)
        if not self.record.reads_a_cache():
            return u.detach(), products, 1.0
        missing = [name for name, product in zip(self.trained, products[1:], strict=False) if product is None]
        if missing:
            raise BranchError(
                f"{self.name} got no gradient for its parameter {missing[0]!r}, and its forward left a tensor on the module "
                "that the recomputation has read: a value computed from a parameter must not be cached, compute it in each call"
            )
        return u.detach(), products, 1.0

    def _grad(self, outputs: list[Tensor], grads: list[Tensor], wrt: list[Tensor]) -> Sequence[Tensor | None]:
        """Run ``torch.autograd.grad`` without its checks of shapes, which take a tenth of a tiny branch's time."""
        try:
            return Variable._execution_engine.run_backward(  # pyright: ignore[reportAttributeAccessIssue]
                tuple(outputs), tuple(grads), False, False, tuple(wrt), allow_unreachable=True, accumulate_grad=False
            )
        except RuntimeError as error:
            if "use_reentrant" in str(error) or "Checkpointing is not compatible" in str(error):
                raise BranchError(
                    f"{self.name} uses torch's checkpoint with use_reentrant=True, which cannot be differentiated inside "
                    "a reversible sequence: give it use_reentrant=False"
                ) from error
            raise

    def _leaves(self, wanted: bool) -> tuple[list[Tensor], dict[str, Tensor] | None]:
        """Return the parameters to differentiate for, and the tensors to lend the branch in place of its own, if any.

        A branch's own parameters serve as leaves if they are as in the forward pass, and no hook on them would be called twice.
        """
        trained, own = self.trained, self.parameters
        for (home, key, name), then in zip(self.record.contents.parameters, own.values(), strict=True):
            if home[key] is not then or then._backward_hooks or then.requires_grad != (name in trained):
                break
        else:
            if not hooks_hear_every_module():
                return [own[name] for name in trained], None
        leaves = {name: p.detach().requires_grad_(wanted and name in trained) for name, p in own.items()}
        with torch.enable_grad():  # aliases, since hooks on modules cannot be given leaves in autograd.grad
            return [leaves[name] for name in trained], {name: alias(leaf) for name, leaf in leaves.items()}

    def _look_at_graph(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], coupling: Coupling) -> None:
        """Raise if an output depends on an unknown tensor that requires grad; warn once of a skip connection in the branch."""
        contents = self.record.contents
        if contents.is_known and contents.has_skip is not None:
            return  # modules of known classes, without hooks, use their own parameters and what they are given
        ours = {id(leaf) for leaf in leaves}
        for leaf in graph_leaves(outputs):
            if id(leaf) not in ours:
                raise BranchError(
                    f"{self.name} uses a tensor of shape {tuple(leaf.shape)} that requires grad but is neither its "
                    "parameter nor a keyword argument: register it, or pass it as a keyword argument, to get its gradient"
                )
        adds_states = not (is_number(coupling.carry, 0.0) and is_number(coupling.keep, 0.0))
        if contents.has_skip is None and adds_states:
            contents.has_skip = adds(outputs[0], leaves[0], lambda name: name.startswith(_NEUTRAL))
            if contents.has_skip and self.context.warns_of("skip connection"):
                warnings.warn(
                    f"{self.name} adds its own input, as a residual block does, and the scheme adds it once more: leave "
                    "out the skip connection, or use revode.convert",
                    stacklevel=2,
                )


_NEUTRAL = ("AddBackward", "AliasBackward", "CloneBackward", "ToCopyBackward", "ViewBackward", "UnsafeViewBackward")


class Known(Replayed):
    """A field that gives its own VJP, without a graph."""

    writes_over_value = True
    branch: KnownField

    def value(self, q: Tensor, recomputed: bool = True) -> tuple[Tensor, Any]:
        try:
            u = self.branch.value(q, self.context.autocast.compute_dtype(q)).to(q.dtype)
        except _FAILURES as error:
            raise self.failure(q, error) from error
        return with_strides(u, q.stride()), None

    def vjp(
        self, q: Tensor, g: Tensor | None, g_aux: Sequence[Tensor | None], coupling: Coupling, needs_value: bool
    ) -> tuple[Tensor | None, Sequence[Tensor | None], Factor]:
        if g is None or not self._holds_its_parameters():
            return super().vjp(q, g, g_aux, coupling, needs_value)
        autocast, gain = self.context.autocast, coupling.gain
        dtype = autocast.compute_dtype(q)
        # Scaling the products spares a pass over g. But on the grid, bits must be those of the stored path, and float16 has
        # no range to spare for what is scaled only later.
        later = self.context.grid is None and dtype == q.dtype and isinstance(gain, float)
        scaled = with_strides(g if later else g * gain, q.stride())
        with autocast.disabled():  # the field casts by itself
            u, g_state, g_parameters = self.branch.vjp(q, scaled, dtype, needs_value)
        return None if u is None else u.to(q.dtype), [g_state, *g_parameters], gain if later else 1.0

    def _holds_its_parameters(self) -> bool:
        """Return True if the field still holds the parameters of forward (``torch.func.functional_call`` lends others)."""
        held = self.branch.tensors()
        return len(held) == len(self.parameters) and all(map(operator.is_, held, self.parameters.values()))


def evaluation_of(context: Context, index: int, branch: nn.Module, arguments: Arguments, q: Tensor) -> Replayed:
    """Return a replayable evaluation of a branch on states like q."""
    known = known_field(branch, q, context, arguments.given) is not None
    return (Known if known else Replayed)(context, index, branch, arguments)


def refuse_unknown_arguments(branches: Sequence[nn.Module], kwargs: dict[str, Any]) -> None:
    """Raise if no branch takes one of the keyword arguments."""
    taken = [contents_of(branch).takes for branch in branches] if kwargs else []
    if None in taken:
        return
    names = frozenset().union(*(names for names in taken if names))
    for name in kwargs:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BranchTypeError(f"no branch takes the keyword argument {name!r}{hint}")


def _in_fp8() -> str | None:
    """Return why a branch with modules of Transformer Engine cannot be recomputed now, or None."""
    names = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")
    managers = [getattr(sys.modules.get(name), "FP8GlobalStateManager", None) for name in names]
    if not any(manager is not None and manager.is_fp8_enabled() for manager in managers):
        return None
    reason = "runs in FP8 (Transformer Engine), whose scales a recomputation would move a second time"
    return f"{reason}: leave fp8_autocast, or use backprop='store'"
