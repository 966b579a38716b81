"""How close a refined network is to the shallow one, with weights interpolated in time and with blocks copied.

    python examples/refinement.py

The distance ||deep(x) - shallow(x)|| / ||shallow(x)|| of the last features, for networks whose kernels are smooth in time
(`init="smooth"`, horizon 1), refined to twice their depth; 16 random images of 16x16, fp64.
"""

import torch
from torch import nn

import revode
from revode.networks import FAMILIES, StagedClassifier


def shallow(family: str, norm: str, blocks: int) -> StagedClassifier:
    torch.manual_seed(0)
    options = {"norm": norm, "horizon": 1.0, "init": "smooth", "channels": (8, 16, 16), "image_size": 16}
    return revode.create_model(name(family, blocks), **options).double()


def name(family: str, blocks: int) -> str:
    return f"{family}-{3 * FAMILIES[family].layers_per_block * blocks + 2}"


def copy_blocks_(deep: StagedClassifier, model: StagedClassifier) -> StagedClassifier:
    """Give every block the weights of the nearest before it, as Chang et al. (2018) do."""
    for (_, old, num_old), (_, new, num_new) in zip(model.sequences(), deep.sequences(), strict=True):
        per_block = new.scheme.fields_per_step
        for index, field in enumerate(new.fields):
            block, position = divmod(index, per_block)
            source = old.fields[block * num_old // num_new * per_block + position]
            field.load_state_dict(source.state_dict(), strict=False)  # the first has no leading norm
    return deep


@torch.no_grad()
def distance(deep: nn.Module, model: nn.Module, x: torch.Tensor) -> float:
    y = model.features(x)
    return float((deep.features(x) - y).norm() / y.norm())


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    print("| family | norm | blocks a unit | interpolated | copied |\n|---|---|---:|---:|---:|")
    for family, norm in [(f, n) for f, row in FAMILIES.items() if row.integrates for n in row.norms if n != "tv"]:
        for blocks in (3, 6, 12):
            model = shallow(family, norm, blocks)
            deep = revode.refine(model, name(family, 2 * blocks))
            interpolated = distance(deep, model, x)
            copied = distance(copy_blocks_(deep, model), model, x)
            print(f"| {family} | {norm} | {blocks} → {2 * blocks} | {interpolated:.3f} | {copied:.3f} |")


if __name__ == "__main__":
    main()
