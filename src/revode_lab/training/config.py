"""The configuration of a training run: one frozen tree, checked once, written to ``config.yaml``.

Every setting has a name of its own, which is its key in YAML (inside its section) and its flag on the command line. The tree
holds what decides the numbers of a run; where it is written and whether it resumes are arguments of `train`. A recipe is a
named set of settings: the paper's are as printed in it and in its authors' code, the others were chosen by measurement.
docs/training.md has them in a table.

Nothing here needs torch, so that ``revode train --help`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from revode.errors import nearest, unknown

MOST_THREADS = 1024
"""More make the thread pool fail."""


def _setting(default: Any, help: str, at_least: float | None = None, below: float | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "at_least": at_least, "below": below})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network, and how its gradients are computed."""

    name: str = _setting("hamiltonian-digits", "a name of `revode models`")
    backprop: Literal["auto", "reversible", "checkpoint", "store"] = _setting(
        "auto", "gradient strategy; auto: the network's own"
    )
    exact: int = _setting(0, "bits k of the grid 2^-k for bit-exact reversing; 0 is off, 14 is customary", at_least=0)
    options: dict[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"help": "further options of the network, as h=0.05,init=smooth"}
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images."""

    dataset: str = _setting(
        "digits",
        "digits, cifar10, cifar100, stl10; your own images: folder:PATH or npz:FILE, @64 behind it for edge 64",
    )
    train_fraction: float = _setting(1.0, "stratified, seeded share of the training images")
    validation: float = _setting(0.0, "share held out to choose best.ckpt; 0: the last weights", at_least=0, below=1)
    augment: bool = _setting(True, "random crops, and flips where they keep the meaning")
    flips: Literal["random", "alternating", "none"] = _setting(
        "random", "mirror by chance, in every second epoch, or never"
    )
    cutout: int = _setting(0, "edge of the square that is blanked in every augmented image; 0 is none", at_least=0)


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """SGD with momentum, and its schedule. Steps are updates of the weights."""

    epochs: int | None = _setting(40, "passes over the training images; none: max-steps decides", at_least=1)
    levels: str = _setting("", "multilevel schedule LAYERS@SIZE:EPOCHS,..., as 38@16:8,74@32:14")
    rate_per_level: bool = _setting(False, "a course of the learning rate for each level, instead of one for all")
    max_steps: int | None = _setting(None, "stop after this many updates, if that comes first", at_least=1)
    batch_size: int = _setting(64, "images per update, over all processes", at_least=1)
    lr: float = _setting(0.1, "learning rate (its peak, for one-cycle)", at_least=0)
    schedule: Literal["constant", "step", "one-cycle"] = _setting("one-cycle", "course of the learning rate")
    milestones: tuple[int, ...] = _setting((), "where `step` divides the learning rate by 10, as 80,120")
    milestone_unit: Literal["epochs", "steps"] = _setting("epochs", "what milestones count")
    warmup_fraction: float = _setting(0.3, "share of a one-cycle run in which the rate rises", at_least=0, below=1)
    momentum: float = _setting(0.9, "momentum of SGD", at_least=0, below=1)
    nesterov: bool = _setting(False, "Nesterov's momentum")
    weight_decay: float = _setting(2e-4, "decay of convolution and linear weights", at_least=0)
    smoothness: float = _setting(2e-4, "decay of the weights' change over depth, the paper's R_h", at_least=0)
    label_smoothing: float = _setting(0.0, "mass spread over all classes", at_least=0, below=1)
    clip: float = _setting(0.0, "largest norm of the gradient; 0 does not clip", at_least=0)
    ema: float = _setting(0.0, "decay of the averaged weights that are scored and kept; 0 is off", at_least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """Where and how it runs."""

    seed: int = _setting(0, "of initial weights, order, augmentation and subsets", at_least=0, below=2**63)
    device: str = _setting("auto", "cpu, cuda, cuda:1, ...; auto takes a GPU if there is one")
    threads: int = _setting(
        0, "CPU threads; 0 leaves torch's choice; the last bits depend on it", at_least=0, below=MOST_THREADS + 1
    )
    autocast: Literal["none", "bfloat16"] = _setting("none", "dtype of the branches; states stay float32")
    compile: bool = _setting(False, "compile the blocks, once for each kind and shape")


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """Files of a run, and how often they are written. Nothing here changes the weights."""

    log_every: int = _setting(20, "updates between lines of metrics.jsonl", at_least=1)
    evaluate_every: int = _setting(1, "epochs between evaluations; 0 evaluates at the end only", at_least=0)
    checkpoint_every: int = _setting(200, "updates between checkpoints", at_least=1)
    evaluation_batch_size: int = _setting(500, "images per forward pass of an evaluation", at_least=1)
    monitor: bool = _setting(False, "follow the stability of the network during training")
    monitor_every: int = _setting(100, "updates between calls of the monitor", at_least=1)
    report: bool = _setting(True, "write report.html at every evaluation, whole at the end")
    tensorboard: bool = _setting(False, "also write TensorBoard events")
    data_root: str | None = _setting(None, "folder of the data sets; default as in `revode data get --help`")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole tree."""

    recipe: str = _setting("auto", "the recipe that gave the defaults")
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimization: OptimizationConfig = dataclasses.field(default_factory=OptimizationConfig)
    execution: ExecutionConfig = dataclasses.field(default_factory=ExecutionConfig)
    record: RecordConfig = dataclasses.field(default_factory=RecordConfig)

    def __post_init__(self) -> None:
        _check(self.leaves())

    def leaves(self) -> dict[str, Any]:
        """Return name -> value of every setting, over all sections."""
        return {name: getattr(getattr(self, leaf.section, self), name) for name, leaf in LEAVES.items()}

    def to_yaml(self) -> str:
        """Return the tree as YAML that `read_yaml` reads back."""
        import yaml

        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)


@dataclass(frozen=True)
class Leaf:
    """One setting: its name, the section it lives in (empty at the top), its type, its help and its bounds."""

    name: str
    section: str
    kind: Any
    help: str
    at_least: float | None = None
    below: float | None = None

    @property
    def path(self) -> str:
        """Its place in the tree, as ``optimization.lr``."""
        return f"{self.section}.{self.name}" if self.section else self.name


SECTIONS: dict[str, Any] = {
    field.name: field.default_factory for field in dataclasses.fields(Config) if not field.metadata
}
"""Name of a section -> its class."""

LEAVES = {
    field.name: Leaf(field.name, section, typing.get_type_hints(tree)[field.name], **field.metadata)
    for section, tree in {"": Config, **SECTIONS}.items()
    for field in dataclasses.fields(tree)
    if field.metadata
}
"""Every setting by its name, which is unique over the tree."""

FREE = frozenset(
    "device threads data_root report log_every checkpoint_every tensorboard monitor monitor_every evaluation_batch_size".split()
)
"""Settings that leave a run the same run: where and how it runs, and what it writes down."""


_LEVEL = re.compile(r"(\d+)@(\d+):(\d+)")


class Level(NamedTuple):
    """A network of so many layers on images of this size, for so many epochs."""

    layers: int
    edge: int
    epochs: int

    @property
    def cost(self) -> int:
        """The cost of an epoch, in proportion to layers and areas of images."""
        return self.layers * self.edge**2


def parse_levels(text: str) -> tuple[Level, ...]:
    """Return the levels of ``38@16:8,74@32:14``; none of an empty text."""
    levels = []
    for part in text.split(",") if text else []:
        match = _LEVEL.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"levels has {part!r}; expected layers@edge:epochs, as 38@16:8,74@32:14")
        levels.append(Level(*map(int, match.groups())))
    for first, second in itertools.pairwise(levels):
        if second.layers < first.layers or second.edge < first.edge:
            raise ValueError(f"levels is {text}; neither layers nor the edge of images may fall from level to level")
    if any(not (level.edge and level.epochs) for level in levels):
        raise ValueError(f"levels is {text}; every level needs an edge and epochs of at least 1")
    return tuple(levels)


def num_epochs(levels: tuple[Level, ...]) -> int:
    """Return the epochs of all levels."""
    return sum(level.epochs for level in levels)


def cost_until(levels: tuple[Level, ...], epoch: int) -> float:
    """Return the cost of the first epochs, in epochs of the last level."""
    if not levels:
        return float(epoch)
    each = [level.cost for level in levels for _ in range(level.epochs)]
    return sum(each[:epoch]) / levels[-1].cost


def mean_cost(levels: tuple[Level, ...]) -> float:
    """Return the mean cost of an epoch, in epochs of the last level."""
    return cost_until(levels, num_epochs(levels)) / num_epochs(levels) if levels else 1.0


def _check(values: dict[str, Any]) -> None:
    """Refuse values out of bounds, and those that do not go together."""
    for name, leaf in LEAVES.items():
        value = values[name]
        if leaf.at_least is None or value is None:
            continue
        below = float("inf") if leaf.below is None else leaf.below
        if not leaf.at_least <= value < below:
            limit = "" if leaf.below is None else f" and less than {leaf.below}"
            raise ValueError(f"{name} is {value}; expected at least {leaf.at_least}{limit}")
    if not 0 < values["train_fraction"] <= 1:
        raise ValueError(f"train_fraction is {values['train_fraction']}; expected a number above 0 and at most 1")
    if values["epochs"] is None and values["max_steps"] is None:
        raise ValueError("epochs and max_steps are both none; give one of them")
    if values["schedule"] == "step" and not values["milestones"]:
        raise ValueError("schedule is step without milestones; give milestones, as 80,120")
    if any(milestone < 1 for milestone in values["milestones"]):
        raise ValueError(f"milestones are {','.join(map(str, values['milestones']))}; expected numbers of at least 1")
    if values["cutout"] and not values["augment"]:
        raise ValueError(f"cutout is {values['cutout']}, but nothing is augmented; leave out cutout, or --no-augment")
    levels = parse_levels(values["levels"])
    if values["rate_per_level"] and not levels:
        raise ValueError("rate_per_level needs levels; give --levels, or leave it out")
    if levels and values["epochs"] != num_epochs(levels):
        raise ValueError(
            f"epochs is {values['epochs']}, but the levels {values['levels']} have {num_epochs(levels)} in all; "
            "leave epochs out"
        )
    if values["nesterov"] and not values["momentum"]:
        raise ValueError("nesterov needs momentum above 0")


def from_leaves(values: Mapping[str, Any]) -> Config:
    """Return the tree in which the named settings have these values and all others their defaults."""
    parts: dict[str, dict[str, Any]] = {section: {} for section in ("", *SECTIONS)}
    for name, value in values.items():
        parts[LEAVES[name].section][name] = convert(LEAVES[name], value)
    return Config(**parts.pop(""), **{name: SECTIONS[name](**part) for name, part in parts.items()})


def convert(leaf: Leaf, value: Any) -> Any:
    """Return `value` in the type of `leaf`, from a string or from YAML; raise ValueError with the expectation."""
    try:
        return _convert(leaf.kind, value)
    except Exception:
        raise ValueError(f"{leaf.path} is {value!r}; expected {_expectation(leaf.kind)}") from None


_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text",
    tuple: "whole numbers, as 80,120", dict: "settings, as h=0.05,init=smooth",
}  # fmt: skip


def _expectation(kind: Any) -> str:
    """Return the values that `kind` admits, in words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " or ".join(arguments)
    if origin is types.UnionType:
        return f"{_expectation(arguments[0])} or none"
    return _WORDS[origin or kind]


def _convert(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # with None
        return None if value is None or str(value).lower() in ("none", "null") else _convert(arguments[0], value)
    if origin is Literal:
        return arguments[arguments.index("none" if value is None else value)]
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        return tuple(_convert(int, item) for item in items if item != "")
    if origin is dict:
        return _convert_options(value)
    if kind is bool:
        return value if isinstance(value, bool) else {"true": True, "false": False}[str(value).lower()]
    if isinstance(value, bool) or (kind is str and not isinstance(value, str)):
        raise TypeError
    if kind is int and not isinstance(value, int):
        with contextlib.suppress(ValueError):
            return int(str(value))  # not by way of a float, which would round a large seed
        number = float(value)  # "1e3"
        if not number.is_integer():
            raise ValueError
        return int(number)
    return kind(value)  # YAML reads 1e-3, without a point, as a string


def _convert_options(value: Any) -> dict[str, Any]:
    """Return options from a dict, or from ``key=value,key=[value,value]`` with values as YAML reads them."""
    if isinstance(value, str):
        import yaml

        value = yaml.safe_load("{" + value.replace("=", ": ") + "}")
        if None in value.values():
            raise ValueError
    found = {str(key): item for key, item in value.items()}
    for key, item in found.items():
        with contextlib.suppress(ValueError):  # YAML reads 1e-3, without a point, as a string
            found[key] = float(item) if isinstance(item, str) else item
    return found


def read_yaml(path: str) -> dict[str, Any]:
    """Return name -> value of the settings in a YAML file."""
    import yaml

    try:
        with open(path, encoding="utf-8") as stream:
            tree = yaml.safe_load(stream)
    except OSError as error:
        raise ValueError(f"cannot read the configuration {path} ({error.strerror}); check --config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not a YAML file ({reason}); write one with --print-config") from error
    return flatten(tree, path)


def flatten(tree: Any, origin: str) -> dict[str, Any]:
    """Return name -> value of the nested dict in a YAML file called `origin`; refuse unknown keys with the nearest one."""
    if not isinstance(tree, Mapping | None):
        raise ValueError(f"{origin} holds a {type(tree).__name__}; expected sections such as `optimization:`")
    found: dict[str, Any] = {}
    for key, value in (tree or {}).items():
        if key not in SECTIONS:
            found[str(key)] = value
        elif isinstance(value, Mapping):
            found |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            raise ValueError(f"section {key!r} of {origin} holds {value!r}; expected settings such as `name: value`")
    names = {leaf.path: name for name, leaf in LEAVES.items()}
    for path in found:
        if path not in names:
            raise _unknown_key(path, origin)
    return {names[path]: value for path, value in found.items()}


def _unknown_key(path: str, origin: str) -> ValueError:
    name = path.rpartition(".")[2]
    if name in LEAVES:
        return ValueError(f"unknown key {path!r} in {origin}; it is spelled {LEAVES[name].path!r}")
    near = [LEAVES[found].path for found in nearest(name, LEAVES)] or nearest(path, SECTIONS)
    hint = f"nearest: {', '.join(near)}" if near else f"the sections are {', '.join(SECTIONS)}"
    return ValueError(f"unknown key {path!r} in {origin}; {hint}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Return one flag per setting, grouped by section. A flag that is not given leaves no trace in the namespace."""
    groups = {section: parser.add_argument_group(section) for section in SECTIONS}
    for name, leaf in LEAVES.items():
        if name in ("name", "recipe"):  # MODEL and --recipe
            continue
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": leaf.help.replace("%", "%%")}
        if leaf.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            literal = typing.get_origin(leaf.kind) is Literal
            options["metavar"] = "|".join(typing.get_args(leaf.kind)) if literal else _METAVARS.get(leaf.kind, "VALUE")
        groups[leaf.section].add_argument(f"--{name.replace('_', '-')}", **options)


_METAVARS = {int: "N", float: "X", str: "NAME", int | None: "N", str | None: "DIR"}


RECIPES: dict[str, dict[str, Any]] = {
    "digits": {
        "dataset": "digits",
        "epochs": 20,
        "batch_size": 32,
        "lr": 0.2,
        "schedule": "one-cycle",
        "label_smoothing": 0.1,
        "ema": 0.99,
        "weight_decay": 5e-4,
        "validation": 0.1,
        "evaluate_every": 5,
    },
    "quick": {
        "name": "hamiltonian-74",
        "dataset": "cifar10",
        "epochs": 25,
        "batch_size": 64,
        "lr": 0.1,
        "schedule": "one-cycle",
        "nesterov": True,
        "ema": 0.99,
        "clip": 1.0,
        "weight_decay": 5e-4,
        "validation": 0.1,
    },
    "cifar": {
        "name": "hamiltonian-74",
        "dataset": "cifar10",
        "epochs": 160,
        "batch_size": 100,
        "lr": 0.1,
        "schedule": "step",
        "milestones": (80, 120),
    },
    "cifar-1202": {
        "name": "hamiltonian-1202",
        "dataset": "cifar10",
        "epochs": None,
        "max_steps": 80_000,
        "batch_size": 32,
        "lr": 0.1,
        "schedule": "step",
        "milestones": (40_000, 60_000),
        "milestone_unit": "steps",
    },
    "stl": {
        "name": "hamiltonian-stl",
        "dataset": "stl10",
        "epochs": None,
        "max_steps": 20_000,
        "batch_size": 128,
        "lr": 0.1,
        "schedule": "step",
        "milestones": (60, 80, 100),
        "weight_decay": 5e-4,
        "smoothness": 3e-4,
    },
}
"""Name -> settings that differ from the defaults of `Config`."""

_USUAL_RECIPES = {"digits": "digits", "cifar10": "cifar", "cifar100": "cifar", "stl10": "stl"}
_RECIPES_OF_MODELS = {"hamiltonian-1202": "cifar-1202"}


def configure(config_file: str | None = None, **settings: Any) -> Config:
    """Return the configuration from a recipe, then a YAML file, then single settings such as ``model="hamiltonian-74"``.

    Each overrides the one before. With nothing given, it is a Hamiltonian network on the embedded digits. A data set without a
    recipe takes its usual one, and a recipe without a data set or a network its own.
    """
    if "model" in settings:
        settings["name"] = settings.pop("model")
    for name in settings:
        if name not in LEAVES:
            raise unknown("setting", name, LEAVES, "`revode train --help` lists all")
    given = {**(read_yaml(config_file) if config_file else {}), **settings}
    given = {name: convert(LEAVES[name], value) for name, value in given.items()}
    if ":" in given.get("dataset", ""):
        from revode_lab.data import full_name

        given["dataset"] = full_name(given["dataset"])
    recipe = given.get("recipe", "auto")
    if recipe == "auto":
        recipe = _usual_recipe(given.get("name"), given.get("dataset"))
    if recipe not in RECIPES:
        raise unknown("recipe", recipe, RECIPES)
    if given.get("levels"):
        given = {"epochs": num_epochs(parse_levels(given["levels"])), "max_steps": None} | given  # not the recipe's
    return from_leaves({**RECIPES[recipe], **given, "recipe": recipe})


def _usual_recipe(model: str | None, dataset: str | None) -> str:
    """Return the recipe of the data set, or of the data set whose images have the size of the network."""
    if dataset is None and model is not None:
        from revode.networks import model_config
        from revode_lab.data import INFOS

        size = model_config(model).image_size
        dataset = next((info.name for info in INFOS.values() if info.image_size == size), "cifar10")
    if dataset == "cifar10" and model in _RECIPES_OF_MODELS:
        return _RECIPES_OF_MODELS[model]
    if dataset and ":" in dataset:
        return "quick"
    return _USUAL_RECIPES.get(dataset or "digits", "cifar")
