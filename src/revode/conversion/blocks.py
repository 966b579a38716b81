"""Find the lists of residual blocks that `convert` can run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from revode.errors import unknown


def blocks_of(model: nn.Module, path: str | None = None) -> tuple[Any, str]:
    """Return the list of blocks at `path`, or the longest one, and its path."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    if not lists:
        raise ValueError(f"{type(model).__name__} has no nn.ModuleList or nn.Sequential of blocks to convert")
    if path is not None and not isinstance(path, str):
        raise TypeError(f"path must be the path of a list of blocks, got {path!r}; give a scheme by scheme=…")
    if path is not None and path in lists:
        return _without_lists(lists[path], path), path
    candidates = {name: found for name, found in lists.items() if _are_blocks(found)}
    if path is not None:
        choices = [name or "'' (the model itself)" for name in _outermost(candidates or lists)]
        raise unknown(f"list of blocks in {type(model).__name__}", path, choices)
    longest = max(map(len, candidates.values()), default=0)
    found = _outermost([name for name, blocks in candidates.items() if len(blocks) == longest])
    if len(found) != 1:
        names = [repr(name) for name in found or lists]
        shown = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
        raise ValueError(
            f"{type(model).__name__} does not tell which blocks to convert: give a path, or a list of paths. "
            f"Its lists of {'equal blocks' if found else 'modules'}: {shown}"
        )
    return lists[found[0]], found[0]


_MOST_NAMED = 10


def _without_lists(blocks: Any, path: str) -> Any:
    """Return a list of blocks; raise if it holds lists, which nobody calls."""
    inside = [f"{path}.{i}".lstrip(".") for i, m in enumerate(blocks) if isinstance(m, nn.ModuleList | nn.ModuleDict)]
    if inside:
        raise ValueError(f"{path!r} is a list of lists, which cannot be called: give the paths of those, as {inside}")
    return blocks


def _outermost(names: Iterable[str]) -> list[str]:
    """Return the paths that lie in no other of them."""
    names = list(names)
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def lists_like_the_longest(model: nn.Module) -> list[str]:
    """Return the path that `convert` takes by default, and the paths of all other lists of blocks of the same classes."""
    blocks, path = blocks_of(model)
    kinds = {type(block) for block in blocks}
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m)]
    return [path, *(name for name, m in lists if name != path and {type(block) for block in m} <= kinds)]


def _are_blocks(modules: Any) -> bool:
    """Return True if modules look like residual blocks: made of modules, and of one class or one base class."""
    made = all(any(True for _ in m.children()) and not isinstance(m, nn.ModuleList | nn.ModuleDict) for m in modules)
    kinds = [set(type(module).__mro__) for module in modules]
    return made and bool(kinds and set.intersection(*kinds) - set(nn.Module.__mro__))
