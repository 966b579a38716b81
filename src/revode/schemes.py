"""Integrators, each a chain of one map on a pair of tensors.

Every step of every scheme is a `Coupling`

    (p, q) -> (q, s p + c q + a F(q)),        reversed by   p = (q' - c q - a F(q)) / s.

A scheme gives the coefficients (s, c, a) for each field in turn, and the way into the pair (``init``) and out of it
(``readout``). ``reverse`` undoes ``step`` with the same single evaluation of F.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from revode.errors import unknown

__all__ = [
    "BDIA", "SCHEMES", "AdditiveCoupling", "Coupling", "Leapfrog", "MidPoint", "Momentum", "Scheme", "Verlet", "create_scheme",
]  # fmt: skip

Field = Callable[[Tensor], Tensor]
Factor = Any
"""A coefficient: a number, or a tensor with one for each sample."""
Rounding = Callable[[Tensor, float], Tensor]
"""(u, gain) -> gain * u, rounded."""
MOST_SHIFT = 6
"""The largest n for which a scheme with |s| = 2^-n can be reversed exactly."""
State = tuple[Tensor, Tensor]
OpenState = tuple[Tensor | None, Tensor]
"""A pair. Its first member is None in a scheme on one tensor before the start."""


def is_number(factor: Factor, value: float) -> bool:
    """Return True if a coefficient is this number, and not a tensor."""
    return isinstance(factor, float) and factor == value


def times(x: Tensor, factor: Factor, out: Tensor | None = None) -> Tensor:
    """Return factor * x, or x itself if the factor is 1."""
    return x if is_number(factor, 1.0) else torch.mul(x, factor, out=out)


def plus(x: Tensor, y: Tensor, factor: Factor, out: Tensor | None = None) -> Tensor:
    """Return x + factor * y."""
    if isinstance(factor, Tensor):
        return torch.addcmul(x, y, factor, out=out)
    return torch.add(x, y, alpha=factor, out=out)


_SHIFTS = {2.0**-n: n for n in range(MOST_SHIFT + 1)}


def shift_of(carry: float) -> int | None:
    """Return n where |carry| = 2^-n, or None if there is no such n."""
    return _SHIFTS.get(abs(carry))


@dataclass(slots=True, eq=False)  # frozen would take 2 µs a branch to make
class Coupling:
    """The coefficients of q' = carry * p + keep * q + gain * F(q).

    >>> coupling, p, q = Coupling(carry=0.5, keep=0.0, gain=2.0), torch.ones(2), torch.ones(2)
    >>> coupling.reverse(q, q_next=coupling.step(p, q, u=q.tanh()), u=q.tanh())
    tensor([1., 1.])
    """

    carry: Factor
    keep: Factor
    gain: Factor
    shift: int = 0
    """n where |carry| = 2^-n for every sample. Give n if carry is a tensor."""

    def __post_init__(self) -> None:
        if isinstance(self.carry, float):
            self.shift = shift_of(self.carry) or 0

    @property
    def is_plain(self) -> bool:
        """Return True for the step q + F(q) of a plain residual network."""
        return is_number(self.carry, 0.0) and is_number(self.keep, 1.0) and is_number(self.gain, 1.0)

    def phi(self, q: Tensor, u: Tensor, rounding: Rounding | None, out: Tensor | None) -> Tensor:
        """Return keep * q + gain * u, rounded if asked; ``step`` and ``reverse`` get the same bits."""
        if rounding is None:
            increment = times(u, self.gain, out)
        elif isinstance(self.keep, float) and self.keep.is_integer():
            increment = rounding(u, self.gain)
        else:  # a part of q that is off the grid is rounded with the rest
            return rounding(plus(times(u, self.gain), q, self.keep), 1.0)
        return increment if is_number(self.keep, 0.0) else plus(increment, q, self.keep, out)

    def step(
        self, p: Tensor | None, q: Tensor, u: Tensor, rounding: Rounding | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return the new state q' from p, q and u = F(q). Without p its term is absent, as in a start.

        `rounding` rounds the increment before it is added. `out` may be u itself if nobody else needs u.
        """
        p = None if is_number(self.carry, 0.0) else p
        if p is not None and rounding is None and is_number(self.carry, 1.0) and is_number(self.keep, 0.0):
            return plus(p, u, self.gain, out)
        phi = self.phi(q, u, rounding, out)
        return phi if p is None else plus(phi, p, self.carry, out)

    def reverse(
        self, q: Tensor, q_next: Tensor, u: Tensor, rounding: Rounding | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return the old state p from q, q' and u = F(q)."""
        adds_only = rounding is None and is_number(self.carry, 1.0) and is_number(self.keep, 0.0)
        if adds_only and isinstance(self.gain, float):
            return torch.sub(q_next, u, alpha=self.gain, out=out)
        p = torch.sub(q_next, self.phi(q, u, rounding, out), out=out)
        return p if is_number(self.carry, 1.0) else torch.div(p, self.carry, out=out)


class Scheme(abc.ABC):
    """An integrator. A concrete scheme states its attributes and gives ``coupling``.

    >>> class Explicit(Scheme):  # Y+ = Y- + h F(Y)
    ...     def coupling(self, index):
    ...         return Coupling(self.carry, 0.0, self.h)
    ...     def starting(self):
    ...         return Coupling(0.0, 1.0, self.h)
    >>> ReversibleSequence([nn.Linear(4, 4)] * 3, Explicit(h=0.1))(torch.ones(1, 4)).sum().backward()

    Args:
        h: step size, positive.
        start: how a scheme on one tensor makes its second state; one of ``starts``.
        damping: d in [0, 1) multiplies the carried state by 1 - d.
    """

    splits: ClassVar[bool] = False
    """True if the pair is two parts of the state that take turns, such as halves. False for two successive states."""
    fields_per_step: ClassVar[int] = 1
    starts: ClassVar[tuple[str, ...]] = ()
    draws: ClassVar[bool] = False
    """True if coefficients are drawn at each call. Then a pair alone cannot be reversed."""

    def __init__(self, h: float = 0.1, *, start: str | None = None, damping: float = 0.0) -> None:
        if isinstance(h, bool) or not (isinstance(h, int | float) and 0.0 < h < float("inf")):
            raise ValueError(f"h must be a positive number, got {h!r}")
        if not (isinstance(damping, int | float) and 0.0 <= damping < 1.0):
            raise ValueError(f"damping must lie in [0, 1), got {damping!r}")
        if start is None:
            start = self.starts[0] if self.starts else None
        elif start not in self.starts:
            choices = " or ".join(repr(name) for name in self.starts) or "left out (this scheme needs none)"
            raise ValueError(f"start of {type(self).__name__} must be {choices}, got {start!r}")
        self.h = float(h)
        self.start = start
        self.damping = float(damping)

    @property
    def order(self) -> int | None:
        """Return the order of convergence as h goes to 0, or None if there is no ODE to converge to."""
        return None

    @property
    def carry(self) -> float:
        """Return s, the factor of the old state in one step."""
        return 1.0 - self.damping

    @property
    def halves(self) -> bool:
        """Return True if the pair is the two halves of the input, so that branches have half of its width."""
        return self.splits and self.start != "duplicate"

    @property
    def shift(self) -> int | None:
        """Return n if s is 2^-n or its negative, else None. Then ``exact`` applies and keeps n bits of each element."""
        return shift_of(self.carry)

    @property
    def invertible_exactly(self) -> bool:
        """Return True if ``exact`` applies."""
        return self.shift is not None

    @property
    def invertible(self) -> bool:
        """Return True if the input can be computed from a final pair."""
        return self.carry != 0.0 and not self.draws

    def in_eval(self) -> Scheme:
        """Return the scheme that runs in eval mode."""
        return self

    @abc.abstractmethod
    def coupling(self, index: int) -> Coupling:
        """Return the coefficients for the field at `index`."""

    def couplings(self, number: int, q: Tensor, started: bool, first: int = 0) -> list[Coupling]:
        """Return the coefficients of one call: `number` branches from the index `first` on, for states like q.

        `started` is True if the call begins with a pair.
        """
        couplings = [self.coupling(first + index) for index in range(number)]
        return couplings if started else [self.starting(), *couplings[1:]]

    def starting(self) -> Coupling:
        """Return the coefficients for the first field, where p is absent."""
        raise ValueError(f"{type(self).__name__} has no start: its pair is the two halves of the input")

    def dim_to_halve(self, shape: Sequence[int], split_dim: int | None) -> int:
        """Return the dimension whose halves are the pair: as given, else the channels. Raise if the shape is ambiguous."""
        num_dims = len(shape)
        if split_dim is not None:
            if not -num_dims <= split_dim < num_dims:
                raise ValueError(f"split_dim={split_dim} is out of range for an input of shape {tuple(shape)}")
            return split_dim
        if num_dims == 3:
            raise ValueError(
                f"{type(self).__name__} halves one dimension of its input, and three dimensions do not tell which: give "
                "split_dim=-1 for (batch, time, width) or split_dim=1 for (batch, channels, length)"
            )
        if num_dims < 2:
            raise ValueError(f"{type(self).__name__} halves dimension 1 of its input, got one of shape {tuple(shape)}")
        return 1

    def init(self, x: Tensor, split_dim: int | None = None) -> OpenState:
        """Return the pair that x enters with: its two halves, or (None, x)."""
        if not self.splits:
            return None, x
        split_dim = self.dim_to_halve(x.shape, split_dim)
        size = x.shape[split_dim]
        if size % 2:
            raise ValueError(
                f"{type(self).__name__} splits dimension {split_dim} in two halves, but its size is {size} "
                f"(input of shape {tuple(x.shape)}): give it an even size"
            )
        y, z = x.split(size // 2, dim=split_dim)
        return y, z

    def step(self, state: OpenState, field: Field, index: int = 0) -> State:
        """Return the pair behind one coupling, with one evaluation of `field`."""
        p, q = state
        coupling = self.starting() if p is None else self.coupling(index)
        return q, coupling.step(p, q, field(q))

    def reverse(self, state: State, field: Field, index: int = 0) -> State:
        """Undo ``step`` with one evaluation of `field`. (To undo a start, take the first member alone.)"""
        q, q_next = state
        return self.coupling(index).reverse(q, q_next, field(q)), q

    def undo_init(self, state: State, split_dim: int | None = None) -> Tensor:
        """Return the input whose parts are this pair."""
        return torch.cat(state, dim=self.dim_to_halve(state[1].shape, split_dim))

    def readout(self, state: State, split_dim: int | None = None) -> Tensor:
        """Return the halves joined, or a copy of the newest state."""
        return self.undo_init(state, split_dim) if self.splits else state[1].clone()

    def __repr__(self) -> str:
        """Return the call that makes the scheme: its first argument, and those that differ from their defaults."""
        parts, usual_start = [], self.starts[0] if self.starts else None
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value, usual = getattr(self, name), usual_start if name == "start" else parameter.default
            if not parts or value != usual:
                parts.append(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


class Verlet(Scheme):
    """The Hamiltonian network's step y += h F(z); z -= h G(y) (paper, eq. 11), of order 1 as printed.

    Fields come in pairs ``[F1, G1, F2, G2, ...]``; the sign of G is the scheme's.

    >>> ReversibleSequence([nn.Linear(2, 2), nn.Linear(2, 2)], Verlet(h=0.1))(torch.randn(3, 4)).shape
    torch.Size([3, 4])
    """

    splits = True
    fields_per_step = 2

    @property
    def order(self) -> int | None:
        return None if self.damping else 1

    def coupling(self, index: int) -> Coupling:
        return Coupling(self.carry, 0.0, -self.h if index % 2 else self.h)


class AdditiveCoupling(Scheme):
    """RevNet's and NICE's step y += F(z); z += G(y) (Gomez et al. 2017; Dinh et al. 2014). Fields come as ``[F1, G1, ...]``.

    >>> fields = [nn.Linear(4, 4), nn.Linear(4, 4)]
    >>> ReversibleSequence(fields, AdditiveCoupling(start="duplicate"))(torch.randn(3, 4)).shape
    torch.Size([3, 4])

    Args:
        start: ``"split"``: the pair is the two halves of the input. ``"duplicate"``: the pair is the input twice, and branches
            keep the input's width (Kitaev et al. 2020).
        readout: ``"join"`` or ``"mean"`` of the final pair; by default the one that undoes the start.
    """

    splits = True
    fields_per_step = 2
    starts = ("split", "duplicate")
    readouts: ClassVar[dict[str, str]] = {"split": "join", "duplicate": "mean"}
    """Each start, with the readout that undoes it."""

    def __init__(self, *, start: str | None = None, readout: str | None = None, damping: float = 0.0) -> None:
        super().__init__(1.0, start=start, damping=damping)
        self.leaves_by = self.readouts[str(self.start)] if readout is None else readout
        if self.leaves_by not in self.readouts.values():
            raise ValueError(f"readout of AdditiveCoupling must be 'join' or 'mean', got {readout!r}")

    def coupling(self, index: int) -> Coupling:
        return Coupling(self.carry, 0.0, 1.0)

    def init(self, x: Tensor, split_dim: int | None = None) -> OpenState:
        return super().init(x, split_dim) if self.start == "split" else (x, x)

    def undo_init(self, state: State, split_dim: int | None = None) -> Tensor:
        return super().undo_init(state, split_dim) if self.start == "split" else state[1].clone()

    def readout(self, state: State, split_dim: int | None = None) -> Tensor:
        return super().undo_init(state, split_dim) if self.leaves_by == "join" else torch.lerp(*state, 0.5)

    def __repr__(self) -> str:
        parts = [f"start={self.start!r}"] if self.start != "split" else []
        parts += [f"readout={self.leaves_by!r}"] if self.leaves_by != self.readouts[str(self.start)] else []
        parts += [f"damping={self.damping:g}"] if self.damping else []
        return f"AdditiveCoupling({', '.join(parts)})"


class MidPoint(Scheme):
    """The step Y+ = a Y- + (1 - a) Y + (1 + a) h F(Y), for Y' = F(Y).

    a = 1 is the paper's network, Y+ = Y- + 2h F(Y): central differences (eq. 13), order 2. a = 0 is a plain residual network,
    which cannot be reversed. In between lie the blends of Gal et al. (2025), of order 1. Reversing divides by a.

    Starts: ``"euler"`` Y1 = Y0 + h F(Y0), as the paper's prose; ``"paper"`` Y- = 0, so Y1 = 2h F(Y0), as its equation says.

    >>> MidPoint(h=0.5, blend=0.25).coupling(0)
    Coupling(carry=0.25, keep=0.75, gain=0.625, shift=2)

    Args:
        h: step size, positive.
        blend: a in [-1, 1]. ``exact`` works for ±1, and for ±2^-n with n up to 6, where n bits of each element and step are
            kept (in 1, 2, 4, 4, 8 and 8 bits).
    """

    starts = ("euler", "paper")

    def __init__(self, h: float = 0.1, *, blend: float = 1.0, start: str | None = None, damping: float = 0.0) -> None:
        super().__init__(h, start=start, damping=damping)
        if isinstance(blend, bool) or not (isinstance(blend, int | float) and -1.0 <= blend <= 1.0):
            raise ValueError(f"blend must lie in [-1, 1], got {blend!r}")
        self.blend = float(blend)

    @property
    def order(self) -> int | None:
        if self.start != "euler" or self.damping or self.blend == -1.0:
            return None
        return 2 if self.blend == 1.0 else 1

    @property
    def carry(self) -> float:
        return self.blend * (1.0 - self.damping)

    def coupling(self, index: int) -> Coupling:
        return Coupling(self.carry, 1.0 - self.blend, (1.0 + self.blend) * self.h)

    def starting(self) -> Coupling:
        return Coupling(0.0, 1.0, self.h) if self.start == "euler" else replace(self.coupling(0), carry=0.0)


class BDIA(MidPoint):
    """The blended step with a drawn sign: Y+ = a Y- + (1 - a) Y + (1 + a) h F(Y), a = ±blend (Zhang et al., ICML 2025).

    Signs are drawn for each sample and step from torch's RNG of the device. Their mean is the plain residual network Y + h
    F(Y), which runs in eval mode, bit for bit: a plain network is trained reversibly, and stays one. A draw adds a times the
    difference of two neighbouring steps. A small blend makes little noise, but keeps more bits.

    >>> branch, x = nn.Linear(4, 4), torch.randn(3, 4)
    >>> torch.equal(ReversibleSequence([branch], BDIA()).eval()(x), x + branch(x))
    True

    Args:
        h: step size; 1 for a plain residual network.
        blend: the magnitude of a, in (0, 1].
        batch_dim: the dimension that counts the samples.
    """

    starts = ("euler",)
    draws = True

    def __init__(
        self, h: float = 1.0, *, blend: float = 0.5, batch_dim: int = 0, start: str | None = None, damping: float = 0.0
    ) -> None:
        super().__init__(h, blend=blend, start=start, damping=damping)
        if self.blend <= 0.0:
            raise ValueError(f"blend of BDIA must lie in (0, 1], got {blend!r}")
        if not isinstance(batch_dim, int) or isinstance(batch_dim, bool):
            raise ValueError(f"batch_dim must be an integer, got {batch_dim!r}")
        self.batch_dim = batch_dim

    @property
    def order(self) -> int | None:
        return None

    def in_eval(self) -> Scheme:
        return MidPoint(self.h, blend=0.0)

    def couplings(self, number: int, q: Tensor, started: bool, first: int = 0) -> list[Coupling]:
        if not -q.dim() <= self.batch_dim < q.dim():
            raise ValueError(f"batch_dim={self.batch_dim} is out of range for a state of shape {tuple(q.shape)}")
        shape = [1] * q.dim()
        shape[self.batch_dim] = q.shape[self.batch_dim]
        couplings = []
        for _ in range(number):
            a = (2.0 * self.blend) * (torch.randint(2, shape, device=q.device).to(q.dtype) - 0.5)
            couplings.append(Coupling(a * (1.0 - self.damping), 1.0 - a, (1.0 + a) * self.h, self.shift or 0))
        return couplings if started else [self.starting(), *couplings[1:]]


class Leapfrog(Scheme):
    """The step Y+ = 2Y - Y- - h² F(Y): symmetric differences for Y'' = -F(Y) (paper, eq. 16).

    Starts: ``"taylor"`` Y1 = Y0 - h²/2 F(Y0), zero velocity, order 2; ``"meganet"`` Y(-1) = Y0, so Y1 = Y0 - h² F(Y0), order 1;
    ``"paper"`` Y1 = 2 Y0 - h² F(Y0) as printed, which is an initial velocity Y0 / h. Damping d gives Y+ = (2 - d) Y - (1 - d)
    Y- - h² F(Y).

    >>> Leapfrog(h=0.5).coupling(0)
    Coupling(carry=-1.0, keep=2.0, gain=-0.25, shift=0)
    """

    starts = ("taylor", "meganet", "paper")

    @property
    def order(self) -> int | None:
        return None if self.damping else {"taylor": 2, "meganet": 1}.get(self.start or "")

    @property
    def carry(self) -> float:
        return -(1.0 - self.damping)

    def coupling(self, index: int) -> Coupling:
        return Coupling(self.carry, 1.0 - self.carry, -(self.h**2))

    def starting(self) -> Coupling:
        if self.start == "taylor":
            return Coupling(0.0, 1.0, -0.5 * self.h**2)
        return Coupling(0.0, 1.0 if self.start == "meganet" else 1.0 - self.carry, -(self.h**2))


class Momentum(Scheme):
    """The momentum network's step Y+ = (1 + γ) Y - γ Y- + (1 - γ) F(Y), started at rest (Sander et al. 2021).

    Reversing divides by γ at every step and so amplifies rounding. The engine keeps anchors to bound the error.

    >>> Momentum(gamma=0.5).coupling(0)
    Coupling(carry=-0.5, keep=1.5, gain=0.5, shift=1)
    """

    def __init__(self, gamma: float = 0.9, *, damping: float = 0.0) -> None:
        if not (isinstance(gamma, int | float) and 0.0 < gamma < 1.0):
            raise ValueError(f"gamma must lie in (0, 1), got {gamma!r}")
        super().__init__(1.0, damping=damping)
        self.gamma = float(gamma)

    @property
    def carry(self) -> float:
        return -self.gamma * (1.0 - self.damping)

    def coupling(self, index: int) -> Coupling:
        return Coupling(self.carry, 1.0 - self.carry, 1.0 - self.gamma)

    def starting(self) -> Coupling:
        return Coupling(0.0, 1.0, 1.0 - self.gamma)


SCHEMES: dict[str, type[Scheme]] = {
    "verlet": Verlet,
    "additive": AdditiveCoupling,
    "midpoint": MidPoint,
    "bdia": BDIA,
    "leapfrog": Leapfrog,
    "momentum": Momentum,
}


def create_scheme(name: str, **options: Any) -> Scheme:
    """Return the scheme of this name in `SCHEMES`, built with those of the options that it takes and that are not None.

    >>> create_scheme("midpoint", h=0.5, blend=0.25), create_scheme("additive", h=0.5)
    (MidPoint(h=0.5, blend=0.25), AdditiveCoupling())
    """
    if name not in SCHEMES:
        raise unknown("scheme", name, SCHEMES)
    taken = inspect.signature(SCHEMES[name]).parameters
    return SCHEMES[name](**{key: value for key, value in options.items() if key in taken and value is not None})
