"""`odeint`: ordinary differential equations solved by reversible Runge-Kutta steps, in torchdiffeq's habits.

The increment Ψ_h of any Runge-Kutta step makes a reversible one on a pair (McCallum and Foster, arXiv 2410.11648):

    y' = λ y + (1 - λ) z + Ψ_h(t, z),      z' = z - Ψ_{-h}(t', y')

These are two couplings of the one map: (λ, 1 - λ, 1) with F = Ψ_h, then (1, 0, -1) with F = Ψ_{-h}. The difference y - z obeys
the equation backwards in time: it grows where solutions approach each other. There an anchor is kept, and z becomes y.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from revode.engine.call import compilation_is_possible, eagerly
from revode.engine.walk import Walk
from revode.errors import unknown
from revode.memory import graph_leaves
from revode.schemes import AdditiveCoupling, Coupling, State


class Tableau(NamedTuple):
    """A Runge-Kutta method. The error has a weight for each slope, and one for the slope at the new state."""

    order: int
    c: Sequence[float]
    a: Sequence[Sequence[float]]
    b: Sequence[float]
    error: Sequence[float] = ()


METHODS = {
    "euler": Tableau(1, (0,), ((),), (1,)),
    "midpoint": Tableau(2, (0, 1 / 2), ((), (1 / 2,)), (0, 1)),
    "heun2": Tableau(2, (0, 1), ((), (1,)), (1 / 2, 1 / 2)),
    "rk4": Tableau(4, (0, 1 / 3, 2 / 3, 1), ((), (1 / 3,), (-1 / 3, 1), (1, -1, 1)), (1 / 8, 3 / 8, 3 / 8, 1 / 8)),
    "bosh3": Tableau(
        3, (0, 1 / 2, 3 / 4), ((), (1 / 2,), (0, 3 / 4)), (2 / 9, 1 / 3, 4 / 9), (-5 / 72, 1 / 12, 1 / 9, -1 / 8)
    ),
    "dopri5": Tableau(
        5,
        (0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1),
        (
            (),
            (1 / 5,),
            (3 / 40, 9 / 40),
            (44 / 45, -56 / 15, 32 / 9),
            (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
            (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        ),
        (35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
        (71 / 86400, 0, -142 / 50085, 71 / 2880, -5751 / 169600, 44 / 1575, -1 / 60),
    ),
}
"""Methods by name; ``rk4`` is the 3/8 rule, as in torchdiffeq."""
OPTIONS = ("step_size", "grid_constructor", "min_step", "max_num_steps", "blend", "anchor_every", "stats")
"""Names of options: two of fixed steps, two of adaptive ones, and those of all methods."""
LACKING = {
    "method": "dopri8 fehlberg2 adaptive_heun heun3 explicit_adams implicit_adams fixed_adams scipy_solver",
    "option": "first_step max_step safety ifactor dfactor norm dtype step_t jump_t interp perturb solver",
    "argument": "event_fn adjoint_params adjoint_rtol adjoint_atol adjoint_method adjoint_options",
    "attribute of func": "callback_step callback_accept_step callback_reject_step",
}
"""Names that torchdiffeq has and revode has not, by kind."""
GROWTH, LARGEST_SHARE = 1.5, 0.05
"""Bounds of y - z for fixed steps: a multiple of its growth in one step, and a share of the increment of that step."""


class Increment(nn.Module):
    """The increment Ψ that a Runge-Kutta step adds to a state, which is one tensor. One module serves all steps and times."""

    def __init__(self, func: Any, tableau: Tableau, shapes: Any, rtol: float, atol: float) -> None:
        super().__init__()
        self.func, self.tableau, self.shapes, self.rtol, self.atol = func, tableau, shapes, rtol, atol
        self.owner = owner if isinstance(owner := getattr(func, "__self__", None), nn.Module) else None
        self.num_evaluations, self.estimates = 0, False
        self.error = 0.0  # the local error in units of the tolerance, where it is estimated; never in a recomputation

    def parts(self, y: Tensor, *leading: int) -> Any:
        """Return the parts of a state, as the user knows them."""
        if self.shapes is None:
            return y
        parts = y.split([shape.numel() for shape in self.shapes], dim=-1)
        return tuple(part.reshape((*leading, *shape)) for part, shape in zip(parts, self.shapes, strict=True))

    def norms(self, errors: Sequence[Tensor], size: Tensor) -> list[float]:
        """Return the norms of errors in units of the tolerance at this size: root mean squares, of all parts the largest."""
        scaled = [self.parts(error / (self.atol + self.rtol * size)) for error in errors]
        sizes = [torch.stack([*map(_rms, each if self.shapes else [each])]).max() for each in scaled]
        return torch.stack(sizes).tolist()

    def slope(self, time: Any, y: Tensor) -> Tensor:
        """Return func(t, y) as one tensor. The time is a number, or a tensor which requires grad."""
        self.num_evaluations += 1
        t = time.to(y.dtype) if isinstance(time, Tensor) else torch.full((), time, dtype=y.dtype, device=y.device)
        value = self.func(t, self.parts(y))
        found = [getattr(part, "shape", type(part)) for part in (value if isinstance(value, tuple | list) else [value])]
        if found != (self.shapes or [y.shape]) or isinstance(value, Tensor) == bool(self.shapes):
            raise ValueError(f"func(t, y) must return what y is, of shape {self.shapes or y.shape}, got {found}")
        value = _joined(value)
        if value.dtype != y.dtype and not torch.is_autocast_enabled(y.device.type):
            raise ValueError(f"func(t, y) must keep the dtype of y, {y.dtype}, got {value.dtype}: cast its result")
        return value.to(y.dtype)

    def forward(self, q: Tensor, *, span: tuple[Any, Any], begin: float, until: float) -> Tensor:
        """Return Ψ at q from one fraction of `span`, the time between two outputs, to another."""
        h, slopes = (until - begin) * (span[1] - span[0]), []
        for c, row in zip(self.tableau.c, self.tableau.a, strict=True):
            y = q + h * _sum(row, slopes) if row else torch.ops.aten.alias(q)
            slopes.append(self.slope(_at(span, begin * (1.0 - c) + until * c), y))
        u = h * _sum(self.tableau.b, slopes)
        if self.estimates:
            slopes.append(self.slope(_at(span, until), q + u))
            (error,) = self.norms([h * _sum(self.tableau.error, slopes)], torch.maximum(q.abs(), (q + u).abs()))
            self.error = error if error == error else math.inf
        return u


def _rms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x) / max(1, x.numel()) ** 0.5


def _joined(parts: Any) -> Any:
    return parts if isinstance(parts, Tensor) else torch.cat([part.reshape(-1) for part in parts])


def _sum(weights: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
    total = slopes[0] * weights[0]
    for weight, slope in zip(weights[1:], slopes[1:], strict=True):
        total = torch.add(total, slope, alpha=weight) if weight else total
    return total


def _at(span: tuple[Any, Any], place: float) -> Any:
    return span[1] if place == 1.0 else span[0] + place * (span[1] - span[0])


class Solver:
    """The pair of one solution, and its steps through time."""

    def __init__(self, walk: Walk, blend: float, increment: Increment, y0: Tensor) -> None:
        self.walk, self.increment, self.state = walk, increment, cast(State, walk.enter(y0))
        self.forth, self.back = Coupling(blend, 1.0 - blend, 1.0), Coupling(1.0, 0.0, -1.0)
        self.is_adaptive = bool(increment.tableau.error)
        self.every = walk.strategy.segment_length(walk.scheme, 0) // 2  # steps between anchors of the walk's own
        self.stats = {"steps": 0, "rejected": 0, "anchors": 0}
        self.num_apart = 0  # steps since y and z were equal

    def step(self, span: tuple[Any, Any], begin: float, until: float, most: float = 1.0) -> float:
        """Advance the pair unless the local error is above `most`. Return the error, in units of the tolerance."""
        increment, before = self.increment, self.state
        increment.estimates = self.is_adaptive
        half = self.walk.step(increment, before, coupling=self.forth, span=span, begin=begin, until=until)
        increment.estimates = False
        if not increment.error <= most:
            self.walk.undo(before)
            self.stats["rejected"] += 1
            return increment.error
        self.state = self.walk.step(increment, half, coupling=self.back, span=span, begin=until, until=begin)
        self.stats["steps"] += 1
        self.stats["anchors"] += bool(self.num_apart and self.every and self.num_apart % self.every == 0)
        self.num_apart += 1
        if self._is_apart(before[1], *self.state):
            self.walk.undo(half)
            self.state = half[1], half[1]
            if not bool(half[1].detach().isfinite().all()):
                raise ValueError(f"the state is not finite at t = {_at(span, until):g}: give smaller steps")
            self.num_apart, self.stats["anchors"] = 0, self.stats["anchors"] + 1
        return increment.error

    @torch.no_grad()
    def _is_apart(self, z_before: Tensor, y: Tensor, z: Tensor) -> bool:
        """Return True if y - z is more than the local errors since they were equal, so that it has grown by itself."""
        first, size = self.num_apart == 1, torch.maximum(y.abs(), z.abs())
        self._size = size if first else torch.maximum(size, self._size)  # an element may pass through zero
        rounding = 4.0 * torch.finfo(y.dtype).eps * _rms(y)
        apart, rounding, moved = self.increment.norms([y - z, rounding.expand_as(y), y - z_before], self._size)
        if first:
            self._allowed, self._fresh = 0.0, GROWTH * min(apart, LARGEST_SHARE * moved)
        self._allowed += rounding + (self.increment.error if self.is_adaptive else self._fresh)
        return not apart <= self._allowed

    def adapt(self, span: tuple[Any, Any], ends: tuple[float, float], h: float, options: dict[str, Any]) -> float:
        """Advance over a span in steps whose local error is small; return the next step size."""
        length, begin, min_step = abs(ends[1] - ends[0]), 0.0, options.get("min_step", 0.0)
        for _ in range(most_steps := options.get("max_num_steps", 2**31 - 1)):
            h = max(h, min_step)
            lands = begin * length + 1.01 * h >= length
            until = 1.0 if lands else begin + h / length
            taken, at = (until - begin) * length, _at(ends, begin)
            if h < 1e-15 * max(abs(at), length):
                reason = "the solution ends there, func is not finite, or rtol and atol are below rounding"
                raise ValueError(f"the step size fell to {h:.1g} at t = {at:g}: {reason}")
            most = math.inf if taken <= min_step else 1.0
            error = self.step(span, begin, until, most)
            factor = 0.9 * max(error, 1e-30) ** (-1.0 / self.increment.tableau.order)
            following = taken * min(10.0, max(factor, 1.0 if error < 1.0 else 0.2))
            if error <= most and lands:
                return max(h, following)
            begin, h = until if error <= most else begin, following
        raise ValueError(f"max_num_steps={most_steps} do not reach t = {ends[1]:g}: allow more, or larger tolerances")


@torch.no_grad()
def first_step(increment: Increment, y: Tensor, f: Tensor, start: float, end: float) -> float:
    """Return the first step size (Hairer, Norsett, Wanner: Solving Ordinary Differential Equations I, II.4)."""
    size, steep = increment.norms([y, f], y.abs())
    h = min(0.01 * size / steep if min(size, steep) >= 1e-5 else 1e-6, abs(end - start))
    step = math.copysign(h, end - start)
    (bent,) = increment.norms([increment.slope(start + step, y + step * f) - f], y.abs())
    steepest, order = max(steep, bent / h if math.isfinite(bent) else 0.0), increment.tableau.order
    return min(100.0 * h, max(1e-6, 1e-3 * h) if steepest <= 1e-15 else (0.01 / steepest) ** (1.0 / order))


def first_slope(increment: Increment, y: Tensor, time: float, tracked: bool) -> Tensor:
    """Return func(t, y); raise if func uses a tensor that requires grad and is not its parameter."""
    hidden = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    with torch.set_grad_enabled(tracked), hidden:
        y = y.clone().requires_grad_(tracked)  # func may differentiate by it
        slope = torch.ops.aten.alias(increment.slope(time, torch.ops.aten.alias(y)))
    if not bool(slope.detach().isfinite().all()):
        raise ValueError(f"func(t, y) is not finite at t = {time:g}, where y is y0")
    ours = {id(y), *map(id, increment.parameters())}
    way_out = "make func a torch.nn.Module that holds it, or use gradient='store'"
    for shape in [tuple(leaf.shape) for leaf in graph_leaves([slope]) if id(leaf) not in ours]:
        raise ValueError(f"func uses a tensor of shape {shape} that requires grad and is not its parameter: {way_out}")
    return slope.detach()


def mesh(options: dict[str, Any], func: Any, y0: Any, t: Tensor) -> list[list[float]]:
    """Return where fixed steps begin and end, as fractions of each span of t."""
    times, size, construct = t.tolist(), options.get("step_size"), options.get("grid_constructor")
    spans = list(itertools.pairwise(times))
    if construct is None:
        numbers = [1 if size is None else math.ceil(abs(b - a) / float(size) - 1e-6) or 1 for a, b in spans]
        return [[step / number for step in range(number + 1)] for number in numbers]
    grid, sign = construct(func, y0, t).tolist(), math.copysign(1.0, times[-1] - times[0])
    ordered = all(sign * a < sign * b for a, b in itertools.pairwise(grid))
    if size is not None or not ordered or (grid[0], grid[-1]) != (times[0], times[-1]):
        raise ValueError("grid_constructor goes without step_size, and returns times from t[0] to t[-1] in this order")
    inner = [[(time - a) / (b - a) for time in grid if sign * a < sign * time < sign * b] for a, b in spans]
    return [[0.0, *places, 1.0] for places in inner]


def odeint(
    func: Any,
    y0: Any,
    t: Tensor,
    *,
    rtol: float = 1e-7,
    atol: float = 1e-9,
    method: str = "dopri5",
    options: dict[str, Any] | None = None,
    gradient: str = "reversible",
    verify: bool = True,
    **lacking: Any,
) -> Any:
    """Return the solution of dy/dt = func(t, y), y(t[0]) = y0, at all times t.

    Each step is reversible, so that gradients by y0, t and the parameters of func take the memory of one step.

    >>> class Spiral(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.mix = nn.Linear(2, 2)
    ...     def forward(self, t, y):
    ...         return self.mix(y**3)
    >>> solution = odeint(Spiral(), torch.tensor([[1.0, 0.0]]), torch.linspace(0, 2, 20), rtol=1e-5, atol=1e-6)
    >>> solution[-1].sum().backward()  # solution has the shape (20, 1, 2)

    Args:
        func: (t, y) -> dy/dt. Tensors in it that require grad must be its parameters; then func is a module, or a method of
            one.
        y0: a tensor, or a tuple of tensors; then func and odeint return tuples, too.
        t: times, increasing or decreasing. Steps land on each; times between them move with them in proportion.
        rtol: relative tolerance of a step.
        atol: absolute tolerance of a step.
        method: ``euler``, ``midpoint``, ``heun2``, ``rk4`` (the 3/8 rule): fixed steps; ``bosh3``, ``dopri5``: adaptive ones.
        options: ``step_size`` or ``grid_constructor`` of fixed steps (unless given, one from each time to the next);
            ``min_step`` and ``max_num_steps`` (between two times) of adaptive ones; ``blend``: λ in (0, 1], 0.999 unless given;
            ``anchor_every``: keep each k-th pair; ``stats``: a dict that gets steps, rejected ones, anchors, evaluations.
        gradient: ``"reversible"``, ``"checkpoint"`` (keeps two states a step) or ``"store"`` (autograd); values are the same.
        verify: whether to check that the walk back ends where forward began; if not, raise `ReversalError`.
        lacking: arguments of torchdiffeq that revode has not; refused by name.
    """
    solve = eagerly(_solve) if compilation_is_possible() else _solve
    return solve(func, y0, t, rtol, atol, method, options or {}, {"backprop": gradient, "verify": verify}, lacking)


def _solve(func: Any, y0: Any, t: Any, rtol: Any, atol: Any, method: Any, options: Any, how: Any, lacking: Any) -> Any:
    options = {name: value for name, value in options.items() if value is not None}
    _check(func, y0, t, rtol, atol, method, options, lacking)
    shapes = None if isinstance(y0, Tensor) else [part.shape for part in y0]
    increment = Increment(func, METHODS[method], shapes, float(rtol), float(atol))
    blend = float(options.get("blend", 0.999))
    pair = AdditiveCoupling(start="duplicate", damping=1.0 - blend)
    solver = Solver(Walk(pair, anchor_every=options.get("anchor_every"), **how), blend, increment, _joined(y0))
    y = solver.state[1].detach()
    t = t.to(y.device, torch.promote_types(t.dtype, y.dtype))
    tracked, times = torch.is_grad_enabled(), t.detach().tolist()
    slope = first_slope(increment, y, times[0], tracked and how["backprop"] != "store")
    ends, outputs = list(itertools.pairwise(times)), [solver.state[0]]
    spans = list(itertools.pairwise(t.unbind())) if t.requires_grad and tracked else ends
    places = [] if solver.is_adaptive else mesh(options, func, y0, t.detach())
    h = first_step(increment, y, slope, *ends[0]) if solver.is_adaptive and spans else 0.0
    for number, span in enumerate(spans):
        if solver.is_adaptive:
            h = solver.adapt(span, ends[number], h, options)
        for begin, until in itertools.pairwise(places[number] if places else ()):
            solver.step(span, begin, until)
        outputs.append(solver.state[0])
    options.get("stats", {}).update(solver.stats, evaluations=increment.num_evaluations)
    return increment.parts(torch.stack(outputs), len(outputs))


def _check(func: Any, y0: Any, t: Any, rtol: Any, atol: Any, method: Any, options: Any, lacking: Any) -> None:
    """Raise if the arguments of a call are not right."""
    callbacks = [name for name in LACKING["attribute of func"].split() if hasattr(func, name)]
    for kind, names in zip(LACKING, ([str(method)], options, lacking, callbacks), strict=True):
        for name in {*LACKING[kind].split()} & {*names}:
            raise ValueError(f"odeint has not torchdiffeq's {kind} {name!r}: leave it out, or use torchdiffeq")
    if lacking:
        raise TypeError(f"odeint has no argument {min(lacking)!r}")
    if method not in METHODS:
        raise unknown("method", str(method), METHODS)
    known = OPTIONS[2:] if METHODS[method].error else (*OPTIONS[:2], *OPTIONS[4:])
    for name in options.keys() - {*known}:
        raise unknown(f"option of {method}", name, known)
    numbers = {"rtol": rtol, "atol": atol, "step_size": options.get("step_size", 1), "blend": options.get("blend", 1)}
    for name, value in numbers.items():
        if isinstance(value, tuple | list) or not 0.0 < float(value) <= (1.0 if name == "blend" else math.inf):
            raise ValueError(f"{name} must be one positive number{', at most 1' * (name == 'blend')}, got {value!r}")
    parts = [y0] if isinstance(y0, Tensor) else y0
    if not isinstance(parts, tuple | list) or not parts or not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(f"y0 must be a tensor, or a tuple of tensors, got {type(y0).__name__}")
    kinds = {f"{part.dtype} on {part.device}" for part in parts}
    are_finite = all(bool(part.detach().isfinite().all()) for part in parts)
    if not (parts[0].is_floating_point() and are_finite and len(kinds) == 1):
        raise ValueError(f"y0 must be floating-point, real and finite, of one dtype and device, got {', '.join(kinds)}")
    if not isinstance(t, Tensor) or not t.is_floating_point() or t.dim() != 1 or not len(t):
        raise ValueError(f"t must be a floating-point tensor of one dimension, got {t!r}")
    steps = t.detach().diff()
    if not (bool(t.detach().isfinite().all()) and (bool((steps > 0).all()) or bool((steps < 0).all()))):
        raise ValueError(f"t must be finite, and strictly increasing or decreasing, got {t.detach().tolist()}")
