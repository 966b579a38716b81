"""What nnU-Net's plans take: bytes of a training step, as nnU-Net's own network, stored, and reversible.

    .venv/bin/python benchmarks/plans.py --out results/volumes-cpu  # about 10 minutes; needs nnunetv2, without its dependencies

Both networks are built by nnU-Net's ``get_network_from_plans`` from the architecture of a plans file: a patch of 20x320x256
points of anisotropic spacing, and one of 128x128x128.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from revode.files import write_atomically
from revode.networks import step_bytes
from revode_lab.system import peak as process_peak
from revode_lab.system import reset_peak

PLANS: dict[str, Any] = {
    # as nnU-Net plans them: a spacing that is coarse along the first axis, and an isotropic one
    "anisotropic": {
        "patch": (20, 320, 256),
        "crop": (8, 64, 64),
        "features": [32, 64, 128, 256, 320, 320],
        "kernels": [[1, 3, 3], [1, 3, 3], [3, 3, 3], [3, 3, 3], [3, 3, 3], [3, 3, 3]],
        "strides": [[1, 1, 1], [1, 2, 2], [1, 2, 2], [2, 2, 2], [2, 2, 2], [1, 2, 2]],
    },
    "isotropic": {
        "patch": (128, 128, 128),
        "crop": (64, 32, 32),
        "features": [32, 64, 128, 256, 320, 320],
        "kernels": [[3, 3, 3]] * 6,
        "strides": [[1, 1, 1], *[[2, 2, 2]] * 5],
    },
}
OURS = "revode.networks.PlannedUNet"
THEIRS = "dynamic_network_architectures.architectures.unet.ResidualEncoderUNet"
NEEDS_IMPORT = ["conv_op", "norm_op", "dropout_op", "nonlin"]


def arguments(plan, ndim=3, blocks=None):
    """The architecture of a plans file: names in place of classes, as JSON has them."""
    return {
        "n_stages": len(plan["features"]),
        "features_per_stage": plan["features"],
        "conv_op": f"torch.nn.modules.conv.Conv{ndim}d",
        "kernel_sizes": plan["kernels"],
        "strides": plan["strides"],
        "n_blocks_per_stage": blocks or [1, 3, 4, 6, 6, 6][: len(plan["features"])],
        "n_conv_per_stage_decoder": [1] * (len(plan["features"]) - 1),
        "conv_bias": True,
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{ndim}d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }


def build(kind: str, plan: dict[str, Any], deep_supervision: bool = True, blocks: list[int] | None = None) -> Any:
    """Return the network, made by nnU-Net's own function."""
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans

    options = arguments(plan, blocks=blocks) | ({"exact": True} if kind == OURS else {})
    return get_network_from_plans(kind, options, NEEDS_IMPORT, 1, 3, True, deep_supervision)


def rows(name: str, plan: dict[str, Any]) -> list[str]:
    """Return a row of the table for each network: its bytes, and the batches that fit."""
    found = []
    for words, kind, strategy in (
        ("nnU-Net's ResidualEncoderUNet", THEIRS, ""),
        ("PlannedUNet, store", OURS, "store"),
        ("PlannedUNet, reversible", OURS, "reversible"),
    ):
        bills = []
        for batch in (1, 2):
            with FakeTensorMode():
                net = build(kind, plan)
                net = net.with_strategy(strategy) if strategy else net
                bills.append(step_bytes(net, torch.zeros(batch, 1, *plan["patch"])))
        (kept, one), (_, two) = bills
        num_parameters = sum(parameter.numel() for parameter in net.parameters())
        fixed = 2 * one - two + 12 * num_parameters  # with gradients and momenta
        cells = [f"{name}, {'x'.join(map(str, plan['patch']))}", words, f"{num_parameters / 1e6:.1f} M"]
        cells += [f"{size / 1e9:.2f} GB" for size in (kept, one)]
        cells += [str(max(0, int((gb * 1e9 - fixed) // (two - one)))) for gb in (8, 24)]
        found.append(f"| {' | '.join(cells)} |")
    return found


def step(name: str) -> None:
    """Take one reversible training step on the whole patch, behind a small one; print its bytes, counted and resident."""
    torch.set_num_threads(1)
    net, plan = build(OURS, PLANS[name]), PLANS[name]
    step_bytes(net, torch.zeros(1, 1, *plan["crop"]))  # libraries load their code
    before, start = reset_peak(), time.process_time()
    _, peak = step_bytes(net, torch.randn(1, 1, *plan["patch"]))
    grown = process_peak() - before
    print(f"{peak / 1e9:.2f} GB | {grown / 1e9:.2f} GB | {time.process_time() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/plans"), help="where plans.md is written")
    parser.add_argument("--step", choices=PLANS, help="take one step on this plan's patch, and print its peak")
    args = parser.parse_args()
    if args.step:
        return step(args.step)
    table = [row for name, plan in PLANS.items() for row in rows(name, plan)]
    measured = []
    for name, (words, limit) in itertools.product(PLANS, ALLOCATORS.items()):
        environment = os.environ | ({"MALLOC_MMAP_THRESHOLD_": limit} if limit else {})
        command = [sys.executable, __file__, "--step", name]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        measured.append(f"| {name}, {words} | {run.stdout.strip().splitlines()[-1]} |")
    text = PAGE.format(table="\n".join(table), measured="\n".join(measured))
    args.out.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out / "plans.md", text)
    print(text)


ALLOCATORS = {"as it is": "", "`MALLOC_MMAP_THRESHOLD_=65536`": "65536"}
"""Settings of the C library's allocator: the second returns what is freed to the system at once."""

PAGE = """# What nnU-Net's plans take

Bytes of all tensors in a training step on one image: kept between forward and backward, and at the peak of the step. The step
runs on fake tensors of the patch's size, under bfloat16 autocast, with deep supervision (`revode.networks.cost.step_bytes`).
Batches are those that fit beside weights, gradients and momenta (12 bytes a parameter). Workspace of convolutions is not
counted.

Command: `.venv/bin/python benchmarks/plans.py --out results/volumes-cpu`

| plan | network | parameters | kept | peak | batch in 8 GB | in 24 GB |
|---|---|---:|---:|---:|---:|---:|
{table}

`PlannedUNet.compute_conv_feature_map_size` returns the peak of the reversible step, divided by 5: nnU-Net's own network takes
5.3 and 5.9 bytes at the peak for each element that it counts.

## Measured

One real step of the reversible network, one image, one thread. "Counted" is the peak of the tensors; it should be the predicted
one. "Resident" is what the process grew by at most.

| plan, allocator | counted | resident | processor |
|---|---:|---:|---:|
{measured}

Resident memory is larger. oneDNN copies what a convolution reads and writes into its own layout, and those copies are no
tensors of torch. By default glibc keeps memory that was freed; `MALLOC_MMAP_THRESHOLD_=65536` makes it give that back.
"""


if __name__ == "__main__":
    main()
