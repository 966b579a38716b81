"""Families of transformers, converted: a handful here, all of them in the slow test, as docs/architectures.md shows."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import revode

architectures: Any = pytest.importorskip("architectures", reason="transformers is not installed")
PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
NAMED = """albert bart bert bloom deberta-v2 gemma2 gemma3_text gpt2 gpt_neo gpt_neox gptj llama mamba mistral mixtral opt
qwen2 rwkv t5 vit whisper""".split()

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers; those of a conversion are in the row


@pytest.mark.parametrize("family", ["albert", "bart", "bloom", "deberta-v2", "jamba", "mamba", "mixtral", "t5"])
def test_a_family_converts_with_the_gradients_of_plain_autograd(family: str) -> None:
    row = architectures.try_family(family)
    assert architectures.verdict(row) == "converts", row
    assert row["kept"] < 0.3


def test_a_wrong_gradient_is_seen() -> None:
    row = architectures.try_family("gpt2")
    assert architectures.verdict(row) == "converts"
    assert architectures.verdict(row | {"training": 1e-3}) == "wrong"
    assert architectures.verdict(row | {"training": float("nan")}) == "wrong"
    assert architectures.verdict(row | {"equal in eval": False}) == "wrong"
    tensors = {"a": torch.ones(3), "b": torch.ones(3)}
    assert architectures.distance(tensors | {"b": -torch.ones(3)}, tensors) > 1
    assert architectures.distance({"a": torch.ones(3)}, tensors) == float("inf")


def test_blocks_that_share_tensors_through_an_object_are_refused_and_may_be_left_out() -> None:
    """Layers of Gemma 3n put keys and values into a dictionary for later layers."""
    plain = architectures.tiny_model("gemma3n_text").double().eval()
    given = architectures.inputs_of(plain)
    with pytest.raises(ValueError, match=r"model.layers.2 changes an object among its.*leave out blocks that do so"):
        architectures.gradients(revode.convert(copy.deepcopy(plain)).train(), given)
    found = {}
    for backprop in ("reversible", "store"):
        model = revode.convert(copy.deepcopy(plain), blocks=slice(2), exact=23, backprop=backprop)
        found[backprop] = architectures.gradients(model.train(), given)
    assert architectures.distance(found["reversible"], found["store"]) < 1e-12


def test_the_page_has_the_named_families() -> None:
    convert = PAGE.read_text().partition("## Convert\n")[2].partition("\n## ")[0]
    assert set(NAMED) <= set(re.findall(r"^\| (\S+) \|", convert, flags=re.MULTILINE))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_family_has_a_wrong_gradient_or_ends_in_a_traceback(capsys: Any) -> None:
    rows = architectures.try_all(sorted(architectures.modeling_auto.MODEL_MAPPING_NAMES))
    kinds = {family: architectures.verdict(row) for family, row in rows.items()}
    assert not {family: rows[family] for family, kind in kinds.items() if kind in ("wrong", "traceback")}
    assert sum(kind != "untried" for kind in kinds.values()) >= 60
