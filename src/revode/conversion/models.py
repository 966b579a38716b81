"""Models that exist already, run reversibly: `convert` and `revert`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from revode.conversion.blocks import blocks_of, lists_like_the_longest
from revode.conversion.converted import Conversion, Converted, converted_class
from revode.engine.strategy import Strategy
from revode.schemes import BDIA, Scheme

Model = TypeVar("Model", bound=nn.Module)
_log = logging.getLogger("revode")


def convert(
    model: Model,
    path: str | Sequence[str] | None = None,
    scheme: Scheme | None = None,
    *,
    blocks: slice = slice(None),
    **options: Any,
) -> Model:
    """Run residual blocks of a model reversibly; return the model, which is changed.

    Parameters, the keys of the ``state_dict``, the model's own loop and its hooks stay. With `BDIA` the model in eval mode is
    the unconverted one, bit for bit. With other schemes it is another network with the same weights, to be fine-tuned.

    Beside one float32 pair, bits are kept of each element and block: 1, 2, 4, 4, 8 or 8 for a blend of 2^-1 to 2^-6, none for
    ``MidPoint(h)``. Training a trained model on with BDIA's signs costs quality: 0.1 % of the loss with the default, 5.6 % with
    ±1/2 (docs/transformers.md). For an untrained model use `MidPoint`, or write it with `AdditiveCoupling`, at no such cost.

    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    >>> model = convert(nn.TransformerEncoder(layer, 12, enable_nested_tensor=False))
    >>> model(torch.randn(2, 5, 16)).sum().backward()

    Args:
        model: the model.
        path: of its ``nn.ModuleList`` or ``nn.Sequential`` of blocks, as in ``"transformer.h"``; ``""`` is the model itself;
            several paths for several lists. By default, the longest list of blocks of one class.
        scheme: a scheme on one tensor; ``BDIA(blend=1/16)`` by default.
        blocks: which of them, if some change the shape.
        options: of `Strategy`: ``backprop``, ``exact``, ``anchor_every``, ``verify``. A blend below 1/2 implies ``exact``:
            unless given, its bits are chosen from the states of the first batch, in which each block keeps its input.
    """
    if isinstance(path, Sequence) and not isinstance(path, str):
        lists = [blocks_of(model, each)[1] for each in path]  # all are looked for before the first is changed
        for each in lists:
            convert(model, each, scheme, blocks=blocks, **options)
        return model
    others = lists_like_the_longest(model)[1:] if path is None else []
    container, path = blocks_of(model, path)
    children = {f"{path}.{i}".lstrip("."): getattr(m, "_orig_mod", m) for i, m in enumerate(container.children())}
    chosen = dict(list(children.items())[blocks])
    if blocks.step not in (None, 1) or not chosen:
        raise ValueError(f"blocks must be a slice without step that chooses some of {len(children)}, got {blocks}")
    time_first = any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in container.modules())
    scheme = BDIA(blend=1 / 16, batch_dim=int(time_first)) if scheme is None else scheme
    if not isinstance(scheme, Scheme) or scheme.splits:
        raise ValueError(f"convert takes a scheme that keeps the state whole, as BDIA() or MidPoint(), got {scheme!r}")
    strategy = Strategy().replace(**options)
    strategy.check_scheme(scheme)
    if strategy.memory_budget is not None or strategy.compile:
        raise ValueError("convert takes no memory_budget and does not compile: use ReversibleSequence")
    for name, block in chosen.items():
        if isinstance(block, Converted):
            raise ValueError(f"{name} is converted already: revode.revert the model first")
        if isinstance(block, torch.jit.ScriptModule):
            raise ValueError(f"{name} is TorchScript code, which cannot be converted: give the module it was made from")
    amplifies = scheme.shift is not None and 0.0 < abs(scheme.carry) < 0.5  # rounding grows by 1 / |carry| a step back
    chooses_bits = amplifies and "exact" not in options and strategy.backprop == "reversible"
    distinct = {block: name for name, block in reversed(chosen.items())}  # a block may be in the list twice
    conversion = Conversion(scheme, strategy, chooses_bits)
    for number, (block, name) in enumerate(reversed(distinct.items())):
        own = block.__dict__.pop("forward", None)
        block.__dict__["_revode"] = conversion, f"the converted block {name}", number, own
        block.__class__ = converted_class(type(block))
    if type(model).forward is not nn.Module.forward and not isinstance(model, Converted):
        model.register_forward_hook(conversion.watch, with_kwargs=True)
    kind = type(next(iter(distinct))).__name__
    _log.info("converted %d blocks %s of %r, %r", len(distinct), kind, path, scheme)
    if others:
        _log.warning(
            "converted %d blocks %s of %r only; %s hold such blocks, too: convert takes a list of paths",
            *(len(distinct), kind, path, ", ".join(map(repr, others))),
        )
    return model


def revert(model: Model) -> Model:
    """Undo `convert`: run the blocks as before; return the model, which is changed.

    **Warning:** with another scheme than `BDIA`, a model that was trained as converted computes something else afterwards.

    >>> revert(convert(nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(3)]), ""))[0](torch.ones(4)).shape
    torch.Size([4])
    """
    found: list[Any] = [module for module in model.modules() if isinstance(module, Converted)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no converted blocks to revert")
    for conversion in conversions_in(model):
        scheme = conversion.scheme.in_eval()
        if conversion.is_trained and not (scheme.carry == 0.0 and scheme.coupling(0).is_plain):
            _log.warning(
                "a model that was trained with %r computes something else when it is reverted", conversion.scheme
            )
    for block in found:
        own = block.__dict__.pop("_revode")[3]
        if own is not None:
            block.__dict__["forward"] = own
        block.__class__ = block._converted_from
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Conversion):
                del module._forward_hooks[key], module._forward_hooks_with_kwargs[key]
    return model


def conversions_in(model: nn.Module) -> list[Conversion]:
    """Return the `Conversion` of each list of converted blocks, once each."""
    shared = {id(block._revode[0]): block._revode[0] for block in model.modules() if isinstance(block, Converted)}
    return list(shared.values())
