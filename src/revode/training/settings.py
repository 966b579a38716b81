"""The settings of `Config` one by one: found by name, read from YAML and from the command line, converted and refused.

An unknown key is refused with the nearest that exist, and a value of the wrong kind with what was expected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from revode.training.config import Config


@dataclass(frozen=True)
class Leaf:
    """One setting: its name, the section it lives in (empty at the top), its type and its help."""

    name: str
    section: str
    annotation: Any
    default: Any
    help: str

    @property
    def path(self) -> str:
        """Its place in the tree, as ``optimization.lr``."""
        return f"{self.section}.{self.name}" if self.section else self.name


def _find_leaves() -> Iterator[Leaf]:
    for top in dataclasses.fields(Config):
        annotation = typing.get_type_hints(Config)[top.name]
        if not dataclasses.is_dataclass(annotation):
            yield Leaf(top.name, "", annotation, top.default, top.metadata["help"])
            continue
        hints = typing.get_type_hints(annotation)
        for field in dataclasses.fields(annotation):
            default = {} if field.default is dataclasses.MISSING else field.default
            yield Leaf(field.name, top.name, hints[field.name], default, field.metadata["help"])


LEAVES = {leaf.name: leaf for leaf in _find_leaves()}
"""Every setting by its name, which is unique over the tree."""
SECTIONS = tuple(dict.fromkeys(leaf.section for leaf in LEAVES.values() if leaf.section))


def from_leaves(values: Mapping[str, Any]) -> Config:
    """The tree in which the named settings have these values and all others their defaults."""
    parts: dict[str, dict[str, Any]] = {section: {} for section in ("", *SECTIONS)}
    for name, value in values.items():
        leaf = LEAVES[name]
        parts[leaf.section][name] = convert(leaf, value)
    hints = typing.get_type_hints(Config)
    return Config(**parts.pop(""), **{name: hints[name](**part) for name, part in parts.items()})


def flatten(tree: Any, origin: str) -> dict[str, Any]:
    """Leaf name -> value of a nested dict; a key that does not exist is refused with the nearest that does.

    Args:
        tree: What a YAML file holds.
        origin: Its name, for messages.
    """
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ValueError(f"{origin} holds a {type(tree).__name__}; expected sections such as `optimization:`")
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key in SECTIONS:
            if not isinstance(value, Mapping):
                raise ValueError(
                    f"section {key!r} of {origin} holds {value!r}; expected settings such as `name: value`"
                )
            for name, inner in value.items():
                if name not in LEAVES or LEAVES[name].section != key:
                    raise ValueError(_unknown(f"{key}.{name}", str(name), origin))
                values[name] = inner
        elif key in LEAVES and not LEAVES[key].section:
            values[key] = value
        else:
            raise ValueError(_unknown(str(key), str(key), origin))
    return values


def _unknown(path: str, name: str, origin: str) -> str:
    if name in LEAVES:
        return f"unknown key {path!r} in {origin}; it is spelled {LEAVES[name].path!r}"
    paths = {leaf.path: leaf.path for leaf in LEAVES.values()} | {section: section for section in SECTIONS}
    near = [paths[p] for p in difflib.get_close_matches(path, paths, n=3, cutoff=0.5)]
    near += [LEAVES[n].path for n in difflib.get_close_matches(name, LEAVES, n=2) if LEAVES[n].path not in near]
    hint = f"; nearest: {', '.join(near)}" if near else f"; the sections are {', '.join(SECTIONS)}"
    return f"unknown key {path!r} in {origin}{hint}"


def read_yaml(path: str) -> dict[str, Any]:
    """Leaf name -> value of a YAML file."""
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


def convert(leaf: Leaf, value: Any) -> Any:
    """`value` in the type of `leaf`, from a string or from what YAML gives; else a ValueError that says what was expected."""
    try:
        return _convert(leaf.annotation, value)
    except (OverflowError, TypeError, ValueError):
        raise ValueError(f"{leaf.path} is {value!r}; expected {expectation(leaf.annotation)}") from None


def expectation(annotation: Any) -> str:
    """The values that `annotation` admits, in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join("none" if a is type(None) else expectation(a) for a in arguments)
    if origin is tuple:
        return "whole numbers, as 80,120"
    if origin is dict:
        return "settings, as h=0.05,init=smooth"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[annotation]


def _convert(annotation: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value)
    if origin is Literal:
        value = "none" if value is None and "none" in arguments else value
        if value not in arguments:
            raise ValueError
        return value
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        return tuple(_convert(int, item) for item in items if item != "")
    if origin is dict:
        return _convert_options(value)
    return _convert_scalar(annotation, value)


def _convert_scalar(kind: type, value: Any) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        return {"true": True, "false": False}[value.lower()] if str(value).lower() in ("true", "false") else int("")
    if kind is str:
        if isinstance(value, str):
            return value
        raise ValueError
    if isinstance(value, bool):
        raise ValueError
    if kind is int and isinstance(value, int):
        return value  # through a float, large ones would be rounded
    # YAML reads 1e-3, without a point, as a string.
    number = float(value)
    if kind is int:
        if number != int(number):
            raise ValueError
        return int(value) if isinstance(value, str) and value.strip("+-").isdigit() else int(number)
    return number


def _convert_options(value: Any) -> dict[str, Any]:
    """Options from a dict, or from ``key=value,key=[value,value]`` with values as YAML reads them."""
    if isinstance(value, Mapping):
        return {str(key): _number_if_possible(item) for key, item in value.items()}
    if not isinstance(value, str):
        raise ValueError
    import yaml

    try:
        options = yaml.safe_load("{" + value.replace("=", ": ") + "}")
    except yaml.YAMLError:
        raise ValueError from None
    if any(item is None for item in options.values()):
        raise ValueError
    return {str(key): _number_if_possible(item) for key, item in options.items()}


def _number_if_possible(item: Any) -> Any:
    """YAML reads 1e-3, without a point, as a string."""
    if isinstance(item, str):
        with contextlib.suppress(ValueError):
            return float(item)
    return item
