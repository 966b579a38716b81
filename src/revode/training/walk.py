"""A classifier's depth as pictures: images found again by walking back, and the state on its way."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from revode.engine import ReversibleSequence
from revode.networks.blocks import ConvStem
from revode.networks.classifier import InvertibleClassifier, StagedClassifier


class Walk(NamedTuple):
    """Images found again, and from where, in words."""

    images: Tensor
    start: str


@torch.no_grad()
def walk_back(model: nn.Module, images: Tensor) -> Walk | None:
    """The images that walking back finds, as far as a network can be walked back: all of it, or its first unit.

    None where there is no way back: in a ResNet, or where the final pair alone does not tell it.
    """
    if isinstance(model, InvertibleClassifier):
        return Walk(model.inverse(model.features(images)), "the last features, behind all blocks")
    if not isinstance(model, StagedClassifier) or not model.sequences() or not isinstance(model.stem, ConvStem):
        return None
    name, sequence, num_blocks = model.sequences()[0]
    _, state = sequence(model.stem(images), return_state=True)
    try:
        features = sequence.inverse(state)
    except ValueError:
        return None
    start = f"the end of {name} ({num_blocks} blocks): the features that entered it, and the image that gives these"
    return Walk(_image_before(model.stem, features), start)


def _image_before(stem: ConvStem, features: Tensor) -> Tensor:
    """The image whose stem features these are: least squares over those that ReLU let pass.

    Features are rebuilt with an error, so that the smallest may have been cut off.
    """
    stem, wanted = copy.deepcopy(stem).double().eval(), features.double()
    passed = wanted > 1e-3 * wanted.max()
    shape = len(features), stem.conv.in_channels, *features.shape[2:]
    image = torch.zeros(shape, dtype=torch.float64, device=features.device, requires_grad=True)  # type: ignore[arg-type]
    search = torch.optim.LBFGS([image], max_iter=300, tolerance_grad=1e-12, tolerance_change=1e-14, history_size=20)

    def distance() -> Tensor:
        with torch.enable_grad():
            loss = ((stem.norm(stem.conv(image)) - wanted) * passed).square().sum()
            (image.grad,) = torch.autograd.grad(loss, image)
        return loss

    search.step(distance)  # type: ignore[arg-type]
    return image.detach().float()


@torch.no_grad()
def activations(model: nn.Module, image: Tensor, count: int) -> dict[int, list[tuple[int, Tensor]]]:
    """Unit -> up to `count` of its blocks, evenly spaced, each with the mean over channels of the state behind it."""
    assert isinstance(model, StagedClassifier)
    found: dict[int, list[tuple[int, Tensor]]] = {}
    y = model.stem(image)
    for number, stage in enumerate(model.stages, 1):
        body = stage.body
        if isinstance(body, ReversibleSequence):
            states = list(body.states(y))[:: body.scheme.fields_per_step]
            blocks = sorted({round(i * (len(states) - 1) / (count - 1)) for i in range(count)})
            found[number] = [(block, _picture(states[block])) for block in blocks]
        y = stage(y)
    return found


def _picture(state: tuple[Tensor | None, Tensor]) -> Tensor:
    return torch.cat([member[0] for member in state if member is not None]).mean(0, keepdim=True)
