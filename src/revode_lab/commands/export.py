"""``revode export RUN --onnx``: a run's network as an ONNX file."""

from __future__ import annotations

import argparse
from pathlib import Path

from revode_lab.system import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN and the file to write."""
    parser.epilog = "example: revode export runs/first --onnx first.onnx"
    parser.add_argument("run", metavar="RUN", help="a directory that `revode train` wrote")
    parser.add_argument(
        "--onnx", nargs="?", const="", required=True, metavar="FILE", help="the file; RUN/model.onnx unless given"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")


def run(args: argparse.Namespace) -> int:
    """Write the file, and print its path and how it compares with torch."""
    require()
    from revode_lab.training.run import export_onnx

    target = args.onnx or Path(args.run) / "model.onnx"
    path, difference = export_onnx(args.run, target, overwrite=args.overwrite)
    print(path)
    if difference is None:
        print("not compared with torch: onnxruntime is not installed")
    else:
        print(f"class scores differ from torch's by at most {difference:.1e} of the largest")
    return 0
