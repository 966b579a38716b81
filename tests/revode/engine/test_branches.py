"""Real branches, and unkind ones: the gradient is the stored one, or there is an error; never a wrong number."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from branches import Attention, Checkpointed, Conditioned, Perceptron, Recurrent, conv_norm_relu, tanh_layer
from gradients import assert_agree, compare_with_store, training_step, weighted_sum
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from revode import AdditiveCoupling, Leapfrog, MidPoint, ReversalError, ReversibleSequence, SymmetricField, Verlet

Make = Callable[..., ReversibleSequence]


def sequence_of(make: Callable[[], nn.Module], number: int = 6, **options: Any) -> ReversibleSequence:
    return ReversibleSequence([make() for _ in range(number)], MidPoint(h=0.2), **options).double()


def double_input(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)), dtype=torch.float64)


class TestRealBranches:
    @pytest.mark.parametrize("split_dim", [-1, 2])
    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
    def test_attention_and_perceptron_with_dropout_and_a_mask(self, split_dim: int, backprop: str) -> None:
        def make(**options: Any) -> ReversibleSequence:
            fields = [part for _ in range(4) for part in (Attention(8), Perceptron(8))]
            options = {"backprop": backprop} | options
            return ReversibleSequence(fields, AdditiveCoupling(), split_dim=split_dim, **options).double()

        mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        for kwargs in ({}, {"mask": mask}):
            compare_with_store(make, double_input(2, 5, 16), kwargs=kwargs)

    def test_the_mask_matters(self) -> None:
        sequence = ReversibleSequence([Attention(8), Perceptron(8)], AdditiveCoupling(), split_dim=-1).eval()
        x = torch.randn(1, 5, 16)
        mask = torch.tensor([[False, False, False, True, True]])
        assert not torch.allclose(sequence(x), sequence(x, mask=mask))

    def test_convolution_with_batch_norm_and_relu(self) -> None:
        def make(**options: Any) -> ReversibleSequence:
            return ReversibleSequence([conv_norm_relu(3) for _ in range(8)], Verlet(h=0.3), **options).double()

        compare_with_store(make, double_input(4, 6, 5, 7))

    def test_three_dimensional_convolution(self) -> None:
        def branch() -> nn.Module:
            return nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.SiLU())

        compare_with_store(lambda **o: sequence_of(branch, **o), double_input(2, 2, 3, 4, 5))

    @pytest.mark.parametrize("frozen", [[0], [2, 3], [5], [0, 1, 2, 3, 4, 5]])
    @pytest.mark.parametrize("make", [lambda: tanh_layer(4), lambda: SymmetricField(4, ndim=1)], ids=["tanh", "field"])
    def test_frozen_branches(self, frozen: list[int], make: Callable[[], nn.Module]) -> None:
        def freeze(sequence: ReversibleSequence) -> None:
            for index in frozen:
                sequence.fields[index].requires_grad_(False)

        compare_with_store(lambda **o: sequence_of(make, **o), double_input(3, 4, 4), prepare=freeze)

    @pytest.mark.parametrize("name", ["0.weight", "0.bias"])
    def test_one_frozen_parameter(self, name: str) -> None:
        def freeze(sequence: ReversibleSequence) -> None:
            for field in sequence.fields:
                field.get_parameter(name).requires_grad_(False)

        compare_with_store(lambda **o: sequence_of(lambda: tanh_layer(4), **o), double_input(), prepare=freeze)

    def test_a_frozen_parameter_of_a_field(self) -> None:
        def freeze(sequence: ReversibleSequence) -> None:
            sequence.fields[1].norm.bias.requires_grad_(False)
            sequence.fields[2].operator.weight.requires_grad_(False)

        compare_with_store(
            lambda **o: sequence_of(lambda: SymmetricField(4, ndim=1), **o), double_input(2, 4, 5), prepare=freeze
        )

    def test_nothing_to_train_and_an_input_without_grad(self) -> None:
        sequence = sequence_of(lambda: tanh_layer(4)).requires_grad_(False)
        y = sequence(double_input())
        assert not y.requires_grad

    @pytest.mark.parametrize("anchor_every", [None, 2])
    def test_a_tied_branch_at_several_depths(self, anchor_every: int | None) -> None:
        def make(**options: Any) -> ReversibleSequence:
            shared, field = tanh_layer(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            fields = [shared, tanh_layer(4), shared, field, shared, field, shared]
            return ReversibleSequence(fields, Leapfrog(h=0.3), **({"anchor_every": anchor_every} | options)).double()

        compare_with_store(make, double_input())

    @pytest.mark.parametrize(
        "wrap",
        [
            parametrizations.spectral_norm,
            parametrizations.weight_norm,
            parametrizations.orthogonal,
            nn.utils.spectral_norm,
        ],
        ids=["spectral_norm", "weight_norm", "orthogonal", "spectral_norm by hooks"],
    )
    def test_parametrized_branches(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        compare_with_store(
            lambda **o: sequence_of(lambda: nn.Sequential(wrap(nn.Linear(4, 4)), nn.Tanh()), **o), double_input()
        )

    def test_two_forwards_before_the_backward_with_spectral_norm(self) -> None:
        def twice(sequence: ReversibleSequence) -> Callable[[Tensor], Tensor]:
            return lambda x: sequence(x) - 0.5 * sequence(-x)

        records = []
        for backprop in ("reversible", "store"):
            torch.manual_seed(0)
            sequence = sequence_of(lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), backprop=backprop)
            records.append(training_step(sequence, torch.ones(2, 4).double(), call=twice(sequence)))
        assert_agree(*records)

    def test_recurrent_branches(self) -> None:
        def branch() -> nn.Module:
            return Recurrent(nn.GRU(4, 4, batch_first=True))

        compare_with_store(lambda **o: sequence_of(branch, **o), double_input(2, 5, 4))

    def test_a_branch_that_is_the_gradient_of_an_energy(self) -> None:
        class Force(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.energy = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))

            def forward(self, q: Tensor) -> Tensor:
                with torch.enable_grad():
                    q = q if q.requires_grad else q.detach().requires_grad_()
                    return torch.autograd.grad(self.energy(q).sum(), q, create_graph=True)[0]

        compare_with_store(lambda **o: sequence_of(Force, **o), double_input())

    def test_a_reversible_sequence_inside_a_branch(self) -> None:
        def branch() -> nn.Module:
            inner = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)), tanh_layer(4), nn.Linear(4, 4)]
            return nn.Sequential(ReversibleSequence(inner, MidPoint(h=0.3)), nn.BatchNorm1d(4), nn.Tanh())

        compare_with_store(lambda **o: sequence_of(branch, **o), double_input())

    def test_a_checkpoint_inside_a_branch_and_around_a_sequence(self) -> None:
        from torch.utils.checkpoint import checkpoint

        compare_with_store(lambda **o: sequence_of(lambda: Checkpointed(nn.Dropout(0.2)), **o), double_input())
        sequence = sequence_of(lambda: tanh_layer(4))
        x = double_input()
        around = training_step(sequence, x, call=lambda x: checkpoint(sequence, x, use_reentrant=False))
        assert_agree(around, training_step(sequence, x))

    def test_a_branch_compiled_code_never_sees_is_any_module(self) -> None:
        class Nested(nn.Module):
            """Takes a nest of keyword arguments."""

            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(4, 4)

            def forward(self, q: Tensor, *, context: dict[str, Any], flag: bool = False) -> Tensor:
                scale, (shift, _) = context["scale"], context["shift"]
                return torch.tanh(self.mix(q) * scale + shift) * (2.0 if flag else 1.0)

        grads = []
        for backprop in ("reversible", "store"):
            torch.manual_seed(0)
            sequence = sequence_of(Nested, backprop=backprop)
            scale, shift = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
            context = {"scale": scale, "shift": [shift, "text"]}
            y = sequence(torch.ones(2, 4).double(), context=context, flag=True)
            weighted_sum(y).backward()
            grads.append({"scale": scale.grad, "shift": shift.grad})
        assert_agree(*grads)


class Returning(nn.Module):
    """A linear layer, then whatever `change` makes of its value and of q."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.change = change

    def forward(self, q: Tensor) -> Tensor:
        return self.change(self.mix(q), q)


class TestOddReturns:
    """The value of a branch may alias its input, a parameter, a buffer, or itself."""

    @pytest.mark.parametrize(
        "scheme",
        [MidPoint(h=0.2), MidPoint(h=0.5, start="paper"), Leapfrog(h=0.3), Verlet(h=1.0), AdditiveCoupling()],
        ids=repr,
    )
    @pytest.mark.parametrize("number", [2, 6])
    def test_a_branch_that_returns_its_input(self, scheme: Any, number: int) -> None:
        def make(**options: Any) -> ReversibleSequence:
            return ReversibleSequence([nn.Identity() for _ in range(number)], scheme, **options).double()

        compare_with_store(make, double_input())

    @pytest.mark.parametrize(
        "change",
        [
            lambda u, q: u.mean(-1, keepdim=True).expand_as(u),
            lambda u, q: u.t().contiguous().t(),
            lambda u, q: torch.cat((u, q), -1)[:, 2:6],
            lambda u, q: u.flip(-1),
            lambda u, q: q.view_as(q),
            lambda u, q: u * q + q.square() - q.detach(),
            lambda u, q: u.as_strided(u.shape, u.stride()),
            lambda u, q: u.relu_(),
            lambda u, q: torch.zeros_like(q),
            lambda u, q: u.detach(),
            lambda u, q: q.clone().mul_(u),
        ],
        ids=[
            "expanded",
            "other strides",
            "a slice",
            "flipped",
            "a view of the input",
            "uses the input several times",
            "as_strided",
            "changed in place",
            "a constant",
            "detached",
            "a copy of the input changed in place",
        ],
    )
    @pytest.mark.parametrize("exact", [False, True])
    def test_a_branch_may_return_a_view(self, change: Any, exact: bool) -> None:
        def make(**options: Any) -> ReversibleSequence:
            return sequence_of(lambda: Returning(change), **({"exact": exact} | options))

        compare_with_store(make, double_input(), tolerance=0.0 if exact else 1e-10)

    @pytest.mark.parametrize("kind", ["parameter", "buffer"])
    @pytest.mark.parametrize("scheme", [AdditiveCoupling(), MidPoint(h=0.5), Verlet(h=0.1)], ids=repr)
    def test_a_branch_that_returns_what_it_holds(self, kind: str, scheme: Any) -> None:
        class Constant(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                value = torch.randn(3, 2 if scheme.splits else 4)
                if kind == "parameter":
                    self.value = nn.Parameter(value)
                else:
                    self.register_buffer("value", value)

            def forward(self, q: Tensor) -> Tensor:
                return self.value

        def make(**options: Any) -> ReversibleSequence:
            return ReversibleSequence([Constant() for _ in range(4)], scheme, **options).double()

        compare_with_store(make, double_input())
        sequence = make()
        before = {name: value.clone() for name, value in sequence.state_dict().items()}
        training_step(sequence, double_input())
        assert_agree(dict(sequence.state_dict()), before, 0.0)

    @pytest.mark.parametrize("make", [lambda: tanh_layer(4), lambda: nn.Sequential(SymmetricField(4, ndim=0))])
    def test_activations_kept_by_hooks_are_never_overwritten(self, make: Callable[[], nn.Module]) -> None:
        sequence = sequence_of(make)
        kept: list[tuple[Tensor, Tensor]] = []
        for module in sequence.fields.modules():
            module.register_forward_hook(lambda m, args, u: kept.append((u, u.detach().clone())))
            module.register_forward_pre_hook(lambda m, args: kept.append((args[0], args[0].detach().clone())) and None)
        weighted_sum(sequence(double_input())).backward()
        assert len(kept) > 20
        assert all(torch.equal(live, copy) for live, copy in kept)

    def test_hooks_on_a_field_that_knows_its_gradient_are_called(self) -> None:
        calls: list[str] = []
        field = SymmetricField(2)
        sequence = ReversibleSequence([field, SymmetricField(2)], MidPoint(h=0.1))
        sequence(torch.randn(1, 2, 4, 4)).sum().backward()
        handle = field.operator.register_forward_hook(lambda *_: calls.append("forward"))
        sequence(torch.randn(1, 2, 4, 4)).sum().backward()
        assert calls == ["forward", "forward"]
        handle.remove()
        field.register_full_backward_hook(lambda *_: calls.append("backward"))
        sequence(torch.randn(1, 2, 4, 4, requires_grad=True)).sum().backward()
        assert calls.count("backward") == 1

    @pytest.mark.parametrize("method", ["kernel", "convolve", "convolve_adjoint"])
    def test_a_method_replaced_on_one_operator_is_honoured(self, method: str) -> None:
        def make(**options: Any) -> ReversibleSequence:
            fields = [SymmetricField(4) for _ in range(4)]
            original = getattr(fields[1].operator, method)
            setattr(fields[1].operator, method, lambda *args: 2.0 * original(*args))
            return ReversibleSequence(fields, MidPoint(h=0.1), **options).double()

        compare_with_store(make, double_input(2, 4, 5, 5))

    def test_a_forward_replaced_on_one_field_is_honoured(self) -> None:
        def make(**options: Any) -> ReversibleSequence:
            sequence = sequence_of(lambda: SymmetricField(4, ndim=1), **options)
            original = sequence.fields[1].forward
            sequence.fields[1].forward = lambda y: 2.0 * original(y) + torch.tanh(y)
            inner = sequence.fields[2].operator.forward
            sequence.fields[2].operator.forward = lambda x, bias=None: inner(x, bias) + 1.0
            adjoint = sequence.fields[3].operator.adjoint
            sequence.fields[3].operator.adjoint = lambda y: 3.0 * adjoint(y)
            return sequence

        compare_with_store(make, double_input(2, 4, 5))


class TestBetweenForwardAndBackward:
    """What the user does between the two changes nothing, or raises."""

    def step(self, backprop: str, between: Callable[[ReversibleSequence], Any], make: Any = None) -> dict[str, Any]:
        torch.manual_seed(0)
        sequence = sequence_of(make or (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))), backprop=backprop)
        named = dict(sequence.named_parameters())
        x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(1)
        loss = weighted_sum(sequence(x))
        between(sequence)
        loss.backward()
        return {"x": x.grad} | {name: parameter.grad for name, parameter in named.items()}

    @pytest.mark.parametrize(
        "between",
        [
            lambda s: s.eval(),
            lambda s: s.fields[2].eval(),
            lambda s: setattr(s.fields[1][0], "weight", nn.Parameter(torch.zeros(4, 4).double())),
            lambda s: torch.manual_seed(7),
            lambda s: s(torch.randn(5, 4).double()),
            lambda s: s.zero_grad(),
            lambda s: s.register_buffer("later", torch.zeros(3)),
        ],
        ids=["eval", "eval of one", "a parameter replaced", "a new seed", "a second forward", "zero_grad", "a buffer"],
    )
    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
    def test_the_gradient_is_that_of_the_forward(self, backprop: str, between: Any) -> None:
        assert_agree(self.step(backprop, between), self.step("store", lambda s: None))

    @pytest.mark.parametrize("used", [0, 1])
    def test_a_field_in_the_mode_of_its_forward_though_only_one_state_is_used(self, used: int) -> None:
        gradients = []
        for change in (False, True):
            torch.manual_seed(0)
            sequence = ReversibleSequence([SymmetricField(4, norm="batch") for _ in range(4)], Verlet(h=0.3)).double()
            x = double_input(3, 8, 5, 5).requires_grad_()
            _, state = sequence(x, return_state=True)
            sequence.train(not change)
            state[used].square().sum().backward()
            gradients.append({"x": x.grad} | {name: p.grad for name, p in sequence.named_parameters()})
        assert_agree(*gradients, 0.0)

    def test_modes_are_left_as_the_user_set_them(self) -> None:
        sequence = sequence_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
        loss = sequence(double_input()).sum()
        sequence.fields[1].eval()
        loss.backward()
        assert [field[1].training for field in sequence.fields] == [True, False, True, True, True, True]

    @pytest.mark.parametrize("trained", [True, False])
    @pytest.mark.parametrize("field", [False, True])
    def test_a_parameter_changed_in_place_raises(self, trained: bool, field: bool) -> None:
        make = (lambda: SymmetricField(4, ndim=0)) if field else (lambda: tanh_layer(4))
        sequence = sequence_of(make)
        parameter = next(sequence.fields[2].parameters()).requires_grad_(trained)
        loss = sequence(double_input()).sum()
        with torch.no_grad():
            parameter.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"modified in place between forward and backward"):
            loss.backward()

    def test_an_optimizer_step_raises(self) -> None:
        for make in (lambda: tanh_layer(4), lambda: SymmetricField(4, ndim=0)):
            sequence = sequence_of(make)
            optimizer = torch.optim.SGD(sequence.parameters(), lr=0.1)
            first, second = sequence(double_input()).sum(), sequence(double_input()).sum()
            first.backward()
            optimizer.step()
            with pytest.raises(RuntimeError, match="optimizer step"):
                second.backward()

    def test_a_buffer_changed_in_place_raises(self) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(4, 4)
                self.register_buffer("scale", torch.ones(4))

            def forward(self, q: Tensor) -> Tensor:
                return self.mix(q) * self.scale

        sequence = sequence_of(Scaled)
        loss = sequence(double_input()).sum()
        sequence.fields[3].scale.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"branch 3 .*'scale' was modified in place"):
            loss.backward()

    def test_a_keyword_argument_changed_in_place_raises(self) -> None:
        sequence = sequence_of(lambda: Conditioned(4))
        condition = torch.randn(3, 4, dtype=torch.float64)
        loss = sequence(double_input(), condition=condition).sum()
        condition.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_a_state_changed_in_place_raises(self) -> None:
        sequence = sequence_of(lambda: tanh_layer(4))
        y, state = sequence(double_input(), return_state=True)
        with torch.no_grad():
            state[0].mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    def test_the_check_catches_recomputation_in_another_mode(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import contextlib

        import revode.engine.replay

        monkeypatch.setattr(revode.engine.replay, "_training_modes", lambda *_: contextlib.nullcontext())
        with pytest.raises(ReversalError, match="missed the state"):
            self.test_the_gradient_is_that_of_the_forward("reversible", lambda s: s.eval())


class Counting(nn.Module):
    """Multiplies by a buffer that each call halves."""

    def __init__(self, assign: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(()))
        self.assign = assign

    def forward(self, q: Tensor) -> Tensor:
        if self.assign:
            self.scale = self.scale * 0.5
        else:
            self.scale.mul_(0.5)
        return self.mix(q) * self.scale.clone()


class Renormalizing(nn.BatchNorm1d):
    """A batch norm whose output in training depends on its running statistics."""

    def forward(self, q: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean.mul_(0.9).add_(q.mean(0), alpha=0.1)
        return (q - q.mean(0)) * self.weight + self.running_mean.clone() * self.bias.exp()


class TestBuffers:
    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("assign", [True, False])
    def test_a_buffer_that_a_branch_updates_and_uses(self, assign: bool, training: bool) -> None:
        compare_with_store(lambda **o: sequence_of(lambda: Counting(assign), **o).train(training), double_input())

    @pytest.mark.parametrize("assign", [True, False])
    def test_a_tied_branch_that_updates_its_buffer(self, assign: bool) -> None:
        def make(**options: Any) -> ReversibleSequence:
            return ReversibleSequence([Counting(assign)] * 4, MidPoint(h=0.3), **options).double()

        compare_with_store(make, double_input())

    def test_a_batch_norm_of_another_kind(self) -> None:
        compare_with_store(lambda **o: sequence_of(lambda: Renormalizing(4), **o), double_input())

    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint", "store"])
    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("momentum", [0.1, None])
    def test_batch_statistics_move_once(self, momentum: float | None, exact: bool, backprop: str) -> None:
        norms = [nn.BatchNorm1d(4, momentum=momentum) for _ in range(4)]
        sequence = ReversibleSequence(norms, MidPoint(h=0.1), backprop=backprop, exact=exact).double()
        x = 3.0 + double_input(16, 4)
        loss = sequence(x).sum()
        after_forward = {name: buffer.clone() for name, buffer in sequence.named_buffers()}
        loss.backward(retain_graph=True)
        loss.backward()
        assert_agree(dict(sequence.named_buffers()), after_forward, 0.0)
        assert [int(norm.num_batches_tracked) for norm in norms] == [1] * 4
        torch.testing.assert_close(norms[0].running_mean, x.mean(0) * (0.1 if momentum else 1.0), rtol=1e-3, atol=1e-3)

    def test_batch_statistics_of_a_field_move_once_though_only_the_older_state_is_used(self) -> None:
        fields = [SymmetricField(4, norm="batch", leading=True) for _ in range(4)]
        sequence = ReversibleSequence(fields, Verlet(h=0.1))
        _, (p, _) = sequence(torch.randn(2, 8, 5, 5, requires_grad=True), return_state=True)
        after_forward = {name: buffer.clone() for name, buffer in sequence.named_buffers()}
        p.sum().backward()
        assert_agree(dict(sequence.named_buffers()), after_forward, 0.0)

    def test_inverse_does_not_move_batch_statistics(self) -> None:
        sequence = sequence_of(lambda: nn.BatchNorm1d(4))
        _, state = sequence(double_input(), return_state=True)
        before = {name: buffer.clone() for name, buffer in sequence.named_buffers()}
        sequence.inverse(state)
        assert_agree(dict(sequence.named_buffers()), before, 0.0)

    def test_the_check_catches_statistics_that_move_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import revode.engine.replay

        monkeypatch.setattr(revode.engine.replay, "_idle_statistics", lambda contents: [])
        with pytest.raises((AssertionError, RuntimeError)):
            self.test_batch_statistics_move_once(0.1, False, "reversible")


class InPlaceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, q: Tensor) -> Tensor:
        return self.layers(q)


class TestUnkindBranches:
    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint", "store"])
    @pytest.mark.parametrize("scheme", [MidPoint(h=0.2), Leapfrog(h=0.2), AdditiveCoupling()], ids=repr)
    @pytest.mark.parametrize("grad", [True, False])
    def test_a_branch_that_overwrites_its_input_is_refused(self, grad: bool, scheme: Any, backprop: str) -> None:
        sequence = ReversibleSequence([InPlaceFirst(), InPlaceFirst()], scheme, backprop=backprop)
        x = torch.randn(1, 8 if scheme.splits else 4)
        before = x.clone()
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"branch 0 \(InPlaceFirst\).*in place"):
            sequence(x)
        assert torch.equal(x, before)

    @pytest.mark.parametrize("backprop", ["reversible", "store"])
    def test_inverse_refuses_it_too_and_leaves_the_state(self, backprop: str) -> None:
        sequence = ReversibleSequence([nn.Linear(4, 4), InPlaceFirst()], MidPoint(h=0.2), backprop=backprop)
        state = torch.randn(2, 4), torch.randn(2, 4)
        before = [member.clone() for member in state]
        with torch.no_grad(), pytest.raises(ValueError, match="in place"):
            sequence.inverse(state)
        assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))

    def test_relu_in_place_inside_a_branch_and_after_the_sequence_works(self) -> None:
        def branch() -> nn.Module:
            return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))

        def make(**options: Any) -> nn.Module:
            return nn.Sequential(sequence_of(branch, **options), nn.ReLU(inplace=True), nn.Linear(4, 2).double())

        compare_with_store(make, double_input())

    def test_a_branch_that_overwrites_a_keyword_argument_is_refused(self) -> None:
        class Overwriting(nn.Module):
            def forward(self, q: Tensor, mask: Tensor) -> Tensor:
                mask.add_(1.0)
                return q * mask

        with pytest.raises(ValueError, match=r"branch 0 \(Overwriting\).*in place"):
            sequence_of(Overwriting)(double_input(), mask=torch.zeros(4).double())

    def test_a_branch_that_writes_its_own_parameters_is_refused_or_right(self) -> None:
        class Shrinking(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(4, 4)

            def forward(self, q: Tensor) -> Tensor:
                with torch.no_grad():
                    self.mix.weight.mul_(0.5)
                return self.mix(q)

        def make(**options: Any) -> ReversibleSequence:
            return ReversibleSequence([Shrinking()] * 3, MidPoint(h=0.3), **options).double()

        with pytest.raises(RuntimeError, match="in place"):
            training_step(make(), double_input())

    def test_parameters_that_are_not_registered_are_refused(self) -> None:
        class Hidden(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = [nn.Linear(4, 4).double()]

            def forward(self, q: Tensor) -> Tensor:
                return self.layers[0](q)

        sequence = ReversibleSequence([nn.Linear(4, 4).double(), Hidden()], MidPoint(h=0.1))
        loss = sequence(double_input()).sum()
        with pytest.raises(ValueError, match=r"branch 1 \(Hidden\).*neither its parameter nor a keyword argument"):
            loss.backward()

    def test_a_closure_over_a_tensor_that_requires_grad_is_refused(self) -> None:
        encoder, x = nn.Linear(4, 4).double(), double_input()
        encoded = encoder(x)
        sequence = sequence_of(lambda: Returning(lambda u, q: u + encoded))
        loss = sequence(x).sum()
        with pytest.raises(ValueError, match="neither its parameter nor a keyword argument"):
            loss.backward()

    def test_lazy_branches_are_refused_until_they_have_run(self) -> None:
        sequence = ReversibleSequence([nn.LazyLinear(4) for _ in range(3)], MidPoint(h=0.1))
        with pytest.raises(ValueError, match=r"branch \d \(LazyLinear\).*uninitialised"):
            sequence(torch.randn(2, 4))
        with torch.no_grad():
            sequence(torch.randn(2, 4))
        sequence(torch.randn(2, 4)).sum().backward()
        assert all(p.grad is not None for p in sequence.parameters())


class TestParametersAreInputs:
    def test_hooks_on_parameters_fire_once(self) -> None:
        def halve(sequence: ReversibleSequence) -> None:
            for parameter in sequence.parameters():
                parameter.register_hook(lambda g: g * 0.5)

        for make in (lambda: tanh_layer(4), lambda: SymmetricField(4, ndim=0)):
            compare_with_store(lambda make=make, **o: sequence_of(make, **o), double_input(), prepare=halve)

    def test_hooks_after_accumulation_fire_once_for_a_parameter(self) -> None:
        shared = tanh_layer(4)
        sequence = ReversibleSequence([shared, tanh_layer(4), shared, shared], MidPoint(h=0.1))
        calls: dict[str, int] = {}
        for name, parameter in sequence.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, n=name: calls.update({n: calls.get(n, 0) + 1}))
        sequence(torch.randn(2, 4)).sum().backward()
        assert calls == dict.fromkeys(dict(sequence.named_parameters()), 1)

    @pytest.mark.parametrize("make", [lambda: tanh_layer(4), lambda: SymmetricField(4, ndim=0)])
    def test_functional_call_differentiates_the_given_parameters(self, make: Callable[[], nn.Module]) -> None:
        grads = []
        for backprop in ("reversible", "checkpoint", "store"):
            torch.manual_seed(0)
            sequence = sequence_of(make, backprop=backprop)
            given = {n: (2.0 * p.detach()).requires_grad_() for n, p in sequence.named_parameters()}
            weighted_sum(functional_call(sequence, given, (torch.ones(2, 4).double(),))).backward()
            assert all(p.grad is None for p in sequence.parameters())
            grads.append({name: p.grad for name, p in given.items()})
        assert_agree(grads[0], grads[2])
        assert_agree(grads[1], grads[2])

    def test_gradients_accumulate_over_calls(self) -> None:
        sequence = sequence_of(lambda: tanh_layer(4))
        halves = double_input(), double_input()
        for x in halves:
            sequence(x).sum().backward()
        accumulated = {n: p.grad for n, p in sequence.named_parameters()}
        sequence.zero_grad()
        sequence(torch.cat(halves)).sum().backward()
        assert_agree(accumulated, {n: p.grad for n, p in sequence.named_parameters()})


class TestNoise:
    def noisy(self, kind: str) -> nn.Module:
        class Noisy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(4, 4)
                self.generator = torch.Generator().manual_seed(3)

            def forward(self, q: Tensor) -> Tensor:
                u = torch.tanh(self.mix(q))
                if kind == "own generator":
                    return u * torch.rand(4, generator=self.generator).double()
                return u * {"random": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(())}[kind]()

        return Noisy()

    @pytest.mark.parametrize("kind", ["torch", "own generator", "random", "numpy"])
    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
    def test_every_source_of_noise_repeats_itself(self, kind: str, backprop: str) -> None:
        def seed(sequence: ReversibleSequence) -> None:
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002

        after = []

        def call(sequence: ReversibleSequence) -> None:
            after.append((random.random(), np.random.rand()))  # noqa: NPY002

        def make(**options: Any) -> ReversibleSequence:
            return sequence_of(lambda: self.noisy(kind), **({"backprop": backprop} | options))

        compare_with_store(make, double_input(), prepare=seed)
        for strategy in (backprop, "store"):
            sequence = make(backprop=strategy)
            seed(sequence)
            training_step(sequence, double_input())
            call(sequence)
        assert after[0] == after[1]

    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
    def test_the_streams_are_where_store_leaves_them_after_each_pass(self, backprop: str) -> None:
        states = []
        for strategy in (backprop, "store"):
            sequence = sequence_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), backprop=strategy)
            torch.manual_seed(5)
            loss = sequence(double_input()).sum()
            states.append(torch.get_rng_state())
            torch.rand(3)
            loss.backward()
            states.append(torch.get_rng_state())
        assert torch.equal(states[0], states[2])
        assert torch.equal(states[1], states[3])

    def test_dropout_drops_something_different_at_each_step(self) -> None:
        sequence = sequence_of(lambda: nn.Dropout(0.5))
        x = double_input()
        assert not torch.equal(sequence(x), sequence(x))

    def test_a_branch_that_fails_in_backward_leaves_the_stream(self) -> None:
        class Failing(nn.Module):
            def forward(self, q: Tensor) -> Tensor:
                u = q * torch.rand(())
                if torch.is_grad_enabled():
                    raise RuntimeError("out of luck")
                return u

        loss = sequence_of(Failing)(double_input().requires_grad_()).sum()
        state = torch.get_rng_state()
        with pytest.raises(RuntimeError, match=r"branch 5 \(Failing\).*out of luck"):
            loss.backward()
        assert torch.equal(torch.get_rng_state(), state)

    def test_the_check_catches_other_noise_in_recomputation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import contextlib

        import revode.engine.replay

        monkeypatch.setattr(revode.engine.replay, "drawn_again", lambda draws: contextlib.nullcontext())
        with pytest.raises(ReversalError, match="missed the state"):
            self.test_every_source_of_noise_repeats_itself("torch", "reversible")

    def test_the_check_catches_a_stream_that_moved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import revode.engine.replay

        original = revode.engine.replay.drawn_again

        def clobbering(draws: Any) -> Any:
            torch.rand(1)
            return original(draws)

        monkeypatch.setattr(revode.engine.replay, "drawn_again", clobbering)
        with pytest.raises(AssertionError):
            self.test_the_streams_are_where_store_leaves_them_after_each_pass("reversible")
