"""``revode models`` lists the named networks, ``revode models NAME`` shows what one is made of and what it costs."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The name, and how to print."""
    parser.epilog = "example: revode models\n         revode models hamiltonian-74 --batch-size 100"
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a network: show its stages, FLOPs and activation bytes"
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="images in a step, for the bytes of NAME; default 100"
    )
    parser.add_argument(
        "--image-size", type=int, metavar="N", help="edge of the images; default as the network is named"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the list or the bill."""
    if args.name is None:
        if args.batch_size is not None or args.image_size is not None:
            raise ValueError("--batch-size and --image-size belong to one network: give its NAME")
        return _print_list(args.json)
    from revode.networks.description import describe

    batch_size = 100 if args.batch_size is None else args.batch_size
    description = describe(args.name, image_size=args.image_size, batch_size=batch_size).to_dict()
    print(json.dumps(description, indent=2) if args.json else "\n".join(_bill(description)))
    return 0


def _print_list(as_json: bool) -> int:
    from revode.networks.description import summarize_all

    rows = summarize_all()
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    line = "{:<23}{:>6}  {:<12}{:<15}{:>11}{:>11}"
    print(line.format("", "", "", "", "parameters,", "paper, in").rstrip())
    print(line.format("name", "layers", "units", "channels", "10 classes", "millions"))
    for row in rows:
        paper = row["paper_params_cifar10_m"]
        print(
            line.format(
                row["name"],
                row["layers"],
                _dashes(row["units"]),
                _dashes(row["channels"]),
                f"{row['params_cifar10']:,}",
                "" if paper is None else f"{paper:.1f}" if paper > 10 else f"{paper:.2f}",
            ).rstrip()
        )
    print("\n<family>-<layers> of other depths work too; -stl behind a name: 96x96 images.")
    return 0


def _bill(description: dict[str, Any]) -> list[str]:
    """The table of one network, in 80 columns."""
    strategies = list(description["activation_bytes"])
    line = "{:<10}{:>6}  {:<11}{:>10}{:>8}" + "{:>11}" * len(strategies)
    rows = [line.format("stage", "blocks", "output", "parameters", "MFLOPs", *strategies)]
    total = description | {"name": "total", "blocks": 0, "shape": []}
    for part in [*description["stages"], total]:
        rows.append(
            line.format(
                part["name"],
                part["blocks"] or "",
                "x".join(map(str, part["shape"])),
                f"{part['params']:,}",
                f"{part['flops_per_image'] / 1e6:,.1f}",
                *(_bytes(part["activation_bytes"][strategy]) for strategy in strategies),
            ).rstrip()
        )
    size = "x".join(map(str, description["image_shape"]))
    settings = _settings(description["config"])
    return [
        f"{description['name']}: {description['layers']} layers, images of {size}",
        *([settings] if settings else []),
        f"FLOPs of one forward image; bytes kept for backward at batch {description['batch_size']}",
        "",
        *rows,
    ]


def _settings(config: dict[str, Any]) -> str:
    names = ("h", "horizon", "init", "activation", "norm", "transition")
    return ", ".join(f"{name}={config[name]}" for name in names if config.get(name) is not None)


def _bytes(number: int) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000  # type: ignore[assignment]
    return f"{number:.2f} GB"


def _dashes(values: list[int]) -> str:
    return "-".join(map(str, values))
