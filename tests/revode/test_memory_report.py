"""`revode.memory.report` on a user's model: bytes that other counters confirm, advice, and a model that is as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import revode
from revode import MidPoint, ReversibleSequence
from revode.memory import SavedTensors, report


class Block(nn.Module):
    """An ordinary residual block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.drop = nn.BatchNorm1d(width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.mix(self.norm(x))))


class Plain(nn.Module):
    def __init__(self, num_blocks: int = 12, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def branch(width: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1))


def reversible(**options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 16), ReversibleSequence([branch(16) for _ in range(12)], MidPoint(0.1), **options)
    )


def kept(model: nn.Module, x: Tensor) -> int:
    with SavedTensors(exclude=model.parameters()) as saved:
        model(x).float().square().mean()
    return saved.num_bytes


def test_a_reversible_model_in_three_ways() -> None:
    model, x = reversible(), torch.randn(64, 16)
    found = report(model, x)
    assert list(found.costs) == ["stored", "checkpoint of each block", "reversible"]
    for name, backprop in zip(found.costs, ("store", "checkpoint", "reversible"), strict=True):
        model[1] = model[1].with_strategy(backprop=backprop)  # type: ignore[operator]
        assert found.costs[name].kept == kept(model, x)
        assert found.costs[name].peak >= found.costs[name].kept
        assert found.costs[name].seconds > 0.0
    assert found.costs["reversible"].kept < found.costs["checkpoint of each block"].kept < found.costs["stored"].kept
    assert found.parameters == found.gradients == 4 * sum(p.numel() for p in model.parameters())


def test_a_plain_model_beside_its_checkpoint_and_its_conversion() -> None:
    model, x = Plain(), torch.randn(64, 16)
    found = report(model, x)
    stored, checkpointed, converted = found.costs.values()
    assert list(found.costs)[2] == "reversible, convert(model, 'blocks')"
    assert stored.kept == kept(model, x)
    with SavedTensors(exclude=model.parameters()) as saved:
        y = x
        for block in model.blocks:
            y = checkpoint(block, y, use_reentrant=False)  # type: ignore[assignment]
        y.square().mean()
    assert checkpointed.kept == saved.num_bytes
    assert checkpointed.peak > checkpointed.kept
    assert converted.kept < checkpointed.kept < stored.kept
    assert "reversible blocks save" in found.advice
    assert str(found).splitlines()[2].startswith("stored ")


def test_a_converted_model() -> None:
    model = revode.convert(Plain())
    found = report(model, torch.randn(64, 16))
    assert list(found.costs) == ["stored", "checkpoint of each block", "reversible"]
    assert found.costs["reversible"].kept < found.costs["stored"].kept
    assert "reversible by" in repr(model)


@pytest.mark.parametrize(
    "make", [Plain, reversible, lambda: revode.convert(Plain())], ids=["plain", "own", "converted"]
)
def test_the_model_is_as_before(make: Any) -> None:
    model, x = make(), torch.randn(8, 16)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds, text, rng = [type(module) for module in model.modules()], repr(model), torch.get_rng_state()
    own = [sorted(module.__dict__) for module in model.modules()]
    report(model, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(
        p.grad is then and bool((then == 1).all()) for p, then in zip(model.parameters(), gradients, strict=True)
    )
    assert ([type(module) for module in model.modules()], repr(model)) == (kinds, text)
    assert [sorted(module.__dict__) for module in model.modules()] == own
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(module._forward_hooks for module in model.modules() if module is not model)


def test_do_not_use_it_where_parameters_are_the_memory() -> None:
    model = ReversibleSequence([nn.Linear(128, 128) for _ in range(4)], MidPoint(0.1))
    assert report(model, torch.randn(2, 128)).advice.startswith("do not use reversible blocks here: activations are")


def test_a_model_without_blocks_is_shown_as_it_is() -> None:
    found = report(nn.Linear(4, 4), torch.randn(2, 4))
    assert list(found.costs) == ["stored"]
    assert found.remarks[0].startswith("only stored: Linear has no nn.ModuleList or nn.Sequential of blocks")
    assert "no reversible blocks to compare with" in str(found)


def test_blocks_without_a_skip_connection_are_told() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    assert any("has no skip connection" in remark for remark in report(model, torch.randn(2, 8)).remarks)


def test_batches_and_losses_of_every_kind() -> None:
    class Named(Plain):
        def forward(self, x: Tensor, scale: float = 1.0) -> Any:  # type: ignore[override]
            return {"y": scale * super().forward(x), "text": "a word"}

    model, x = Named(), torch.randn(8, 16)
    sizes = {report(model, batch, repeats=1).costs["stored"].kept for batch in (x, (x, 2.0), {"x": x, "scale": 2.0})}
    assert len(sizes) == 1
    assert report(model, x, lambda output: output["y"].sum(), repeats=1).costs["stored"].kept < sizes.pop()


def test_what_cannot_be_measured_is_said() -> None:
    model = nn.Linear(2, 2)
    for loss in (lambda output: output.detach().sum(), lambda output: output, lambda output: 1.0):
        with pytest.raises(ValueError, match="a loss must be a tensor of one element with a gradient, got"):
            report(model, torch.randn(2, 2), loss)
    with pytest.raises(ValueError, match="no parameter of Linear requires a gradient"):
        report(nn.Linear(2, 2).requires_grad_(False), torch.randn(2, 2))
    with pytest.raises(TypeError, match="takes a module and a batch, got Tensor"):
        report(torch.ones(1), torch.ones(1))  # type: ignore[arg-type]


def test_all_lists_of_such_blocks_are_converted() -> None:
    model = nn.Sequential(Plain(6), nn.Linear(16, 24), Plain(12, 24))
    found = report(model, torch.randn(64, 16), repeats=1)
    name = "reversible, convert(model, ['2.blocks', '0.blocks'])"
    assert list(found.costs)[2] == name
    revode.convert(model, ["2.blocks", "0.blocks"])
    model(torch.randn(64, 16))  # chooses the bits of the grid
    assert found.costs[name].kept < found.costs["checkpoint of each block"].kept


def test_a_stored_step_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from revode.memory import steps

    count, calls = steps._count, []

    def too_large_at_first(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return count(*args)

    monkeypatch.setattr(steps, "_count", too_large_at_first)
    found = report(Plain(), torch.randn(64, 16), repeats=1)
    assert "stored" not in found.costs
    assert "stored: does not fit" in str(found)
    assert "a stored step does not fit into this machine's memory; with reversible blocks it takes" in found.advice
    monkeypatch.setattr(steps, "_count", lambda *args: too_large_at_first(calls.clear()))
    with pytest.raises(RuntimeError, match="give report a smaller batch"):
        report(Plain(), torch.randn(64, 16), repeats=1)


def test_labels_in_the_batch_are_refused_in_one_sentence() -> None:
    with pytest.raises(TypeError, match="batch is what the model is called with, and labels belong into loss"):
        report(Plain(), (torch.randn(4, 16), torch.ones(4)))
