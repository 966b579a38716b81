"""What torch is told in forward holds in the recomputation, whatever holds around backward: settings, threads, devices."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients import assert_bitwise
from torch import Tensor, nn

import revode.engine.call
from revode import BranchError, Leapfrog, MidPoint, ReversalError, ReversibleSequence, SymmetricField
from revode.engine.call import SETTINGS

OTHER: dict[str, Any] = {
    "default_dtype": torch.float64,
    "num_threads": torch.get_num_threads() + 1,
    "deterministic_algorithms": (True, True),
    "sdp_priority_order": [0, 1, 2, 3, 4],
    "float32_matmul_precision": "medium",
    "cublas_allow_fp16_reduced_precision_reduction": (False, True),
    "cublas_allow_bf16_reduced_precision_reduction": (False, True),
    "cudnn_depthwise_kernel": "native",
    "blas_preferred_backend": torch._C._BlasBackend.Cublaslt,
    "linalg_preferred_backend": torch._C._LinalgBackend.Magma,
    "rocm_fa_preferred_backend": torch._C._ROCmFABackend.AOTriton,
}


def other_value(name: str) -> Any:
    """A value that the setting does not have now."""
    value = SETTINGS[name][0]()
    return OTHER[name] if name in OTHER else "ieee" if isinstance(value, str) else not value


def read_all() -> dict[str, Any]:
    return {name: read() for name, (read, _) in SETTINGS.items()}


class Reading(nn.Module):
    """Multiplies by a number that depends on a setting, as a kernel chosen by it would."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.mix, self.name, self.usual = nn.Linear(4, 4), name, repr(SETTINGS[name][0]())

    def forward(self, q: Tensor) -> Tensor:
        return torch.tanh(self.mix(q)) * (1.0 if repr(SETTINGS[self.name][0]()) == self.usual else 1.5)


@pytest.fixture
def _restored() -> Any:
    before = read_all()
    yield
    revode.engine.call._write(list(before.values()))
    assert read_all() == before


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("name", SETTINGS)
class TestEachSetting:
    def step(self, name: str) -> list[Tensor]:
        torch.manual_seed(0)
        sequence = ReversibleSequence([Reading(name) for _ in range(3)], MidPoint(h=0.3)).float()
        loss = sequence(torch.randn(2, 4, dtype=torch.float32)).sum()
        try:
            SETTINGS[name][1](other_value(name))
        except RuntimeError as error:
            pytest.skip(f"this machine has one value of {name} only: {error}")
        around = read_all()
        loss.backward()
        assert read_all() == around  # the caller's settings are left alone
        return [parameter.grad for parameter in sequence.parameters()]

    def test_of_forward_holds_in_the_recomputation(self, name: str) -> None:
        torch.manual_seed(0)
        sequence = ReversibleSequence([Reading(name) for _ in range(3)], MidPoint(h=0.3), backprop="store")
        sequence(torch.randn(2, 4)).sum().backward()
        for ours, stored in zip(self.step(name), sequence.parameters(), strict=True):
            torch.testing.assert_close(ours, stored.grad, check_dtype=False)

    def test_is_noticed_if_it_is_not_restored(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(revode.engine.call.Settings, "restore", lambda self: contextlib.nullcontext())
        with pytest.raises(ReversalError):
            self.step(name)


def test_every_setting_that_the_issue_of_gpus_names_is_there() -> None:
    names = (
        "cudnn_enabled cudnn_benchmark cudnn_deterministic cudnn_allow_tf32 cublas_allow_tf32 float32_matmul_precision"
    )
    names += " deterministic_algorithms flash_sdp math_sdp mem_efficient_sdp cudnn_sdp mkldnn_enabled default_dtype num_threads"
    names += " cublas_allow_fp16_reduced_precision_reduction cublas_allow_bf16_reduced_precision_reduction"
    assert set(names.split()) <= SETTINGS.keys()


@pytest.mark.usefixtures("_restored")
def test_matrix_products_in_another_precision_give_the_bits_of_forward() -> None:
    """On CPUs with bfloat16, ``set_float32_matmul_precision`` chooses other kernels."""

    def step(between: Callable[[], None]) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
        sequence = ReversibleSequence(layers, MidPoint(h=0.3), exact=True)
        torch.set_float32_matmul_precision("medium")
        loss = sequence(torch.randn(64, 64)).sum()
        between()
        loss.backward()
        torch.set_float32_matmul_precision("highest")
        return {name: parameter.grad for name, parameter in sequence.named_parameters()}

    assert_bitwise(step(lambda: None), step(lambda: torch.set_float32_matmul_precision("highest")))


class Making(nn.Module):
    """Makes tensors of the default dtype and device, and asks for autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, q: Tensor) -> Tensor:
        made = torch.full((4,), 1.0 / 3.0)
        u = self.mix(q.to(made.device)) * made.to(q.dtype)
        return torch.tanh(u).to(q.dtype) * (1 + q.new_tensor(torch.is_autocast_enabled("cpu")))


def on_another_thread(function: Callable[[], None]) -> None:
    caught: list[Exception] = []

    def run() -> None:
        try:
            function()
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    outside = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(outside)


AROUND_BACKWARD: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another default dtype": lambda: default_dtype(torch.float64),
    "another default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("around", AROUND_BACKWARD)
@pytest.mark.parametrize("autocast", [False, True])
def test_backward_on_another_thread_and_under_other_conditions(autocast: bool, around: str, threaded: bool) -> None:
    def step(backprop: str) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        sequence = ReversibleSequence([Making() for _ in range(4)], MidPoint(h=0.3), exact=True, backprop=backprop)
        x = torch.randn(2, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = sequence(x).sum()

        def backward() -> None:
            with AROUND_BACKWARD[around]():
                loss.backward()

        on_another_thread(backward) if threaded else backward()
        return {"x": x.grad, **{name: parameter.grad for name, parameter in sequence.named_parameters()}}

    assert_bitwise(step("reversible"), step("store"))


def test_a_default_device_of_forward_is_known_on_the_thread_of_backward() -> None:
    sequence = ReversibleSequence([Making() for _ in range(3)], MidPoint(h=0.3)).to("meta")
    with torch.device("meta"):
        loss = sequence(torch.randn(2, 4, requires_grad=True)).sum()
    on_another_thread(loss.backward)
    assert next(sequence.parameters()).grad is not None


def test_fp8_of_transformer_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its amax history would move twice."""
    enabled = True
    engine = types.ModuleType("transformer_engine.pytorch.fp8")
    engine.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: enabled)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    kind = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.module.linear"})
    sequence = ReversibleSequence([kind(4, 4), kind(4, 4)], MidPoint(h=0.3))
    with pytest.raises(BranchError, match=r"runs in FP8.*leave fp8_autocast, or use backprop='store'"):
        sequence(torch.randn(2, 4))
    enabled = False
    sequence(torch.randn(2, 4)).sum().backward()


class TestOddTensors:
    def test_a_jagged_state_is_refused(self) -> None:
        nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged)
        with pytest.raises(ValueError, match=r"got a nested \(jagged\) one: pad it"):
            ReversibleSequence([nn.Linear(4, 4)], MidPoint(h=0.3))(nested)

    @pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: Making()], ids=["known", "of a user"])
    def test_fake_tensors(self, make: Callable[[], nn.Module]) -> None:
        with torch._subclasses.fake_tensor.FakeTensorMode():
            sequence = ReversibleSequence([make() for _ in range(3)], MidPoint(h=0.3))
            y = sequence(torch.randn(2, 4))
            y.sum().backward()
            grad = next(sequence.parameters()).grad
        assert y.shape == (2, 4)
        assert grad is not None

    def test_distributed_tensors(self, tmp_path: Any) -> None:
        import torch.distributed as dist
        from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor, init_device_mesh

        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
        try:
            mesh, x = init_device_mesh("cpu", (1,)), torch.randn(3, 4)
            torch.manual_seed(0)
            plain = ReversibleSequence([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)], MidPoint(h=0.3))
            torch.manual_seed(0)
            spread = ReversibleSequence([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)], MidPoint(h=0.3))
            distribute_module(spread, mesh)
            plain(x).sum().backward()
            spread(distribute_tensor(x, mesh, [Replicate()])).sum().backward()
            for ours, theirs in zip(spread.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("backprop", ["reversible", "checkpoint"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_frozen_encoder_in_eval_mode_gives_the_bits_of_store(exact: bool, backprop: str) -> None:
    """Where nothing has a gradient, torch's attention takes other kernels; the walk takes them, too."""

    def run(backprop: str) -> Tensor:
        torch.manual_seed(0)
        frozen = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(False) for _ in range(3)]
        sequence = ReversibleSequence([*frozen, nn.Linear(8, 8)], MidPoint(h=0.3), exact=exact, backprop=backprop)
        return sequence.eval()(torch.randn(4, 5, 8))

    assert torch.equal(run(backprop), run("store"))


OF_TORCH = [
    lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
    lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
]


@pytest.mark.filterwarnings("ignore")  # of dynamo and inductor
class TestCompiled:
    @pytest.mark.parametrize("make", OF_TORCH)
    def test_branches_of_torch_are_compiled_once_for_their_kind(self, make: Callable[[], nn.Module]) -> None:
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        sequence = ReversibleSequence([make() for _ in range(4)], MidPoint(h=0.3), compile=True)
        x = torch.randn(2, 5, 8)
        compiled = sequence(x)
        compiled.sum().backward()
        assert 1 <= counters["stats"]["unique_graphs"] <= 2  # with gradients and without
        for branch in sequence.fields:
            branch._compiled_call_impl = None
        torch.testing.assert_close(compiled, sequence(x))
        torch._dynamo.reset()

    def test_statistics_of_a_batch_whose_first_value_is_an_outlier(self) -> None:
        x = torch.randn(64, 2, 128, 128)
        x[0, :, 0, 0] = 1e4  # a million values for each channel

        def step(dtype: torch.dtype, **options: Any) -> list[Tensor]:
            torch.manual_seed(0)
            sequence = ReversibleSequence(
                [SymmetricField(2, norm="batch") for _ in range(2)], Leapfrog(h=0.1), **options
            )
            sequence = sequence.to(dtype)
            sequence(x.to(dtype)).square().mean().backward()
            return [parameter.grad.double() for parameter in sequence.parameters()]  # type: ignore[union-attr]

        true = step(torch.float64, backprop="store")
        for ours, theirs in zip(step(torch.float32, compile=True), true, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < 2e-3

    def test_two_threads_that_compile_one_kind_at_once(self) -> None:
        errors: list[Exception] = []

        def step() -> None:
            try:
                fields = [SymmetricField(6) for _ in range(2)]
                ReversibleSequence(fields, Leapfrog(h=0.1), compile=True)(torch.randn(2, 6, 7, 9)).sum().backward()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=step) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
