"""A sequence as a citizen of autograd: graphs, hooks, leaks, layouts, copies, autocast."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from branches import ALL_SCHEMES, EXACT, SCHEMES, Conditioned, conv_norm_relu, small_conv, tanh_layer, width
from gradients import assert_agree, assert_bitwise, compare_with_store, training_step, weighted_sum
from torch import Tensor, nn

from revode import (
    AdditiveCoupling,
    AntisymmetricField,
    Leapfrog,
    MidPoint,
    ReversalError,
    ReversibleSequence,
    SymmetricField,
    Verlet,
)

STRATEGIES = ("reversible", "checkpoint", "store")


def make_sequence(number: int = 6, **options: Any) -> ReversibleSequence:
    return ReversibleSequence([tanh_layer(4) for _ in range(number)], MidPoint(h=0.2), **options).double()


def field_sequence(**options: Any) -> ReversibleSequence:
    fields = [SymmetricField(2, activation="tanh") for _ in range(6)]
    return ReversibleSequence(fields, Verlet(h=0.3), **options).double()


MAKERS: dict[str, tuple[Callable[..., ReversibleSequence], tuple[int, ...]]] = {
    "modules": (make_sequence, (3, 4)),
    "fields": (field_sequence, (2, 4, 5, 3)),
}


def double_input(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)), dtype=torch.float64)


class TestGraphs:
    @pytest.mark.parametrize("maker", MAKERS)
    @pytest.mark.parametrize("exact", [False, True])
    def test_backward_twice_gives_twice_the_gradient(self, maker: str, exact: bool) -> None:
        make, shape = MAKERS[maker]
        sequence = make(exact=exact)
        x = double_input(*shape).requires_grad_()
        y = sequence(x)
        weighted_sum(y).backward(retain_graph=True)
        once = {"x": x.grad.clone()} | {n: p.grad.clone() for n, p in sequence.named_parameters()}
        weighted_sum(y).backward()
        twice = {"x": x.grad} | {n: p.grad for n, p in sequence.named_parameters()}
        assert_bitwise(twice, {name: 2.0 * grad for name, grad in once.items()})

    def test_backward_twice_without_retaining_raises(self) -> None:
        y = make_sequence()(double_input())
        y.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()

    @pytest.mark.parametrize("maker", MAKERS)
    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
    def test_a_gradient_of_the_gradient_is_refused(self, backprop: str, maker: str) -> None:
        make, shape = MAKERS[maker]
        x = double_input(*shape).requires_grad_()
        y = make(backprop=backprop)(x)
        with pytest.raises(RuntimeError, match=r"create_graph=True .*backprop='store'"):
            torch.autograd.grad(y.square().sum(), x, create_graph=True)

    @pytest.mark.parametrize("exact", [False, True])
    def test_a_gradient_of_the_gradient_is_that_of_the_formula_under_store(self, exact: bool) -> None:
        x = double_input().requires_grad_()
        sequence = make_sequence(3, backprop="store", exact=exact)
        if exact:
            (g,) = torch.autograd.grad(sequence(x).square().sum(), x, create_graph=True)
            (g.square().sum()).backward()
            assert all(p.grad is not None and p.grad.any() for p in sequence.parameters() if p.dim() == 2)
            return
        assert torch.autograd.gradgradcheck(sequence, (x,), fast_mode=True)

    def test_a_double_backward_beside_the_sequence_works(self) -> None:
        sequence, head = make_sequence(), nn.Linear(4, 1).double()
        y = sequence(double_input())
        w = torch.ones(4, dtype=torch.float64, requires_grad=True)
        (g,) = torch.autograd.grad((head(y) * w.square().sum()).sum(), w, create_graph=True)
        g.sum().backward()
        assert all(p.grad is not None for p in sequence.parameters() if p.dim() == 2)

    def test_gradients_of_some_inputs_only(self) -> None:
        sequence, reference = make_sequence(), make_sequence(backprop="store")
        reference.load_state_dict(sequence.state_dict())
        x = double_input().requires_grad_()
        for pick in (lambda s: [x], lambda s: [s.fields[2][0].weight], lambda s: [s.fields[5][0].bias, x]):
            ours = torch.autograd.grad(weighted_sum(sequence(x)), pick(sequence))
            theirs = torch.autograd.grad(weighted_sum(reference(x)), pick(reference))
            assert_agree(dict(enumerate(ours)), dict(enumerate(theirs)))
            assert all(p.grad is None for p in sequence.parameters())

    @pytest.mark.parametrize("maker", MAKERS)
    def test_an_input_without_grad_still_trains_the_parameters(self, maker: str) -> None:
        make, shape = MAKERS[maker]
        x = double_input(*shape)
        records = []
        for backprop in STRATEGIES:
            torch.manual_seed(0)
            sequence = make(backprop=backprop)
            weighted_sum(sequence(x)).backward()
            records.append({n: p.grad for n, p in sequence.named_parameters()})
        assert x.grad is None
        assert_agree(records[0], records[2])
        assert_agree(records[1], records[2])

    @pytest.mark.parametrize("maker", MAKERS)
    def test_the_users_gradient_is_not_modified(self, maker: str) -> None:
        make, shape = MAKERS[maker]
        sequence = make()
        x = double_input(*shape).requires_grad_()
        _, state = sequence(x, return_state=True)
        grads = [torch.randn_like(member) for member in state]
        before = [grad.clone() for grad in grads]
        torch.autograd.backward(state, grads)
        assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))

    def check_no_graph(self, mode: Any, **options: Any) -> None:
        sequence, x = make_sequence(**options), double_input()
        expected = sequence(x)
        with mode:
            y, state = sequence(x, return_state=True)
            again = sequence.inverse(state)
        assert not y.requires_grad
        assert torch.equal(y, expected)
        torch.testing.assert_close(again, x, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("options", [{}, {"backprop": "store"}, {"exact": True}], ids=str)
    def test_no_grad_builds_no_graph(self, options: Any) -> None:
        self.check_no_graph(torch.no_grad(), **options)

    @pytest.mark.parametrize("options", [{}, {"backprop": "store"}, {"exact": True}], ids=str)
    def test_inference_mode_builds_no_graph(self, options: Any) -> None:
        self.check_no_graph(torch.inference_mode(), **options)

    def test_an_inference_tensor_is_an_input_like_any_other(self) -> None:
        with torch.inference_mode():
            x, condition = torch.randn(2, 3, 4)
        sequence = ReversibleSequence([Conditioned(4) for _ in range(3)], MidPoint(h=0.2))
        with torch.no_grad():
            expected = sequence(x.clone(), condition=condition.clone())
            assert torch.equal(sequence(x, condition=condition), expected)

    def test_inverse_is_differentiable(self) -> None:
        sequence = make_sequence(4)
        pair = double_input().requires_grad_(), double_input().requires_grad_()
        assert torch.autograd.gradcheck(lambda p, q: sequence.inverse((p, q)), pair, fast_mode=True)

    def test_backward_in_another_thread(self) -> None:
        import threading

        sequence = ReversibleSequence(
            [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)], MidPoint(h=0.3)
        )
        x = torch.randn(3, 4)
        here = training_step(sequence, x)

        def elsewhere(x: Tensor) -> Tensor:
            return sequence(x)

        def loss(y: Tensor) -> Tensor:
            total = weighted_sum(y)
            thread = threading.Thread(target=lambda: total.backward())
            thread.start()
            thread.join()
            return torch.zeros((), requires_grad=True).sum()

        there = training_step(sequence, x, call=elsewhere, loss=loss)
        assert_agree(there, here, 1e-6)


class TestUsersTensors:
    @pytest.mark.parametrize("backprop", STRATEGIES)
    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("name", EXACT)
    def test_the_input_is_not_modified_or_freed(self, name: str, exact: bool, backprop: str) -> None:
        scheme = EXACT[name]()
        fields = [SymmetricField(width(scheme, 2)) for _ in range(4)]
        sequence = ReversibleSequence(fields, scheme, backprop=backprop, exact=exact)
        x = torch.randn(1, 2, 3, 3)
        before, version = x.clone(), x._version
        y = sequence(x.requires_grad_())
        y.detach().zero_()
        y.sum().backward()
        assert torch.equal(x, before)
        assert x._version == version
        assert x.untyped_storage().nbytes() == before.untyped_storage().nbytes()

    def test_the_output_may_be_changed_in_place(self) -> None:
        compare_with_store(lambda **o: nn.Sequential(make_sequence(**o), nn.Hardtanh(inplace=True)), double_input())

    @pytest.mark.parametrize("number", [1, 2, 4])
    @pytest.mark.parametrize("backprop", STRATEGIES)
    def test_the_output_is_no_alias_of_the_input_or_the_state(self, backprop: str, number: int) -> None:
        for scheme in (MidPoint(h=0.5, start="paper"), Leapfrog(h=0.1)):
            x = torch.randn(1, 4)
            before = x.clone()
            with torch.no_grad():
                sequence = ReversibleSequence([nn.Identity()] * number, scheme, backprop=backprop)
                y, state = sequence(x, return_state=True)
                kept = [member.clone() for member in state]
                y.fill_(7.0)
            assert torch.equal(x, before)
            assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))

    @pytest.mark.parametrize("name", ALL_SCHEMES)
    def test_an_empty_batch_passes_through(self, name: str) -> None:
        scheme = ALL_SCHEMES[name]()
        for exact in (False, True) if scheme.invertible_exactly else (False,):
            for make in (small_conv, SymmetricField):
                fields = [make(width(scheme, 4)) for _ in range(4)]
                sequence = ReversibleSequence(fields, scheme, exact=exact)
                x = torch.randn(0, 4, 5, 5, requires_grad=True)
                y, state = sequence(x, return_state=True)
                y.sum().backward()
                assert y.shape == x.shape == x.grad.shape
                if scheme.invertible and (not exact or abs(scheme.carry) == 1.0):
                    assert sequence.inverse(state).shape == x.shape
                assert not any(p.grad.any() for p in sequence.parameters())

    @pytest.mark.parametrize("name", ["verlet", "leapfrog", "additive", "midpoint"])
    @pytest.mark.parametrize("maker", [small_conv, SymmetricField, conv_norm_relu])
    @pytest.mark.parametrize(
        "layout",
        [
            lambda x: x,
            lambda x: x.contiguous(memory_format=torch.channels_last),
            lambda x: x.transpose(2, 3),
            lambda x: x.repeat(1, 1, 2, 2)[:, :, ::2, ::2],
            lambda x: x[:1].expand(3, -1, -1, -1),
            lambda x: x.flip(0)[1:, :, :, 1:],
            lambda x: x[:1],
            lambda x: x[:, :, :1],
        ],
        ids=["plain", "channels_last", "transposed", "sliced", "expanded", "offset", "batch of one", "one row"],
    )
    def test_any_layout_gives_the_same_gradient(self, layout: Any, maker: Any, name: str) -> None:
        scheme = SCHEMES[name]()
        x = layout(double_input(3, 4, 5, 7))
        sequence = ReversibleSequence([maker(width(scheme, 4)) for _ in range(4)], scheme).double()
        sequence.zero_grad()
        strange, plain = (
            leaf.detach().requires_grad_() for leaf in (x, x.clone(memory_format=torch.contiguous_format))
        )
        grads = []
        for leaf in (strange, plain):
            sequence.zero_grad(set_to_none=True)
            weighted_sum(sequence(leaf)).backward()
            grads.append({"x": leaf.grad} | {n: p.grad for n, p in sequence.named_parameters()})
        assert_agree(*grads, 1e-10)

    def test_unused_outputs_and_results_leak_nothing(self) -> None:
        class Witness(nn.Module):
            """Remembers, weakly, everything it has seen."""

            seen: list[weakref.ref]

            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(4, 4)
                self.seen = []

            def forward(self, q: Tensor, condition: Tensor | None = None) -> Tensor:
                u = torch.tanh(self.mix(q))
                self.seen += [weakref.ref(q), weakref.ref(u)]
                return u

        gc.collect()
        gc.disable()
        try:
            for backward in (False, True):
                for backprop in ("reversible", "checkpoint"):
                    witness = Witness()
                    sequence = ReversibleSequence([witness] * 5, MidPoint(h=0.1), backprop=backprop)
                    x = torch.randn(2, 4, requires_grad=True)
                    condition = torch.randn(4, requires_grad=True)
                    y, state = sequence(x, condition=condition, return_state=True)
                    alive = weakref.ref(condition), weakref.ref(x)
                    if backward:
                        y.sum().backward()
                    del y, state, x, condition
                    assert not [ref for ref in (*witness.seen, *alive) if ref() is not None]
        finally:
            gc.enable()

    def test_a_deleted_sequence_is_freed(self) -> None:
        gc.collect()
        gc.disable()
        try:
            sequence = make_sequence()
            refs = [weakref.ref(sequence), *(weakref.ref(p) for p in sequence.parameters())]
            sequence(double_input()).sum().backward()
            del sequence
            assert not [ref for ref in refs if ref() is not None]
        finally:
            gc.enable()

    def test_the_leak_check_catches_a_leak(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from revode.engine.path import _Node

        kept = []
        original = _Node.forward

        def forward(ctx: Any, *args: Any) -> Any:
            kept.append(args[3])
            return original(ctx, *args)

        monkeypatch.setattr(_Node, "forward", staticmethod(forward))
        with pytest.raises(AssertionError):
            self.test_unused_outputs_and_results_leak_nothing()

    def test_the_check_catches_a_write_to_the_users_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = ReversibleSequence.forward

        def overwriting(self: ReversibleSequence, x: Tensor, **kwargs: Any) -> Any:
            y = original(self, x, **kwargs)
            x.data.add_(1e-6)
            return y

        monkeypatch.setattr(ReversibleSequence, "forward", overwriting)
        with pytest.raises(AssertionError):
            self.test_the_input_is_not_modified_or_freed("midpoint", False, "reversible")


class TestCopies:
    @pytest.mark.parametrize("name", ALL_SCHEMES)
    def test_state_dict_is_plain_and_the_same_under_every_strategy(self, name: str) -> None:
        scheme = ALL_SCHEMES[name]()
        fields = [conv_norm_relu(width(scheme, 4)) for _ in range(2)]
        plain = nn.ModuleDict({"fields": nn.ModuleList(fields)}).state_dict()
        options: list[dict[str, Any]] = [{"backprop": backprop} for backprop in STRATEGIES]
        options += [{"anchor_every": 2}, {"memory_budget": 10**8}]
        options += [{"exact": True}] if scheme.invertible_exactly else []
        for option in options:
            sequence = ReversibleSequence(copy.deepcopy(fields), scheme, **option)
            before = list(sequence.state_dict())
            sequence(torch.randn(2, 4, 5, 5)).sum().backward()
            assert list(sequence.state_dict()) == before == list(plain)
            sequence.load_state_dict(plain)
            assert all(torch.equal(sequence.state_dict()[key], value) for key, value in plain.items())

    @pytest.mark.parametrize(
        "copying", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deep", "pickle"]
    )
    @pytest.mark.parametrize("options", [{}, {"exact": True}, {"memory_budget": 10**6}, {"anchor_every": 2}], ids=str)
    @pytest.mark.parametrize("maker", MAKERS)
    def test_copies_are_independent_and_compute_the_same(self, maker: str, options: Any, copying: Any) -> None:
        make, shape = MAKERS[maker]
        sequence = make(**options)
        x = double_input(*shape)
        reference = training_step(sequence, x)
        twin = copying(sequence)
        assert repr(twin) == repr(sequence)
        assert_bitwise(training_step(twin, x), reference)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert_bitwise(training_step(sequence, x), reference)

    def test_repr_says_what_it_is(self) -> None:
        text = repr(make_sequence(2, exact=12, anchor_every=3))
        for part in ("MidPoint(h=0.2)", "exact=12", "anchor_every=3"):
            assert part in text

    def test_it_sits_inside_an_ordinary_sequential(self) -> None:
        def make(**options: Any) -> nn.Module:
            fields = [conv_norm_relu(4) for _ in range(4)]
            body = ReversibleSequence(fields, AdditiveCoupling(), **options)
            return nn.Sequential(
                nn.Conv2d(3, 8, 3), body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
            ).double()

        compare_with_store(make, double_input(2, 3, 7, 7))


def autocast(enabled: bool = True, dtype: torch.dtype = torch.bfloat16) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype, enabled=enabled)


class TestAutocast:
    def make(self, **options: Any) -> ReversibleSequence:
        fields = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()) for _ in range(6)]
        return ReversibleSequence(fields, MidPoint(h=0.2), exact=True, **options)

    def record(self, forward: Any, backward: Any, backprop: str) -> dict[str, Any]:
        torch.manual_seed(0)
        sequence = self.make(backprop=backprop)
        x = torch.randn(3, 4, requires_grad=True)
        with forward:
            y = sequence(x)
        with backward:
            weighted_sum(y).backward()
        assert y.dtype == torch.float32
        return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in sequence.named_parameters()}

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
    def test_the_autocast_of_forward_is_restored_outside_of_it(self, backprop: str, dtype: torch.dtype) -> None:
        ours = self.record(autocast(dtype=dtype), contextlib.nullcontext(), backprop)
        assert_bitwise(ours, self.record(autocast(dtype=dtype), contextlib.nullcontext(), "store"))
        plain = self.record(contextlib.nullcontext(), contextlib.nullcontext(), "store")
        assert not torch.equal(ours["y"], plain["y"])

    def test_backward_inside_autocast(self) -> None:
        ours = self.record(autocast(), autocast(), "reversible")
        assert_agree(ours, self.record(autocast(), autocast(), "store"), 1e-2)

    def test_autocast_in_backward_does_not_touch_a_forward_without(self) -> None:
        """Recomputation must see the numbers of forward; the products themselves are torch's affair, as under store."""
        seen: list[Tensor] = []

        class Seeing(nn.Linear):
            def forward(self, q: Tensor) -> Tensor:
                u = super().forward(q)
                seen.append(u.detach().clone())
                return u

        sequence = ReversibleSequence([Seeing(4, 4) for _ in range(4)], MidPoint(h=0.2), exact=True)
        y = sequence(torch.randn(3, 4))
        with autocast():
            y.sum().backward()
        assert len(seen) == 8
        assert all(torch.equal(a, b) for a, b in zip(seen[:4], reversed(seen[4:]), strict=True))

    @pytest.mark.parametrize("backward", ["outside", "inside", "inside another"])
    @pytest.mark.parametrize("norm", ["none", "batch"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_field_with_a_product_of_its_own_gives_autograds_bits(
        self, dtype: torch.dtype, norm: str, backward: str
    ) -> None:
        def record(known: bool) -> dict[str, Any]:
            torch.manual_seed(0)
            fields = [SymmetricField(4, norm=norm, leading=True) for _ in range(3)]
            fields += [AntisymmetricField(4, norm=norm)]
            for field in fields:
                if not known:
                    field.register_forward_hook(lambda *_: None)  # sends it through autograd
            sequence = ReversibleSequence(fields, Verlet(h=0.1), exact=True)
            x = torch.randn(3, 8, 5, 5, requires_grad=True)
            with autocast(dtype=dtype):
                y = sequence(x)
            other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
            with autocast(backward != "outside" and known, other if backward == "inside another" else dtype):
                weighted_sum(y).backward()
            return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in sequence.named_parameters()}

        assert_bitwise(record(known=True), record(known=False))

    def test_a_field_with_a_product_of_its_own_keeps_the_range_of_float16(self) -> None:
        """The step size must scale a co-state before it is cast, not after."""
        for backprop in ("reversible", "store"):
            torch.manual_seed(0)
            sequence = ReversibleSequence([SymmetricField(4) for _ in range(4)], Leapfrog(h=0.1), backprop=backprop)
            x = torch.randn(2, 4, 5, 5, requires_grad=True)
            with autocast(dtype=torch.float16):
                y = sequence(x)
            y.backward(torch.full_like(y, 1e3))
            assert all(p.grad.isfinite().all() for p in [x, *sequence.parameters()]), backprop

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_inputs_are_raised_to_single(self, dtype: torch.dtype) -> None:
        for exact in (False, True):
            sequence = ReversibleSequence([tanh_layer(4) for _ in range(4)], MidPoint(h=0.2), exact=exact)
            x = torch.randn(3, 4).to(dtype).requires_grad_()
            with autocast():
                y, state = sequence(x, return_state=True)
            assert {y.dtype, *(member.dtype for member in state)} == {torch.float32}
            y.sum().backward()
            assert x.grad.dtype == dtype

    @pytest.mark.parametrize("order", ["outside first", "inside first", "both sides", "without grad first"])
    def test_a_weight_used_inside_and_outside_under_one_autocast(self, order: str) -> None:
        """A cast of the weight made without gradients must not be found in the cache by those who need one."""
        grads = []
        for backprop in ("reversible", "checkpoint", "store"):
            torch.manual_seed(0)
            layer = nn.Linear(4, 4)
            sequence = ReversibleSequence([layer] * 3, MidPoint(h=0.2), backprop=backprop)
            x = torch.randn(3, 4)
            with autocast():
                if order == "without grad first":
                    with torch.no_grad():
                        sequence(x)
                    y = layer(sequence(x))
                elif order == "outside first":
                    y = sequence(layer(x))
                elif order == "inside first":
                    y = layer(sequence(x))
                else:
                    y = layer(sequence(layer(x)))
                loss = weighted_sum(y)
            loss.backward()
            grads.append({"weight": layer.weight.grad, "bias": layer.bias.grad})
        assert grads[0]["weight"] is not None
        assert_agree(grads[0], grads[2], 2e-2)
        assert_agree(grads[1], grads[2], 2e-2)

    def test_the_autocast_state_is_left_as_it_was(self) -> None:
        sequence = self.make()
        with autocast():
            y = sequence(torch.randn(2, 4))
            assert torch.is_autocast_enabled("cpu")
            assert torch.is_autocast_cache_enabled()
        y.sum().backward()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()

    def test_gradients_reach_keyword_arguments_under_autocast(self) -> None:
        grads = []
        for backprop in ("reversible", "store"):
            torch.manual_seed(0)
            sequence = ReversibleSequence([Conditioned(4) for _ in range(4)], MidPoint(h=0.2), backprop=backprop)
            condition = torch.randn(3, 4, requires_grad=True)
            with autocast():
                y = sequence(torch.ones(3, 4), condition=condition)
            weighted_sum(y).backward()
            grads.append({"condition": condition.grad} | {n: p.grad for n, p in sequence.named_parameters()})
        assert_agree(*grads, 2e-2)

    def test_the_check_catches_recomputation_outside_autocast(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from revode.engine.call import Autocast

        monkeypatch.setattr(Autocast, "restore", lambda self: contextlib.nullcontext())
        with pytest.raises((AssertionError, ReversalError)):
            self.test_the_autocast_of_forward_is_restored_outside_of_it("reversible", torch.bfloat16)
