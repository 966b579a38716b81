from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from revode_lab.data import Dataset, Split, describe, hold_out, load, subset


def labelled(labels: list[int]) -> Split:
    """A split whose images carry their own position, so that one sees which were taken."""
    count = len(labels)
    images = torch.arange(count).view(count, 1, 1, 1)
    assert count <= 256
    return Split(images=images.to(torch.uint8), labels=torch.tensor(labels))


LABELS = st.lists(st.integers(0, 4), min_size=2, max_size=120)


@given(labels=LABELS, seed=st.integers(0, 2**32), data=st.data())
def test_hold_out_divides_without_loss_and_in_proportion(labels: list[int], seed: int, data: st.DataObject) -> None:
    split = labelled(labels)
    count = data.draw(st.integers(1, len(labels) - 1))
    rest, held = hold_out(split, count, seed)
    assert len(held) == count
    positions = torch.cat([rest.images, held.images]).flatten()
    assert positions.sort().values.tolist() == list(range(len(labels)))
    assert torch.equal(rest.images.flatten().sort().values, rest.images.flatten())
    for part in (rest, held):
        assert torch.equal(part.labels, split.labels[part.images.flatten().long()])
    shares = torch.bincount(split.labels, minlength=5) * count / len(labels)
    assert (torch.bincount(held.labels, minlength=5) - shares).abs().max() < 1


def test_hold_out_takes_a_fraction_or_a_count_and_obeys_the_seed() -> None:
    split = labelled([0, 1] * 50)
    rest, held = hold_out(split, 0.1, seed=0)
    assert (len(rest), len(held)) == (90, 10)
    assert torch.equal(hold_out(split, 10, seed=0)[1].images, held.images)
    assert not torch.equal(hold_out(split, 10, seed=1)[1].images, held.images)


@pytest.mark.parametrize("amount", [0, 100, -1, 0.0, 1.0, 1.5])
def test_hold_out_refuses_to_empty_a_side(amount: float) -> None:
    with pytest.raises(ValueError, match=r"hold out|held-out fraction"):
        hold_out(labelled([0, 1] * 50), amount, seed=0)


@given(labels=LABELS, fraction=st.floats(0.001, 1), seed=st.integers(0, 2**32))
def test_subset_keeps_every_class_or_names_a_fraction_that_does(labels: list[int], fraction: float, seed: int) -> None:
    split = labelled(labels)
    try:
        part = subset(split, fraction, seed)
    except ValueError as error:
        fraction = float(str(error).rsplit("use at least ", 1)[1])
        part = subset(split, fraction, seed)
    assert set(part.labels.tolist()) == set(labels)
    assert len(part) == round(fraction * len(labels))


def test_a_lost_class_is_named() -> None:
    with pytest.raises(ValueError, match=r"leaves no image of class 1 and 1 of 2 classes empty; use at least 0.145"):
        subset(labelled([0] * 200 + [1] * 7), 0.01, seed=0)


def test_a_whole_subset_is_the_split_itself() -> None:
    split = labelled([0, 1, 2])
    assert subset(split, 1.0, seed=0) is split


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, float("nan")])
def test_impossible_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="expected a number above 0 and at most 1"):
        subset(labelled([0, 1]), fraction, seed=0)


def test_split_refuses_other_types_and_counts() -> None:
    images, labels = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected uint8"):
        Split(images=images.float(), labels=labels)
    with pytest.raises(ValueError, match=r"expected int64 of shape \(2,\)"):
        Split(images=images, labels=labels[:1])


def test_data_move_to_a_device_as_a_whole() -> None:
    moved = load("digits").to("meta")
    assert moved.test is not None
    assert {moved.train.images.device.type, moved.train.labels.device.type, moved.test.images.device.type} == {"meta"}
    assert (moved.name, moved.num_classes) == ("digits", 10)


def test_an_absent_test_split_says_how_to_get_it() -> None:
    split = labelled([0, 1])
    info = {key: getattr(describe("stl10"), key) for key in describe("stl10").__dataclass_fields__}
    data = Dataset(**info, train=split, test=None)
    assert data.split("train") is split
    assert data.to("cpu").test is None
    with pytest.raises(FileNotFoundError, match="revode data get stl10"):
        data.split("test")
    with pytest.raises(ValueError, match="unknown split 'validation'"):
        data.split("validation")
