"""The tables of README.md and docs/ that quote results/*.json and docs/benchmarks.json, written between their marks.

.venv/bin/python docs/tables.py      # after new results; tests/test_tables.py holds the pages to what this writes

A mark is ``<!-- KIND: WORDS -->``; what stands from there to ``<!-- end -->`` is generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from revode_lab.reproduce import paper
from revode_lab.reproduce.accuracy import spread
from revode_lab.reproduce.item import ABSENT, by_training, conditions, percent
from revode_lab.system import human_bytes

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/results.md", "docs/engine.md", "docs/speed.md")
BLOCK = re.compile(r"(<!-- (accuracies|steps|ratios): ?(.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
STAGES = ("stage-32x32", "stage-16x16", "stage-8x8")
NETWORKS = (*STAGES, "hamiltonian-74", "hamiltonian-1202")
PEERS = ("memcnn", "revtorch", "revlib")


def accuracies(words: str, page: str) -> str:
    """A row for each training of these pages in results/: how it was trained, what it reached, what the paper has."""
    rows, seen = [], set[float]()
    for name in words.split():
        path = next(ROOT.glob(f"results/*/{name}.json"))
        entries = json.loads(path.read_text())["tasks"]
        link = "../" * page.count("/") + str(path.with_suffix(".md").relative_to(ROOT))
        for own in by_training(entries).values():
            times = {entry["result"]["seconds"] for entry in own}
            if times <= seen:  # a run that two items share
                continue
            seen |= times
            settings, scores = own[0]["settings"], [entry["result"]["score"] for entry in own]
            found = spread(100 * score["accuracy"] for score in scores)
            row = conditions(own) | {"test accuracy": f"[{found}]({link})"}
            if scores[0]["split"] != "test":
                row["test accuracy"] += f", {scores[0]['split']}"
            theirs = "damping" not in settings.get("options", {}) and not re.search(r"\d percent", own[0]["title"])
            printed = (paper.CIFAR | paper.STL).get(settings.get("name", ""), {}).get(settings.get("dataset", ""))
            rows.append(row | {"paper": percent(printed) if theirs else ABSENT})
    return _table(rows)


def _rows() -> dict[tuple[str, str, str], dict[str, Any]]:
    rows = json.loads((ROOT / "docs" / "benchmarks.json").read_text())["rows"]
    return {(row["workload"], row["dtype"], row["method"]): row for row in rows}


def steps(words: str, page: str) -> str:
    """Steps of one workload in one dtype by these methods."""
    workload, dtype, *methods = words.split()
    found = [_rows()[workload, dtype, method] for method in methods]
    return _table(
        {
            f"{workload}, {dtype}, batch {row['batch']}": row["method"],
            "ms": f"{1e3 * row['seconds']:.0f}",
            "over stored": f"{row['ratio_to_store']:.2f}",
            "convolutions alone / step": f"{row['roofline']:.2f}",
            "bytes kept": human_bytes(row["saved_bytes"]),
        }
        for row in found
    )


def ratios(words: str, page: str) -> str:
    """Our step over a stored one, and the alternatives over ours: a row for each workload, or one sentence for `in words`."""
    rows = _rows()

    def seconds(workload: str, method: str) -> float:
        return rows[workload, "float32", method]["seconds"]

    def peers(workload: str) -> list[float]:
        ours = seconds(workload, "revode")
        return [seconds(workload, name) / ours for name in PEERS if (workload, "float32", name) in rows]

    stored = {name: seconds(name, "revode") / seconds(name, "store") for name in (*NETWORKS, "attention-12")}
    checkpoint = {name: seconds(name, "checkpoint") / seconds(name, "revode") for name in stored}
    fastest = {name: min(found) for name in stored if (found := peers(name))}
    if words == "in words":
        network = [checkpoint[name] for name in NETWORKS]
        peer = [fastest[name] for name in NETWORKS if name in fastest]
        return (
            f"<sub>Work in evaluations of a branch; a gradient counts two. On two CPU cores a reversible step takes "
            f"{min(stored.values()):.2f} to {max(stored.values()):.2f} times a stored one.\n"
            f"Torch's checkpoint of each block takes {min(network):.2f} to {max(network):.2f} times our time on convolutions "
            f"and {checkpoint['attention-12']:.2f} times on attention,\nthe fastest of the other libraries {min(peer):.2f} to "
            f"{max(peer):.2f} times on convolutions and {fastest['attention-12']:.2f} times on attention\n"
            f"([benchmarks](docs/benchmarks.md), `make bench-docs`).</sub>\n"
        )
    return _table(
        {
            "workload": name,
            "reversible / stored": f"{stored[name]:.2f}",
            "torch's checkpoint of each block / ours": f"{checkpoint[name]:.2f}",
            "fastest other library / ours": f"{fastest[name]:.2f}" if name in fastest else ABSENT,
            "bytes kept, stored / ours": f"{_kept(rows, name, 'store'):.1f}",
            "checkpoint / ours": f"{_kept(rows, name, 'checkpoint'):.1f}",
        }
        for name in stored
    )


def _kept(rows: dict[tuple[str, str, str], dict[str, Any]], workload: str, method: str) -> float:
    return rows[workload, "float32", method]["saved_bytes"] / rows[workload, "float32", "revode"]["saved_bytes"]


def _table(rows: Iterable[dict[str, str]]) -> str:
    """A Markdown table, numbers to the right."""
    found = list(rows)
    rule = ["---", *["---:"] * (len(found[0]) - 1)]
    lines = [list(found[0]), rule, *(list(row.values()) for row in found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


KINDS: dict[str, Callable[[str, str], str]] = {"accuracies": accuracies, "steps": steps, "ratios": ratios}


def rewritten(page: str) -> str:
    """The text of a page with its generated blocks anew."""
    text = (ROOT / page).read_text()
    return BLOCK.sub(lambda found: found[1] + KINDS[found[2]](found[3], page) + found[4], text)


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / name).write_text(rewritten(name))
