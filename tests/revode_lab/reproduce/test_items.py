"""Every item runs end to end under the smoke budget and says what its numbers are."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from revode_lab.cli import main
from revode_lab.reproduce import BUDGETS, ITEMS, paper, subsets
from revode_lab.reproduce.item import Budget, find_item
from revode_lab.reproduce.task import Setup, TrainingRun

IN_TABLE = {
    "table-1": "| hamiltonian-74 cut to 18 layers | biases | 692 | 0.43 | ",
    "table-2": "85.50 %",
    "small-data": "up to +13",
    "fig-stl-subset": "3.4 points",
    "depth-1202": "93.84 %",
    "levels-1202": "93.84 %",
    "memory": "10 GB",
    "stability": "Re λ = 0: stable",
    "levels-74": "92.76 %",
    "same-weights": "The weights are equal, bit for bit.",
}
"""What each page must have of the paper."""


def plan(item: str, budget: str, data_root: object = "no-such-folder") -> Budget:
    return find_item(item).plan(Setup(budget=budget, data_root=str(data_root)))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("reproduce")


@pytest.mark.parametrize("item", ITEMS)
def test_smoke_budget_runs_end_to_end(item, home, capsys):
    out = home / item
    assert main(["reproduce", item, "--runs", str(home / "runs"), "--out", str(out), "--threads", "1"]) == 0
    text = (out / f"{item}.md").read_text()
    assert IN_TABLE[item] in text
    assert "**Smoke budget" in text
    assert f"`revode reproduce {item} --budget smoke`" in text
    assert "versions: revode" in text
    assert str(home) not in text
    numbers = json.loads((out / f"{item}.json").read_text())
    assert numbers["finished"] == numbers["of"] == len(numbers["tasks"])
    assert numbers["budget"] == "smoke"
    assert str(home) not in json.dumps(numbers)
    figures = list(out.glob("*.svg"))
    assert figures
    for figure in figures:
        ElementTree.parse(figure)  # a file of its own, with its namespaces
        assert figure.name in text
    shrunk = {getattr(task, "model", None) for task in plan(item, "smoke").tasks if "blocks" in str(task)}
    table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    for name in filter(None, shrunk):  # an 18-layer network is not hamiltonian-74, least of all beside its accuracy
        assert not re.search(rf"\| {name}\b", re.sub(r"[^|]* cut to \d+ layers", " ", table))
    page = (out / f"{item}.html").read_text()
    assert page.count("<figure>") == len(figures)
    assert page.count("<table") >= 2
    assert "Smoke budget" in page
    if item in ("table-2", "fig-stl-subset"):
        assert_hold_out_is_never_called_test(text, numbers)


def assert_hold_out_is_never_called_test(text: str, numbers: dict) -> None:
    header = next(line for line in text.splitlines() if line.startswith("| "))
    ours = [cell for cell in header.split(" | ") if "paper" not in cell]
    assert any("hold-out" in cell for cell in ours)
    assert not any("test" in cell for cell in ours)
    for task in numbers["tasks"]:
        assert task["result"]["score"]["split"] == "hold-out"
        assert "test_accuracy" not in task["result"]


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_budget_lists_different_tasks(item, budget):
    tasks = plan(item, budget).tasks
    assert len({(task.slug, task.digest) for task in tasks}) == len(tasks) > 0
    assert plan(item, budget).note


def test_cpu_numbers_are_always_called_what_they_are():
    for item in ITEMS.keys() - {"memory", "stability"}:  # these two train nothing
        note = plan(item, "cpu").note
        assert note.startswith("CPU budget: ")
        assert "not the paper's schedule" in note


def test_the_papers_budget_leaves_its_recipes_as_they_are(tmp_path):
    tasks = plan("table-1", "paper").tasks
    assert [(task.model, task.dataset) for task in tasks] == [(m, d) for m, row in paper.CIFAR.items() for d in row]
    assert all(not task.settings and not task.options for task in tasks)
    by_name = {(task.model, task.dataset): task for task in tasks}
    assert by_name["hamiltonian-74", "cifar10"].num_steps == 80_000
    assert by_name["hamiltonian-1202", "cifar10"].batch_size == 32
    (tmp_path / "stl10_binary").mkdir()
    (tmp_path / "stl10_binary" / "test_X.bin").touch()
    stl = plan("table-2", "paper", tmp_path).tasks
    assert all(task.num_steps == 20_000 and task.split == "test" for task in stl)


def test_small_data_compares_both_networks_with_both_norms_at_one_budget():
    tasks = plan("small-data", "cpu").tasks
    alike = [task for task in tasks if task.fraction == subsets.SHARE]
    assert {(task.model, task.norm) for task in alike} == {
        (model, norm) for model in subsets.CIFAR_NETWORKS for norm in ("batch norm", "biases")
    }
    assert {(task.num_images, task.num_steps, task.batch_size) for task in alike} == {(2_000, 3_000, 50)}
    assert {(task.num_images, task.norm) for task in tasks if task not in alike} == {
        (500, "batch norm"),
        (5_000, "batch norm"),
    }
    pairs = {(task.fraction, task.norm, task.seed, task.num_steps, task.batch_size) for task in tasks}
    assert len(pairs) == len(tasks) // 2  # both networks train alike
    assert {task.seed for task in tasks} == {0, 1, 2}


def test_small_data_has_the_papers_shares_under_the_papers_budget():
    tasks = plan("small-data", "paper").tasks
    assert sorted({task.fraction for task in tasks}) == sorted(paper.CIFAR_FRACTIONS)
    assert {task.num_steps for task in tasks} == {80_000}
    smallest = tasks[-1]
    assert smallest.num_images == smallest.batch_size == 25


def test_table_1_trains_every_family_alike():
    tasks = plan("table-1", "cpu").tasks
    assert {task.model.rpartition("-")[0] for task in tasks} == {name.rpartition("-")[0] for name in paper.CIFAR}
    assert {(task.norm, task.num_images, task.num_steps) for task in tasks} == {("batch norm", 50_000, 32 * 390)}


def test_stl_without_test_labels_holds_out_1000_and_keeps_the_papers_shares():
    run = TrainingRun(model="hamiltonian-stl", dataset="stl10", recipe="stl", hold_out=1_000)
    assert (run.num_images, run.num_scored, run.split) == (4_000, 1_000, "hold-out")
    part = TrainingRun(model="hamiltonian-stl", dataset="stl10", recipe="stl", hold_out=1_000, fraction=0.4)
    assert part.num_images == 2_000
