"""Graph breaks, compiled autograd, threads, hidden state: what ``store`` gives, or an error; never another number."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gradients import assert_agree, assert_bitwise, compare_with_store, training_step, weighted_sum
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import spectral_norm

import revode.engine.arrival
import revode.engine.replay
from revode import AdditiveCoupling, Leapfrog, MidPoint, ReversalError, ReversibleSequence, SymmetricField, Verlet


def double_input(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)), dtype=torch.float64)


def layer(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class Around(nn.Module):
    """tanh(inner(W q)), perhaps with a graph break between."""

    def __init__(self, inner: nn.Module, breaks: bool = False) -> None:
        super().__init__()
        self.mix, self.inner, self.breaks = nn.Linear(4, 4), inner, breaks

    def forward(self, q: Tensor) -> Tensor:
        u = self.mix(q)
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.tanh(self.inner(u))


INNER: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "dropout": (lambda: nn.Dropout(0.5), True),
    "dropout in eval": (lambda: nn.Dropout(0.5), False),
    "batch norm": (lambda: nn.BatchNorm1d(4), True),
    "frozen batch norm": (lambda: nn.BatchNorm1d(4), False),
    "spectral norm": (lambda: spectral_norm(nn.Linear(4, 4)), True),
}


def sequence_of(make: Callable[[], nn.Module], number: int = 4, training: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    return ReversibleSequence([make() for _ in range(number)], MidPoint(h=0.3), **options).double().train(training)


@pytest.fixture
def compiler() -> Iterator[Any]:
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield counters
    torch._dynamo.reset()


class TestCompiled:
    @pytest.mark.parametrize("kind", INNER)
    def test_a_graph_break_inside_a_branch(self, kind: str, compiler: Any) -> None:
        inner, training = INNER[kind]
        make = functools.partial(sequence_of, lambda: Around(inner(), breaks=True), training=training)
        x = double_input()
        sequence = make()
        ours = training_step(sequence, x, call=torch.compile(sequence, backend="eager"))
        assert compiler["stats"]["unique_graphs"] > 0
        assert_agree(ours, training_step(make(backprop="store"), x))

    @pytest.mark.parametrize("kind", [kind for kind, (_, training) in INNER.items() if training])
    def test_compiled_autograd_over_an_eager_forward(self, kind: str, compiler: Any) -> None:
        make = functools.partial(sequence_of, lambda: Around(INNER[kind][0]()), 3)
        x = double_input()
        records = []
        for sequence, compiled in ((make(), True), (make(backprop="store"), False)):
            torch.manual_seed(1)
            loss = weighted_sum(sequence(x))
            enabled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
            with enabled if compiled else contextlib.nullcontext():
                loss.backward()
            records.append({name: p.grad for name, p in sequence.named_parameters()})
        assert compiler["compiled_autograd"]["captures"] == 1
        assert_agree(*records)

    @pytest.mark.parametrize(
        "draw",
        [
            lambda u: u * random.random(),
            lambda u: u * torch.from_numpy(np.random.rand(4)),  # noqa: NPY002
            lambda u: torch.ops.aten.native_dropout(u, 0.5, True)[0],
        ],
        ids=["random", "numpy", "native_dropout"],
    )
    def test_numbers_that_a_branch_draws_are_right(self, draw: Any, compiler: Any) -> None:
        class Drawing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(4, 4)

            def forward(self, q: Tensor) -> Tensor:
                return torch.tanh(draw(self.mix(q)))

        def step(sequence: Any, call: Any) -> Any:
            random.seed(3), np.random.seed(3)  # noqa: NPY002
            return training_step(sequence, x, call=call)

        x = double_input()
        stored, sequence = sequence_of(Drawing, backprop="store"), sequence_of(Drawing)
        reference = step(stored, None)
        ours = step(sequence, torch.compile(sequence, backend="eager"))
        assert_agree(ours, reference)


class TestThreads:
    def test_two_threads_train_one_module(self) -> None:
        def make() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1))

        sequence = ReversibleSequence([make() for _ in range(10)], MidPoint(h=0.1))
        failures: list[BaseException] = []
        x = torch.randn(8, 8)  # drawn before: which of two threads moves the one global stream cannot be told

        def train() -> None:
            try:
                for _ in range(10):
                    sequence(x).square().sum().backward()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=train) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        for module in sequence.modules():
            assert all(isinstance(p, nn.Parameter) for p in module._parameters.values() if p is not None)
            assert all(buffer is not None for buffer in module._buffers.values())
        assert sequence.fields[0][1].num_batches_tracked == 30

    @pytest.mark.parametrize("source", ["random", "numpy", "torch"])
    def test_another_threads_numbers_are_its_own(self, source: str) -> None:
        """A network without randomness rewinds no stream, so a thread that draws beside it sees no number twice."""
        draw = {"random": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand((), dtype=torch.float64)}
        sequence = sequence_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()), 10)
        seen: list[float] = []
        done = threading.Event()

        def prefetch() -> None:
            while not done.is_set() or len(seen) < 1000:
                seen.append(float(draw[source]()))

        thread = threading.Thread(target=prefetch)
        thread.start()
        for _ in range(10):
            sequence(torch.ones(3, 4, dtype=torch.float64)).square().sum().backward()
        done.set()
        thread.join()
        assert len(set(seen)) == len(seen)

    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
    def test_streams_of_branches_that_draw_nothing_are_not_written(
        self, backprop: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Unknown(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(4, 4)

            def forward(self, q: Tensor) -> Tensor:
                return torch.tanh(self.mix(q))

        sequence = sequence_of(Unknown, backprop=backprop)
        loss = sequence(double_input()).sum()
        for owner, name in ((random, "setstate"), (torch, "set_rng_state"), (np.random, "set_state")):
            monkeypatch.setattr(owner, name, lambda *_: pytest.fail("a stream was rewound"))
        loss.backward()


class Cache:
    """As a cache of keys and values: an object that every call fills."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []


class TestArguments:
    @pytest.mark.parametrize("kind", ["object", "list", "dict"])
    def test_an_argument_that_a_branch_fills_is_refused(self, kind: str) -> None:
        class Filling(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(4, 4)

            def forward(self, q: Tensor, cache: Any = None) -> Tensor:
                u = self.mix(q)
                if isinstance(cache, Cache):
                    cache.layers.append({"keys": u.detach()})
                elif isinstance(cache, list):
                    cache.append(u.detach())
                else:
                    cache[len(cache)] = u.detach()
                return torch.tanh(u)

        given = {"object": Cache, "list": list, "dict": dict}[kind]
        with pytest.raises(ValueError, match=r"changes an object among its keyword arguments.*use_cache=False"):
            sequence_of(Filling)(double_input(), cache=given())
        cache = given()
        with torch.no_grad():
            sequence_of(Filling)(double_input(), cache=cache)  # without gradients nothing is recomputed
        assert len(cache.layers if kind == "object" else cache) == 4

    @pytest.mark.parametrize("leaf", [True, False])
    def test_a_tensor_inside_an_object_is_refused_if_it_needs_a_gradient(self, leaf: bool) -> None:
        @dataclasses.dataclass
        class Condition:
            scale: Tensor

        class Conditioned(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(4, 4)

            def forward(self, q: Tensor, condition: Condition) -> Tensor:
                return torch.tanh(self.mix(q) * condition.scale)

        scale = torch.ones(4, dtype=torch.float64, requires_grad=True)
        loss = sequence_of(Conditioned)(double_input(), condition=Condition(scale if leaf else scale.exp())).sum()
        with pytest.raises(ValueError, match="requires grad but is neither its parameter nor a keyword argument"):
            loss.backward()

    def test_an_argument_goes_to_the_branches_that_take_it(self) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(4, 4)

            def forward(self, q: Tensor, scale: Tensor) -> Tensor:
                return torch.tanh(self.mix(q) * scale)

        def make(**options: Any) -> Any:
            return ReversibleSequence([layer(), Scaled(), layer(), Scaled()], MidPoint(h=0.2), **options).double()

        scale = torch.linspace(0.5, 1.5, 4, dtype=torch.float64, requires_grad=True)
        compare_with_store(make, double_input(), kwargs={"scale": scale})
        with pytest.raises(TypeError, match="no branch takes the keyword argument 'scales'; did you mean 'scale'"):
            make()(double_input(), scales=scale)


class Helper:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)


GLOBAL = torch.Generator()
SOURCES: dict[str, Callable[[], Any]] = {
    "helper object": Helper,
    "partial": lambda: functools.partial(torch.rand, generator=torch.Generator().manual_seed(2)),
    "nested containers": lambda: {"a": [({"b": torch.Generator().manual_seed(3)},)]},
    "global": lambda: None,
}


class DrawingFrom(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mix, self.kind, self.source = nn.Linear(4, 4), kind, SOURCES[kind]()

    def forward(self, q: Tensor) -> Tensor:
        if self.kind == "partial":
            return torch.tanh(self.mix(q) * self.source((4,)))
        generator = GLOBAL
        if self.kind == "helper object":
            generator = self.source.generator
        elif self.kind == "nested containers":
            generator = self.source["a"][0][0]["b"]
        return torch.tanh(self.mix(q) * torch.rand(4, generator=generator))


class Counter(nn.Module):
    """Hidden state of a kind that nothing records."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mix, self.kind = nn.Linear(4, 4), kind
        self.count, self.tensor, self.memory = 0, torch.ones(()), {}

    def forward(self, q: Tensor) -> Tensor:
        u = self.mix(q)
        if self.kind == "counter":
            self.count += 1
            return torch.tanh(u * (1 + self.count))
        if self.kind == "plain tensor":
            self.tensor = self.tensor * 1.5
            return torch.tanh(u * self.tensor)
        self.memory["last"] = self.memory.get("last", 0.0) + u.detach().mean()
        return torch.tanh(u + self.memory["last"])


class TestHiddenState:
    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
    @pytest.mark.parametrize("kind", SOURCES)
    def test_generators_are_found_where_a_branch_keeps_them(self, kind: str, backprop: str) -> None:
        def make(**options: Any) -> Any:
            GLOBAL.manual_seed(5)
            return sequence_of(lambda: DrawingFrom(kind), **({"backprop": backprop} | options))

        compare_with_store(make, double_input())

    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
    @pytest.mark.parametrize("kind", ["counter", "plain tensor", "cache"])
    def test_what_nothing_records_is_noticed(self, kind: str, backprop: str, exact: bool) -> None:
        sequence = sequence_of(lambda: Counter(kind), backprop=backprop, exact=exact)
        loss = sequence(double_input()).sum()
        with pytest.raises(ReversalError, match="missed the state that forward had seen"):
            loss.backward()

    @pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
    def test_an_option_changed_before_backward_is_noticed(self, backprop: str) -> None:
        sequence = sequence_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), backprop=backprop)
        loss = sequence(double_input()).sum()
        for field in sequence.fields:
            field[1].p = 0.1
        with pytest.raises(ReversalError, match=r"Dropout\.p"):
            loss.backward()

    @pytest.mark.parametrize("exact", [False, True])
    def test_numbers_drawn_from_a_forked_stream_are_noticed(self, exact: bool) -> None:
        class Forking(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(4, 4)

            def forward(self, q: Tensor) -> Tensor:
                with torch.random.fork_rng(devices=[]):
                    noise = torch.randn_like(q)
                return torch.tanh(self.mix(q + noise))

        loss = sequence_of(Forking, exact=exact)(double_input()).sum()
        torch.randn(1)
        with pytest.raises(ReversalError):
            loss.backward()

    def test_without_verification_nothing_is_said(self) -> None:
        sequence_of(lambda: Counter("counter"), verify=False)(double_input()).sum().backward()

    def test_states_that_are_not_finite_say_nothing(self) -> None:
        """A step that a gradient scaler will skip."""
        x = double_input()
        x[0, 0] = float("inf")
        sequence_of(layer)(x).sum().backward()

    def test_drift_that_matters_is_warned_of_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(revode.engine.arrival, "WARN_ABOVE", 1e-9)
        sequence = ReversibleSequence([layer(16) for _ in range(50)], Leapfrog(h=0.3))
        x = torch.randn(4, 16)
        with pytest.warns(UserWarning, match=r"missed the state.*exact=True, or set anchor_every") as caught:
            sequence(x).sum().backward()
        sequence(x).sum().backward()
        assert len(caught) == 1


class TestHooks:
    @pytest.mark.parametrize("norm", ["none", "batch"])
    def test_hooks_on_all_modules_hear_of_known_fields(self, norm: str) -> None:
        heard: list[str] = []
        handle = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: heard.append(type(m).__name__))
        try:

            def make(**options: Any) -> Any:
                return ReversibleSequence(
                    [SymmetricField(2, norm=norm) for _ in range(4)], Verlet(h=0.1), **options
                ).double()

            compare_with_store(make, double_input(3, 4, 5, 5))
        finally:
            handle.remove()
        assert heard.count("SymmetricField") == 4 + 4 + 4  # forward, recomputation, store


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24)

    def forward(self, q: Tensor) -> Tensor:
        parts = self.mix(q).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)


class TestBits:
    @pytest.mark.parametrize(
        "under",
        [lambda: sdpa_kernel(SDPBackend.MATH), lambda: torch.backends.mkldnn.flags(enabled=False)],
        ids=["another attention kernel", "without mkldnn"],
    )
    @pytest.mark.filterwarnings("ignore:TF32")
    def test_kernels_chosen_for_forward_alone(self, under: Any) -> None:
        grads = []
        for backprop in ("reversible", "store"):
            torch.manual_seed(0)
            sequence = ReversibleSequence(
                [Attending() for _ in range(4)], MidPoint(h=0.3), exact=True, backprop=backprop
            )
            with under():
                loss = sequence(torch.randn(2, 6, 8)).square().sum()
            loss.backward()
            grads.append({name: p.grad for name, p in sequence.named_parameters()})
        assert_bitwise(*grads)

    def test_the_older_state_alone_behind_frozen_attention(self) -> None:
        class Own(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

            def forward(self, q: Tensor) -> Tensor:
                return self.attend(q, q, q, need_weights=False)[0]

        grads = []
        for backprop in ("reversible", "store"):
            torch.manual_seed(0)
            fields = [Own() for _ in range(4)]
            sequence = ReversibleSequence(fields, MidPoint(h=0.3), exact=True, backprop=backprop).eval()
            fields[3].requires_grad_(False)
            _, state = sequence(torch.randn(2, 6, 8), return_state=True)
            state[0].square().sum().backward()
            grads.append({name: p.grad for name, p in sequence.named_parameters() if p.grad is not None})
        assert_bitwise(*grads)


class Residual(nn.Module):
    """A block with its own skip connection."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, q: Tensor) -> Tensor:
        return q + self.inner(q)


class TestSkips:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: Residual(layer()),
            lambda: nn.Sequential(Residual(layer()), Residual(layer())),
            lambda: Residual(nn.Sequential(nn.LayerNorm(4), layer())),
        ],
        ids=["perceptron", "two in a row", "pre-norm"],
    )
    def test_a_branch_that_adds_its_input_is_warned_of_once(self, make: Any) -> None:
        sequence = sequence_of(make)
        with pytest.warns(UserWarning, match=r"adds its own input.*leave out the skip") as caught:
            sequence(double_input()).sum().backward()
        sequence(double_input()).sum().backward()
        assert len(caught) == 1

    @pytest.mark.parametrize("make", [nn.Identity, layer, lambda: nn.Sequential(nn.Linear(4, 4), nn.Identity())])
    def test_others_are_not(self, make: Any) -> None:
        sequence = ReversibleSequence([make(), layer()], MidPoint(h=0.1)).double()
        sequence(double_input()).sum().backward()


class TestSplitting:
    @pytest.mark.parametrize("scheme", [AdditiveCoupling(), Verlet(h=0.1)], ids=repr)
    def test_three_dimensions_need_a_word(self, scheme: Any) -> None:
        sequence = ReversibleSequence([nn.Linear(4, 4), nn.Linear(4, 4)], scheme)
        with pytest.raises(ValueError, match=r"split_dim=-1 for \(batch, time, width\) or split_dim=1"):
            sequence(torch.randn(2, 6, 8))
        assert sequence.with_strategy(split_dim=-1)(torch.randn(2, 6, 8)).shape == (2, 6, 8)

    def test_others_need_none(self) -> None:
        assert ReversibleSequence([nn.Linear(8, 8)], MidPoint(h=0.1))(torch.randn(2, 6, 8)).shape == (2, 6, 8)
        sequence = ReversibleSequence([nn.Linear(4, 4), nn.Linear(4, 4)], AdditiveCoupling())
        assert sequence(torch.randn(2, 8)).shape == (2, 8)


class TestOddWorlds:
    """What used to crash: works, or one sentence."""

    def test_transforms_of_torch_func_under_store(self) -> None:
        for exact in (False, True):
            sequence = ReversibleSequence([layer() for _ in range(3)], MidPoint(h=0.1), backprop="store", exact=exact)
            x = torch.randn(3, 4)
            torch.testing.assert_close(torch.func.vmap(sequence)(x[:, None])[:, 0], sequence(x), rtol=1e-3, atol=1e-4)
            grad = torch.func.grad(lambda x, s=sequence: s(x).sum())(x)
            leaf = x.clone().requires_grad_()
            sequence(leaf).sum().backward()
            torch.testing.assert_close(grad, leaf.grad)
            params = dict(sequence.named_parameters())
            each = torch.func.vmap(
                torch.func.grad(lambda p, t, s=sequence: torch.func.functional_call(s, p, (t[None],)).sum()), (None, 0)
            )(params, x)
            assert each["fields.0.0.weight"].shape == (3, 4, 4)

    @pytest.mark.parametrize(
        "options", [{}, {"backprop": "store"}, {"exact": True}, {"backprop": "checkpoint"}], ids=str
    )
    def test_tensors_without_numbers(self, options: dict[str, Any]) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        sequence = ReversibleSequence([layer() for _ in range(3)], MidPoint(h=0.1), **options).to("meta")
        sequence(torch.empty(2, 4, device="meta")).sum().backward()
        with FakeTensorMode():
            sequence = ReversibleSequence([layer() for _ in range(3)], MidPoint(h=0.1), **options)
            sequence(torch.empty(2, 4)).sum().backward()
            with torch.no_grad():
                assert sequence(torch.empty(2, 4)).shape == (2, 4)

    @pytest.mark.filterwarnings("ignore:None of the inputs")
    def test_a_reentrant_checkpoint_is_named(self) -> None:
        from torch.utils.checkpoint import checkpoint

        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = layer()

            def forward(self, q: Tensor) -> Tensor:
                return checkpoint(self.inner, q, use_reentrant=True)

        with pytest.raises(ValueError, match=r"branch 3 .*use_reentrant=False"):
            sequence_of(Checkpointed)(double_input().requires_grad_()).sum().backward()

    @pytest.mark.parametrize("sparse_first", [True, False])
    def test_a_weight_of_a_sparse_embedding_and_of_a_dense_branch(self, sparse_first: bool) -> None:
        class Embedded(nn.Module):
            def __init__(self, weight: nn.Parameter) -> None:
                super().__init__()
                self.table = nn.Embedding(4, 4, sparse=True)
                self.table.weight = weight

            def forward(self, q: Tensor) -> Tensor:
                return torch.tanh(q + self.table(torch.arange(3)))

        class Dense(nn.Module):
            def __init__(self, weight: nn.Parameter) -> None:
                super().__init__()
                self.weight = weight

            def forward(self, q: Tensor) -> Tensor:
                return torch.tanh(q @ self.weight)

        grads = []
        x = double_input()
        for backprop in ("reversible", "store"):
            weight = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4))
            kinds = (Embedded, Dense, Embedded) if sparse_first else (Dense, Embedded, Dense)
            ReversibleSequence([kind(weight) for kind in kinds], MidPoint(h=0.1), backprop=backprop)(x).sum().backward()
            grads.append({"weight": weight.grad.to_dense() if weight.grad.is_sparse else weight.grad})
        assert_agree(*grads)

    def test_a_replica_of_data_parallel_is_named(self) -> None:
        branch = layer()._replicate_for_data_parallel()
        with pytest.raises(ValueError, match="use DistributedDataParallel"):
            ReversibleSequence([branch], MidPoint(h=0.1))(torch.randn(2, 4, requires_grad=True))

    def test_a_device_whose_streams_cannot_be_read_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(revode.engine.replay, "can_replay", lambda device: False)
        with pytest.raises(ValueError, match=r"draws random numbers on the device .*backprop='store'"):
            sequence_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))(double_input())
        sequence_of(layer)(double_input()).sum().backward()

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("exact", [False, True])
    def test_distributed_tensors(self, exact: bool) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            x, grads = double_input(), []
            for backprop in ("reversible", "store"):
                sequence = distribute_module(sequence_of(layer, backprop=backprop, exact=exact), mesh)
                weighted = sequence(distribute_tensor(x, mesh, [Shard(0)])).square().sum()
                weighted.backward()
                grads.append({name: p.grad.to_local() for name, p in sequence.named_parameters()})
            assert_agree(*grads)
        finally:
            dist.destroy_process_group()
