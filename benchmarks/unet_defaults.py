"""The trial behind the default of ``unet-3d``: norms, activations and schemes on a phantom and on the MNI volume.

    nice -n 5 .venv/bin/python benchmarks/unet_defaults.py --rates 5e-3 1.5e-3 1.5e-2 --append results/volumes-cpu/trial.jsonl

Each row of the grid is trained for a few steps on small patches (150 of 32x32x32 points, 40 of 16x16x16 of the phantom), and
scored on planes that it was not trained on, which are none of those that `examples/volumes.py` tests on. Rows that are in the
file are left out, so that a trial can be stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

import revode
from revode.files import write_atomically
from revode_lab.data import data_root

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import volumes

LEAKY: dict[str, Any] = {"activation": "leaky_relu"}
GRID: list[dict[str, Any]] = [
    {"scheme": "hamiltonian", "norm": "none", "activation": "relu", "h": 0.1},
    {"scheme": "hamiltonian", "norm": "none", "activation": "relu", "h": 0.3},
    *({"scheme": "hamiltonian", "norm": norm, "h": 0.3} | LEAKY for norm in ("instance", "group", "batch")),
    *({"scheme": "hamiltonian", "norm": "instance", "h": h} | LEAKY for h in (0.1, 1.0)),
    *({"scheme": "revnet", "norm": norm} | LEAKY for norm in ("instance", "group")),
    {"scheme": "revnet", "norm": "batch", "activation": "relu"},
    *({"scheme": "midpoint", "norm": norm, "h": 0.3} | LEAKY for norm in ("instance", "group")),
    {"scheme": "leapfrog", "norm": "instance", "h": 0.3} | LEAKY,
]
SETTINGS: dict[str, dict[str, Any]] = {
    "mni": {"steps": 150, "patch": 32, "blocks": 4, "channels": (16, 32, 64)},
    "phantom": {"steps": 40, "patch": 16, "blocks": 1, "channels": (16, 32)},
}


def train(data: str, options: dict[str, Any], rate: float) -> dict[str, Any]:
    """Train one row of the grid; the loss over the last 50 steps, and Dice on the planes left out."""
    torch.manual_seed(0)
    setting = SETTINGS[data]
    layout = {"blocks": setting["blocks"], "channels": setting["channels"]}
    net = revode.create_model("unet-3d", num_classes=4, exact=True, **layout, **options)
    net = net.to(memory_format=torch.channels_last_3d)
    found = volumes.phantom() if data == "phantom" else volumes.brain(data_root(None) / "volumes")
    intensity, labels = found
    planes = torch.arange(labels.shape[1]) * volumes.SHAPE[1] / labels.shape[1]
    scored, near = (planes >= 95) & (planes < 115), (planes >= 87) & (planes < 123)
    margin = volumes.MARGIN * (3 if data == "phantom" else 1)
    trained = torch.where((near | volumes.coronal(len(planes), margin))[:, None], volumes.IGNORED, labels)
    generator, inside = torch.Generator().manual_seed(0), (trained > 0).nonzero()
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=1e-4)
    start, losses = time.process_time(), []
    for step in range(setting["steps"]):
        optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / setting["steps"]))
        centre = inside[torch.randint(len(inside), (), generator=generator)].tolist()
        where = volumes.cube(centre, setting["patch"], labels.shape)
        scan = volumes.disturbed(intensity[where], generator, knots=2)
        optimizer.zero_grad()
        loss = volumes.loss_of(net, scan, trained[where][None], False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    seconds = time.process_time() - start
    index = scored.nonzero().flatten()
    first, last = max(0, int(index[0]) - 8), min(len(planes), int(index[-1]) + 9)
    scan = volumes.disturbed(intensity, torch.Generator().manual_seed(77))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        classes = net.eval()(scan[:, :, :, first:last]).argmax(1)[0]
    return {
        "loss": sum(losses[-50:]) / len(losses[-50:]),
        "dice": volumes.dice(classes[:, index - first], labels[:, index]),
        "processor_seconds": round(seconds, 1),
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-3], help="learning rates")
    parser.add_argument("--data", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="what to train on")
    parser.add_argument("--append", type=Path, default=Path("runs/trial.jsonl"), help="where rows are written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.append.parent.mkdir(parents=True, exist_ok=True)
    lines = args.append.read_text().splitlines() if args.append.exists() else []
    done = [{name: row[name] for name in ("data", "options", "rate")} for row in map(json.loads, lines)]
    for rate, data, options in itertools.product(args.rates, args.data, GRID):
        row = {"data": data, "options": options, "rate": rate}
        if row in done:
            continue
        try:
            row |= train(data, options, rate)
        except revode.OutOfRange as error:
            row["error"] = str(error)
        with args.append.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
    write_atomically(args.append.with_suffix(".md"), page([json.loads(line) for line in args.append.open()]))


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as a table, the best of each data set and rate first."""
    command = "`.venv/bin/python benchmarks/unet_defaults.py --rates 5e-3 1.5e-3 1.5e-2`"
    text = "# The trial behind the default of unet-3d\n\n"
    text += "Loss over the last 50 steps, Dice on planes left out, seconds of the processor (busy). Planes are scored\n"
    text += f"in one piece, which costs networks with a norm some Dice. Command, stopped before its last rows: {command}\n\n"
    text += "| data | rate | scheme | norm | activation | h | loss | grey | white | other | seconds | parameters |\n"
    text += "|---|---:|---|---|---|---:|---:|---:|---:|---:|---:|---:|\n"
    for row in sorted(rows, key=lambda row: (row["data"], row["rate"], row.get("loss", math.inf))):
        options, dice = row["options"], row.get("dice", {})
        words = [row["data"], f"{row['rate']:g}", *(options[name] for name in ("scheme", "norm", "activation"))]
        words += [str(options.get("h", ""))]
        if "error" in row:
            words += ["left the grid's range", *[""] * 5]
        else:
            words += [f"{row['loss']:.3f}", *(f"{dice[name]:.3f}" for name in volumes.CLASSES[1:])]
            words += [f"{row['processor_seconds']:g}", f"{row['parameters']:,}"]
        text += f"| {' | '.join(words)} |\n"
    return text


if __name__ == "__main__":
    main()
