"""A finished or unfinished run read back: its network with the weights it keeps, its data, its score."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from revode import data
from revode.files import read_json
from revode.networks.files import load
from revode.training.checkpoint import read_newest
from revode.training.config import Config, from_leaves, read_yaml
from revode.training.distributed import Group, choose_device
from revode.training.evaluation import Score, evaluate
from revode.training.job import build_model
from revode.training.runs import CONFIG, RESULT, WEIGHTS, existing_run


@dataclass(frozen=True)
class Run:
    """What lies in a run directory.

    Attributes:
        folder: The directory.
        config: Its configuration.
        model: Its network, in evaluation mode.
        weights_of: Which weights these are, in words.
        result: What ``result.json`` holds; empty before the run is finished.
    """

    folder: Path
    config: Config
    model: nn.Module
    weights_of: str
    result: dict[str, Any]


def load_run(folder: str | Path, device: str = "cpu") -> Run:
    """Read a run: its kept weights if it is finished, else those of its newest checkpoint (averaged, if it averages)."""
    path = existing_run(folder)
    config = from_leaves(read_yaml(str(path / CONFIG)))
    where = choose_device(device)
    result = read_json(path / RESULT) or {}
    if result and (path / WEIGHTS).exists():
        return Run(path, config, load(path / WEIGHTS).to(where).eval(), result["weights_of"], result)
    checkpoint = read_newest(path, print)
    if checkpoint is None:
        raise ValueError(f"{path} has no weights yet; wait for its first checkpoint, or resume it")
    state = checkpoint["model"]
    if checkpoint["average"] is not None:
        state = {**state, **checkpoint["average"]["tensors"]}
    model = build_model(config, data.describe(config.data.dataset))
    model.load_state_dict(state)
    return Run(path, config, model.to(where).eval(), f"checkpoint at step {checkpoint['step']}", result)


def score_run(run: Run, split: str = "test", data_root: str | None = None) -> Score:
    """The score of a run's network on ``"test"``, ``"validation"`` (as it was held out) or ``"train"`` images."""
    dataset = data.load(run.config.data.dataset, data_root or run.config.record.data_root)
    device = next(run.model.parameters()).device
    images = choose_split(run.config, dataset, split).to(device)
    size = run.config.record.evaluation_batch_size
    score = evaluate(run.model, images, dataset, Group(0, 1, device), batch_size=size)
    assert score is not None
    return score


def choose_split(config: Config, dataset: data.Dataset, name: str) -> data.Split:
    """The images a run calls by this name."""
    if name == "test":
        return dataset.split("test")
    settings, seed = config.data, config.execution.seed
    split = data.subset(dataset.train, settings.train_fraction, seed)
    if not settings.validation:
        if name == "validation":
            raise ValueError("this run held out no validation images; score it on test or train")
        return split
    kept, held_out = data.hold_out(split, settings.validation, seed)
    return held_out if name == "validation" else kept


def images_as_seen(dataset: data.Dataset, split: data.Split, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` images of a split, standardised, and their labels."""
    batch = split.take(torch.arange(min(count, len(split))))
    return data.standardise(batch.images, dataset), batch.labels
