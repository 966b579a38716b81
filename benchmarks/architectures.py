"""Convert every family of the installed ``transformers``: which run reversibly, which are refused and why, bytes kept.

Models are made from tiny random configurations, offline. Each one is compared with itself in float64: in eval mode with the
plain model, to the bit; in training with ``backprop="store"``, which draws the same signs. Run it from the root:

    python benchmarks/architectures.py docs          # writes docs/architectures.md, about 15 minutes of one core
    python benchmarks/architectures.py gpt2 llama    # some families, printed
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import random
import re
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import revode
from revode.memory import SavedTensors

DEPTH = 6
TOLERANCE = 1e-8
MOST_PARAMETERS = 3_000_000
SECONDS = 30.0
RULES: tuple[tuple[str, int], ...] = (
    (r"(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(encoder|decoder)_layers|depth|num_blocks)$", DEPTH),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads?)$", 2),
    (r"((num_)?(\w*_)?attention_heads|n_heads?|num_heads|(mamba|linear)_num_\w+_heads)$", 2),
    (r"(hidden_size|d_model|n_embd|embed_dim|emb_dim|(encoder|decoder)_embed_dim|hidden_dim|embedding_size)$", 16),
    (r"(projection_dim|width|dim)$", 16),
    (r"(\w*intermediate_size|(encoder_|decoder_)?ffn_dim|d_ff|d_inner|\w*ffn_hidden_size)$", 32),
    (r"(head_dim|d_kv|\w+_head_dim|\w*_rank)$", 8),
    (r"\w*vocab_size$", 64),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$", 4),
    (r"(num_experts_per_tok|moe_k|top_k_experts)$", 2),
    (r"(n_group|topk_group)$", 1),
    (r"(image_size|img_size)$", 16),
    (r"patch_size$", 4),
)
"""Pattern of a name in a configuration -> its largest value in a tiny model."""
HEADS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


def shrunk(config: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that make a configuration tiny."""
    changes: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        inner = getattr(config, name, None)
        if isinstance(inner, transformers.PreTrainedConfig):
            changes[name] = {**value, **shrunk(inner, {})}
        elif name.endswith("token_id") and isinstance(value, int):
            changes[name] = value % 64
        elif name.endswith("token_id") and isinstance(value, list):
            changes[name] = [each % 64 for each in value]
        elif isinstance(value, list) and DEPTH < len(value) == getattr(config, "num_hidden_layers", None):
            changes[name] = [*value[: DEPTH - 2], *value[-2:]]
        elif isinstance(value, int) and not isinstance(value, bool):
            small = next((limit for rule, limit in RULES if re.match(rule, name) and value > limit), value)
            changes |= {} if small == value else {name: small}
    return changes | own


def tiny_model(family: str) -> Any:
    """Return a small random model of a family."""
    kind = CONFIG_MAPPING[family]
    config = kind(**shrunk(kind(), OWN.get(family, {})))
    config.use_cache = False
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = True
    config._experts_implementation = "eager"  # the others have no float64
    names = next(getattr(modeling_auto, head)[family] for head in HEADS if family in getattr(modeling_auto, head))
    kind = getattr(transformers, names if isinstance(names, str) else names[0])
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > MOST_PARAMETERS:
        raise Untried(f"{size:,} parameters")
    torch.manual_seed(0)
    return kind(config)


class Untried(Exception):
    """No tiny model, or no input for it, was found."""


OWN: dict[str, dict[str, Any]] = {
    "gptj": {"rotary_dim": 4},
    "falcon_h1": {"mamba_chunk_size": 8},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": 32,
        "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
}


def some_inputs(model: Any) -> Iterator[dict[str, Any]]:
    """Return inputs of several kinds, of which a model may take one."""
    size = model.config.to_dict().get("image_size", 16)
    side = size if isinstance(size, int) else 16
    channels = getattr(model.config, "num_channels", 3)
    bins = getattr(model.config, "num_mel_bins", getattr(model.config, "feature_size", 80))
    frames = 2 * getattr(model.config, "max_source_positions", 32)
    tokens = torch.randint(3, 60, (3, 12))
    images = torch.randn(3, channels, side, side)
    video = torch.randn(2, 4, channels, side, side)
    sound, features, long = torch.randn(2, 8000), torch.randn(2, bins, 64), torch.randn(2, bins, frames)
    yield from (
        {"input_ids": tokens},
        {"input_ids": tokens, "decoder_input_ids": tokens[:, :7]},
        {"pixel_values": images},
        {"input_ids": tokens, "pixel_values": images},
        {"input_features": features},
        {"input_features": features.transpose(1, 2)},
        {"input_features": features, "decoder_input_ids": tokens[:2, :7]},
        {"input_features": features.transpose(1, 2), "decoder_input_ids": tokens[:2, :7]},
        {"input_features": long, "decoder_input_ids": tokens[:2, :7]},
        {"input_values": sound},
        {"input_values": sound, "decoder_input_ids": tokens[:2, :7]},
        {"input_values": features.transpose(1, 2)},
        {"pixel_values": video},
        {"pixel_values_videos": video},
        {"inputs_embeds": torch.randn(2, 12, 16)},
        {"hidden_states": torch.randn(2, 12, 16)},
        {"input_values": torch.randn(2, 1, 2000)},
        {"past_values": torch.randn(2, 32, getattr(model.config, "num_input_channels", 1))},
    )


def outputs(model: Any, given: dict[str, Any]) -> list[Tensor]:
    """Return the floating-point tensors that a model makes, from the same random numbers each time."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002, layers are dropped, and spans masked, by the RNGs of others
    found = model(**given)
    leaves = pytree.tree_leaves(dict(found) if hasattr(found, "items") else found)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def gradients(model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """Return the outputs of a model, and the gradients of a loss on all of them."""
    model.zero_grad(set_to_none=True)
    made = outputs(model, given)
    loss: Any = sum((1 + i) * y.square().mean() for i, y in enumerate(made) if y.requires_grad)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {f"output {i}": y.detach() for i, y in enumerate(made)} | found


def distance(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Return the largest distance of two sets of tensors, relative to the norm of the one, or of a thousandth of all."""
    whole = max((float(t.norm()) for t in reference.values()), default=0.0)
    missing = [n for n in ours.keys() ^ reference.keys() if float((ours | reference)[n].norm()) > 1e-12 * whole]
    if missing:
        return float("inf")
    floor = 1e-3 * whole
    both = [(ours[name], t) for name, t in reference.items() if name in ours]
    return max((float((a - b).norm()) / max(floor, float(b.norm())) for a, b in both if a.numel()), default=0.0)


def inputs_of(model: Any) -> dict[str, Any]:
    """Return inputs that the model takes."""
    taken = inspect.signature(model.forward).parameters
    error: Any = None
    for given in [inputs for inputs in some_inputs(model) if inputs.keys() <= taken.keys()]:
        try:
            with torch.no_grad():
                if outputs(model, given):
                    return given
        except Exception as failed:
            error = error or failed
    raise Untried(f"no input was found: {error}")


def kept(model: Any, given: dict[str, Any]) -> int:
    """Return the bytes that a forward pass keeps for backward."""
    with SavedTensors([*model.parameters(), *model.buffers()]) as saved:
        outputs(model, given)
    return saved.num_bytes


def converted(model: Any, **options: Any) -> list[str]:
    """Convert the blocks of a model, or one list of blocks after the other; return their paths."""
    try:
        revode.convert(model, **options)
    except ValueError as error:
        paths = re.findall(r"'([^']*)'", str(error).partition("lists of equal blocks:")[2])
        if not paths:
            raise
        for path in paths:
            revode.convert(model, path, **options)
    return sorted({name.rpartition(".")[0] for name, module in model.named_modules() if hasattr(module, "_revode")})


def try_family(family: str) -> dict[str, Any]:
    """Return what converting a family comes to; raise `Untried` if there is no tiny model, or no input for it."""
    plain = tiny_model(family).eval()
    small = inputs_of(plain)
    given = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in small.items()}
    single, plain = copy.deepcopy(plain), plain.double()
    with torch.no_grad():
        before, again = outputs(plain, given), outputs(plain, given)
    if not all(map(torch.equal, before, again)):
        raise Untried("two calls give different outputs")
    if not all(bool(torch.isfinite(t).all()) for t in gradients(copy.deepcopy(plain).train(), given).values()):
        raise Untried("its own gradients are not finite")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = compare(plain.eval(), given)
        except (ValueError, TypeError, RuntimeError) as error:
            is_ours = "/revode/" in traceback.extract_tb(error.__traceback__)[-1].filename
            return {"refused" if is_ours and " failed on a state" not in str(error) else "traceback": str(error)}
    texts = [str(entry.message) for entry in said]
    found["has no skip"] = any("has no skip connection" in text for text in texts)
    found["not called"] = any("without calling its converted blocks" in text for text in texts)
    storing = kept(single.train(), small)
    converted(single, exact=True)
    found["kept"] = kept(single, small) / max(1, storing)
    return found


def compare(plain: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return how far a converted model is from the plain one in eval mode, and from storing in training."""
    stored, ours = copy.deepcopy(plain), copy.deepcopy(plain)
    found: dict[str, Any] = {"paths": converted(ours, exact=23)}
    converted(stored, exact=23, backprop="store")
    with torch.no_grad():
        found["equal in eval"] = all(map(torch.equal, outputs(ours, given), outputs(plain, given)))
    found["eval"] = distance(gradients(ours, given), gradients(plain, given))
    reference = gradients(stored.train(), given)
    if not all(bool(torch.isfinite(t).all()) for t in reference.values()):
        raise Untried("its random states are too small for the grid")
    found["training"] = distance(gradients(ours.train(), given), reference)
    if found["training"] > TOLERANCE:  # compare with what a change of the weights' last bits makes
        for p in stored.parameters():
            p.detach().mul_(1 + 1e-15)
        found["of rounding"] = distance(gradients(stored, given), reference)
    return found


def verdict(row: dict[str, Any]) -> str:
    """Return the class of a family, a key of `KINDS`."""
    if kind := next((kind for kind in ("untried", "refused", "traceback") if kind in row), None):
        return kind
    wrong = not row["equal in eval"] or not row["eval"] <= TOLERANCE
    if wrong or not row["training"] <= max(TOLERANCE, 10 * row.get("of rounding", 0.0)):
        return "wrong"
    return "warned" if row["has no skip"] or row["not called"] else "converts"


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise `Untried` after this many seconds of the processor."""

    def stop(*_: Any) -> None:
        raise Untried(f"more than {seconds} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def try_all(families: list[str]) -> dict[str, dict[str, Any]]:
    """Return what converting each family comes to."""
    rows = {}
    for family in families:
        try:
            with limit(SECONDS), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows[family] = try_family(family)
        except Exception as error:  # of transformers: it has nothing to do with a conversion
            rows[family] = {"untried": str(error) if isinstance(error, Untried) else f"{type(error).__name__}: {error}"}
    return rows


KINDS = {
    "converts": "convert, with the gradients of plain autograd",
    "warned": "convert with a warning, and have those gradients too",
    "refused": "are refused, by the sentence below",
    "wrong": "have a wrong gradient",
    "traceback": "end in a traceback",
    "untried": "could not be tried: no tiny model, or no input for it, was found by rule, or a package is missing",
}


def page(rows: dict[str, dict[str, Any]]) -> str:
    """Return the page."""
    kinds = {family: verdict(row) for family, row in rows.items()}
    lists = {kind: [family for family in rows if kinds[family] == kind] for kind in KINDS}
    paths = {family: ", ".join(f"`{path}`" for path in row.get("paths", ())) for family, row in rows.items()}
    converts = [[family, paths[family], f"{100 * rows[family]['kept']:.1f} %"] for family in lists["converts"]]
    reasons = {True: "no skip connection", False: "one list is not called for text alone"}
    warned = [[family, paths[family], reasons[rows[family]["has no skip"]]] for family in lists["warned"]]
    others = [
        [family, kind, " ".join(rows[family].get(kind, f"off by {rows[family].get('training')}").split())]
        for kind in ("wrong", "traceback", "refused")
        for family in lists[kind]
    ]
    untried = textwrap.fill(f"{', '.join(lists['untried'])}.", 118, break_long_words=False, break_on_hyphens=False)
    return HEAD.format(
        families=len(rows),
        version=transformers.__version__,
        depth=DEPTH,
        tolerance=TOLERANCE,
        counts=_table(["families", ""], [[str(len(lists[kind])), text] for kind, text in KINDS.items()]),
        converts=_table(["family", "blocks", "kept"], converts),
        warned=_table(["family", "blocks", "warned of"], warned),
        others=_table(["family", "", "what is said"], others),
        untried=untried,
    )


HEAD = """# Architectures

What `revode.convert(model)` does to {families} families of transformers {version}, with tiny random models of about
{depth} blocks in each list. This page is generated: `python benchmarks/architectures.py docs`.

{counts}

Compared in float64. In eval mode the converted model gives the bits of the plain one. In training, the gradients of a loss on
everything that the model returns (logits of routers among it) are those of `backprop="store"` with the same signs: they differ
by at most {tolerance:g} of their norm, or by what a change of all weights by 1e-15 makes.

## Convert

**kept**: what a forward pass in training keeps for backward, over what the plain model keeps, with `exact=True` and the default
scheme (`python benchmarks/architectures.py docs`). It counts embeddings and heads, too: a deep model keeps a smaller part.

{converts}

## Convert with a warning

Where blocks have no skip connection, the model mixes states by itself, or the list holds parts of blocks: choose the list by
its path. Models of images and text were tried with text, which does not reach the blocks for images.

{warned}

## Refused

{others}

## Not tried

{untried}
"""


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    whole = sys.argv[1:2] == ["docs"]
    rows = try_all(sorted(modeling_auto.MODEL_MAPPING_NAMES) if whole else sys.argv[1:])
    for family, row in rows.items():
        print(family, verdict(row), json.dumps(row))
    if whole:
        Path("docs/architectures.md").write_text(page(rows))
