"""A step of a network in bfloat16 by every way, in one process, in turn; and its bare convolutions.

python benchmarks/bfloat16.py                          # hamiltonian-74 with batch norm, batch 64
python benchmarks/bfloat16.py --old ../before/src      # beside the code of another checkout
python benchmarks/bfloat16.py --float32 --old ../before/src       # the same without autocast
python benchmarks/bfloat16.py --profile                # where the time of the compiled exact step goes
python benchmarks/bfloat16.py --first hamiltonian-74 hamiltonian-1202     # what the first step costs beyond a steady one
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from measure import clock, seconds_alone
from torch.profiler import ProfilerActivity, profile

import revode

WAYS: dict[str, dict[str, Any]] = {
    "exact": {"exact": True},
    "exact, compiled": {"exact": True, "compile": True},
    "store": {"backprop": "store"},
    "store, compiled": {"backprop": "store", "compile": True},
}

PROFILED = {"conv": "convolutions", "CompiledFxGraph": "compiled passes", "ReversibleFunction": "the engine in Python"}
"""What the names of operations hold, and what they then belong to."""


@contextlib.contextmanager
def checkout(path: str) -> Iterator[Any]:
    """The package of another checkout in the place of ours."""

    def taken() -> dict[str, Any]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "revode"}

    ours = taken()
    sys.path.insert(0, path)
    try:
        yield importlib.import_module("revode")
    finally:
        sys.path.remove(path)
        taken()
        sys.modules.update(ours)


def make_step(package: Any, args: argparse.Namespace, name: str, options: dict[str, Any]) -> Callable[[], None]:
    """A training step without its optimizer."""
    torch.manual_seed(0)
    net = package.create_model(name, norm=args.norm, h=args.h, **options).to(memory_format=torch.channels_last)
    images = torch.randn(args.batch, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (args.batch,))
    parameters = list(net.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=not args.float32):
            loss = F.cross_entropy(net(images), labels)
        loss.backward()

    return step


def compare(args: argparse.Namespace) -> None:
    steps = {way: make_step(revode, args, args.name, options) for way, options in WAYS.items()}
    if args.old:
        with checkout(args.old) as other:
            for way in ("exact", "store"):
                steps[f"{way}, old"] = make_step(other, args, args.name, WAYS[way])
                steps[f"{way}, old"]()  # whatever it imports at its first call, it imports here
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(args.rounds):
        for way in random.sample(list(steps), len(steps)):
            times[way].append(clock(steps[way]))
    bare = {way: seconds_alone(steps[way], args.rounds) for way in ("exact", "store")}
    medians = {way: statistics.median(found) for way, found in times.items()}
    dtype = "float32" if args.float32 else "bfloat16"
    print(f"{args.name}, norm {args.norm}, {dtype}, batch {args.batch}, {torch.get_num_threads()} threads")
    for way, median in medians.items():
        low, _, high = statistics.quantiles(times[way], n=4)
        share = bare["store" if way.startswith("store") else "exact"] / median
        against = f"   / old {median / medians['exact, old']:.2f}" if args.old else ""
        print(
            f"{way:<17} {1e3 * median:6.0f} ms ({1e3 * low:.0f}-{1e3 * high:.0f})   convolutions {share:.2f}{against}"
        )
    print(f"reversible / store, both compiled: {medians['exact, compiled'] / medians['store, compiled']:.2f}")


def first_steps(args: argparse.Namespace) -> None:
    """Each network in this process in turn: name the shallow one last to see that depth costs nothing, or run them alone."""
    for name in args.first:
        step = make_step(revode, args, name, WAYS["exact, compiled"])
        first = clock(step)
        steady = statistics.median(clock(step) for _ in range(3))
        print(f"{name}: first step {first:.1f} s, a steady one {steady:.2f} s: {first - steady:.1f} s more", flush=True)


def profile_step(args: argparse.Namespace, repeats: int = 5) -> None:
    """Shares of the processor's time: what operations are called themselves, without those that they call."""
    step = make_step(revode, args, args.name, WAYS["exact, compiled"])
    step()
    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(repeats):
            step()
    shares = {"convolutions": 0.0, "compiled passes": 0.0, "the engine in Python": 0.0, "other operations": 0.0}
    for event in found.key_averages():
        kind = next((kind for word, kind in PROFILED.items() if word in event.key), "other operations")
        shares[kind] += event.self_cpu_time_total / repeats / 1e3
    for kind, milliseconds in shares.items():
        print(f"{kind:<21} {milliseconds:6.0f} ms  {milliseconds / sum(shares.values()):4.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="hamiltonian-74")
    parser.add_argument("--norm", default="batch")
    parser.add_argument("--h", type=float, default=0.3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--old", help="the src folder of another checkout")
    parser.add_argument("--float32", action="store_true", help="no autocast")
    parser.add_argument("--profile", action="store_true", help="only where the time of a step goes")
    parser.add_argument("--first", nargs="+", help="networks whose first step to time")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.profile:
        profile_step(args)
    elif args.first:
        first_steps(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
