"""The paper's numbers (Chang et al., "Reversible Architectures for Arbitrarily Deep Residual Neural Networks", AAAI 2018)."""

from __future__ import annotations

Accuracies = dict[str, dict[str, float]]

CIFAR: Accuracies = {
    "resnet-32": {"cifar10": 92.86, "cifar100": 70.05},
    "revnet-38": {"cifar10": 92.76, "cifar100": 71.04},
    "hamiltonian-74": {"cifar10": 92.76, "cifar100": 69.78},
    "midpoint-26": {"cifar10": 91.16, "cifar100": 67.25},
    "leapfrog-26": {"cifar10": 91.92, "cifar100": 69.14},
    "resnet-110": {"cifar10": 94.26, "cifar100": 73.56},
    "revnet-110": {"cifar10": 94.24, "cifar100": 74.60},
    "hamiltonian-218": {"cifar10": 94.02, "cifar100": 73.89},
    "midpoint-62": {"cifar10": 92.76, "cifar100": 70.98},
    "leapfrog-62": {"cifar10": 93.40, "cifar100": 72.28},
    "resnet-1202": {"cifar10": 92.07},
    "hamiltonian-1202": {"cifar10": 93.84},
}
"""Table 1: test accuracy in per cent, in the table's order."""

STL: Accuracies = {"hamiltonian-stl": {"stl10": 85.5}, "midpoint-stl": {"stl10": 84.6}, "leapfrog-stl": {"stl10": 83.7}}
"""Table 2: test accuracy in per cent of the paper's networks."""

STL_BASELINES = {"Yang et al. 2015": 73.15, "Dundar et al. 2015": 74.1, "Zhao et al. 2015": 74.3}
"""Table 2: the results it compares with."""

SUBSET_GAINS = {"cifar10": {0.04: "up to +13", 0.03: "up to +13"}, "stl10": {0.4: "+5.7"}}
"""The text's claims: points of Hamiltonian over ResNet at a share of the training images. The rest is only plotted."""

CIFAR_FRACTIONS = (0.2, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01, 0.005, 0.001, 0.0005)
"""Shares from the text's largest to its smallest; it does not list those between."""
STL_FRACTIONS = (0.8, 0.6, 0.4, 0.2, 0.1, 0.05)

CIFAR_SCHEDULE = "160 epochs"
STL_SCHEDULE = "20,000 steps"
DEEP_SCHEDULE = "80,000 steps"
