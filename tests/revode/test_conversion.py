"""Models that exist already, converted and reverted: torch's own, plain ones, and those of transformers if it is there."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import revode
from revode import BDIA, AdditiveCoupling, MidPoint
from revode.memory import SavedTensors

BLEND = MidPoint(0.5, blend=0.5)


class Block(nn.Module):
    """A pre-norm residual perceptron; returns a tuple if asked."""

    def __init__(self, width: int, as_tuple: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)
        self.as_tuple = as_tuple

    def forward(self, x: Tensor, scale: Tensor | None = None, *, shift: float = 0.0) -> Any:
        y = self.drop(self.down(torch.tanh(self.up(self.norm(x)) + shift)))
        y = x + (y if scale is None else y * scale)
        return (y, None) if self.as_tuple else y


class Perceptron(nn.Module):
    """A loop over blocks of one's own, with positional and keyword arguments."""

    def __init__(self, width: int = 6, depth: int = 7, as_tuple: bool = False, num_run: int | None = None) -> None:
        super().__init__()
        self.enter = nn.Linear(3, width)
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(Block(width, as_tuple) for _ in range(depth))})
        self.leave = nn.Linear(width, 2)
        self.scale = nn.Parameter(torch.ones(width))
        self.num_run = num_run

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.body["blocks"][: self.num_run] if self.num_run else self.body["blocks"]:
            y = block(x, self.scale, shift=0.1)
            x = y[0] if isinstance(y, tuple) else y
        return self.leave(x)


class Stage(nn.Module):
    """Blocks as in a ResNet's stage: the first changes the shape, an activation follows the sum."""

    class Basic(nn.Module):
        def __init__(self, wide: int, width: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(wide, width, 3, padding=1)
            self.norm = nn.BatchNorm2d(width)
            self.skip = nn.Conv2d(wide, width, 1) if wide != width else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.norm(self.conv(x)) + self.skip(x))

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Stage.Basic(3, 4), *(Stage.Basic(4, 4) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer1(x).mean((2, 3))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)


CASES: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any], tuple[int, ...]]] = {
    "perceptron": (Perceptron, "body.blocks", {}, (4, 3)),
    "tuples": (lambda: Perceptron(as_tuple=True), "body.blocks", {}, (4, 3)),
    "some of the blocks": (Perceptron, "body.blocks", {"blocks": slice(1, -2)}, (4, 3)),
    "fewer blocks run": (lambda: Perceptron(num_run=4), "body.blocks", {}, (4, 3)),
    "sequential": (lambda: nn.Sequential(*(Block(6) for _ in range(5))), "", {}, (4, 6)),
    "resnet stage": (Stage, "layer1", {"blocks": slice(1, None)}, (2, 3, 5, 5)),
    "encoder": (encoder, "layers", {}, (3, 4, 8)),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    make, path, options, shape = CASES[request.param]
    torch.manual_seed(0)
    return make(), path, options, torch.randn(shape)


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    torch.manual_seed(1)
    y = model(x)
    y.square().sum().backward()
    return {"output": y.detach()} | {name: p.grad for name, p in model.named_parameters()}


def assert_close(ours: dict[str, Tensor | None], reference: dict[str, Tensor | None], tolerance: float) -> None:
    assert ours.keys() == reference.keys()
    for name, value in reference.items():
        if value is None or ours[name] is None:
            assert not any(t is not None and t.any() for t in (value, ours[name])), name
            continue
        assert float((ours[name] - value).norm()) <= tolerance * max(1e-3, float(value.norm())), name


def test_in_eval_mode_bdia_is_the_model_itself_to_the_bit(case: Any) -> None:
    model, path, options, x = case
    converted = revode.convert(copy.deepcopy(model), path, **options).eval()
    model.eval()
    with torch.no_grad():
        assert torch.equal(converted(x), model(x))
    assert torch.equal(converted(x.clone().requires_grad_()), model(x.clone().requires_grad_()))
    assert_close(gradients(converted.double(), x.double()), gradients(model.double(), x.double()), 1e-12)


def test_keys_and_parameters_stay_and_revert_undoes_it(case: Any) -> None:
    model, path, options, x = case
    plain = copy.deepcopy(model)
    before = dict(model.named_parameters())
    assert revode.convert(model, path, **options) is model
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(p is before[name] for name, p in model.named_parameters())
    model(x).sum().backward()
    with pytest.raises(ValueError, match="converted already"):
        revode.convert(model, path, **options)
    assert revode.revert(model) is model
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), plain.eval()(x))
    with pytest.raises(ValueError, match="no converted blocks"):
        revode.revert(model)


@pytest.mark.parametrize("scheme", [BDIA(), BLEND, MidPoint(0.3)], ids=repr)
def test_gradients_in_training_are_those_of_store(case: Any, scheme: Any) -> None:
    model, path, options, x = case
    model, x = model.double(), x.double()
    stored = revode.convert(copy.deepcopy(model), path, scheme, backprop="store", **options)
    ours = revode.convert(model, path, scheme, **options)
    reference = gradients(stored, x)
    assert_close(gradients(ours, x), reference, 1e-9)
    assert sum(value is not None for value in reference.values()) > 4
    exact = revode.convert(revode.revert(ours), path, scheme, exact=True, **options)
    assert_close(gradients(exact, x), gradients(stored, x), 0.05)


def test_it_computes_the_formula_written_out() -> None:
    model = Perceptron(depth=6).double().eval()
    x = torch.randn(4, 3, dtype=torch.float64)

    def by_hand(x: Tensor) -> Tensor:
        old, a, h = model.enter(x), BLEND.blend, BLEND.h
        blocks = list(model.body["blocks"]._modules.values())
        branch = [lambda y, block=block: block(y, model.scale, shift=0.1) - y for block in blocks]
        new = old + h * branch[0](old)
        for F in branch[1:]:
            old, new = new, a * old + (1 - a) * new + (1 + a) * h * F(new)
        return model.leave(new)

    expected = by_hand(x)
    expected.square().sum().backward()
    reference = {"output": expected.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}
    assert_close(gradients(revode.convert(model, "body.blocks", BLEND), x), reference, 1e-11)


def test_copies_and_pickles_of_a_converted_model_run_on_their_own_blocks() -> None:
    model = revode.convert(Perceptron(), "body.blocks", BLEND).eval()
    x = torch.randn(4, 3)
    y = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), y)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert not torch.equal(twin(x), y)
    assert torch.equal(model(x), y)


def test_a_block_that_is_replaced_runs() -> None:
    model, x = revode.convert(Perceptron(), "body.blocks"), torch.randn(4, 3)
    model.body["blocks"][2] = Block(6)
    with pytest.warns(UserWarning, match=r"block body.blocks.3 is not what .* before it returned.*a new walk starts"):
        model(x).sum().backward()
    model(x).sum().backward()  # once is enough
    assert all(p.grad is not None for p in model.body.parameters())
    other = revode.convert(Perceptron(), "body.blocks", BLEND)
    other.body["blocks"][2] = Block(6)
    with pytest.raises(ValueError, match=r"body.blocks.3 .*cannot start in the middle"):
        other(x)


@pytest.mark.parametrize(
    ("scheme", "most"), [(MidPoint(0.5), 200), (BLEND, 40), (BDIA(), 40), (BDIA(blend=1 / 16), 90)], ids=repr
)
def test_what_is_kept_of_48_layers(scheme: Any, most: int) -> None:
    """With GELU, as in GPT-2. With ReLU, which stores less, halved states in floats keep 1/36 and not 1/40."""

    def kept(model: nn.Module) -> int:
        x = torch.randn(4, 16, 32)
        with SavedTensors([*model.parameters(), x]) as saved:
            model(x, is_causal=True, mask=nn.Transformer.generate_square_subsequent_mask(16))
        return saved.num_bytes

    layer = nn.TransformerEncoderLayer(32, 2, 128, 0.0, "gelu", batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 48, enable_nested_tensor=False)
    stored = kept(model)
    revode.convert(model, "layers", scheme, verify=False)
    if abs(scheme.carry) < 0.5:
        state = 4 * 16 * 32 * 4
        assert 48 * state <= kept(model) <= 49 * state  # the first batch chooses the bits: each block keeps its input
    assert kept(model) <= stored / most
    if abs(scheme.carry) == 0.5:
        exact = revode.convert(revode.revert(model), "layers", scheme, exact=True, verify=False)
        assert kept(exact) <= stored / 100


@pytest.mark.parametrize("has_skip", [True, False])
def test_a_model_that_adds_the_skip_itself_is_warned_of(has_skip: bool) -> None:
    """There x + block(x) of the model's loop would go around all blocks at once."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x + self.linear(x)).relu() if has_skip else self.norm(self.linear(x)).relu()

    model = nn.Sequential(*(Branch() for _ in range(3)))
    revode.convert(model, "")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert ["has no skip connection" in str(entry.message) for entry in said] == ([] if has_skip else [True])


def test_states_of_a_model_in_bfloat16_are_in_float32() -> None:
    torch.manual_seed(0)
    model = Perceptron(depth=12).bfloat16().eval()
    x = torch.randn(8, 3).bfloat16()
    ours = gradients(revode.convert(copy.deepcopy(model), "body.blocks", BLEND), x)
    stored = gradients(revode.convert(copy.deepcopy(model), "body.blocks", BLEND, backprop="store"), x)
    assert ours["output"].dtype == torch.bfloat16
    assert_close(ours, stored, 0.05)
    plain = model(x)
    assert torch.equal(revode.convert(model, "body.blocks")(x), plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: revode.convert(Perceptron(), "body.block"),
            r"unknown list of blocks in Perceptron 'body.block'.*body.blocks",
        ),
        (lambda: revode.convert(Perceptron(), "enter"), "unknown list of blocks in Perceptron 'enter'"),
        (lambda: revode.convert(Perceptron(), "body.blocks", blocks=slice(9, None)), "chooses some of 7, got"),
        (lambda: revode.convert(Perceptron(), "body.blocks", blocks=slice(0, 4, 2)), "without step"),
        (lambda: revode.convert(Perceptron(), "body.blocks", AdditiveCoupling()), "keeps the state whole"),
        (lambda: revode.convert(Perceptron(), "body.blocks", backprop="rev"), "backprop must be one of"),
        (
            lambda: revode.convert(Stage(), "layer1")(torch.randn(2, 3, 5, 5)),
            r"layer1.0 makes shape \(2, 4, 5, 5\).*slice\(1",
        ),
        (lambda: revode.convert(nn.Linear(3, 3), "x"), "Linear has no nn.ModuleList or nn.Sequential of blocks"),
        (lambda: revode.convert(nn.Linear(3, 3)), "Linear has no nn.ModuleList or nn.Sequential of blocks"),
        (lambda: revode.convert(nn.Sequential(nn.Linear(3, 3)), "x"), r"choose one of '' \(the model itself\)$"),
        (
            lambda: revode.convert(nn.ModuleDict({"enc": nn.ModuleList([encoder().layers, encoder().layers])}), "enc"),
            r"'enc' is a list of lists, which cannot be called: give the paths of those, as \['enc.0', 'enc.1'\]",
        ),
        (
            lambda: revode.convert(nn.ModuleDict({name: encoder() for name in "ab"})),
            r"does not tell which.*a list of paths.*'a.layers', 'b.layers'",
        ),
        (
            lambda: revode.convert(nn.ModuleDict({"a": nn.Sequential(nn.Linear(3, 3))})),
            "does not tell which blocks to convert.*lists of modules: 'a'",
        ),
    ],
)
def test_what_cannot_be_converted_gets_one_sentence(change: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change()


class Loop(nn.Module):
    """Loops of every kind over five blocks; returns the outputs that a loss is taken of."""

    kinds = (
        "iterates", "index", "slice", "own arguments", "asks the state", "leaves", "collects", "middle only", "siamese",
        "recurs", "skips", "changes", "changes in place", "detaches", "switches gradients",
    )  # fmt: skip
    starts_anew = ("changes", "changes in place", "detaches")
    """Loops in which the input of some block is not what the block before it returned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block(6) for _ in range(5))
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, 30).view(5, 6))

    def forward(self, x: Tensor) -> list[Tensor]:
        if self.kind == "siamese":
            return [self.run(x)[-1], self.run(x.flip(0))[-1]]
        states = self.run(x)
        return {"collects": states, "middle only": states[2:3]}.get(self.kind, states[-1:])

    def run(self, x: Tensor) -> list[Tensor]:
        states = []
        for index, block in enumerate(self.chosen()):
            if self.kind == "changes" and index == 2:
                x = 2 * x
            if self.kind == "changes in place" and index == 2:
                x *= 2
            if self.kind == "detaches" and index == 2:
                x = x.detach()
            scale = self.scales[index if self.kind == "own arguments" else 0]
            if self.kind == "asks the state":
                scale = torch.sigmoid(scale * x.mean(0))
            with torch.set_grad_enabled(self.kind != "switches gradients" or index >= 2):
                x = block(x, scale, shift=0.1)
            states.append(x)
            if self.kind == "leaves" and index == 2:
                break
        return states

    def chosen(self) -> list[nn.Module]:
        if self.kind == "index":
            return [self.blocks[index] for index in range(len(self.blocks))]
        blocks = list(self.blocks[:4] if self.kind == "slice" else self.blocks)
        if self.kind == "skips":
            del blocks[2]
        return blocks * 2 if self.kind == "recurs" else blocks


def loop_gradients(model: Loop, x: Tensor, *, way: str = "backward") -> dict[str, Tensor | None]:
    """Gradients of a loop's outputs, asked for in several ways."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    outputs = model(x)
    loss = sum(y.square().sum() for y in outputs)
    if way == "a part":
        wanted = [model.blocks[3].up.weight if model.kind not in ("leaves", "middle only") else model.scales]
        wanted += [] if model.kind == "detaches" else [model.scales]
        return {"output": outputs[0].detach()} | {
            str(i): g for i, g in enumerate(torch.autograd.grad(loss, wanted, allow_unused=True))
        }
    if way == "twice":
        loss.backward(retain_graph=True)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return {"output": outputs[0].detach(), "input": x.grad} | found


@pytest.mark.filterwarnings("ignore:.*a new walk starts there")
@pytest.mark.parametrize("way", ["backward", "twice", "a part"])
@pytest.mark.parametrize("options", [{}, {"anchor_every": 2}, {"backprop": "checkpoint"}, {"verify": False}], ids=str)
@pytest.mark.parametrize("scheme", [BDIA(), BLEND, MidPoint(0.3), BDIA(blend=1 / 8)], ids=repr)
@pytest.mark.parametrize("kind", Loop.kinds)
def test_loops_of_every_kind_have_the_gradients_of_plain_autograd(
    kind: str, scheme: Any, options: dict[str, Any], way: str
) -> None:
    torch.manual_seed(0)
    model, x = Loop(kind).double(), torch.randn(4, 6, dtype=torch.float64)
    exact: Any = {"exact": 23} if abs(scheme.carry) < 0.5 else {}
    stored = revode.convert(copy.deepcopy(model), "blocks", scheme, backprop="store", **exact)
    ours = revode.convert(model, "blocks", scheme, **(options | exact))
    if kind in Loop.starts_anew and not scheme.draws:
        with pytest.raises(ValueError, match="cannot start in the middle"):
            loop_gradients(ours, x, way=way)
        return
    assert_close(loop_gradients(ours, x, way=way), loop_gradients(stored, x, way=way), 1e-9)


@pytest.mark.parametrize("kind", Loop.kinds)
def test_loops_of_every_kind_are_the_plain_model_in_eval_mode(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Loop(kind).double().eval(), torch.randn(4, 6, dtype=torch.float64)
    plain = loop_gradients(copy.deepcopy(model), x)
    assert_close(loop_gradients(revode.convert(model, "blocks"), x), plain, 0.0)


@pytest.mark.parametrize("kind", Loop.starts_anew)
def test_a_walk_that_starts_anew_is_warned_of_once(kind: str) -> None:
    model, x = revode.convert(Loop(kind), "blocks", BDIA()), torch.randn(4, 6)
    with pytest.warns(UserWarning, match=r"the converted block blocks\.\d is not what.*keeps 192 more bytes"):
        model(x)
    model(x)


class Numbered(nn.Module):
    """A block that is told its number in a dictionary, and the state by name."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, state: Tensor, told: dict[str, int]) -> Tensor:
        return state + torch.tanh(self.mix(state)) * (told["number"] + 1)


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Numbered() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        told: dict[str, int] = {}
        for number, block in enumerate(self.blocks):
            told["number"] = number
            x = block(state=x, told=told)
        return x


def test_a_dictionary_that_is_filled_anew_for_each_block() -> None:
    torch.manual_seed(0)
    model, x = Telling().double(), torch.randn(4, 6, dtype=torch.float64)
    plain = gradients(copy.deepcopy(model).eval(), x)
    assert_close(gradients(revode.convert(model, "blocks").eval(), x), plain, 1e-12)


def test_attributes_of_blocks_are_set_through_the_loop() -> None:
    model = revode.convert(Perceptron(), "body.blocks")
    for block in model.body["blocks"]:
        block.drop = nn.Identity()
        block.as_tuple = True
        del block.as_tuple
        block.as_tuple = False
    revode.revert(model)
    assert all(isinstance(block.drop, nn.Identity) and not block.as_tuple for block in model.body["blocks"])


@pytest.mark.parametrize("scheme", [BDIA(h=0.5), MidPoint(0.5, blend=0.0)], ids=repr)
def test_gradients_recorded_or_not_a_step_has_its_length(scheme: Any) -> None:
    model, x = revode.convert(Perceptron(), "body.blocks", scheme).eval(), torch.randn(4, 3)
    recorded = model(x).detach()
    with torch.no_grad():
        assert torch.allclose(model(x), recorded, rtol=1e-6, atol=1e-7)


def test_what_blocks_return_beside_their_state_is_summed_up_by_the_models_own_loop() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            for block in self.blocks:
                block.register_forward_hook(lambda module, inputs, y: (inputs[0] + y, y.square().mean()))

        def forward(self, x: Tensor) -> tuple[Tensor, Any]:
            total: Any = 0.0
            for block in self.blocks:
                x, extra = block(x)
                total = total + extra
            return x, total

    model, x = Sum().eval(), torch.randn(2, 4)
    with torch.no_grad():
        plain = model(x)
        assert all(torch.equal(a, b) for a, b in zip(revode.convert(model, "blocks")(x), plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model(x), plain, strict=True))
    with pytest.warns(UserWarning, match="a new walk starts there"):  # a hook changes what the block returned
        model.train()(x)


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def pretrained(kind: str) -> tuple[Any, str, dict[str, Tensor]]:
    """A tiny random model of transformers, the path of its blocks, and inputs."""
    import transformers as t

    torch.manual_seed(0)
    tokens = {"input_ids": torch.randint(50, (3, 9))}
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    if kind == "gpt2":
        config = t.GPT2Config(
            vocab_size=50, n_embd=16, n_layer=5, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
        )
        return t.GPT2LMHeadModel(config), "transformer.h", tokens
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**sizes, num_key_value_heads=2)), "model.layers", tokens
    if kind == "gemma3":  # which gives its blocks masks and positions of two kinds
        kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
        own = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "layer_types": kinds}
        return t.Gemma3ForCausalLM(t.Gemma3TextConfig(**sizes, **own)), "model.layers", tokens
    if kind == "bert":
        return t.BertForMaskedLM(t.BertConfig(**sizes)), "bert.encoder.layer", tokens
    del sizes["vocab_size"]
    model = t.ViTForImageClassification(t.ViTConfig(**sizes, image_size=8, patch_size=4))
    path = next(name for name, module in model.named_modules() if type(module) is nn.ModuleList)
    return model, path, {"pixel_values": torch.randn(3, 3, 8, 8)}


def model_gradients(model: Any, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor | None]:
    model.zero_grad()
    torch.manual_seed(1)
    y = model(**inputs, **options).logits
    y.square().sum().backward()
    return {"output": y.detach()} | {name: p.grad for name, p in model.named_parameters()}


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3", "bert", "vit"])
def test_models_of_transformers(kind: str) -> None:
    model, path, inputs = pretrained(kind)
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    model = model.double().eval()
    quiet = {} if kind == "vit" else {"use_cache": False}
    with torch.no_grad():
        plain = model(**inputs).logits
    reference = model_gradients(model, inputs, **quiet)
    revode.convert(model, path)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, plain)
    assert_close(model_gradients(model, inputs, **quiet), reference, 1e-11)
    model.train()
    ours = model_gradients(model, inputs, **quiet)
    stored = revode.convert(revode.revert(model), path, backprop="store")
    assert_close(ours, model_gradients(stored, inputs, **quiet), 1e-9)
    stored_states = hidden_state_gradients(stored, inputs, **quiet)
    ours_states = hidden_state_gradients(revode.convert(revode.revert(stored), path), inputs, **quiet)
    assert_close(ours_states, stored_states, 1e-9)


def hidden_state_gradients(model: Any, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor | None]:
    """Gradients of a loss on all hidden states."""
    model.zero_grad()
    torch.manual_seed(1)
    states = model(**inputs, **options, output_hidden_states=True).hidden_states
    assert len(states) == 6
    sum(state.square().sum() * (1 + i) for i, state in enumerate(states)).backward()
    return {"output": states[2].detach()} | {name: p.grad for name, p in model.named_parameters()}


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("scheme", [BDIA(), BLEND], ids=repr)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_cache_serves_generation_and_is_left_out_of_training(kind: str, scheme: Any) -> None:
    model, path, inputs = pretrained(kind)
    model = revode.convert(model.double().eval(), path, scheme)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(**inputs, **options)
    assert torch.equal(cached, model.generate(**inputs, **options, use_cache=False))
    model.train()
    with pytest.warns(UserWarning, match="leave out the cache"):
        ours = model_gradients(model, inputs)
    assert_close(ours, model_gradients(model, inputs, use_cache=False), 1e-12)


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_blocks_with_masks_of_their_own_generate_with_a_cache() -> None:
    model, path, inputs = pretrained("gemma3")
    revode.convert(model.double().eval(), path, BLEND)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**inputs, **options), model.generate(**inputs, **options, use_cache=False))


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_fewer_layers_and_checkpointing_asked_of_a_converted_model() -> None:
    model, path, inputs = pretrained("llama")
    model = model.double().train()
    model.config.num_hidden_layers = 3
    with torch.no_grad():
        plain = model.eval()(**inputs, use_cache=False).logits
        assert torch.equal(revode.convert(model, path, exact=23)(**inputs, use_cache=False).logits, plain)
    model.train()
    reference = model_gradients(model, inputs, use_cache=False)
    assert reference["model.layers.3.mlp.up_proj.weight"] is None
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_close(model_gradients(model, inputs, use_cache=False), reference, 1e-9)


def gpt2_of_48_layers() -> Any:
    import transformers as t

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 48, "n_head": 2, "n_positions": 64}
    return t.GPT2LMHeadModel(t.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_is_kept_of_48_layers_of_gpt2() -> None:
    """Without dropout, whose masks only storing keeps."""
    model, x = gpt2_of_48_layers().train(), torch.randn(4, 64, 32)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    def kept() -> int:
        with SavedTensors([*model.parameters(), x]) as saved:
            model.transformer(inputs_embeds=x, use_cache=False)
        return saved.num_bytes

    stored = kept()
    for scheme, exact, most in (
        (BDIA(), False, 40), (BLEND, False, 40), (BDIA(), True, 100), (BLEND, True, 100), (MidPoint(0.5), False, 200),
    ):  # fmt: skip
        revode.convert(model, "transformer.h", scheme, exact=exact)
        assert kept() <= stored / most, (scheme, exact)
        revode.revert(model)


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("adapters_first", [True, False])
def test_lora_trains_its_adapters_on_a_converted_gpt2(adapters_first: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], lora_dropout=0.1, init_lora_weights=False, fan_in_fan_out=True
    )

    def make(**options: Any) -> Any:
        model, path, _ = pretrained("gpt2")
        if adapters_first:
            model = peft.get_peft_model(model, config)
            return revode.convert(model, f"base_model.model.{path}", **options).double()
        return peft.get_peft_model(revode.convert(model, path, **options), config).double()

    inputs = pretrained("gpt2")[2]
    torch.manual_seed(2)
    ours = make().train()
    torch.manual_seed(2)
    stored = make(backprop="store").train()
    found = model_gradients(ours, inputs, use_cache=False)
    assert_close(found, model_gradients(stored, inputs, use_cache=False), 1e-9)
    trained = {name for name, value in found.items() if value is not None} - {"output"}
    assert len(trained) == 10
    assert all("lora_" in name for name in trained)
    plain = revode.revert(copy.deepcopy(ours)).eval()
    merged = revode.revert(ours.eval()).merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(**inputs).logits, plain(**inputs).logits, rtol=1e-9, atol=1e-9)


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_accelerate_trains_a_converted_gpt2_in_bfloat16_as_if_stored() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)

    def losses(**options: Any) -> list[float]:
        model, path, inputs = pretrained("gpt2")
        revode.convert(model, path, exact=True, **options)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        found = []
        for _ in range(12):
            with accelerator.accumulate(model):
                loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        assert torch.isfinite(revode.revert(accelerator.unwrap_model(model)).eval()(**inputs).logits).all()
        return found

    ours = losses()
    assert ours[-1] < 0.9 * ours[0]
    assert ours == losses(backprop="store")


@pytest.mark.parametrize("scheme", [MidPoint(0.5), MidPoint(1, blend=0.25), BDIA(), BDIA(blend=1 / 16)], ids=repr)
@pytest.mark.parametrize("make", [Perceptron, lambda: Perceptron(as_tuple=True)], ids=["tensor", "tuple"])
def test_on_the_grid_gradients_are_those_of_store_to_the_bit(make: Callable[[], nn.Module], scheme: Any) -> None:
    x, found = torch.randn(5, 3), []
    for backprop in ("reversible", "store"):
        torch.manual_seed(0)
        model = revode.convert(make(), "body.blocks", scheme, exact=True, backprop=backprop)
        y = model(x)
        y.square().mean().backward()
        found.append([y, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(ours, stored) for ours, stored in zip(*found, strict=True))


def test_several_lists_in_one_call(caplog: pytest.LogCaptureFixture) -> None:
    def model() -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(*(Block(4) for _ in range(number))) for number in (2, 5)), nn.Sequential(nn.Linear(4, 4))
        )

    both = revode.convert(model(), ["0", "1"], MidPoint(0.5))
    assert sum("reversible by" in repr(block) for stage in both for block in stage.children()) == 7
    both(torch.randn(2, 4)).sum().backward()
    one = model()
    with pytest.raises(ValueError, match="unknown list of blocks"):
        revode.convert(one, ["0", "7"])
    assert "reversible" not in repr(one)
    revode.convert(one)
    assert (
        "converted 5 blocks Block of '1' only; '0' hold such blocks, too: convert takes a list of paths" in caplog.text
    )


def test_reverting_what_another_scheme_has_trained_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for scheme in (BDIA(), MidPoint(0.5)):
        model = revode.convert(Perceptron(), "body.blocks", scheme)
        model(torch.randn(2, 3)).sum().backward()
        revode.revert(model)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "trained with MidPoint" in record.getMessage()


def test_a_scheme_in_the_place_of_a_path_is_refused() -> None:
    with pytest.raises(TypeError, match=r"path must be the path of a list of blocks.*give a scheme by scheme="):
        revode.convert(Perceptron(), MidPoint(0.5))  # type: ignore[arg-type]
