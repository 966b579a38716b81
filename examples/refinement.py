"""How close a refined network is to the shallow one, with weights interpolated in time and with blocks copied.

    python examples/refinement.py [--trained | --run DIR --layers 218 1202]

The distance ||deep(x) - shallow(x)|| / ||shallow(x)|| of the last features, for networks whose kernels are smooth in time
(`init="smooth"`, horizon 1), refined to twice their depth; 16 random images of 16x16, fp64.

With --trained, what is left of the accuracy of a trained network: hamiltonian-26 after 15 epochs on the embedded digits, about
half a minute for each row, refined to 50 and 98 layers. Accuracies are on the tenth of the training images that the recipe
holds out; statistics of batch norms are measured on the others.

With --run, the same for a run of `revode train`: what is left on 1,000 images that it held out, statistics measured on 1,000
of those that it trained on, all of the edge that it ended with.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import revode
from revode.networks import FAMILIES, StagedClassifier
from revode_lab import data
from revode_lab.training import configure, load_run, train
from revode_lab.training.run import Run, choose_split, images_as_seen

TRAINED = ({"norm": "batch", "h": 1.0}, {"norm": "batch", "h": 0.3}, {"norm": "none", "h": 0.2})


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


def show_distances() -> None:
    x = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    print("| family | norm | blocks a unit | interpolated | copied |\n|---|---|---:|---:|---:|")
    for family, norm in [(f, n) for f, row in FAMILIES.items() if row.integrates for n in row.norms if n != "tv"]:
        for blocks in (3, 6, 12):
            model = shallow(family, norm, blocks)
            deep = revode.refine(model, name(family, 2 * blocks))
            interpolated = distance(deep, model, x)
            copied = distance(copy_blocks_(deep, model), model, x)
            print(f"| {family} | {norm} | {blocks} → {2 * blocks} | {interpolated:.3f} | {copied:.3f} |")


def trained(options: dict[str, object]) -> Run:
    settings = {"epochs": 15, "evaluate_every": 0, "backprop": "store", "threads": 1, "report": False}
    with tempfile.TemporaryDirectory() as folder:
        train(configure(model="hamiltonian-26", dataset="digits", options=options, **settings), Path(folder) / "run")
        return load_run(Path(folder) / "run")


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model.eval()(x).argmax(1) == labels).float().mean())


def show_accuracies() -> None:
    dataset = data.load("digits")
    table = ["| norm | h | 26 layers | 50, interpolated | copied | 98, interpolated | copied |", "|---|" + "---:|" * 6]
    for options in TRAINED:
        run = trained(options)
        held_out, others = (choose_split(run.config, dataset, name) for name in ("validation", "train"))
        x, seen = data.standardise(held_out.images, dataset), data.standardise(others.images, dataset)
        cells = [accuracy(run.model, x, held_out.labels)]
        for layers in (50, 98):
            deep = revode.refine(run.model, f"hamiltonian-{layers}", [seen])
            cells.append(accuracy(deep, x, held_out.labels))
            update_bn([seen], copy_blocks_(deep, run.model))
            cells.append(accuracy(deep, x, held_out.labels))
        table.append(f"| {options['norm']} | {options['h']} | " + " | ".join(f"{cell:.1%}" for cell in cells) + " |")
    print("\n".join(table))


def show_run(folder: Path, layers: list[int], data_root: str | None) -> None:
    run = load_run(folder)
    dataset, family = data.load(run.config.data.dataset, data_root), run.model.config.family
    (x, labels), (seen, _) = (
        images_as_seen(dataset, choose_split(run.config, dataset, name), 1_000, run.model.config.image_size)
        for name in ("validation", "train")
    )
    print(f"{run.model.config.num_layers} layers: {accuracy(run.model, x, labels):.1%}")
    for depth in layers:
        deep = revode.refine(run.model, f"{family}-{depth}", seen.split(250))
        print(f"{depth} layers: {accuracy(deep, x, labels):.1%}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trained", action="store_true", help="accuracies of trained networks in the place of distances"
    )
    parser.add_argument("--run", type=Path, metavar="DIR", help="what is left of the accuracy of this run's network")
    parser.add_argument("--layers", type=int, nargs="+", default=[218, 1202], help="with --run: depths to refine to")
    parser.add_argument("--data-root", metavar="DIR", help="with --run: folder of the data sets")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.run:
        show_run(args.run, args.layers, args.data_root)
    else:
        show_accuracies() if args.trained else show_distances()
