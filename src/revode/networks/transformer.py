"""A GPT on the engine: pre-norm blocks, rotary positions, tied embeddings, on tokens or bytes.

It runs by any scheme of `revode.schemes.SCHEMES`. Schemes that run two branches a step have attention and MLP as these two; the
others have one branch of both, attention(x) + mlp(x + attention(x)), as in an ordinary block.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from revode.engine import ReversibleSequence
from revode.networks.classifier import build
from revode.networks.config import is_count
from revode.schemes import SCHEMES, Scheme, create_scheme

FAMILY = "gpt"
CHUNK = 1024
"""Tokens with logits in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The options of a GPT.

    >>> GPTConfig(scheme="bdia", depth=2, width=32).num_layers
    4

    Attributes:
        scheme: name in `revode.schemes.SCHEMES`; ``"midpoint"`` with a blend of 0 is the plain residual network.
        h: step size of schemes that take one; 1 is an ordinary residual network's.
        blend: blend of ``"midpoint"`` and ``"bdia"``.
        depth: blocks of attention and MLP.
        width: of the states; with ``"verlet"`` each branch sees half of it.
        heads: of each attention.
        context: tokens that `generate` looks back at.
        vocabulary: number of tokens; 256 for bytes.
        dropout: behind each branch.
        sequence: options of `ReversibleSequence`.
    """

    scheme: str = "midpoint"
    h: float = 1.0
    blend: float = 0.5
    depth: int = 6
    width: int = 128
    heads: int = 4
    context: int = 256
    vocabulary: int = 256
    dropout: float = 0.0
    sequence: dict[str, Any] = field(default_factory=dict)

    family = FAMILY

    def __post_init__(self) -> None:
        self.build_scheme()
        for name in ("depth", "width", "heads", "context", "vocabulary"):
            if not is_count(getattr(self, name)):
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)!r}")
        if self.branch_width % (2 * self.heads):
            raise ValueError(
                f"a branch of width {self.branch_width} cannot have {self.heads} heads of even size: choose a width that is a "
                f"multiple of {2 * self.heads * self.width // self.branch_width}"
            )

    @property
    def num_layers(self) -> int:
        """Return the number of layers: attention and MLP are two in each block."""
        return 2 * self.depth

    @property
    def blocks(self) -> tuple[int, ...]:
        return (self.depth,)

    @property
    def channels(self) -> tuple[int, ...]:
        return (self.width,)

    @property
    def branch_width(self) -> int:
        """Return the width of a branch's input."""
        return self.build_scheme().init(torch.empty(1, 2 * self.width))[1].shape[1] // 2

    def build_scheme(self) -> Scheme:
        """Return the scheme; one that can enter by (x, x) leaves each branch the whole width."""
        start = "duplicate" if "duplicate" in getattr(SCHEMES.get(self.scheme), "starts", ()) else None
        return create_scheme(self.scheme, h=self.h, blend=self.blend, start=start)

    def with_options(self, **options: Any) -> GPTConfig:
        """Return a config with options replaced; options that are not its own go to `ReversibleSequence`."""
        own = {key: options.pop(key) for key in list(options) if key in self.__dataclass_fields__}
        return replace(self, **own, sequence=own.pop("sequence", self.sequence) | options)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain values, for JSON, without ``compile``."""
        sequence = {name: value for name, value in self.sequence.items() if name != "compile"}
        return {"family": FAMILY, **asdict(replace(self, sequence=sequence))}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> GPTConfig:
        return GPTConfig(**{name: value for name, value in values.items() if name != "family"})


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of features by an angle that grows with the place: rotary positions (Su et al. 2021)."""
    places, half = x.shape[-2], x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(places, device=x.device, dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention behind a norm; a branch, without the skip connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.mix_in, self.mix_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        split = self.mix_in(self.norm(x)).view(*x.shape[:-1], 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.drop(self.mix_out(y.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Two layers with a GELU between, behind a norm; a branch, without the skip connection."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Block(nn.Module):
    """Attention and MLP as one branch: an ordinary block without its input."""

    def __init__(self, attention: Attention, mlp: MLP) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        u = self.attention(x)
        return u + self.mlp(x + u)


class GPT(nn.Module):
    """A language model with blocks that run by a scheme.

    >>> model = GPT(GPTConfig(depth=2, width=32))
    >>> model.loss(torch.randint(256, (2, 16))).backward()
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        scheme = config.build_scheme()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        branches: list[nn.Module] = []
        for _ in range(config.depth):
            attention = Attention(config.branch_width, config.heads, config.dropout)
            mlp = MLP(config.branch_width, config.dropout)
            branches += [attention, mlp] if scheme.fields_per_step == 2 else [Block(attention, mlp)]
        options: dict[str, Any] = {"split_dim": -1, "backprop": "store" if scheme.carry == 0.0 else "reversible"}
        self.body = ReversibleSequence(branches, scheme, **(options | config.sequence))
        self.norm = nn.LayerNorm(config.width)
        self._initialize()

    def _initialize(self) -> None:
        """Draw normal weights of variance 1 / fan-in, and branches that add up to the input's scale over the depth."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, parameter in self.body.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("mix_out.weight", "down.weight"))
                std = parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=std / math.sqrt(2 * self.config.depth) if last else std)

    def features(self, tokens: Tensor) -> Tensor:
        """Return the features of each token of (batch, time), which the tied embedding turns into logits."""
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(
                f"tokens must be integers of shape (batch, time), got {tokens.dtype} {tuple(tokens.shape)}"
            )
        return self.norm(self.body(self.embedding(tokens) * self.config.width**0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token."""
        return F.linear(self.features(tokens), self.embedding.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats, of each token given those before it. The logits never exist as a whole.

        (``F.linear_cross_entropy`` of torch 2.13 does not do: chunked, it rounds the loss of a bfloat16 model to bfloat16,
        leaves autocast, cannot be compiled, and detaches gradients of gradients without a word.)
        """
        if tokens.dim() == 2 and tokens.shape[1] < 2:
            raise ValueError(f"the loss needs at least two tokens, got tokens of shape {tuple(tokens.shape)}")
        x, targets = self.features(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        total = x.new_zeros((), dtype=_loss_dtype(x))
        for rows, wanted in zip(x.split(CHUNK), targets.split(CHUNK), strict=True):
            total = total + checkpoint(_sum_of_losses, rows, self.embedding.weight, wanted, use_reentrant=False)
        return total / targets.numel()

    @torch.no_grad()
    def generate(self, tokens: Tensor, number: int, temperature: float = 1.0) -> Tensor:
        """Return the tokens of (batch, time) and `number` more, drawn one by one. A temperature of 0 takes the likeliest."""
        if not temperature >= 0.0:
            raise ValueError(f"temperature must not be negative, got {temperature!r}")
        was_training = self.training
        self.eval()
        for _ in range(number):
            logits = F.linear(self.features(tokens[:, -self.config.context :])[:, -1], self.embedding.weight)
            if temperature == 0.0:
                following = logits.argmax(-1, keepdim=True)
            else:
                following = torch.multinomial((logits.float() / temperature).softmax(-1), 1)
            tokens = torch.cat((tokens, following), dim=1)
        self.train(was_training)
        return tokens


build.register(GPTConfig, GPT)  # type: ignore[arg-type] - a network, if not of images


def _loss_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _sum_of_losses(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.to(_loss_dtype(logits)), targets, reduction="sum")


def on_tokens(name: str) -> ValueError:
    """Return the error where a network on images is wanted.

    >>> str(on_tokens("gpt-mini")).partition(":")[0]
    'gpt-mini is a network on tokens, and one on images is wanted here'
    """
    return ValueError(
        f"{name} is a network on tokens, and one on images is wanted here: build it with revode.create_model and train it by "
        "its own loss, as examples/language.py does"
    )
