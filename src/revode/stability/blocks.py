"""Spectra and reconstruction errors of the blocks of a whole network, at the states that real inputs put them in."""

from __future__ import annotations

from torch import Tensor, nn

from revode.stability.dynamics import ode_state, right_hand_side
from revode.stability.reversibility import reconstruction_error, resized
from revode.stability.spectra import spectrum
from revode.stability.walk import Parts, analysis_copy, calibrate_batch_norm, unit_input, unit_states


def unit_reconstruction_errors(model: nn.Module, images: Tensor) -> list[float]:
    """The relative reconstruction error of every unit on its own input, in the model's dtype."""
    copied = analysis_copy(model, None)
    images = images.to(next(copied.parameters()).dtype)
    calibrate_batch_norm(copied, images)
    states = unit_states(copied, images)
    return [reconstruction_error(resized(unit), unit_input(unit, entrance[0])) for unit, entrance in states]


def unit_spectra(
    model: nn.Module, images: Tensor, *, max_size: int = 500, step: float = 0.5
) -> dict[tuple[int, int], Tensor]:
    """All eigenvalues of the ODE's Jacobian in one block of each unit, at the centre of the first image's state.

    The state is cropped to a square patch so that the dense spectrum stays affordable: a convolution on the patch, with its
    zero padding, is a field of the same kind with the same weights.

    Args:
        model: a network with reversible units.
        images: its inputs.
        max_size: largest dimension of the ODE's state, where a patch of 2x2 allows it.
        step: which block, as a fraction of the unit's depth.

    Returns:
        (unit, step) -> complex eigenvalues.
    """
    copied = analysis_copy(model)
    images = images.double()
    calibrate_batch_norm(copied, images)
    found = {}
    for number, (unit, states) in enumerate(unit_states(copied, images[:1])):
        width = unit.scheme.fields_per_step
        num_steps = len(unit.fields) // width
        index = min(int(step * num_steps), num_steps - 1)
        pair = _patch(states[index], max_size)
        pair = (pair[0], pair[0]) if len(pair) == 1 else pair
        fields = list(unit.fields[index * width : (index + 1) * width])
        rhs = right_hand_side(unit.scheme, fields)
        # Wide units exceed the size on the smallest patch; only a dense spectrum has all eigenvalues.
        limit = max(2 * max_size, 2 * pair[0].numel())
        found[number, index] = spectrum(rhs, ode_state(unit.scheme, pair), dense_limit=limit).eigenvalues  # type: ignore[arg-type]
    return found


def _patch(parts: Parts, max_size: int) -> Parts:
    """The centre of a state, so small that its two members have at most `max_size` numbers together."""
    if parts[0].dim() != 4:
        return parts
    _, channels, height, width = parts[0].shape
    edge = max(2, int((max_size / (2 * channels)) ** 0.5))
    top, left = max(0, (height - edge) // 2), max(0, (width - edge) // 2)
    return tuple(part[:, :, top : top + edge, left : left + edge] for part in parts)
