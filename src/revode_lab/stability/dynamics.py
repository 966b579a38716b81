"""The ODE behind a scheme, one whole step, and the limit of h, read off its coupling coefficients.

A coupling is q' = s p + c q + a F(q) (see `revode.schemes`). Three kinds of ODE lie behind these networks:

| the scheme | its ODE | linear test problem, stable while |
|---|---|---|
| splits its input, gains a of opposite sign (Verlet) | y' = F(z), z' = -G(y) | h √λ(F'G') ≤ 1 + s |
| c = 0 (MidPoint) | y' = F(y), eigenvalues iμ | h μ ≤ (1 + s) / 2 |
| c = 1 - s with s < 0 (Leapfrog) | y'' = -F(y) | h √λ(F') ≤ √(2 (1 + \\|s\\|)) |

With \\|s\\| = 1 these are the bounds 2, 1 and 2 over the spectral radius of the ODE's Jacobian. Damping moves them as shown,
by the Jury conditions on the quadratic whose roots ξ are the growth factors per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from revode.schemes import Field, Scheme, State, is_number

StateMap = Callable[[State], State]


def is_first_order(scheme: Scheme) -> bool:
    """Return True if the scheme carries two successive states of y' = F(y), as MidPoint does, blended or not."""
    return not scheme.splits and scheme.carry >= 0.0


def right_hand_side(scheme: Scheme, fields: Sequence[Field]) -> Callable:
    """Return the ODE that one step with its ``scheme.fields_per_step`` `fields` discretises, as a function on its state.

    The state is a pair (y, z) for splitting schemes, y alone for first-order ones and (y, y') for second-order ones.
    Friction from damping is part of the ODE.
    """
    _check_fields(scheme, fields)
    h, friction = scheme.h, 1.0 - abs(scheme.carry)
    gains = [scheme.coupling(i).gain for i in range(len(fields))]
    if scheme.splits:
        first, second = fields

        def pair(state: State) -> State:
            y, z = state
            return gains[0] / h * first(z) - friction / h * y, gains[1] / h * second(y) - friction / h * z

        return pair
    (field,) = fields
    if is_first_order(scheme):
        keep = scheme.coupling(0).keep
        if is_number(keep, 0.0):
            return lambda y: gains[0] / (2.0 * h) * field(y) - friction / (2.0 * h) * y
        return lambda y: gains[0] / ((1.0 + scheme.carry) * h) * field(y)  # what is kept and carried is the whole of y

    def second_order(state: State) -> State:
        y, velocity = state
        return velocity, gains[0] / h**2 * field(y) - friction / h * velocity

    return second_order


def ode_state(scheme: Scheme, state: State) -> Tensor | State:
    """Return the state of the ODE that corresponds to the scheme's pair."""
    p, q = state
    if scheme.splits:
        return p, q
    return q if is_first_order(scheme) else (q, (q - p) / scheme.h)


def step_map(scheme: Scheme, fields: Sequence[Field]) -> StateMap:
    """Return one whole step on the scheme's pair: its couplings, one for each of `fields`."""
    _check_fields(scheme, fields)

    def step(state: State) -> State:
        for index, field in enumerate(fields):
            state = scheme.step(state, field, index)
        return state

    return step


def step_limit(scheme: Scheme) -> float | None:
    """Return the constant c of the bound h ≤ c / ρ, with ρ the spectral radius of the ODE's Jacobian on the imaginary axis.

    None where the scheme has no such bound: RevNet's gains have equal signs, so its modes grow at any step; a blended MidPoint
    is between MidPoint and Euler's step, which has none.
    """
    s = abs(scheme.carry)
    gains = [scheme.coupling(i).gain for i in range(scheme.fields_per_step)]
    if scheme.splits:
        return 1.0 + s if gains[0] * gains[1] < 0 else None
    if is_first_order(scheme):
        return (1.0 + s) / 2.0 if is_number(scheme.coupling(0).keep, 0.0) else None
    return math.sqrt(2.0 * (1.0 + s)) if gains[0] < 0 else None


def amplification(scheme: Scheme, mu: Tensor | complex, nu: Tensor | complex | None = None) -> Tensor:
    """Return the growth factors ξ of one step for linear branches F(q) = μ q (and G(q) = ν q for splitting schemes).

    They are the roots of ξ² - t ξ + d = 0, with t and d the trace and determinant of the step's 2x2 matrix, in the last
    dimension of a complex tensor. For RevNet, t = 2 + μν and d = 1: the paper's equation for ξ.
    """
    mu = torch.as_tensor(mu, dtype=torch.complex128)
    first = scheme.coupling(0)
    if not scheme.splits:
        trace = first.keep + first.gain * mu
        determinant = torch.full_like(trace, -first.carry)
    else:
        if nu is None:
            raise ValueError(f"{type(scheme).__name__} has two branches in a step: give the eigenvalues of both")
        nu = torch.as_tensor(nu, dtype=torch.complex128)
        second = scheme.coupling(1)
        product = first.gain * mu * second.gain * nu
        trace = first.carry + second.carry + product
        determinant = torch.full_like(trace, first.carry * second.carry)
    a = trace / 2.0
    root = torch.sqrt(a * a - determinant)
    return torch.stack((a + root, a - root), dim=-1)


def _check_fields(scheme: Scheme, fields: Sequence[Field]) -> None:
    if len(fields) != scheme.fields_per_step:
        raise ValueError(
            f"one step of {type(scheme).__name__} has {scheme.fields_per_step} branches, got {len(fields)}"
        )
