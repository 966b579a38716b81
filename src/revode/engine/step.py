"""One step of a walk: a coupling and its branch, forward and backward.

forward:   q' = s p + c q + a F(q)
backward:  u = F(q) and its VJP, from one evaluation;   p = (q' - c q - a u) / s;
           gq = gp' + c g + a vjp_F(q; g);   gp = s g
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from revode.engine import arrival
from revode.engine.branch import Context, Evaluation, Known, Replayed, evaluation_of, known_field
from revode.engine.call import Arguments, gradient_in_strides, with_strides
from revode.engine.regional import CompiledField
from revode.engine.replay import Call, call_to_invert
from revode.schemes import Coupling, Factor, Rounding, is_number, times

Gradients = tuple[Tensor | None, Tensor | None, Sequence[Tensor | None]]
"""The gradients by p, by q, and by each of the branch's tensors."""


class Step:
    """A coupling (s, c, a) and its branch in one forward pass."""

    def __init__(self, evaluation: Replayed, coupling: Coupling) -> None:
        self.evaluation = evaluation
        self.coupling = coupling
        self.remainder: Tensor | None = None
        """The bits of p that a coupling with |s| < 1 drops on the grid."""
        self.fingerprints: list[Tensor] = []
        """Fingerprints of q, and of u if a branch was replayed, where the walk back is to be verified."""
        self.aux: Any = None
        self.has_gradient = True
        """True if an input of the step has a gradient; else it is never recomputed."""
        self.is_planned = False
        """True if the node is made before the step runs."""
        self.is_released = False
        self.position = 0

    def tensors(self) -> list[Tensor]:
        """Return the tensors that ``retreat`` gives gradients for."""
        tensors = self.evaluation.tensors()
        self.num_tensors = len(tensors)
        return tensors

    def parameters(self) -> list[Tensor]:
        """Return the parameters among ``tensors``, which come first there."""
        return [self.evaluation.parameters[name] for name in self.evaluation.trained]

    def tensors_kept(self) -> list[Tensor]:
        """Return the tensors that the way back needs beside the pair."""
        arguments = [] if self.is_released else self.evaluation.arguments.tensors
        return [tensor for tensor in (*self.own_tensors(), *arguments) if tensor is not None]

    def own_tensors(self) -> list[Tensor | None]:
        """Return the tensors that this step alone keeps beside the pair."""
        return [self.remainder, *self.fingerprints, *(() if self.is_released else self.evaluation.record.kept)]

    def set_own_tensors(self, following: Iterator[Any]) -> None:
        """Take the place of ``own_tensors`` from `following`."""
        self.remainder = next(following)
        self.fingerprints = [next(following) for _ in self.fingerprints]
        if not self.is_released:
            self.evaluation.record.kept = [next(following) for _ in self.evaluation.record.kept]

    def release(self) -> None:
        self.is_released = True
        self.remainder, self.fingerprints = None, []
        self.evaluation.release()

    def advance(self, p: Tensor | None, q: Tensor, watched: bool, keeps_remainder: bool) -> tuple[Tensor, Any]:
        """Return q' = s p + c q + a F(q) in the strides of q, and the branch's aux; p is None at the start of a scheme on one
        tensor.

        `watched` keeps fingerprints of q and F(q), `keeps_remainder` the bits that the way back needs to find p.
        """
        evaluation = self.evaluation
        u, aux = evaluation.value(q, self.has_gradient)
        if watched:
            seen = [q] if evaluation.writes_over_value else [q, u]
            self.fingerprints = [arrival.fingerprint(tensor, evaluation.context.grid is not None) for tensor in seen]
        if keeps_remainder and p is not None:
            self.remainder = remainder_of(evaluation.context, self.coupling, evaluation.index, p)
        q_next = advance(
            evaluation.context, self.coupling, evaluation.index, p, q, u, over_u=evaluation.writes_over_value
        )
        if evaluation.context.flags is not None:
            evaluation.context.note(q_next, f"after {evaluation.name}")
        return q_next, aux

    def retreat(
        self, q: Tensor, q_next: Tensor | None, gp: Tensor | None, g: Tensor | None, g_aux: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, Tensor | None, Gradients]:
        """Return u = F(q), p if q' is given, and the gradients, from one evaluation of the branch.

        gp and g are the gradients by the pair (q, q') behind this step, `g_aux` those by the tensors of the aux.
        """
        evaluation, coupling, over_u = self.evaluation, self.coupling, self.evaluation.writes_over_value
        strides = q.stride()
        gp = None if gp is None else with_strides(gp, strides)
        g = None if g is None else with_strides(g, strides)
        u, products, scale = evaluation.vjp(q, g, g_aux, coupling, q_next is not None)
        p = None
        if q_next is not None:
            assert u is not None
            p = retreat(evaluation.context, coupling, evaluation.index, q, q_next, u, self.remainder, over_u=over_u)
        gq = gp
        if g is not None:
            gq = _plus_kept(gq, g, coupling.keep, evaluation.context.grid is not None)
            g = None if is_number(coupling.carry, 0.0) else times(g, coupling.carry)
        if not products:
            return u, p, (g, gq, [None] * self.num_tensors)
        gq = _plus(gq, products[0], scale, over_b=over_u)
        return u, p, (g, gq, [_scaled(product, scale) for product in products[1:]])

    def rebuild(self, q: Tensor, q_next: Tensor) -> Tensor:
        evaluation = self.evaluation
        evaluation.check_unchanged()
        u = evaluation.again(q)
        return retreat(evaluation.context, self.coupling, evaluation.index, q, q_next, u, self.remainder)


class CompiledStep(Step):
    """A field that gives its own VJP, compiled together with its coupling."""

    def __init__(self, evaluation: Replayed, coupling: Coupling, field: CompiledField) -> None:
        super().__init__(evaluation, coupling)
        self.field = field

    def tensors(self) -> list[Tensor]:
        return self.field.tensors

    def release(self) -> None:
        super().release()
        self.field.statistics = ()

    def advance(self, p: Tensor | None, q: Tensor, watched: bool, keeps_remainder: bool) -> tuple[Tensor, Any]:
        context = self.evaluation.context
        if watched:
            self.fingerprints = [arrival.fingerprint(q, context.grid is not None)]
        try:
            q_next, *magnitude = self.field.step(p, q, self.coupling, context.grid)
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise self.evaluation.failure(q, error) from error
        if context.flags is not None:
            context.flags.note_magnitude(magnitude[0], q.dtype, f"after {self.evaluation.name}")
        return with_strides(q_next, q.stride()), None

    def retreat(
        self, q: Tensor, q_next: Tensor | None, gp: Tensor | None, g: Tensor | None, g_aux: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, Tensor | None, Gradients]:
        coupling, strides = self.coupling, q.stride()
        g = torch.zeros_like(q) if g is None else with_strides(g, strides)
        gp = None if gp is None else with_strides(gp, strides)
        p, gq, products = self.field.back(q, q_next, gp, g, coupling, self.evaluation.context.grid)
        g = None if is_number(coupling.carry, 0.0) else times(g, coupling.carry)
        return None, None if p is None else with_strides(p, strides), (g, gq, products)

    def rebuild(self, q: Tensor, q_next: Tensor) -> Tensor:
        self.evaluation.check_unchanged()
        with torch.no_grad():
            u = self.field.stored(q, counts=False)
        return retreat(self.evaluation.context, self.coupling, self.evaluation.index, q, q_next, u)


def step_of(
    context: Context, index: int, branch: nn.Module, coupling: Coupling, arguments: Arguments, q: Tensor
) -> Step:
    field = compiled_field(context, branch, coupling, arguments.given, q)
    if field is not None:
        return CompiledStep(Known(context, index, branch, arguments), coupling, field)
    return Step(evaluation_of(context, index, branch, arguments, q), coupling)


def compiled_field(
    context: Context, branch: nn.Module, coupling: Coupling, has_arguments: bool, q: Tensor
) -> CompiledField | None:
    """Return the branch compiled with its coupling, or None if it does not run so."""
    shrinks = context.grid is not None and coupling.shift > 0
    if not context.compiled or context.keeps_aux or isinstance(coupling.carry, Tensor) or shrinks:
        return None
    field = known_field(branch, q, context, has_arguments)
    return None if field is None else CompiledField(field, q, context.autocast.compute_dtype(q))


def remainder_of(context: Context, coupling: Coupling, index: int, p: Tensor) -> Tensor | None:
    """Return the bits of p that ``advance`` drops, which ``retreat`` needs to find p again."""
    if context.grid is None or not coupling.shift:
        return None
    return context.grid.remainder(p, coupling.shift, _up(index))


def advance(
    context: Context,
    coupling: Coupling,
    index: int,
    p: Tensor | None,
    q: Tensor,
    u: Tensor,
    *,
    over_u: bool = False,
) -> Tensor:
    """Return the next state in the strides of this one, on the grid if there is one; written over u if nobody needs u."""
    grid = context.grid
    if grid is not None and coupling.shift and p is not None:
        p, coupling = grid.shrink(p, coupling.shift, _up(index)), _on_grid(coupling)
    return with_strides(coupling.step(p, q, u, _rounding(context, over_u), u if over_u else None), q.stride())


def retreat(
    context: Context,
    coupling: Coupling,
    index: int,
    q: Tensor,
    q_next: Tensor,
    u: Tensor,
    remainder: Tensor | None = None,
    *,
    over_u: bool = False,
) -> Tensor:
    """Return the state before, which undoes ``advance``."""
    grid, rounding, out = context.grid, _rounding(context, over_u), u if over_u else None
    if grid is None or not coupling.shift:
        return with_strides(coupling.reverse(q, q_next, u, rounding, out), q.stride())
    assert remainder is not None
    m = _on_grid(coupling).reverse(q, q_next, u, rounding, out)
    return with_strides(grid.grow(m, remainder, coupling.shift, _up(index)), q.stride())


def _on_grid(coupling: Coupling) -> Coupling:
    """Return the coupling as it is applied to m of p = 2^n m + r."""
    return replace(coupling, carry=coupling.carry * 2.0**coupling.shift, shift=0)


def _up(index: int) -> bool:
    """Return True if the step at `index` rounds ties up; steps alternate."""
    return index % 2 == 0


def _rounding(context: Context, in_place: bool) -> Rounding | None:
    grid = context.grid
    return None if grid is None else grid.round_ if in_place else grid.round


def _plus(a: Tensor | None, b: Tensor | None, scale: Factor = 1.0, *, over_b: bool = False) -> Tensor | None:
    """Return a + scale * b, either of which may be absent; written over b if nobody else needs b."""
    if b is None:
        return a
    out = b if over_b else None
    if a is None:
        return b if is_number(scale, 1.0) else torch.mul(b, scale, out=out)
    return torch.add(a, b, alpha=scale, out=out)


def _plus_kept(gq: Tensor | None, g: Tensor, keep: Factor, to_the_bit: bool) -> Tensor | None:
    """Return gq + keep * g; in two roundings, as autograd does, where bits must be those of the stored path."""
    if is_number(keep, 0.0):
        return gq
    if isinstance(keep, Tensor) or to_the_bit:
        return _plus(gq, times(g, keep))
    return _plus(gq, g, keep)


def _scaled(product: Tensor | None, scale: Factor) -> Tensor | None:
    """Return scale * product; a view of something larger is copied, so that it does not keep that alive."""
    if product is None:
        return None
    base = product._base
    is_whole = base is None or base.numel() == product.numel()
    return product if is_whole and is_number(scale, 1.0) else product * scale


class Pass:
    """The branches of one call with their coefficients, arguments and context; `first` steps came before."""

    def __init__(
        self,
        branches: Sequence[nn.Module],
        couplings: Sequence[Coupling],
        context: Context,
        kwargs: dict[str, Any],
        first: int = 0,
    ) -> None:
        self.branches = branches
        self.couplings = couplings
        self.context = context
        self.kwargs = kwargs
        self.first = first
        self.aux: list[Any] = []
        """The aux of the branches, if wanted."""
        self._shared: set[int] | None = None

    def advance(self, index: int, p: Tensor | None, q: Tensor) -> Tensor:
        """Return the state behind the branch at `index`, as ordinary autograd sees it."""
        return self.couple(index, p, q, self.evaluate(index, q))

    def evaluate(self, index: int, q: Tensor) -> Tensor:
        """Return F(q) as ordinary autograd sees it; on the grid, gradients must be the engine's to the bit."""
        evaluation = self._evaluation(index)
        u, aux = evaluation.evaluate(q, self.kwargs, self._stored_call(evaluation, index, q))
        if self.context.keeps_aux:
            self.aux.append(aux)
        elif torch.is_grad_enabled():
            evaluation.warn_of_lost_aux(aux)
        return u if self.context.grid is None or not u.requires_grad else gradient_in_strides(u)

    def couple(self, index: int, p: Tensor | None, q: Tensor, u: Tensor) -> Tensor:
        q_next = advance(self.context, self.couplings[index], self.first + index, p, q, u)
        self.context.note(q_next, f"after {self._evaluation(index).name}")
        return q_next

    def retreat(self, index: int, q: Tensor, q_next: Tensor) -> Tensor:
        """Return the state before the pair (q, q') behind the branch at `index`."""
        evaluation = self._evaluation(index)
        u, _ = evaluation.evaluate(q, self.kwargs, self._inverting_call(evaluation, index, q))
        return retreat(self.context, self.couplings[index], self.first + index, q, q_next, u)

    def _evaluation(self, index: int) -> Evaluation:
        return Evaluation(self.context, self.first + index, self.branches[index], _NO_ARGUMENTS)

    def _stored_call(self, evaluation: Evaluation, index: int, q: Tensor) -> Call:
        branch = self.branches[index]
        field = compiled_field(self.context, branch, self.couplings[index], bool(self.kwargs), q)
        if field is not None:
            return lambda q, kwargs: field.stored(q)
        if self.context.grid is None or not torch.is_grad_enabled():
            return lambda q, kwargs: branch(q, **kwargs)
        if self._shared is None:
            uses = Counter(id(parameter) for branch in self.branches for parameter in branch.parameters())
            self._shared = {key for key, count in uses.items() if count > 1}
        return evaluation.stored_call(self._shared)

    def _inverting_call(self, evaluation: Evaluation, index: int, q: Tensor) -> Call:
        field = compiled_field(self.context, self.branches[index], self.couplings[index], bool(self.kwargs), q)
        if field is not None:
            return lambda q, kwargs: field.stored(q, counts=False)
        return lambda q, kwargs: call_to_invert(evaluation.contents(), q, kwargs, self.context)


_NO_ARGUMENTS = Arguments({})
