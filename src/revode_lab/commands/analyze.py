"""``revode analyze MODEL|RUN``: the stability report of a network, with initial or trained weights."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from revode_lab.system import check_folder, require, use_threads

_EPILOG = """example: revode analyze hamiltonian-74
         revode analyze hamiltonian-74 --against resnet-32
         revode analyze runs/first --against revnet-38 --out runs/first
         revode analyze midpoint-62 --options h=0.05,activation=tanh --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add subject, images and output."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "subject", metavar="MODEL|RUN", help="a named network, a run's directory or a saved .safetensors file"
    )
    parser.add_argument("--against", metavar="MODEL|RUN", help="a second network, measured on the same images")
    parser.add_argument("--pretrained", metavar="DATASET", help="take the weights of MODEL that come with the package")
    parser.add_argument(
        "--options", default="", metavar="VALUE", help="options of a named network, as h=0.05,init=smooth"
    )
    parser.add_argument(
        "--dataset",
        metavar="NAME|FILE",
        help="digits, cifar10, cifar100, stl10, or a .npy file of images\n"
        "(N, C, H, W); default: the run's own, else the embedded digits",
    )
    parser.add_argument("--data-root", metavar="DIR", help="folder of the data sets")
    parser.add_argument("--num-images", type=int, default=32, metavar="N", help="images to measure on; default 32")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of initial weights and random directions")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON and nothing else")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where stability.html and stability.json go; default: the run's\n"
        "directory, or runs/MODEL-stability; with --json nothing is written\nunless this is given",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print, write the page."""
    require()
    from revode.networks import GPT, on_tokens
    from revode_lab.stability.analysis import analyze
    from revode_lab.stability.report import summary, write_page
    from revode_lab.stability.walk import walked_units
    from revode_lab.training.terminal import passing

    if args.num_images < 1:
        raise ValueError(f"--num-images must be at least 1, got {args.num_images}")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed is {args.seed}; expected 0 or more, and less than 2^63")
    check_folder(args.out)
    use_threads(args.threads)
    first, dataset, run = _network(args.subject, args.options, args.seed, args.pretrained)
    networks = [(args.subject, first)]
    if args.against:
        networks.append((args.against, _network(args.against, "", args.seed)[0]))
    for name, model in networks:
        if isinstance(model, GPT):
            raise on_tokens(name)
        walked_units(model)  # refuses a network without any, before the other one is measured
        if model.config.scores_points:
            raise ValueError(f"analyze takes classifiers of images, and {model.config.name} scores every point")
    name = args.dataset or dataset or "digits"
    results = []
    source = ""
    for subject, model in networks:
        images, labels, source = _images(name, args.data_root, args.num_images, model, run if model is first else None)
        whose = Path(subject).name if Path(subject).exists() else args.pretrained if model is first else None
        label = model.config.name + (f" ({whose})" if whose else "")
        label += " (2)" if any(result.name == label for result in results) else ""
        note = lambda line: passing(f"measuring: {line}")  # noqa: E731
        results.append(analyze(model, images, labels, name=label, seed=args.seed, note=note))
    passing("")
    if args.json:
        numbers = [result.to_dict() for result in results]
        print(json.dumps(numbers[0] if len(numbers) == 1 else numbers))
    else:
        print(summary(results, source))
    if args.out or not args.json:
        path = Path(args.subject)
        stem = path.stem if path.is_file() else "-".join(filter(None, [args.subject, args.pretrained]))
        own = path if path.is_dir() else Path("runs") / f"{stem}-stability"
        page = write_page(results, args.out or own, source)
        print(f"\npage: {page}", file=sys.stderr if args.json else sys.stdout)
    return 0


def _network(subject: str, options: str, seed: int, pretrained: str | None = None) -> tuple[Any, str | None, Any]:
    """Return the network, the data set it was trained on, and its run, as far as they are known."""
    import torch

    import revode
    from revode_lab.training.config import LEAVES, convert

    path = Path(subject)
    if path.exists() and (options or pretrained):
        raise ValueError(
            "--options and --pretrained belong to a network by name: a run or a file has its own weights and options"
        )
    if path.is_dir():
        from revode_lab.training.run import load_run

        found = load_run(path)
        return found.model, found.config.data.dataset, found
    if path.is_file():
        return revode.load(path), None, None
    if path.suffix or len(path.parts) > 1:
        raise ValueError(f"there is no run and no file {subject}; give a named network (see `revode models`) or a run")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = revode.create_model(subject, pretrained=pretrained, **convert(LEAVES["options"], options))
        return model, pretrained, None


def _images(name: str, root: str | None, num_images: int, model: Any, run: Any) -> tuple[Any, Any, str]:
    """Return images in the shape that the model takes, their labels where they have any, and what they are in words.

    Those of a run are of the edge that it ended with, from where it had them unless `root` says another place.
    """
    import torch

    from revode_lab import data
    from revode_lab.training.run import images_as_seen

    if name.endswith(".npy"):
        images, labels, source, own = _read_array(name, num_images), None, Path(name).name, False
    else:
        own = run is not None and name == run.config.data.dataset
        if root is None and run is not None and own:
            root = run.config.record.data_root
        dataset = data.load(name, root)
        edge = model.config.image_size if own else None
        images, labels = images_as_seen(dataset, dataset.test or dataset.train, num_images, edge)
        source = name
    config = model.config
    if labels is not None and int(labels.max()) >= config.num_classes:
        labels = None
    if images.shape[1] == 1 < config.in_channels:
        images = images.repeat(1, config.in_channels, 1, 1)
    if name == "digits" and not own and images.shape[-1] < config.image_size:
        size = (config.image_size, config.image_size)
        images = torch.nn.functional.interpolate(images, size, mode="bilinear", align_corners=False)
        source += f" enlarged to {size[0]}x{size[1]}"
    return images, labels, source


def _read_array(name: str, num_images: int) -> Any:
    import numpy as np
    import torch

    try:
        array = np.load(name, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"cannot read images from {name}: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is not an array but an archive of some; give one .npy file")
    if array.ndim != 4 or not np.issubdtype(array.dtype, np.number) or np.iscomplexobj(array):
        raise ValueError(f"{name} holds {array.dtype} of shape {array.shape}; expected numbers of shape (N, C, H, W)")
    images = torch.from_numpy(array[:num_images].astype("float32"))
    if not bool(torch.isfinite(images).all()):
        raise ValueError(f"{name} holds NaN or infinity")
    return images
