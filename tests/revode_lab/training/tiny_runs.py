"""Runs small enough for tests: a Hamiltonian network of a few thousand weights on the embedded digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from revode.fields import TVNorm
from revode.networks import NetworkConfig, build
from revode_lab.cli import main
from revode_lab.training import Config, configure

TINY: dict[str, Any] = {
    "dataset": "digits",
    "batch_size": 32,
    "train_fraction": 0.2,
    "validation": 0.0,
    "epochs": None,
    "max_steps": 12,
    "log_every": 1,
    "checkpoint_every": 5,
    "evaluate_every": 1,
    "threads": 1,
    "device": "cpu",
    "report": False,
}
OPTIONS = {"blocks": [2, 2], "channels": [4, 8]}
FLAGS = [
    *(f"--{name.replace('_', '-')}={str(value).lower()}" for name, value in TINY.items() if value is not False),
    "--no-report",
    "--options=blocks=[2,2],channels=[4,8]",
]
"""`tiny` on the command line."""


def tiny(**settings: Any) -> Config:
    """A run of 12 steps, 8 to an epoch."""
    options = {**OPTIONS, **settings.pop("options", {})}
    return configure(**{**TINY, "options": options, **settings})


def command(*words: str | Path, capsys: Any) -> tuple[int, str, str]:
    """Exit code, output and errors of a ``revode`` command run in this process."""
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def read_rows(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The metrics of a run, of one kind if asked."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if kind is None or row["kind"] == kind]


def assert_same_bits(first: Path, second: Path) -> None:
    """Two runs ended with equal weights and equal metrics, bit for bit."""
    ours, theirs = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()


def without_batch_statistics(config: NetworkConfig) -> nn.Module:
    """`revode.networks.build` with every batch norm replaced by one that looks at single images."""
    model = build(config)
    for module in list(model.modules()):
        for child_name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, child_name, TVNorm(child.num_features))
    return model
