"""``revode eval RUN|MODEL``: score a training run, or a network with the weights that come with the package."""

from __future__ import annotations

import argparse

from revode_lab.system import require, use_threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN or MODEL, split and device."""
    parser.epilog = """example: revode eval runs/first --split test --json
         revode eval hamiltonian-74 --pretrained cifar10"""
    parser.add_argument(
        "run", metavar="RUN|MODEL", help="a directory that `revode train` wrote; with --pretrained, a named network"
    )
    parser.add_argument("--pretrained", metavar="DATASET", help="score the weights of MODEL that come with the package")
    parser.add_argument("--split", choices=("test", "validation", "train"), default="test", help="images to score on")
    parser.add_argument(
        "--device", default="auto", metavar="D", help="cpu, cuda, ...; auto takes a GPU if there is one"
    )
    parser.add_argument("--data-root", metavar="DIR", help="folder of the data sets")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--json", action="store_true", help="print one JSON object; accuracies are fractions there")


def run(args: argparse.Namespace) -> int:
    """Print accuracy and loss."""
    require()
    import json

    from revode_lab.training.run import load_run, pretrained_run, score_run

    use_threads(args.threads)
    if args.pretrained and args.split != "test":
        raise ValueError(
            f"--split is {args.split}, but weights of the package are scored on test images; leave --split out"
        )
    found = (
        pretrained_run(args.run, args.pretrained, args.device) if args.pretrained else load_run(args.run, args.device)
    )
    score = score_run(found, args.split, args.data_root)
    classes = (score.confusion.diagonal() / score.confusion.sum(1).clamp(min=1)).tolist()
    if args.json:
        print(
            json.dumps(
                {
                    "run": str(found.folder),
                    "model": found.model.config.name,
                    "dataset": found.config.data.dataset,
                    "split": args.split,
                    "images": int(score.confusion.sum()),
                    "accuracy": score.accuracy,
                    "loss": score.loss,
                    "class_accuracies": classes,
                    "weights_of": found.weights_of,
                }
            )
        )
        return 0
    print(f"{found.model.config.name} on {found.config.data.dataset}, weights of the {found.weights_of}")
    print(f"{args.split} accuracy {score.accuracy:.2%}, loss {score.loss:.4f}, {int(score.confusion.sum())} images")
    return 0
