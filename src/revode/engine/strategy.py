"""Gradient strategies: one frozen set of options, checked once."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from revode.engine.grid import Grid
from revode.schemes import Scheme

STRATEGIES = ("reversible", "checkpoint", "store")
ROUNDING_GROWTH = 64.0
"""The factor by which a walk back may amplify rounding (6 bits) before an anchor is kept, when |s| < 1."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Options of how gradients are computed. Only `exact` changes numbers: states are rounded to the grid.

    >>> Strategy(exact=True).replace(backprop="store")
    Strategy(backprop='store', exact=True)

    Args:
        backprop: ``"reversible"`` (memory of one branch), ``"checkpoint"`` (one state a branch) or ``"store"``.
        exact: True, or the bits k of the grid 2^-k, for bit-exact reversing (k = 14 if True).
        anchor_every: keep the pair of every k-th step, so that drift starts anew there. Schemes that invert with amplified
            rounding (Momentum, damping) have anchors by default.
        memory_budget: bytes of activations that may be kept; as many branches as fit are stored, the rest recomputed.
        verify: whether to check that the walk back ends where forward began; if not, raise `ReversalError`.
        compile: whether to compile the branches, once for each kind and shape.
    """

    backprop: str = "reversible"
    exact: bool | int = False
    anchor_every: int | None = None
    memory_budget: int | None = None
    verify: bool = True
    compile: bool = False

    def __post_init__(self) -> None:
        if self.backprop not in STRATEGIES:
            raise ValueError(f"backprop must be one of {', '.join(map(repr, STRATEGIES))}, got {self.backprop!r}")
        for name, unit in (("anchor_every", "steps"), ("memory_budget", "bytes")):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a positive number of {unit} or None, got {value!r}")
        if self.memory_budget is not None and self.backprop != "reversible":
            raise ValueError(f"memory_budget goes with backprop='reversible', got backprop={self.backprop!r}")
        object.__setattr__(self, "_grid", None if self.exact is False else Grid(self.exact))

    @property
    def grid(self) -> Grid | None:
        """Return the grid of ``exact``."""
        return self._grid  # type: ignore[attr-defined]

    def replace(self, **changes: Any) -> Strategy:
        """Return a strategy with these options changed. A memory budget is dropped where it does not apply."""
        unknown = changes.keys() - {field.name for field in dataclasses.fields(self)}
        if unknown:
            names = ", ".join(field.name for field in dataclasses.fields(self))
            raise TypeError(f"a strategy has no option {sorted(unknown)[0]!r}: choose from {names}")
        if changes.get("backprop", "reversible") != "reversible":
            changes = {"memory_budget": None, **changes}
        return dataclasses.replace(self, **changes)

    def check_scheme(self, scheme: Scheme) -> None:
        """Raise if these options do not go with `scheme`."""
        if self.exact is not False and scheme.shift is None:
            raise ValueError(
                f"exact={self.exact!r} needs a scheme that carries the old state on, or 1/2, 1/4, ... 1/64 of it; {scheme!r} "
                f"scales it by {scheme.carry:g} at each step: use exact=False"
            )

    def grid_for(self, scheme: Scheme) -> Grid | None:
        """Return the grid that states of `scheme` live on; a plain residual network needs none."""
        return None if scheme.shift is None else self.grid

    def segment_length(self, scheme: Scheme, num_branches: int) -> int:
        """Return the number of branches between two kept pairs: all, or as many as between two anchors."""
        if self.backprop == "checkpoint":
            return 1
        carry = abs(scheme.carry)
        if carry == 0.0:
            return 1
        if self.anchor_every is not None:
            return self.anchor_every * scheme.fields_per_step
        if carry == 1.0 or self.grid_for(scheme) is not None:
            return num_branches  # no anchors
        return max(1, math.floor(math.log(ROUNDING_GROWTH) / -math.log(carry))) * scheme.fields_per_step

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)
        changed = [field.name for field in fields if getattr(self, field.name) != field.default]
        return f"Strategy({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"


OPTIONS = tuple(field.name for field in dataclasses.fields(Strategy))
