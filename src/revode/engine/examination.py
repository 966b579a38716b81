"""`check_branch`: run a branch as forward and backward would, under changed conditions, and name the differences."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from revode.engine.branch import Context, Replayed
from revode.engine.call import SETTINGS, Arguments
from revode.schemes import Coupling


@dataclass(frozen=True)
class BranchReport:
    """The findings of `check_branch`, one sentence each; none if the branch can be recomputed.

    >>> check_branch(nn.Linear(4, 4), torch.randn(2, 4)).ok
    True
    """

    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Return True if nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        return (
            "the branch can be recomputed: nothing was found" if self.ok else "\n".join(f"- {f}" for f in self.findings)
        )


def check_branch(branch: nn.Module, x: Tensor, **kwargs: Any) -> BranchReport:
    """Return the reasons why a branch cannot be recomputed exactly, or does not get its gradients.

    A copy of the branch is run in forward on x, without a skip connection, and recomputed as in backward: at once, after random
    numbers were drawn, on another thread, under other autocast and settings of torch. Neither the branch nor any RNG state
    changes.

    >>> print(check_branch(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), torch.randn(2, 4)))
    the branch can be recomputed: nothing was found
    """
    findings: list[str] = []
    with _undisturbed(), torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            findings += _examine(copy.deepcopy(branch), x.detach(), kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            findings.append(str(error))
    return BranchReport((*findings, *dict.fromkeys(str(warning.message) for warning in caught)))


def _examine(branch: nn.Module, q: Tensor, kwargs: dict[str, Any]) -> Iterator[str]:
    evaluation = Replayed(Context(q.device), 0, branch, Arguments(kwargs))
    then, _ = evaluation.value(q)
    seen, streams = _buffers(branch), _rng_states()
    found = _distance(evaluation.again(q), then)
    if _rng_states() != streams:
        yield "its recomputation moves a global RNG state"
    if found:
        yield f"recomputed at once it differs by {found:.2g}: it depends on something that its own call changes, or on chance"
    else:
        for name, changed in _CONDITIONS.items():
            with changed():
                found = _distance(
                    _on_thread(evaluation.again, q) if name == "on another thread" else evaluation.again(q), then
                )
            if found:
                yield f"recomputed {name} it differs by {found:.2g}"
    for name, buffer in _buffers(branch).items():
        if not torch.equal(buffer, seen[name]):
            yield f"its recomputation changes the buffer {name!r}"
    u, products, _ = evaluation.vjp(q, torch.ones_like(q), (), Coupling(1.0, 0.0, 1.0), True)
    if u is not None and not found and _distance(u, then):
        yield f"recomputed with gradients it differs by {_distance(u, then):.2g}: it takes other code, or other kernels, then"
    missing = [name for name, product in zip(evaluation.trained, products[1:], strict=False) if product is None]
    if missing:
        yield f"no gradient reaches {', '.join(map(repr, missing))}: unused, detached, or cached without gradients"


def _distance(u: Tensor, then: Tensor) -> float:
    """Return ‖u - then‖ / ‖then‖; 0 for equal bits only."""
    if torch.equal(u, then):
        return 0.0
    return float(torch.linalg.vector_norm(u - then) / torch.linalg.vector_norm(then).clamp_min(1e-30)) or 1e-30


def _on_thread(function: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function(q))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def _drawn() -> contextlib.AbstractContextManager[None]:
    torch.rand(7)
    random.random()
    _NUMPY.random(7)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _set_to(name: str, value: Any) -> Iterator[None]:
    read, write = SETTINGS[name]
    outside = read()
    write(value)
    try:
        yield
    finally:
        write(outside)


_CONDITIONS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "after other random numbers": _drawn,
    "on another thread": contextlib.nullcontext,
    "under autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "under another default dtype": lambda: _set_to("default_dtype", torch.float64),
}
"""Conditions that may differ when backward runs -> how to make them so."""


def _buffers(branch: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in branch.named_buffers()}


def _rng_states() -> list[bytes]:
    states = torch.get_rng_state().tolist(), random.getstate(), _NUMPY.get_state(legacy=False)
    return [pickle.dumps(state) for state in states]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Set global RNG states back afterwards."""
    python, of_numpy = random.getstate(), _NUMPY.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            _NUMPY.set_state(of_numpy)


_NUMPY: Any = numpy.random.mtrand._rand
"""The RNG behind the functions of ``numpy.random``."""
