"""Predict the bytes of a training step under nnU-Net's plans: its own network, ours stored, ours reversible.

    .venv/bin/python benchmarks/plans.py --out results/volumes-cpu  # about 10 minutes; needs nnunetv2, without its dependencies

Both networks are built by nnU-Net's ``get_network_from_plans`` from the architecture of a plans file: a patch of 20x320x256
points of anisotropic spacing, and one of 128x128x128.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from revode.files import write_atomically
from revode.networks import PlannedUNet, describe
from revode_lab.files import human_bytes
from revode_lab.fresh import in_fresh_process, peak

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
THEIR_BYTES = 4.5
"""Bytes kept under autocast for each element that their network counts (`tests/revode/networks/test_planned.py`)."""


def arguments(plan, ndim=3, blocks=None):
    """Return the architecture of a plans file: names in place of classes, as in JSON."""
    stages = len(plan["features"])
    return {
        "n_stages": stages,
        "features_per_stage": plan["features"],
        "conv_op": f"torch.nn.modules.conv.Conv{ndim}d",
        "kernel_sizes": plan["kernels"],
        "strides": plan["strides"],
        "n_blocks_per_stage": blocks or [1, 3, 4, 6, 6, 6][:stages],
        "n_conv_per_stage_decoder": [1] * (stages - 1),
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

    return get_network_from_plans(kind, arguments(plan, blocks=blocks), NEEDS_IMPORT, 1, 3, True, deep_supervision)


def row(name: str, plan: dict[str, Any]) -> list[str]:
    """Return the lines of one plan: bytes, and the batches that fit."""
    ours, patch = build(OURS, plan), plan["patch"]
    assert isinstance(ours, PlannedUNet)
    theirs = build(THEIRS, plan)
    bill = describe(ours, image_size=patch)
    kept = {"store": bill.bytes_kept("store"), "reversible": bill.bytes_kept("reversible")}
    steps = {
        "nnU-Net's ResidualEncoderUNet": (theirs, THEIR_BYTES * theirs.compute_conv_feature_map_size(patch)),
        "PlannedUNet, store": (ours, float(kept["store"])),
        "PlannedUNet, reversible": (ours, 4.0 * ours.compute_conv_feature_map_size(patch)),
    }
    rows = []
    for words, (net, one) in steps.items():
        weights = 12 * sum(parameter.numel() for parameter in net.parameters())  # with gradients and momenta
        batches = [str(max(0, int((gb * 1e9 - weights) / one))) for gb in (8, 24)]
        edges = "x".join(map(str, patch))
        rows.append(
            f"| {name}, {edges} | {words} | {weights // 12 / 1e6:.1f} M | {one / 1e9:.2f} GB | {' | '.join(batches)} |"
        )
    return rows


def step(name: str) -> str:
    """Run one reversible training step on the whole patch under bfloat16, and return its cost in words."""
    torch.set_num_threads(1)
    net, patch = build(OURS, PLANS[name], deep_supervision=False), PLANS[name]["patch"]
    before, start = peak(), time.process_time()
    with torch.autocast("cpu", torch.bfloat16):
        scores = net(torch.randn(1, 1, *patch))
    scores.float().square().mean().backward()
    grads = sum(4 * parameter.numel() for parameter in net.parameters())
    return (
        f"{human_bytes(peak() - before - grads)} above the network and its gradients "
        f"({human_bytes(peak())} resident at most), {time.process_time() - start:.0f} s of the processor"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/plans"), help="where plans.md is written")
    args = parser.parse_args()
    lines = [
        "| plan | network | parameters | bytes of one image | batch in 8 GB | in 24 GB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, plan in PLANS.items():
        lines += row(name, plan)
    text = "\n".join(lines) + "\n\nMeasured, one reversible step on one image, bfloat16 convolutions, one thread:\n\n"
    text += "".join(f"- {name}: {in_fresh_process(step, name)}\n" for name in PLANS)
    args.out.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out / "plans.md", f"{PREFACE}\n{text}")
    print(text)


PREFACE = """# What nnU-Net's plans take

Bytes of a training step beside weights, gradients and momenta (12 bytes a parameter, taken off the memory of the GPU).
Reversible, as the planner is told: the pairs that backward keeps, the largest graph of a branch, the largest pair rebuilt
and its gradient, in float32. Stored: what autograd keeps, in float32. nnU-Net's own network: 4.5 bytes for each element
that it counts (measured under bfloat16 autocast). These are predictions; kernels that need workspace need more.

Command: `.venv/bin/python benchmarks/plans.py --out results/volumes-cpu`
"""


if __name__ == "__main__":
    main()
