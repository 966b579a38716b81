"""Memory and work: saved bytes do not grow with depth, branches are evaluated twice, budgets are kept.

Bytes are counted here without `revode.memory`: once by hooks on everything that autograd saves, once by what Python
keeps alive, and once as the peak of a fresh process.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import Allocations, storages
from branches import (
    EXACT,
    HALVING,
    IMAGE_BRANCHES,
    SCHEMES,
    Conditioned,
    Perceptron,
    conv_norm_relu,
    small_conv,
    tanh_layer,
    width,
)
from gradients import weighted_sum
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from revode import AdditiveCoupling, Leapfrog, MidPoint, Momentum, ReversibleSequence, Verlet


def saved_bytes(sequence: nn.Module, x: Tensor, **kwargs: Any) -> int:
    """Bytes of distinct storages that autograd saves in forward, parameters and the input apart."""
    apart = {t.untyped_storage().data_ptr() for t in (*sequence.parameters(), x)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = sequence(x, **kwargs)
    assert y.requires_grad
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in apart)


def live_bytes(sequence: nn.Module, x: Tensor) -> int:
    """Bytes of tensors that Python keeps alive between forward and backward and did not before."""
    gc.collect()
    gc.freeze()  # what is here already is not looked at, nor later
    y = sequence(x)
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    assert any(t is y for t in tensors)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Flops(TorchDispatchMode):
    """Floating-point operations by torch's formulas. (Its own counter hooks every module, which fields that know their product
    must obey: they then take the general path.)"""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        self.total += formula(*args, **(kwargs or {}), out_val=out) if formula else 0
        return out


def assert_constant(at_ten: int, at_depth: int) -> None:
    assert at_ten > 0
    assert at_depth <= 1.05 * at_ten, f"{at_ten} bytes at 10 blocks, {at_depth} at many"


def sequence_of(name: str, make: Callable[[int], nn.Module], num_blocks: int, **options: Any) -> ReversibleSequence:
    scheme = EXACT[name]()
    scheme.h = min(scheme.h, 0.02)
    fields = [make(width(scheme, 4)) for _ in range(num_blocks * scheme.fields_per_step)]
    with torch.no_grad():
        for parameter in nn.ModuleList(fields).parameters():
            parameter.mul_(0.02)
    return ReversibleSequence(fields, scheme, **options)


class TestLettingGo:
    """What a step made is gone after it: a leak would fill the memory over the steps, however little one step keeps."""

    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("branch", IMAGE_BRANCHES)
    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint", "store"])
    def test_nothing_but_gradients_outlives_a_step(self, backprop: str, branch: str, exact: bool) -> None:
        sequence = sequence_of("leapfrog", IMAGE_BRANCHES[branch], 3, backprop=backprop, exact=exact)
        x = torch.randn(2, 4, 6, 6)
        sequence(x).square().mean().backward()  # the signs of fingerprints are made once and kept
        sequence.zero_grad()
        with Allocations([x, *sequence.parameters(), *sequence.buffers()]) as allocations:
            sequence(x).square().mean().backward()
        assert allocations.made
        assert allocations.alive() <= storages(p.grad for p in sequence.parameters() if p.grad is not None)

    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("branch", IMAGE_BRANCHES)
    def test_nothing_outlives_a_forward_pass_without_backward(self, branch: str, exact: bool) -> None:
        sequence = sequence_of("leapfrog", IMAGE_BRANCHES[branch], 3, exact=exact)
        x = torch.randn(2, 4, 6, 6)
        sequence(x)
        with Allocations([x, *sequence.parameters(), *sequence.buffers()]) as allocations:
            sequence(x)
        assert allocations.made
        assert not allocations.alive()


class TestSavedBytes:
    @pytest.mark.parametrize(("name", "exact"), [*((name, False) for name in SCHEMES), ("leapfrog", True)])
    def test_they_do_not_grow_with_depth(self, name: str, exact: bool) -> None:
        x = 0.1 * torch.randn(2, 4)
        depth = (
            1000 if name in ("verlet", "additive", "midpoint", "leapfrog") else 100
        )  # starts differ in one step only
        at = {n: saved_bytes(sequence_of(name, tanh_layer, n, exact=exact), x) for n in (10, depth)}
        assert_constant(at[10], at[depth])

    @pytest.mark.parametrize("name", HALVING)
    def test_a_bit_of_each_element_and_step_is_kept_where_states_are_halved_exactly(self, name: str) -> None:
        x = 0.1 * torch.randn(16, 20)
        at = {n: saved_bytes(sequence_of(name, lambda _: tanh_layer(20), n, exact=True), x) for n in (10, 100)}
        assert at[100] - at[10] == 90 * (16 * 20 // 8)
        state = 16 * 20 * 4
        assert at[10] <= 2 * state + 9 * state // 32 + 1024  # the final pair, a bit each, fingerprints

    @pytest.mark.parametrize("name", HALVING)
    def test_a_pair_for_every_six_steps_is_kept_where_states_are_halved_in_floats(self, name: str) -> None:
        x = 0.1 * torch.randn(64, 20)
        kept = saved_bytes(sequence_of(name, lambda _: tanh_layer(20), 48, verify=False), x)
        assert kept == 8 * 2 * 64 * 20 * 4

    @pytest.mark.parametrize("branch", ["symmetric", "conv_norm_relu"])
    @pytest.mark.parametrize("name", ["verlet", "leapfrog"])
    def test_they_do_not_grow_with_the_depth_of_image_networks(self, name: str, branch: str) -> None:
        x = torch.randn(2, 4, 6, 6)
        sequences = {n: sequence_of(name, IMAGE_BRANCHES[branch], n) for n in (10, 80)}
        at = {n: saved_bytes(sequence, x) for n, sequence in sequences.items()}
        assert_constant(at[10], at[80])
        if name == "leapfrog":
            live = {n: live_bytes(sequence, x) for n, sequence in sequences.items()}
            assert live[80] <= 1.05 * live[10] + 8 * 80 * (3 if branch == "conv_norm_relu" else 0)

    def test_a_keyword_argument_is_kept_once(self) -> None:
        x, condition = torch.randn(2, 4), torch.randn(2, 4)
        scheme = MidPoint(h=0.01)
        at = {
            n: saved_bytes(ReversibleSequence([Conditioned(4) for _ in range(n)], scheme), x, condition=condition)
            for n in (10, 200)
        }
        assert_constant(at[10], at[200])

    def test_store_grows_and_checkpoint_keeps_one_state_a_branch(self) -> None:
        x = torch.randn(2, 4, 6, 6)
        at = {
            (backprop, n): saved_bytes(sequence_of("leapfrog", small_conv, n, backprop=backprop), x)
            for backprop in ("store", "checkpoint")
            for n in (10, 40)
        }
        state = x.numel() * x.element_size()
        assert at["store", 40] > 3.5 * at["store", 10]
        fingerprints = 256
        assert at["checkpoint", 40] - at["checkpoint", 10] == 30 * (state + fingerprints)

    @pytest.mark.parametrize("anchor_every", [1, 5, 10])
    def test_anchors_keep_one_pair_each(self, anchor_every: int) -> None:
        x = torch.randn(2, 4, 6, 6)
        state = x.numel() * x.element_size()
        plain = saved_bytes(sequence_of("leapfrog", small_conv, 40), x)
        anchored = saved_bytes(sequence_of("leapfrog", small_conv, 40, anchor_every=anchor_every), x)
        assert anchored - plain <= (2 * state + 256) * (40 / anchor_every)
        assert anchored > plain

    def test_momentum_keeps_anchors_of_its_own(self) -> None:
        x = torch.randn(2, 4)
        at = {
            n: saved_bytes(ReversibleSequence([tanh_layer(4) for _ in range(n)], Momentum(0.9)), x) for n in (39, 390)
        }
        assert 5 * at[39] < at[390] < 15 * at[39]
        assert at[390] < 0.1 * saved_bytes(
            ReversibleSequence([tanh_layer(4) for _ in range(390)], Momentum(0.9), backprop="store"), x
        )

    def test_random_branches_keep_a_few_kilobytes_each(self) -> None:
        x = torch.randn(16, 16, 16)
        sequences = {
            n: ReversibleSequence([Perceptron(8) for _ in range(n)], AdditiveCoupling(), split_dim=-1) for n in (4, 20)
        }
        at = {n: saved_bytes(sequence, x) for n, sequence in sequences.items()}
        assert_constant(at[4], at[20])
        live = {n: live_bytes(sequence, x) for n, sequence in sequences.items()}
        assert live[20] - live[4] <= 16 * 6_000

    def test_the_check_catches_growth(self) -> None:
        x = torch.randn(2, 4)
        at = {n: saved_bytes(sequence_of("leapfrog", tanh_layer, n, anchor_every=5), x) for n in (10, 100)}
        with pytest.raises(AssertionError, match="bytes at 10 blocks"):
            assert_constant(at[10], at[100])


PEAK = """
import os, re, sys
from pathlib import Path
import torch
from torch import nn
from revode import Leapfrog, ReversibleSequence, SymmetricField

def peak():  # not ru_maxrss, which begins at the peak of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)

class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(8, 1, 1))
    def forward(self, q):
        return torch.tanh(self.gain * q)

def measure(backprop, num_blocks, kind):
    make = Gain if kind == "module" else (lambda: SymmetricField(8, kernel_size=1))
    sequence = ReversibleSequence([make() for _ in range(int(num_blocks))], Leapfrog(h=0.01), backprop=backprop)
    x = torch.randn(4, 8, 64, 64)
    ReversibleSequence([make() for _ in range(2)], Leapfrog(h=0.01), backprop="store")(x).sum().backward()
    before = peak()
    sequence(x).sum().backward()
    print(peak() - before, flush=True)

for case in sys.argv[1:]:  # each in a process of its own; torch is loaded once
    child = os.fork()
    if child == 0:
        measure(*case.split())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def process_peaks(*cases: str) -> list[float]:
    """Megabytes by which one training step raises the peak of a fresh process, for each case."""
    done = subprocess.run([sys.executable, "-c", PEAK, *cases], capture_output=True, text=True, timeout=240, check=True)
    return [int(line) / 1024 for line in done.stdout.split()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from Linux's /proc")
def test_the_peak_of_a_process_agrees() -> None:
    depths = {"module": 400, "field": 200}
    cases = [f"reversible {number} {kind}" for kind, deepest in depths.items() for number in (10, deepest)]
    *reversible, stored = process_peaks(*cases, "store 60 module")
    # A state is half a megabyte. What is written down about a branch is a few kilobytes, and its gradients, which are finished
    # one after the other, lie between states on the heap.
    for num_blocks, shallow, deep in zip(depths.values(), reversible[::2], reversible[1::2], strict=True):
        assert deep - shallow < 0.06 * num_blocks
    assert stored > 50.0


class Counter(nn.Module):
    """A branch that counts its evaluations, apart for forward and backward."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.count = 0

    def forward(self, q: Tensor) -> Tensor:
        self.count += 1
        return self.branch(q)


def evaluations(sequence: ReversibleSequence, x: Tensor, loss: Callable = weighted_sum) -> tuple[list[int], list[int]]:
    for field in sequence.fields:
        field.count = 0
    total = loss(sequence(x))
    forward = [field.count for field in sequence.fields]
    total.backward()
    return forward, [field.count - n for field, n in zip(sequence.fields, forward, strict=True)]


class TestWork:
    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("name", [*EXACT, "momentum"])
    def test_each_branch_is_evaluated_once_forward_and_once_backward(self, name: str, exact: bool) -> None:
        if name == "momentum" and exact:
            pytest.skip("momentum has no exact mode")
        scheme = Momentum(0.9) if name == "momentum" else EXACT[name]()
        fields = [Counter(tanh_layer(width(scheme, 4))) for _ in range(60)]
        x = torch.randn(2, 4, requires_grad=True)
        assert evaluations(ReversibleSequence(fields, scheme, exact=exact), x) == ([1] * 60, [1] * 60)
        anchored = ReversibleSequence(fields, scheme, exact=exact, anchor_every=7)
        assert evaluations(anchored, x) == ([1] * 60, [1] * 60)
        checkpointed = ReversibleSequence(fields, scheme, exact=exact, backprop="checkpoint")
        assert evaluations(checkpointed, x) == ([1] * 60, [1] * 60)
        stored = ReversibleSequence(fields, scheme, exact=exact, backprop="store")
        assert evaluations(stored, x) == ([1] * 60, [0] * 60)

    def test_the_forward_without_gradients_and_inverse_evaluate_once(self) -> None:
        sequence = ReversibleSequence([Counter(tanh_layer(4)) for _ in range(6)], MidPoint(h=0.1))
        with torch.no_grad():
            _, state = sequence(torch.randn(2, 4), return_state=True)
            assert [field.count for field in sequence.fields] == [1] * 6
            sequence.inverse(state)
        assert [field.count for field in sequence.fields] == [1, 2, 2, 2, 2, 2]

    @pytest.mark.parametrize(
        "branch",
        [
            "small_conv",
            "symmetric",
            "symmetric_lead_tanh",
            "symmetric_tv",
            "antisymmetric",
        ],
    )
    @pytest.mark.parametrize("name", ["verlet", "leapfrog"])
    def test_a_reversible_step_costs_four_units_where_store_costs_three(self, name: str, branch: str) -> None:
        """Counted in floating-point operations of convolutions, so that fields with a gradient of their own count too.

        Such a field spares K' in the first branch, behind which nothing is reversed.
        """
        num_blocks = 4

        def flops(backprop: str) -> tuple[int, int]:
            sequence = sequence_of(name, IMAGE_BRANCHES[branch], num_blocks, backprop=backprop, verify=False)
            x = torch.randn(2, 4, 5, 5, requires_grad=True)
            with Flops() as forward:
                loss = sequence(x).sum()
            with Flops() as backward:
                loss.backward()
            return forward.total, backward.total

        (forward, backward), (forward_again, product) = flops("reversible"), flops("store")
        assert forward == forward_again
        assert product == 2 * forward
        num_fields = num_blocks * SCHEMES[name]().fields_per_step
        spared = forward // num_fields // 2 if branch in ("symmetric", "symmetric_lead_tanh") else 0
        assert backward == product + forward - spared

    def test_the_check_catches_a_second_evaluation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from revode.engine.branch import Evaluation

        original = Evaluation.evaluate

        def twice(self: Evaluation, *args: Any, **kwargs: Any) -> Any:
            original(self, *args, **kwargs)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Evaluation, "evaluate", twice)
        with pytest.raises(AssertionError):
            self.test_each_branch_is_evaluated_once_forward_and_once_backward("verlet", False)


def one_block(make: Callable[[int], nn.Module], x: Tensor) -> int:
    """Bytes that the graph of one stored branch keeps, with a pair of states."""
    scheme = Leapfrog(h=0.1)
    stored = {n: saved_bytes(ReversibleSequence([make(4)] * n, scheme, backprop="store"), x) for n in (4, 8)}
    return (stored[8] - stored[4]) // 4 + 2 * x.numel() * x.element_size()


class TestBudget:
    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("branch", ["small_conv", "conv_norm_relu", "symmetric", "pooled_gate"])
    def test_it_is_kept_and_recomputation_falls_to_zero(self, branch: str, exact: bool) -> None:
        x = torch.randn(2, 4, 8, 8)
        make = IMAGE_BRANCHES[branch]
        block = one_block(make, x)
        recomputed = []
        budgets = [block * k for k in (2, 4, 8, 12, 16, 20, 40)]
        for budget in budgets:
            fields = [Counter(make(4)) for _ in range(16)]
            sequence = ReversibleSequence(fields, Leapfrog(h=0.1), memory_budget=budget, exact=exact)
            for _ in range(2):
                assert saved_bytes(sequence, x) <= budget + block
            forward, backward = evaluations(sequence, x)
            assert forward == [1] * 16
            assert max(backward) <= 1
            recomputed.append(sum(backward))
        assert recomputed == sorted(recomputed, reverse=True)
        assert recomputed[0] >= 12
        assert recomputed[-1] == 0

    def test_a_budget_too_small_for_one_block_says_what_is_needed(self) -> None:
        sequence = ReversibleSequence([small_conv(4) for _ in range(4)], Leapfrog(h=0.1), memory_budget=64)
        with pytest.raises(ValueError, match=r"memory_budget=64 is too small .*need (\d+) bytes") as caught:
            sequence(torch.randn(2, 4, 8, 8))
        needed = int(str(caught.value).split("need ")[1].split()[0])
        enough = ReversibleSequence([small_conv(4) for _ in range(4)], Leapfrog(h=0.1), memory_budget=needed)
        enough(torch.randn(2, 4, 8, 8)).sum().backward()

    def test_it_is_kept_when_parameters_are_unfrozen(self) -> None:
        x = torch.randn(8, 64)

        def make(_: int) -> nn.Module:
            return nn.Sequential(nn.Linear(64, 64), nn.Tanh())

        fields = [make(4) for _ in range(16)]
        budget = 16 * 4 * x.numel()
        sequence = ReversibleSequence(fields, Leapfrog(h=0.1), memory_budget=budget).requires_grad_(False)
        sequence.fields[0].requires_grad_(True)
        saved_bytes(sequence, x)
        sequence.requires_grad_(True)
        assert saved_bytes(sequence, x) <= budget + 4 * 4 * x.numel()

    def test_it_is_kept_when_keyword_arguments_grow(self) -> None:
        class Lifting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(4))

            def forward(self, q: Tensor, condition: Tensor) -> Tensor:
                return torch.tanh(q * self.scale * condition[:, None]).mean(0)

        x = torch.randn(8, 4)
        small, large = torch.randn(1, 8)[:, :1], torch.randn(64, 1)
        budget = 20_000
        sequence = ReversibleSequence([Lifting() for _ in range(12)], MidPoint(h=0.1), memory_budget=budget)
        saved_bytes(sequence, x, condition=small)
        block = saved_bytes(ReversibleSequence([Lifting()], MidPoint(h=0.1), backprop="store"), x, condition=large)
        assert saved_bytes(sequence, x, condition=large) <= budget + block

    def test_other_shapes_and_modes_are_measured_again(self) -> None:
        sequence = ReversibleSequence([conv_norm_relu(4) for _ in range(8)], Leapfrog(h=0.1), memory_budget=60_000)
        for batch in (1, 2, 4, 1):
            x = torch.randn(batch, 4, 8, 8)
            for training in (True, False):
                sequence.train(training)
                assert saved_bytes(sequence, x) <= 60_000 + one_block(conv_norm_relu, x)

    def test_verlet_keeps_its_budget(self) -> None:
        x = torch.randn(2, 8, 8, 8)
        sequence = ReversibleSequence([small_conv(4) for _ in range(16)], Verlet(h=0.1), memory_budget=60_000)
        assert saved_bytes(sequence, x) <= 60_000 + one_block(small_conv, x[:, :4])
