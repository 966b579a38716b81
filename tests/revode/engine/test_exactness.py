"""Exact mode: reconstruction and every gradient are the stored ones to the last bit, or there is an error."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from branches import EXACT, HALVING, IMAGE_BRANCHES, SCHEMES, Conditioned, conv_norm_relu, gelu_conv, tanh_layer, width
from gradients import Record, assert_bitwise, training_step
from torch import Tensor, nn

from revode import (
    BDIA,
    AdditiveCoupling,
    AntisymmetricField,
    Leapfrog,
    MidPoint,
    Momentum,
    OneLayerField,
    ReversalError,
    ReversibleSequence,
    SymmetricField,
    Verlet,
    Walk,
)
from revode.engine.grid import Grid, bytes_kept

FOUR_SCHEMES = {name: SCHEMES[name] for name in ("verlet", "additive", "midpoint", "leapfrog")}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def autocast(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if enabled else contextlib.nullcontext()


def step(sequence: nn.Module, x: Tensor, enabled: bool = False, **options: Any) -> Record:
    """A training step whose forward runs under autocast if asked."""

    def call(x: Tensor, **kwargs: Any) -> Any:
        with autocast(enabled):
            return sequence(x, **kwargs)

    return training_step(sequence, x, call=call, **options)


def assert_exact(fields: list[nn.Module], scheme: Any, x: Tensor, enabled: bool = False, **options: Any) -> None:
    """All exact strategies, of the same fields, leave the same bits; and `inverse` gives the rounded input."""
    bits = options.pop("exact", 14)
    kwargs = options.pop("kwargs", {})
    stored = ReversibleSequence(copy.deepcopy(fields), scheme, exact=bits, backprop="store")
    reference = step(stored, x, enabled, kwargs=kwargs)
    assert all(torch.isfinite(value).all() for value in reference.values() if value is not None)
    ours = ReversibleSequence(copy.deepcopy(fields), scheme, exact=bits, **options)
    assert_bitwise(step(ours, x, enabled, kwargs=kwargs), reference)
    ours.eval()
    if abs(scheme.carry) != 1.0 or not scheme.invertible:
        return
    with torch.no_grad(), autocast(enabled):
        again = ours.inverse(ours(x, return_state=True, **kwargs)[1], **kwargs)
    assert torch.equal(again, torch.round(x * 2.0**bits) / 2.0**bits)


def stable_fields(scheme: Any, branch: str, number: int, channels: int) -> list[nn.Module]:
    """Branches small enough for `number` of them to stay in the grid's range."""
    fields = [IMAGE_BRANCHES[branch](width(scheme, channels)) for _ in range(number)]
    with torch.no_grad():
        for field in fields:
            for parameter in field.parameters():
                parameter.mul_(0.5)
    return fields


@pytest.mark.parametrize(
    ("branch", "num_blocks", "layout", "enabled"),
    [
        *(
            (branch, 10, layout, on)
            for branch in ("gelu_conv", "symmetric")
            for layout in LAYOUTS
            for on in (False, True)
        ),
        ("symmetric", 100, "contiguous", True),
        ("symmetric", 100, "channels_last", False),
    ],
)
@pytest.mark.parametrize("name", FOUR_SCHEMES)
def test_every_bit_is_that_of_store(num_blocks: int, branch: str, name: str, layout: str, enabled: bool) -> None:
    scheme = FOUR_SCHEMES[name]()
    if isinstance(scheme, AdditiveCoupling | MidPoint) and branch == "symmetric":
        scheme = AdditiveCoupling() if scheme.splits else MidPoint(h=0.02)
    fields = stable_fields(scheme, branch, num_blocks * scheme.fields_per_step, 4)
    if branch == "symmetric" and isinstance(scheme, AdditiveCoupling | MidPoint):
        for field in fields:
            field.operator.weight.data.mul_(0.4)
    x = torch.randn(2, 4, 5, 3).contiguous(memory_format=LAYOUTS[layout])
    assert_exact(fields, scheme, x, enabled)


@pytest.mark.parametrize("enabled", [False, True], ids=["fp32", "bf16-autocast"])
@pytest.mark.parametrize("branch", IMAGE_BRANCHES)
@pytest.mark.parametrize("name", HALVING)
def test_every_bit_is_that_of_store_where_states_are_halved(name: str, branch: str, enabled: bool) -> None:
    scheme = HALVING[name]()
    x = torch.randn(3, 4, 5, 3).contiguous(memory_format=torch.channels_last)
    assert_exact(stable_fields(scheme, branch, 10, 4), scheme, x, enabled)


DEEP_SCHEMES = {
    "half": MidPoint(h=0.002, blend=0.5),
    "minus-half": MidPoint(h=0.002, blend=-0.5),
    "bdia": BDIA(h=0.002),
    "verlet": Verlet(h=0.02),
    "additive": AdditiveCoupling(),
    "midpoint": MidPoint(h=0.002),
    "leapfrog": Leapfrog(h=0.02),
}


@pytest.mark.parametrize(
    ("name", "num_blocks"),
    [
        ("bdia", 1000),  # which halves with either sign
        ("leapfrog", 1000),
        *((name, 300) for name in ("half", "minus-half", "midpoint", "verlet", "additive")),
        *(
            pytest.param(name, 1000, marks=pytest.mark.slow)
            for name in ("half", "minus-half", "midpoint", "verlet", "additive")
        ),
    ],
)
def test_every_bit_is_that_of_store_at_great_depth(name: str, num_blocks: int) -> None:
    scheme = DEEP_SCHEMES[name]
    fields = [tanh_layer(width(scheme, 4)) for _ in range(num_blocks * scheme.fields_per_step)]
    if isinstance(scheme, AdditiveCoupling):
        for field in fields:
            field[0].weight.data.mul_(0.02)
    assert_exact(fields, scheme, torch.randn(2, 4))


BLENDS = [
    *(MidPoint(h=0.002, blend=sign * 2.0**-n) for n in range(1, 7) for sign in (1, -1)),
    *(BDIA(h=0.002, blend=2.0**-n) for n in range(1, 7)),
]


@pytest.mark.parametrize("num_blocks", [10, 100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", BLENDS, ids=repr)
def test_every_bit_is_that_of_store_for_every_blend(scheme: Any, num_blocks: int) -> None:
    assert_exact([tanh_layer(4) for _ in range(num_blocks)], scheme, torch.randn(2, 4))


def test_every_bit_is_that_of_store_at_1000_blocks_with_the_blend_of_convert() -> None:
    assert_exact([tanh_layer(4) for _ in range(1000)], BDIA(h=0.002, blend=1 / 16), torch.randn(2, 4))


@pytest.mark.parametrize("scheme", [MidPoint(h=0.1, blend=2.0**-n) for n in range(1, 7)], ids=repr)
def test_a_flipped_bit_of_a_remainder_is_seen(scheme: Any) -> None:
    walk = Walk(scheme, exact=True)
    state = walk.enter(torch.randn(2, 4))
    for _ in range(20):
        state = walk.step(tanh_layer(4), state)
    assert walk._path is not None
    remainder = walk._path.steps[7].remainder
    assert remainder is not None
    remainder[0] ^= 1
    with pytest.raises(ReversalError, match="missed the state"):
        walk.leave(state).sum().backward()


@pytest.mark.parametrize("num_blocks", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_bit_of_an_image_network_is_that_of_store(num_blocks: int) -> None:
    scheme = DEEP_SCHEMES["leapfrog"]
    x = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    assert_exact(stable_fields(scheme, "symmetric", num_blocks, 4), scheme, x)


@pytest.mark.parametrize("enabled", [False, True], ids=["fp32", "bf16-autocast"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("branch", ["symmetric", "antisymmetric", "gelu_conv", "conv_norm_relu"])
@pytest.mark.parametrize("name", ["verlet", "leapfrog"])
@pytest.mark.parametrize("shape", [(1, 4, 3, 3), (2, 2, 3, 3), (2, 4, 1, 5), (1, 2, 6, 1)], ids=str)
def test_sizes_of_one_are_exact(shape: tuple[int, ...], name: str, branch: str, layout: str, enabled: bool) -> None:
    scheme = SCHEMES[name]()
    x = torch.randn(shape).contiguous(memory_format=LAYOUTS[layout])
    assert_exact(stable_fields(scheme, branch, 4, shape[1]), scheme, x, enabled)


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [False, True], ids=["fp32", "bf16-autocast"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "branch"),
    [
        ("verlet", "conv_norm_relu"),
        ("additive", "sigmoid_conv"),
        ("midpoint", "antisymmetric"),
        ("leapfrog", "symmetric_batch"),
    ],
)
def test_every_bit_is_that_of_store_at_1000_blocks_with_real_branches(
    name: str, branch: str, layout: str, enabled: bool
) -> None:
    scheme = DEEP_SCHEMES[name]
    fields = stable_fields(scheme, branch, 1000 * scheme.fields_per_step, 4)
    if isinstance(scheme, AdditiveCoupling):
        for field in fields:
            for parameter in field.parameters():
                parameter.data.mul_(0.02)
    assert_exact(fields, scheme, torch.randn(2, 4, 5, 3).contiguous(memory_format=LAYOUTS[layout]), enabled)


@pytest.mark.parametrize("enabled", [False, True], ids=["fp32", "bf16-autocast"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("branch", IMAGE_BRANCHES)
@pytest.mark.parametrize("name", ["verlet", "midpoint", "leapfrog-paper"])
def test_every_kind_of_branch_is_exact(name: str, branch: str, layout: str, enabled: bool) -> None:
    scheme = SCHEMES[name]()
    x = torch.randn(3, 8, 7, 5).contiguous(memory_format=LAYOUTS[layout])
    assert_exact(stable_fields(scheme, branch, 6, 8), scheme, x, enabled)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"anchor_every": 1},
        {"anchor_every": 3},
        {"backprop": "checkpoint"},
        {"memory_budget": 20_000},
        {"memory_budget": 60_000, "anchor_every": 2},
        {"memory_budget": 10**9},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", [*FOUR_SCHEMES, *HALVING])
def test_tied_branches_are_exact(name: str, options: dict[str, Any]) -> None:
    scheme = EXACT[name]()
    channels = width(scheme, 8)
    shared, other = gelu_conv(channels), conv_norm_relu(channels)
    fields = [shared, other, shared, gelu_conv(channels), shared, shared, other, shared, shared, other]
    assert_exact(fields, scheme, 0.5 * torch.randn(2, 8, 6, 5), **options)


@pytest.mark.parametrize("options", [{}, {"anchor_every": 1}, {"memory_budget": 30_000, "anchor_every": 2}], ids=str)
def test_one_layer_pairs_that_share_their_kernel_are_exact(options: dict[str, Any]) -> None:
    fields = [field for _ in range(5) for field in OneLayerField.pair(4, activation="tanh")]
    assert_exact(fields, Verlet(h=0.2), torch.randn(2, 8, 6, 5), **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"anchor_every": 2}, {"backprop": "checkpoint"}, {"memory_budget": 4_000, "anchor_every": 2}],
    ids=str,
)
@pytest.mark.parametrize("name", ["midpoint", "leapfrog", "midpoint-half", "bdia"])
def test_keyword_tensors_that_require_grad_are_exact(name: str, options: dict[str, Any]) -> None:
    shared = Conditioned(4)
    fields = [shared, *(Conditioned(4) for _ in range(6)), shared, shared]
    condition = torch.randn(3, 1, requires_grad=True)
    assert_exact(fields, EXACT[name](), torch.randn(3, 4), kwargs={"condition": condition}, **options)


@pytest.mark.parametrize("frozen", [0, 2, 5])
def test_frozen_branches_are_exact(frozen: int) -> None:
    fields = stable_fields(Verlet(), "symmetric", 6, 4)
    for field in fields[: frozen + 1]:
        field.requires_grad_(False)
    assert_exact(fields, Verlet(h=0.2), torch.randn(2, 4, 5, 5))


@pytest.mark.parametrize("bits", [1, 8, 14, 20, 23])
def test_exact_takes_the_bits_of_its_grid(bits: int) -> None:
    x = torch.rand(2, 4) * 0.2 - 0.1
    scheme = MidPoint(h=0.01)
    assert_exact([tanh_layer(4) for _ in range(8)], scheme, x, exact=bits)
    _, state = ReversibleSequence([tanh_layer(4) for _ in range(8)], scheme, exact=bits)(x, return_state=True)
    for member in state:
        assert torch.equal(member * 2.0**bits, torch.round(member * 2.0**bits))


def test_true_means_fourteen_bits() -> None:
    fields, x = [tanh_layer(4) for _ in range(4)], torch.randn(2, 4)
    outputs = [ReversibleSequence(fields, MidPoint(), exact=exact)(x) for exact in (True, 14, 13)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_double_precision_is_exact_too() -> None:
    fields = [tanh_layer(4).double() for _ in range(60)]
    assert_exact(fields, Leapfrog(h=0.2), torch.randn(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("enabled", [False, True], ids=["fp32", "bf16-autocast"])
@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("field", [SymmetricField, AntisymmetricField])
def test_kernels_of_another_layout_than_the_state_change_no_bit(field: Any, norm: str, enabled: bool) -> None:
    gradients = []
    for backprop in ("reversible", "store"):
        torch.manual_seed(0)
        sequence = ReversibleSequence(
            [field(6, norm=norm) for _ in range(6)], MidPoint(h=0.2), exact=True, backprop=backprop
        )
        sequence.to(memory_format=torch.channels_last)
        x = torch.randn(3, 6, 8, 8, requires_grad=True)
        with autocast(enabled):
            y = sequence(x)
        y.square().sum().backward()
        gradients.append({"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in sequence.named_parameters()})
    assert_bitwise(*gradients)


def test_gradient_passes_the_rounding_of_the_input_unchanged() -> None:
    sequence = ReversibleSequence([nn.Identity()], MidPoint(h=0.5, start="paper"), exact=2)
    x = torch.tensor([[0.3, 0.6]], requires_grad=True)
    sequence(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(1, 2))


class Swing(nn.Module):
    """A field that is large or small in turn, whatever the state: it drives a state to wherever we want it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, q: Tensor) -> Tensor:
        return self.value + 0.37 * torch.sin(q)


@pytest.mark.parametrize("name", FOUR_SCHEMES)
def test_states_close_to_the_limit_are_exact(name: str) -> None:
    scheme = {"verlet": Verlet(h=0.7), "additive": AdditiveCoupling(), "midpoint": MidPoint(h=0.3)}.get(
        name, Leapfrog(h=0.6)
    )
    x = torch.linspace(-900.0, 900.0, 24).view(4, 6)
    fields = [Swing(0.9 * (-1) ** (i // 2)) for i in range(12)]
    if isinstance(scheme, MidPoint | Leapfrog):
        x = x + 0.01 * torch.randn_like(x)
    assert_exact(fields, scheme, x)
    with torch.no_grad():
        _, state = ReversibleSequence(fields, scheme, exact=True)(x, return_state=True)
    assert max(member.abs().max() for member in state) > 890


@pytest.mark.parametrize("backprop", ["reversible", "checkpoint", "store"])
@pytest.mark.parametrize("name", FOUR_SCHEMES)
def test_a_state_out_of_range_raises_before_it_corrupts(name: str, backprop: str) -> None:
    scheme = FOUR_SCHEMES[name]()
    fields = [Swing(0.0), Swing(0.0), Swing(1e5), Swing(0.0)]
    sequence = ReversibleSequence(fields, scheme, exact=True, backprop=backprop)
    x = torch.randn(2, 4)
    before = x.clone()
    with pytest.raises(ValueError, match=r"exact=14 .*below 1024 .*magnitude .*after branch 2 \(Swing\)"):
        sequence(x)
    with torch.no_grad(), pytest.raises(ValueError, match="after branch 2"):
        sequence(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("value", "found"), [(2000.0, "magnitude 2000"), (float("inf"), ".*inf"), (float("nan"), "NaN")]
)
@pytest.mark.parametrize("name", FOUR_SCHEMES)
def test_an_input_out_of_range_is_refused_at_entry(name: str, value: float, found: str) -> None:
    sequence = ReversibleSequence(
        [tanh_layer(2 if FOUR_SCHEMES[name]().splits else 4)] * 2, SCHEMES[name](), exact=True
    )
    for place in (0, -1):
        x = torch.zeros(2, 4)
        x.view(-1)[place] = value
        with pytest.raises(ValueError, match=f"found {found} at entry"):
            sequence(x)


class Poison(nn.Module):
    """Returns NaN somewhere."""

    def forward(self, q: Tensor) -> Tensor:
        u = torch.zeros_like(q)
        u.view(-1)[-1] = float("nan")
        return u


def test_nan_from_a_branch_is_found_where_it_arises() -> None:
    fields = [tanh_layer(4), Poison(), tanh_layer(4)]
    with pytest.raises(ValueError, match=r"NaN after branch 1 \(Poison\)"):
        ReversibleSequence(fields, MidPoint(h=0.1), exact=True)(torch.randn(2, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_states_are_refused(dtype: torch.dtype) -> None:
    sequence = ReversibleSequence([tanh_layer(4)] * 2, MidPoint(h=0.1), exact=True).to(dtype)
    with pytest.raises(ValueError, match=rf"exact needs states of dtype float32 or float64, got {dtype}"):
        sequence(torch.randn(2, 4, dtype=dtype))


@pytest.mark.parametrize("scheme", [Momentum(0.9), Verlet(damping=0.1), Leapfrog(damping=0.01)], ids=repr)
def test_exact_is_refused_where_there_is_none(scheme: Any) -> None:
    with pytest.raises(ValueError, match=r"exact=True needs a scheme .*use exact=False") as caught:
        ReversibleSequence([tanh_layer(2)] * 2, scheme, exact=True)
    assert type(scheme).__name__ in str(caught.value)


@pytest.mark.parametrize("exact", [0, 24, -1, 2.5, "14", None])
def test_a_grid_that_does_not_exist_is_refused(exact: Any) -> None:
    with pytest.raises(ValueError, match=rf"exact must be .* got {exact!r}"):
        ReversibleSequence([tanh_layer(2)] * 2, MidPoint(), exact=exact)


def test_without_the_grid_the_bits_are_others() -> None:
    """Why exact exists: the same comparison fails without rounding, so the checks above can fail."""
    torch.manual_seed(0)
    fields = stable_fields(Verlet(), "symmetric", 100, 4)
    records = []
    for backprop in ("reversible", "store"):
        sequence = ReversibleSequence(copy.deepcopy(fields), Verlet(h=0.3), backprop=backprop)
        records.append(step(sequence, torch.ones(2, 4, 5, 5)))
    with pytest.raises(AssertionError, match="grad of input"):
        assert_bitwise(*records)


def test_the_check_catches_a_rounding_that_differs_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    from revode.schemes import Coupling

    original = Coupling.reverse

    def unrounded(self: Coupling, q: Tensor, q_next: Tensor, u: Tensor, rounding: Any = None, *rest: Any) -> Tensor:
        return original(self, q, q_next, u, None)

    monkeypatch.setattr(Coupling, "reverse", unrounded)
    with pytest.raises(ReversalError, match="missed the state"):
        assert_exact(stable_fields(Verlet(), "gelu_conv", 20, 4), Verlet(h=0.3), torch.randn(2, 4, 5, 5))


def test_the_check_catches_other_strides_in_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch may give other bits on another layout, so it must see the same one twice."""
    import revode.engine.step
    from revode.schemes import Coupling

    original = Coupling.reverse
    monkeypatch.setattr(revode.engine.step, "with_strides", lambda x, strides: x)
    monkeypatch.setattr(Coupling, "reverse", lambda *args, **kwargs: original(*args, **kwargs).contiguous())
    x = torch.randn(3, 8, 7, 5).contiguous(memory_format=torch.channels_last)
    with pytest.raises(ReversalError, match="missed the state"):
        assert_exact(stable_fields(MidPoint(), "conv_norm_relu", 8, 8), MidPoint(h=0.1), x)


@pytest.mark.parametrize("shape", [(3,), (2, 5), (1, 8, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", range(1, 7))
def test_a_share_of_a_grid_point_and_its_remainder_give_it_back(
    shift: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    grid = Grid(14)
    x = grid.round(100 * torch.randn(shape, dtype=dtype))
    for up in (True, False):
        m, remainder = grid.shrink(x, shift, up), grid.remainder(x, shift, up)
        assert torch.equal(grid.round(m), m)
        assert (m - x / 2**shift).abs().max() <= 0.5 * 2.0**-14
        assert remainder.nbytes == bytes_kept(shift, x.numel())
        assert torch.equal(grid.grow(m, remainder, shift, up), x)


def test_ties_are_rounded_up_and_down_in_turn() -> None:
    grid = Grid(4)
    odd = torch.arange(-7.0, 8.0, 2.0) / 16
    assert (grid.shrink(odd, 1, up=True) - odd / 2 == 0.5 / 16).all()
    assert (grid.shrink(odd, 1, up=False) - odd / 2 == -0.5 / 16).all()
