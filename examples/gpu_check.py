"""Measure revode on your device: time, memory, gradient error, and whether recomputation gives the same bits.

    python examples/gpu_check.py                # CUDA or MPS if there is one; about five minutes
    python examples/gpu_check.py --device cpu   # the same networks, an eighth of the samples; five minutes of an idle core
    python examples/gpu_check.py --small        # tiny networks, a few seconds on any CPU

It prints one Markdown text: please send it back as an issue. Nothing is written and nothing leaves your machine.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import revode
from revode import AdditiveCoupling, ReversibleSequence
from revode.memory import PeakActivations

METHODS: dict[str, dict[str, Any]] = {
    "store": {"backprop": "store"},
    "checkpoint": {"backprop": "checkpoint"},
    "reversible": {"backprop": "reversible"},
    "exact": {"backprop": "reversible", "exact": True},
    "compiled": {"backprop": "reversible", "compile": True},
}


class Attention(nn.Module):
    """A causal self-attention branch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.enter, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.enter(self.norm(x)).chunk(3, dim=-1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.leave(y.transpose(1, 2).flatten(2))


def resnet_stage(small: bool, **options: Any) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a stage of convolutions with batch norm, and the shape of a sample."""
    width, blocks, edge = (4, 4, 8) if small else (64, 24, 32)
    branches = [
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        for _ in range(2 * blocks)
    ]
    return ReversibleSequence(branches, AdditiveCoupling(), **options), (2 * width, edge, edge)


def gpt_blocks(small: bool, **options: Any) -> tuple[nn.Module, tuple[int, ...]]:
    """Return blocks of attention and perceptron, and the shape of a sample."""
    width, blocks, length = (8, 2, 6) if small else (384, 12, 256)
    branches: list[nn.Module] = []
    for _ in range(blocks):
        perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        branches += [Attention(width, width // 4 if small else 6), perceptron]
    return ReversibleSequence(branches, AdditiveCoupling(), split_dim=-1, **options), (length, 2 * width)


def unet(small: bool, **options: Any) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a U-Net for volumes, and the shape of a sample."""
    sizes: dict[str, Any] = (
        {"channels": (4, 16), "blocks": (1, 1)} if small else {"channels": (32, 64, 128), "blocks": (4, 4, 4)}
    )
    edge = 8 if small else 48
    return revode.create_model("unet-3d", in_channels=1, num_classes=4, **sizes, **options), (1, edge, edge, edge)


WORKLOADS: dict[str, tuple[Callable[..., tuple[nn.Module, tuple[int, ...]]], int]] = {
    "ResNet stage": (resnet_stage, 64),
    "GPT blocks": (gpt_blocks, 8),
    "U-Net, 3D": (unet, 1),
}
"""Name -> how to build it, and samples of a step."""


def build(
    name: str, small: bool, device: torch.device, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, Any]:
    """Return the module with weights that are always the same, and a function from a number of samples to an input."""
    torch.manual_seed(0)
    module, shape = WORKLOADS[name][0](small, **options)

    def inputs(count: int | None) -> Tensor:  # None: those on which gradients are compared, in float64 on the CPU
        size = (shape[0], *(edge // 2 for edge in shape[1:])) if count is None and len(shape) == 4 else shape
        x = torch.randn(count or min(2, WORKLOADS[name][1]), *size, generator=torch.Generator().manual_seed(1))
        return x.to(device, dtype).requires_grad_(isinstance(module, ReversibleSequence))

    return module.to(device, dtype).train(), inputs


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def step(module: nn.Module, x: Tensor) -> None:
    """Run forward and backward."""
    module.zero_grad(set_to_none=True)
    module(x).square().mean().backward()


def gradients(module: nn.Module, x: Tensor) -> Tensor:
    """Return all gradients in one vector of float64 on the CPU."""
    step(module, x)
    return torch.cat([p.grad.detach().cpu().double().flatten() for p in module.parameters() if p.grad is not None])


def samples(name: str, small: bool, device: torch.device) -> int:
    """Return the samples of a step; a CPU gets an eighth, which fills it, too."""
    return 2 if small else max(1, WORKLOADS[name][1] // (8 if device.type == "cpu" else 1))


def cost(module: nn.Module, x: Tensor, device: torch.device, num_steps: int) -> tuple[float, int]:
    """Return the median of a step in seconds, and the peak of memory in a step: of the device, else of activations."""
    for _ in range(2):  # compiles, and chooses kernels
        step(module, x)
    seconds = []
    clock = time.process_time if device.type == "cpu" else time.perf_counter  # a CPU has other work, too
    for _ in range(num_steps):
        synchronize(device)
        began = clock()
        step(module, x)
        synchronize(device)
        seconds.append(clock() - began)
    if device.type == "cuda":
        module.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step(module, x)
        return statistics.median(seconds), torch.cuda.max_memory_allocated(device) - before
    with PeakActivations(module.parameters()) as counter:
        step(module, x)
    return statistics.median(seconds), counter.num_bytes


def measure(
    name: str, small: bool, device: torch.device, methods: list[str], num_steps: int
) -> tuple[list[str], list[str]]:
    """Return the rows of one workload, and what is suspicious in them."""
    truths = {}  # in float64, stored, on the CPU; exact=True is a network on a grid, and has its own
    for exact in (False, True):
        module, inputs = build(name, small, torch.device("cpu"), torch.float64, backprop="store", exact=exact)
        truths[exact] = gradients(module, inputs(None))
    rows, odd, found = [], [], {}
    for method in methods:
        try:
            module, inputs = build(name, small, device, **METHODS[method])
            truth = truths["exact" in METHODS[method]]
            error = float((gradients(module, inputs(None)) - truth).norm() / truth.norm())
            seconds, size = cost(module, inputs(samples(name, small, device)), device, num_steps)
        except Exception as problem:  # what one method cannot do is a result, too
            reason = str(problem).partition("\n")[0][:120]
            rows.append(f"| {name} | {method} | failed: {type(problem).__name__}: {reason.replace('|', '/')} | | |")
            odd.append(f"{name}, {method}: failed")
            continue
        found[method] = seconds, size, error
        relative = seconds / found["store"][0] if "store" in found else float("nan")
        rows.append(
            f"| {name} | {method} | {1e3 * seconds:.1f} ms | {relative:.2f} | {size / 1e6:.3g} MB | {error:.1e} |"
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows, odd + suspicions(name, found, small)


def suspicions(name: str, found: dict[str, tuple[float, int, float]], small: bool) -> list[str]:
    """Return what we would not expect of these numbers."""
    odd = []
    for method, (seconds, size, error) in found.items():
        base = found.get("store", (seconds, size, error))
        # on the grid a branch that rounds in float32 meets another grid point now and then than one in float64
        if not error < max(1e-2 if method == "exact" else 1e-4, 20 * base[2]):
            odd.append(f"{name}, {method}: gradients are off by {error:.1e}, stored ones by {base[2]:.1e}")
        if small:
            continue  # times and sizes of toys mean nothing
        if method in ("reversible", "exact") and size > 0.6 * base[1]:
            odd.append(f"{name}, {method}: keeps {size / 1e6:.0f} MB, storing everything {base[1] / 1e6:.0f} MB")
        if method == "compiled" and "reversible" in found and seconds > 1.2 * found["reversible"][0]:
            odd.append(
                f"{name}, compiled: takes {seconds / found['reversible'][0]:.2f} times a step that is not compiled"
            )
        if method == "reversible" and seconds > 1.7 * base[0]:
            odd.append(
                f"{name}, {method}: takes {seconds / base[0]:.2f} times a stored step; 4/3 of the work was expected"
            )
    return odd


@contextlib.contextmanager
def assigned(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """Within, a setting of torch has this value."""
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


def settings(device: torch.device) -> dict[str, Callable[[], contextlib.AbstractContextManager[Any]]]:
    """Return the usual settings by name, each as a context."""
    return {
        "as it is": contextlib.nullcontext,
        "TF32 on": lambda: assigned(torch.backends.cuda.matmul, "allow_tf32", True),
        "cudnn.benchmark": lambda: assigned(torch.backends.cudnn, "benchmark", True),
        "cudnn.deterministic": lambda: assigned(torch.backends.cudnn, "deterministic", True),
        "autocast bfloat16": lambda: torch.autocast(device.type, torch.bfloat16),
        "autocast float16": lambda: torch.autocast(device.type, torch.float16),
    }


def same_bits(name: str, small: bool, device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield each setting with how the exact gradients differ from stored ones on the same grid."""
    for setting, context in settings(device).items():
        try:
            found = []
            for backprop in ("store", "reversible"):
                module, inputs = build(name, small, device, backprop=backprop, exact=True)
                with context():
                    found.append(gradients(module, inputs(None)))
            differing = int((found[0] != found[1]).sum())
            yield setting, "equal" if not differing else f"{differing} of {len(found[0])} numbers differ"
        except Exception as problem:
            yield setting, f"failed: {type(problem).__name__}: {str(problem).partition(chr(10))[0][:80]}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda, cuda:1, mps, cpu; default: a GPU if there is one")
    parser.add_argument("--small", action="store_true", help="tiny networks: shows that everything runs")
    parser.add_argument("--methods", default=",".join(METHODS), help="which of them; default: %(default)s")
    parser.add_argument("--steps", type=int, help="timed steps of each; default: 10 on a GPU, 2 on a CPU")
    args = parser.parse_args()
    usual = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(args.device or usual)
    num_steps = args.steps or (2 if args.small or device.type == "cpu" else 10)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"### revode {revode.__version__} on {device} ({card}), torch {torch.__version__}, {platform.system()}\n")
    batches = ", ".join(f"{name} {samples(name, args.small, device)}" for name in WORKLOADS)
    print(f"Samples of a step: {batches}. Median of {num_steps} steps, {torch.get_num_threads()} threads of the CPU.\n")
    kind = "peak of the device" if device.type == "cuda" else "peak of activations"
    clock = ", processor time" if device.type == "cpu" else ""
    print(f"| workload | method | step{clock} | / store | {kind} | error of the gradient |\n|---|---|---|---|---|---|")
    odd: list[str] = []
    for name in WORKLOADS:
        rows, found = measure(name, args.small, device, args.methods.split(","), num_steps)
        print("\n".join(rows), flush=True)
        odd += found
    print("\n| exact=True: reversible and stored gradients | " + " | ".join(settings(device)) + " |")
    print("|---" * (1 + len(settings(device))) + "|")
    for name in WORKLOADS:
        answers = dict(same_bits(name, args.small, device))
        print(f"| {name} | " + " | ".join(answers.values()) + " |", flush=True)
        odd += [f"{name}, {setting}: {answer}" for setting, answer in answers.items() if answer != "equal"]
    print("\nSuspicious: " + ("; ".join(odd) if odd else "nothing") + ".")


if __name__ == "__main__":
    main()
