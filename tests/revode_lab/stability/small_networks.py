"""Small networks of every reversible family, and images for them."""

import torch

import revode
from revode_lab.stability import Lyapunov
from revode_lab.stability.lyapunov import random_frame
from revode_lab.stability.walk import flatten_state, prepared, walk

FAMILIES = {
    "hamiltonian": {"blocks": (3, 3), "channels": (8, 16)},
    "hamiltonian-1layer": {"blocks": (3, 3), "channels": (8, 16)},
    "midpoint": {"blocks": (4, 4), "channels": (8, 16)},
    "leapfrog": {"blocks": (4, 4), "channels": (8, 16)},
    "revnet": {"blocks": (3, 3), "channels": (8, 16)},
}
"""A small network of every reversible family."""

NAMED = {
    "hamiltonian": "hamiltonian-74",
    "hamiltonian-1layer": "hamiltonian-1layer-74",
    "midpoint": "midpoint-26",
    "leapfrog": "leapfrog-26",
    "revnet": "revnet-38",
}


def small_network(family: str, **options):
    """A network of the family that runs in milliseconds, on images of 8x8 pixels."""
    torch.manual_seed(3)
    return revode.create_model(NAMED[family], **({"image_size": 8} | FAMILIES[family] | options))


def images(num_images: int = 4, size: int = 8) -> torch.Tensor:
    return torch.randn(num_images, 3, size, size, generator=torch.Generator().manual_seed(1))


def finite_growth(model, x: torch.Tensor, size: float = 1e-4) -> Lyapunov:
    """What `lyapunov_exponents` finds for k = 1, without derivatives: two trajectories, `size` of each image's norm apart."""
    model, x = prepared(model, x)
    scale = size * torch.linalg.vector_norm(x.flatten(1), dim=1)
    step = random_frame(x, 1, seed=0)[0] * scale[:, None]
    places, distances = [], [scale.log()]

    def visit(place, unit, parts) -> None:
        plain, moved = flatten_state(unit, parts).chunk(2)
        places.append(place)
        distances.append(torch.linalg.vector_norm(moved - plain, dim=1).log())

    with torch.no_grad():
        walk(model, torch.cat((x, x + step.reshape(x.shape))), visit)
    return Lyapunov(places, torch.stack(distances).diff(dim=0).mean(1, keepdim=True))
