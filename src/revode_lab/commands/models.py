"""``revode models`` lists the named networks, ``revode models NAME`` shows what one is made of and what it costs."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

WIDTH = 80
_WORDS = (0, 2)
"""The columns of a bill that are words, to the left; numbers stand to the right."""
_FLOPS = {"T": 1e12, "G": 1e9, "M": 1e6}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name and the format."""
    parser.epilog = (
        "example: revode models\n         revode models hamiltonian-74 --batch-size 100\n"
        "         revode models unet-3d --image-size 160,192,160"
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a network: show its stages, FLOPs and activation bytes"
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="images in a step, for the bytes of NAME; default 100, of a U-Net 1"
    )
    parser.add_argument(
        "--image-size",
        type=_edges,
        metavar="N[,N,...]",
        help="edge of the images, or an edge for each dimension; default as the network is named",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _edges(text: str) -> int | tuple[int, ...]:
    """Return one number, or several."""
    try:
        edges = tuple(int(edge) for edge in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected edges such as 32 or 160,192,160, got {text!r}") from None
    return edges[0] if len(edges) == 1 else edges


def run(args: argparse.Namespace) -> int:
    """Print the list or the bill."""
    if args.name is None:
        if args.batch_size is not None or args.image_size is not None:
            raise ValueError("--batch-size and --image-size belong to one network: give its NAME")
        return _print_list(args.json)
    from revode.networks import describe

    description = describe(args.name, image_size=args.image_size, batch_size=args.batch_size).to_dict()
    print(json.dumps(description, indent=2) if args.json else "\n".join(_bill(description)))
    return 0


def _print_list(as_json: bool) -> int:
    from revode.networks import summarize_all

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
    print("\n<family>-<layers> of other depths work too; -stl behind a name: 96x96 images.\ngpt-mini is on bytes.")
    return 0


def _bill(description: dict[str, Any]) -> list[str]:
    """Return the table of one network, in 80 columns."""
    from revode_lab.system import human_bytes

    strategies = list(description["activation_bytes"])
    prefix, unit = next((p, u) for p, u in _FLOPS.items() if description["flops_per_image"] >= 100 * u or p == "M")
    total = description | {"name": "total", "blocks": 0, "shape": []}
    rows = [("stage", "blocks", "output", "params", f"{prefix}FLOPs", *strategies)]
    for part in [*description["stages"], total]:
        kept = (human_bytes(part["activation_bytes"][strategy]) for strategy in strategies)
        flops = f"{part['flops_per_image'] / unit:,.1f}"
        rows.append(
            (part["name"], str(part["blocks"] or ""), _times(part["shape"]), f"{part['params']:,}", flops, *kept)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    line = gap.join(f"{{:{'<' if index in _WORDS else '>'}{width}}}" for index, width in enumerate(widths))
    names = ("scheme", "h", "horizon", "init", "activation", "norm", "transition")
    settings = {name: description["config"].get(name) for name in names}
    return [
        f"{description['name']}: {description['layers']} layers, images of {_times(description['image_shape'])}",
        *textwrap.wrap(", ".join(f"{name}={value}" for name, value in settings.items() if value is not None), WIDTH),
        f"FLOPs of one forward image; bytes kept for backward at batch {description['batch_size']}",
        "",
        *(line.format(*row).rstrip() for row in rows),
    ]


def _times(values: list[int]) -> str:
    return "x".join(map(str, values))


def _dashes(values: list[int]) -> str:
    return "-".join(map(str, values))
