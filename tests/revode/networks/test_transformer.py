"""The GPT: every scheme, its gradients, its loss in chunks, and what it generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import revode
from revode.networks import transformer
from revode.networks.transformer import GPT
from revode.schemes import SCHEMES
from revode_lab.cli import main

EXACT = [name for name, kind in SCHEMES.items() if kind().invertible_exactly]


def gpt(scheme: str, **options: object) -> GPT:
    torch.manual_seed(0)
    if scheme == "plain":
        scheme, options = "midpoint", {"blend": 0.0} | options
    sizes = {"depth": 3, "width": 16, "heads": 2, "context": 12, "vocabulary": 30, "h": 0.5}
    model = revode.create_model("gpt-mini", scheme=scheme, **(sizes | options))
    assert isinstance(model, GPT)
    return model


def tokens(time: int = 10) -> Tensor:
    return torch.randint(30, (3, time), generator=torch.Generator().manual_seed(1))


def gradients(model: GPT) -> dict[str, Tensor]:
    torch.manual_seed(2)
    loss = model.loss(tokens())
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("scheme", [*SCHEMES, "plain"])
def test_gradients_are_those_of_store(scheme: str, dropout: float) -> None:
    ours = gradients(gpt(scheme, dropout=dropout).double())
    stored = gradients(gpt(scheme, dropout=dropout, backprop="store").double())
    for name, expected in stored.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("scheme", EXACT)
def test_exact_gradients_are_those_of_store_to_the_bit(scheme: str) -> None:
    ours, stored = gradients(gpt(scheme, exact=True)), gradients(gpt(scheme, exact=True, backprop="store"))
    assert all(torch.equal(ours[name], expected) for name, expected in stored.items())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_token_sees_those_behind_it_and_places_matter(scheme: str) -> None:
    model, a = gpt(scheme).eval(), tokens()
    b = a.clone()
    b[:, 6:] = (b[:, 6:] + 1) % 30
    ours, theirs = model(a), model(b)
    torch.testing.assert_close(ours[:, :6], theirs[:, :6])
    assert not torch.allclose(ours[:, 6:], theirs[:, 6:])
    swapped = a[:, [1, 0, *range(2, 10)]]
    assert not torch.allclose(model(swapped)[:, -1], ours[:, -1])


def test_the_plain_one_is_an_ordinary_transformer() -> None:
    model = gpt("plain", h=1.0).eval()
    x = model.embedding(tokens()) * 4.0
    for block in model.body.fields:
        x = x + block.attention(x)
        x = x + block.mlp(x)
    torch.testing.assert_close(model(tokens()), nn.functional.linear(model.norm(x), model.embedding.weight))
    bdia = gpt("bdia", h=1.0).eval()
    bdia.load_state_dict(model.state_dict())
    assert torch.equal(bdia(tokens()), model(tokens()))


def test_loss_in_chunks_is_the_loss_and_keeps_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "CHUNK", 4)
    model = gpt("midpoint").double()
    logits = model(tokens()[:, :-1])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), tokens()[:, 1:].flatten())
    torch.testing.assert_close(model.loss(tokens()).double(), expected, rtol=1e-6, atol=1e-6)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.shape), t)[1], lambda t: t):
        model.loss(tokens())
    assert (27, 30) not in [tuple(size) for size in sizes]
    assert (4, 30) not in [tuple(size) for size in sizes]


def test_generate_goes_on_and_follows_the_seed() -> None:
    model = gpt("midpoint")
    start = tokens(4)
    greedy = model.generate(start, 12, temperature=0.0)
    assert greedy.shape == (3, 16)
    assert torch.equal(greedy[:, :4], start)
    assert torch.equal(greedy[:, 4], model.eval()(start)[:, -1].argmax(-1))
    torch.manual_seed(0)
    first = model.train().generate(start, 5)
    torch.manual_seed(0)
    assert torch.equal(model.generate(start, 5), first)
    assert model.training


@pytest.mark.parametrize("scheme", ["bdia", "additive", "midpoint"])
def test_it_learns_more_of_a_short_text_than_its_letters(scheme: str) -> None:
    torch.manual_seed(0)
    model = revode.create_model("gpt-mini", scheme=scheme, depth=2, width=32, heads=2)
    text = torch.tensor([list(b"to be or not to be, that is the question")])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(text).backward()
        optimizer.step()
    counts = text.unique(return_counts=True)[1] / text.numel()
    of_letters = -(counts * counts.log()).sum()
    assert model.eval().loss(text) < 0.85 * of_letters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "midpiont"}, "unknown scheme 'midpiont'; nearest: midpoint"),
        (
            {"width": 18, "heads": 4},
            "width 18 cannot have 4 heads of even size: choose a width that is a multiple of 8",
        ),
        ({"scheme": "verlet", "width": 8, "heads": 4}, "multiple of 16"),
        ({"depth": 0}, "depth must be a positive number, got 0"),
        ({"anchor_evry": 2}, "anchor_evry"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        revode.create_model("gpt-mini", **options)
    with pytest.raises(ValueError, match="tokens must be integers"):
        gpt("midpoint").loss(torch.randn(2, 4))
    with pytest.raises(ValueError, match="temperature must not be negative"):
        gpt("midpoint").generate(tokens(), 1, temperature=-1.0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_saved_and_loaded_with_its_config(scheme: str, tmp_path: Path) -> None:
    model = gpt(scheme, **({"exact": True} if scheme in EXACT else {}))
    revode.save(model, tmp_path / "gpt.safetensors")
    twin = revode.load(tmp_path / "gpt.safetensors", backprop="store")
    assert isinstance(twin, GPT)
    assert twin.config == model.config.with_options(backprop="store")
    assert torch.equal(twin.eval()(tokens()), model.eval()(tokens()))


def test_it_is_listed_and_refused_where_images_are_wanted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "gpt-mini" in revode.list_models()
    assert main(["models"]) == 0
    model = revode.create_model("gpt-mini")
    assert f"{sum(p.numel() for p in model.parameters()):,}" in capsys.readouterr().out
    for command in (["models", "gpt-mini"], ["train", "gpt-mini", "--out", str(tmp_path)], ["analyze", "gpt-mini"]):
        assert main(command) == 2
        message = capsys.readouterr().err.strip()
        assert "gpt-mini is a network on tokens" in message
        assert len(message.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("scheme", [name for name in [*SCHEMES, "plain"] if name != "bdia"])
def test_it_is_compiled_around_its_walk(scheme: str) -> None:
    """The plain network as one graph; a walk breaks it."""
    model, compiled = gpt(scheme), gpt(scheme)
    torch.compile(compiled.loss, fullgraph=scheme == "plain")(tokens()).backward()
    model.loss(tokens()).backward()
    for expected, found in zip(model.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-6)


def test_the_loss_of_a_gpt_needs_two_tokens_and_has_the_precision_of_the_model() -> None:
    model = revode.create_model("gpt-mini", depth=2, width=16).double()
    for length in (0, 1):
        with pytest.raises(ValueError, match=rf"at least two tokens, got tokens of shape \(3, {length}\)"):
            model.loss(torch.zeros(3, length, dtype=torch.long))
    assert model.loss(torch.zeros(3, 2, dtype=torch.long)).dtype == torch.float64
