"""Converted models in the hands of others: compiled, checkpointed, hooked, copied, averaged, cached, and out of range."""

from __future__ import annotations

import copy
import importlib.util
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_conversion import Block, Perceptron, assert_close, encoder, gradients, needs_transformers, pretrained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import revode
from revode import BDIA, MidPoint

NAME = "body.blocks"
X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def perceptron(dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    model = Perceptron().double()
    for block in model.body["blocks"]:
        block.drop.p = dropout
    return model


def stored(model: nn.Module, scheme: Any = None) -> dict[str, Tensor | None]:
    """Gradients of a model by ordinary autograd, with the signs that its conversion draws."""
    return gradients(revode.convert(copy.deepcopy(model), NAME, scheme or BDIA(), backprop="store"), X)


def test_functional_call_differentiates_for_the_parameters_it_is_given() -> None:
    model = perceptron()
    reference = stored(model)
    revode.convert(model, NAME, BDIA())
    given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.manual_seed(1)
    y = torch.func.functional_call(model, given, (X,))
    found = torch.autograd.grad(y.square().sum(), list(given.values()))
    assert_close(dict(zip(given, found, strict=True)), {name: reference[name] for name in given}, 1e-12)


def test_a_moving_average_of_a_converted_model_is_one_of_its_own() -> None:
    model = perceptron()
    plain = copy.deepcopy(model).eval()
    revode.convert(model, NAME, BDIA())
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
        average.update_parameters(model)
    plain.load_state_dict(average.module.state_dict())
    with torch.no_grad():
        assert torch.equal(average.eval()(X), plain(X))
    assert_close(gradients(average.module.train(), X), stored(plain.train()), 1e-12)


def test_a_saved_and_a_copied_model_train_alike(tmp_path: Path) -> None:
    model = revode.convert(perceptron(), NAME, BDIA())
    model(X)  # a copy after a forward pass has nothing of its walk
    torch.save(model, tmp_path / "model.pt")
    reference = gradients(model, X)
    for twin in (torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)):
        assert_close(gradients(twin, X), reference, 0.0)
        revode.revert(twin)


class Checkpointed(nn.Module):
    """The loop of a perceptron with torch's checkpoint around each block."""

    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner: Any = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.enter(x)
        for block in self.inner.body["blocks"]:
            x = checkpoint(
                lambda x, block=block: block(x, self.inner.scale, shift=0.1), x, use_reentrant=self.use_reentrant
            )  # type: ignore[assignment]
        return self.inner.leave(x)


@pytest.mark.parametrize("scheme", [BDIA(), MidPoint(0.5, blend=0.5)], ids=repr)
def test_torchs_checkpoint_around_converted_blocks_is_right_or_refused(scheme: Any) -> None:
    model = perceptron()
    reference = stored(model, scheme)
    revode.convert(model, NAME, scheme)
    found = gradients(Checkpointed(model, use_reentrant=False), X)
    assert_close({name.removeprefix("inner."): value for name, value in found.items()}, reference, 1e-12)
    refusal = r"blocks\.6 is called inside a backward pass.*use_reentrant=True|blocks\.1 .*cannot start in the middle"
    with pytest.raises((RuntimeError, ValueError), match=refusal):
        gradients(Checkpointed(model, use_reentrant=True), X)


def compile_block(blocks: nn.ModuleList, number: int) -> None:
    blocks[number].compile(backend="eager")


def wrap_block(blocks: nn.ModuleList, number: int) -> None:
    blocks[number] = torch.compile(blocks[number], backend="eager")  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`", "ignore:The .grad attribute")
@pytest.mark.parametrize("first", ["compile", "convert"])
@pytest.mark.parametrize("do", [compile_block, wrap_block])
def test_blocks_that_are_compiled_train_alike(do: Callable[[nn.ModuleList, int], None], first: str) -> None:
    torch.compiler.reset()
    model = perceptron(dropout=0.0)
    reference = stored(model)
    blocks = model.body["blocks"]
    if first == "convert":
        revode.convert(model, NAME, BDIA())
    for number in range(len(blocks)):
        do(blocks, number)
    if first == "compile":
        revode.convert(model, NAME, BDIA())
    found = gradients(model, X)
    assert_close({name.replace("._orig_mod", ""): value for name, value in found.items()}, reference, 1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_inside_a_block_runs_and_as_a_block_is_refused() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.branch(x)

    model, x = nn.Sequential(*(Scripted() for _ in range(4))).double(), torch.randn(3, 6, dtype=torch.float64)
    found = gradients(revode.convert(model, "", BDIA()), x)
    found = {name: value if value is None else value.clone() for name, value in found.items()}
    assert_close(found, gradients(revode.convert(revode.revert(model), "", BDIA(), backprop="store"), x), 1e-12)
    blocks = nn.Sequential(*(torch.jit.script(nn.Sequential(nn.Linear(6, 6))) for _ in range(2)))
    with pytest.raises(ValueError, match="0 is TorchScript code, which cannot be converted"):
        revode.convert(blocks, "")


@pytest.mark.parametrize("first", ["hook", "convert"])
def test_accelerates_hooks_stay_on_converted_blocks(first: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    seen: list[int] = []

    class Hook(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(1)
            return args, kwargs

    model = perceptron()
    reference, plain = stored(model), gradients(copy.deepcopy(model).eval(), X)
    if first == "convert":
        revode.convert(model, NAME, BDIA())
    for block in model.body["blocks"]:
        hooks.add_hook_to_module(block, Hook())
    if first == "hook":
        revode.convert(model, NAME, BDIA())
    assert_close(gradients(model, X), reference, 1e-12)
    assert len(seen) >= 7
    seen.clear()
    assert_close(gradients(revode.revert(model).eval(), X), plain, 0.0)
    assert len(seen) == 7


def test_a_forward_that_is_put_on_blocks_later_is_warned_of() -> None:
    model = revode.convert(perceptron(), NAME, BDIA())
    for block in model.body["blocks"]:
        block.forward = lambda *args, block=block, **kwargs: Block.forward(block, *args, **kwargs)
    with pytest.warns(UserWarning, match="ran a training step without calling its converted blocks"):
        model(X)


def test_a_state_that_two_blocks_go_on_from_starts_two_walks() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            return self.blocks[1](x) + self.blocks[2](x)

    torch.manual_seed(0)
    model, x = Fork().double(), torch.randn(4, 6, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"blocks\.2 is not what the converted block before it returned"):
        reference = gradients(revode.convert(copy.deepcopy(model), "blocks", BDIA(), backprop="store"), x)
    with pytest.warns(UserWarning, match=r"blocks\.2 is not what the converted block before it returned"):
        assert_close(gradients(revode.convert(copy.deepcopy(model), "blocks", BDIA()), x), reference, 1e-12)
    with pytest.raises(ValueError, match=r"blocks\.2 .*cannot start in the middle"):
        revode.convert(model, "blocks", MidPoint(0.5))(x)


class Intermediates(nn.Module):
    """As timm's ``forward_intermediates``: some states by number, each through the norm, and the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block(6) for _ in range(6)), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in (1, 4):
                found.append(self.norm(x))
        return [*found, self.norm(x)]


class Skips(nn.Module):
    """As MONAI's UNETR: an encoder appends all states to a list, and a decoder takes some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(6))
        self.decoders = nn.ModuleList(nn.Linear(12, 6) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        for decoder, state in zip(self.decoders, reversed(states[::2]), strict=True):
            x = decoder(torch.cat((x, state), -1)).relu()
        return [x]


class Pairs(nn.Module):
    """As diffusers' ``CrossAttnDownBlock2D``: two lists in turn, and states that are collected in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(4))
        self.attentions = nn.ModuleList(Block(6) for _ in range(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        states: tuple[Tensor, ...] = ()
        for block, attention in zip(self.blocks, self.attentions, strict=True):
            x = block(x)
            x = attention(x)
            states = (*states, x)
        return list(states)


@pytest.mark.filterwarnings("ignore:.*a new walk starts there")
@pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
@pytest.mark.parametrize("paths", [["blocks"], ["blocks", "attentions"]], ids=str)
@pytest.mark.parametrize("make", [Intermediates, Skips, Pairs])
def test_loops_as_in_timm_monai_and_diffusers(make: Any, paths: list[str], backprop: str) -> None:
    def loop_gradients(model: nn.Module) -> dict[str, Tensor | None]:
        model.zero_grad()
        torch.manual_seed(1)
        outputs = model(x)
        sum(y.square().sum() for y in outputs).backward()
        return {"output": outputs[-1].detach()} | {name: p.grad for name, p in model.named_parameters()}

    torch.manual_seed(0)
    model, x = make().double(), torch.randn(4, 6, dtype=torch.float64)
    found = {}
    for way in ("store", backprop):
        found[way] = copy.deepcopy(model)
        for path in [path for path in paths if hasattr(model, path)]:
            revode.convert(found[way], path, BDIA(), backprop=way)
    assert_close(loop_gradients(found[backprop]), loop_gradients(found["store"]), 1e-9)


@pytest.mark.parametrize("depth", [0, 1, 9])
def test_an_object_that_blocks_share_tensors_through_is_refused_at_any_depth(depth: int) -> None:
    class Sharing(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.mix, self.writes = nn.Linear(6, 6), writes

        def forward(self, x: Tensor, shared: Any) -> Tensor:
            while hasattr(shared, "inner"):
                shared = shared.inner
            if self.writes:
                shared.tensors["key"] = self.mix(x)
            return x + shared.tensors["key"]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Sharing(writes=number == 0) for number in range(3))

        def forward(self, x: Tensor) -> Tensor:
            shared: Any = SimpleNamespace(tensors={"key": x})
            for _ in range(depth):
                shared = SimpleNamespace(inner=shared)
            for block in self.blocks:
                x = block(x, shared)
            return x

    with pytest.raises(ValueError, match=r"blocks.0 changes an object among its keyword arguments.*leave out blocks"):
        revode.convert(Model(), "blocks", BDIA())(torch.randn(2, 6, requires_grad=True))


def test_signs_are_drawn_for_samples_wherever_they_are_counted() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)
    model = revode.convert(nn.TransformerEncoder(layer, 5, enable_nested_tensor=False))
    assert model.layers[0]._revode[0].scheme.batch_dim == 1
    assert revode.convert(encoder()).layers[0]._revode[0].scheme.batch_dim == 0
    y = model(torch.randn(5, 1, 8).repeat(1, 8, 1))
    assert not torch.allclose(y, y[:, :1])  # equal samples, other signs
    with pytest.raises(ValueError, match=r"batch_dim=3 is out of range for a state of shape \(5, 8, 8\)"):
        revode.convert(revode.revert(model), scheme=BDIA(batch_dim=3))(torch.randn(5, 8, 8))


class Scaled(nn.Module):
    """Residual perceptrons on states of which one channel has this size."""

    def __init__(self, size: float, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(depth))
        self.size, self.num_run = size, depth

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.tensor([self.size, 1.0, 1.0, 1.0, 1.0, 1.0]).to(x) if self.size > 1 else x * self.size
        for block in self.blocks[: self.num_run]:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("size", "bits"), [(1.0, 14), (100.0, 14), (5000.0, 8), (1e6, 1), (1e-3, 14), (1e-6, 14)], ids=str
)
def test_bits_are_chosen_from_the_states_of_the_first_batch(
    size: float, bits: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x = Scaled(size).eval().train(), torch.ones(4, 6)
    for block in model.blocks:
        block.drop.p = 0.0
    revode.convert(model, "blocks")
    with caplog.at_level(logging.INFO, "revode"):
        for _ in range(3):
            model(x).square().mean().backward()
    strategy = model.blocks[0]._revode[0].strategy
    assert strategy.exact == bits
    assert [f"exact={bits}" in record.message for record in caplog.records] == [True]
    assert f"exact={bits}" in repr(model)


@pytest.mark.parametrize("size", [5000.0, 1.0])
def test_gradients_on_the_chosen_grid_are_those_of_store(size: float) -> None:
    torch.manual_seed(0)
    model, x = Scaled(size), torch.randn(4, 6)
    ours = revode.convert(copy.deepcopy(model), "blocks")
    gradients(ours, x)  # off the grid
    found = gradients(ours, x)
    bits = ours.blocks[0]._revode[0].strategy.exact
    on_grid = revode.convert(copy.deepcopy(model), "blocks", backprop="store", exact=bits)
    assert_close(found, gradients(on_grid, x), 1e-6)


def test_bits_are_chosen_where_some_blocks_never_run() -> None:
    model = Scaled(1.0)
    model.num_run = 3
    revode.convert(model, "blocks")
    for _ in range(2):
        model(torch.randn(4, 6)).sum().backward()
    assert model.blocks[0]._revode[0].strategy.exact == 14


def test_a_state_that_leaves_the_chosen_range_is_an_error_with_a_way_out() -> None:
    model = revode.convert(Scaled(1.0), "blocks")
    for _ in range(2):
        model(torch.randn(4, 6)).sum().backward()
    x = 1e4 * torch.randn(4, 6)
    words = r"exact=14 holds states of magnitude below 1024 only.*use fewer grid bits \(exact=(\d+)\)"
    with pytest.raises(revode.OutOfRange, match=words) as error:
        model(x)
    bits = re.search(words, str(error.value))
    assert bits is not None
    revode.convert(Scaled(1.0), "blocks", exact=int(bits[1]))(x)


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "bart"])
def test_a_cache_that_was_left_out_is_never_gone_on_from(kind: str) -> None:
    import transformers as t

    if kind != "bart":
        model, path, inputs = pretrained(kind)
    else:
        sizes = {"vocab_size": 50, "d_model": 16, "encoder_layers": 3, "decoder_layers": 3}
        more = {
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
        }
        torch.manual_seed(0)
        model, path = t.BartForConditionalGeneration(t.BartConfig(**sizes, **more)), "model.decoder.layers"
        inputs = {"input_ids": torch.randint(4, 50, (3, 9)), "decoder_input_ids": torch.randint(4, 50, (3, 5))}
    revode.convert(model.train(), path, BDIA())
    with pytest.warns(UserWarning, match="leave out the cache"):
        left_out = model(**inputs).past_key_values
    with pytest.raises(ValueError, match="left empty by converted blocks"):
        model.eval()(**inputs, past_key_values=left_out)
    model.train()
    with pytest.raises(ValueError, match="was asked for a cache, which its converted blocks do not fill"):
        model(**inputs, use_cache=True)
    if kind == "llama":
        with pytest.raises(ValueError, match="was asked for a cache"):
            model(**inputs, past_key_values=t.DynamicCache())
        with torch.no_grad():
            filled = model.eval()(**inputs).past_key_values
        with pytest.raises(ValueError, match=r"cannot use a filled cache.*use_cache=False"):
            model.train()(**inputs, past_key_values=filled)


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_mambas_cache_serves_generation() -> None:
    import transformers as t

    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4}
    torch.manual_seed(0)
    model = t.MambaForCausalLM(t.MambaConfig(**sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0)).eval()
    tokens = torch.randint(50, (2, 7))
    plain = model.generate(tokens, max_new_tokens=5, do_sample=False)
    revode.convert(model)
    assert torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), plain)
    model.train()(tokens, labels=tokens).loss.backward()
    with (
        pytest.raises(ValueError, match="was asked for a cache"),
        pytest.warns(UserWarning, match="leave out the cache"),
    ):
        model(tokens, use_cache=True)


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("scheme", [BDIA(), MidPoint(0.5, blend=0.5)], ids=repr)
def test_attentions_that_hooks_collect_have_their_gradients(scheme: Any) -> None:
    def attention_gradients(model: Any) -> dict[str, Tensor | None]:
        model.zero_grad()
        torch.manual_seed(1)
        attentions = model(**inputs, output_attentions=True, use_cache=False).attentions
        assert len(attentions) == 5
        sum(each.square().sum() for each in attentions).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    model, path, inputs = pretrained("llama")
    model.set_attn_implementation("eager")
    model = model.double().train()
    reference = attention_gradients(revode.convert(copy.deepcopy(model), path, scheme, backprop="store"))
    assert_close(attention_gradients(revode.convert(model, path, scheme)), reference, 1e-9)
    assert reference["model.layers.1.self_attn.q_proj.weight"] is not None


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_with_adapters_is_converted_without_a_path() -> None:
    import peft

    model = peft.get_peft_model(pretrained("llama")[0], peft.LoraConfig(r=2, target_modules=["q_proj"]))
    revode.convert(model)
    assert hasattr(model.base_model.model.model.layers[0], "_revode")
