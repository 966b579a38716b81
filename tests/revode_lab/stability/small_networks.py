"""Small networks of every reversible family, and images for them."""

import torch

import revode

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
