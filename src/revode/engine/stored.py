"""One call of a sequence run by ordinary autograd, or backwards without a graph of its own: `Pass`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revode.engine.arguments import Arguments
from revode.engine.branch import Context, Evaluation
from revode.engine.grid import gradient_in_strides
from revode.engine.replay import Call, call_to_invert
from revode.engine.step import advance, compiled_field, retreat
from revode.schemes import Coupling


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
        return lambda q, kwargs: call_to_invert(evaluation.contents(), q, kwargs, self.context.streams)


_NO_ARGUMENTS = Arguments({})
