"""Layers of Hugging Face models, LoRA and accelerate: as branches they have the gradients of ``store``.

Tiny configurations with random weights; the packages are needed by these tests only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients import assert_agree, compare_with_store, training_step
from torch import Tensor, nn

from revode import AdditiveCoupling, MidPoint, ReversibleSequence

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

WIDTH, HEADS, LENGTH = 16, 2, 5


class Increment(nn.Module):
    """block(x) - x: a residual block as a branch, without its skip connection."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, q: Tensor, **kwargs: Any) -> Tensor:
        u = self.block(q, **kwargs)
        return (u[0] if isinstance(u, tuple) else u) - q


def gpt2() -> tuple[Callable[[int], nn.Module], dict[str, Any]]:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config

    config = GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=4, n_positions=LENGTH, attn_implementation="eager")
    mask = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -1e4)
    return lambda index: GPT2Block(config, layer_idx=index), {"attention_mask": mask.double()}


def llama() -> tuple[Callable[[int], nn.Module], dict[str, Any]]:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=24,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_hidden_layers=4,
    )
    config._attn_implementation = "sdpa"
    positions = torch.arange(LENGTH)[None]
    rotary = LlamaRotaryEmbedding(config)(torch.zeros(2, LENGTH, WIDTH, dtype=torch.float64), positions)
    return lambda index: LlamaDecoderLayer(config, index), {"position_embeddings": rotary}


def bert() -> tuple[Callable[[int], nn.Module], dict[str, Any]]:
    from transformers.models.bert.modeling_bert import BertConfig, BertLayer

    config = BertConfig(hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=24, num_hidden_layers=4)
    config._attn_implementation = "eager"
    mask = torch.zeros(2, 1, 1, LENGTH)
    mask[1, ..., -2:] = -1e4
    return lambda index: BertLayer(config), {"attention_mask": mask.double()}


def vit() -> tuple[Callable[[int], nn.Module], dict[str, Any]]:
    from transformers.models.vit.modeling_vit import ViTConfig, ViTLayer

    config = ViTConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=24, hidden_dropout_prob=0.1, num_hidden_layers=4
    )
    config._attn_implementation = "sdpa"
    return lambda index: ViTLayer(config), {}


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit}


@pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_have_the_gradients_of_store(name: str, backprop: str) -> None:
    block, arguments = MODELS[name]()

    def make(**options: Any) -> ReversibleSequence:
        fields = [Increment(block(index)) for index in range(4)]
        return ReversibleSequence(fields, MidPoint(h=0.2), **({"backprop": backprop} | options)).double()

    def call(sequence: ReversibleSequence) -> Any:
        return lambda x: sequence(x, **arguments)

    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    records = []
    for strategy in ({}, {"backprop": "store"}):
        torch.manual_seed(0)
        sequence = make(**strategy)
        records.append(training_step(sequence, x, call=call(sequence)))
    assert_agree(*records)


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_block_as_a_branch_is_warned_of(name: str) -> None:
    block, arguments = MODELS[name]()
    if name == "bert":
        pytest.skip("BERT normalises behind its additions, which hides the skip connection")

    class First(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, q: Tensor, **kwargs: Any) -> Tensor:
            u = self.inner(q, **kwargs)
            return u[0] if isinstance(u, tuple) else u

    sequence = ReversibleSequence([First(block(0))], MidPoint(h=0.1)).double().eval()
    with pytest.warns(UserWarning, match="adds its own input"):
        sequence(torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), **arguments).sum().backward()


def test_a_cache_is_refused_where_gradients_are_recorded() -> None:
    block, arguments = llama()
    sequence = ReversibleSequence([Increment(block(index)) for index in range(2)], MidPoint(h=0.2)).double()
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match="use_cache=False"):
        sequence(x, past_key_values=transformers.DynamicCache(), use_cache=True, **arguments)


def test_lora_trains_its_adapters_only() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def make(**options: Any) -> nn.Module:
        def branch() -> nn.Module:
            return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())

        sequence = ReversibleSequence([branch() for _ in range(4)], AdditiveCoupling(), split_dim=-1, **options)
        config = peft.LoraConfig(r=2, target_modules=r"fields\.\d+\.1", lora_dropout=0.1, init_lora_weights=False)
        return peft.inject_adapter_in_model(config, sequence).double()

    compare_with_store(make, torch.randn(2, LENGTH, 16, dtype=torch.float64))
    model = make()
    model(torch.randn(2, LENGTH, 16, dtype=torch.float64)).sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)


def test_accelerate_prepares_and_trains() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    torch.manual_seed(0)
    fields = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
    sequence = ReversibleSequence(fields, MidPoint(h=0.3), exact=True)
    model, optimizer = accelerator.prepare(sequence, torch.optim.SGD(sequence.parameters(), lr=0.1))
    x, losses = torch.randn(16, 8), []
    for _ in range(5):
        loss = (model(x) - 1.0).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains() -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            fields = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(6)]
            self.net, self.losses = ReversibleSequence(fields, MidPoint(h=0.3), exact=True), []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = (self.net(batch[0]) - 1.0).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    module, data = Module(), torch.utils.data.TensorDataset(torch.randn(64, 8))
    silent = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", precision="bf16-mixed", **silent)
    trainer.fit(module, torch.utils.data.DataLoader(data, 16))
    assert module.losses[-1] < module.losses[0]
