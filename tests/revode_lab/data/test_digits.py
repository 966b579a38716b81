from __future__ import annotations

import hashlib
from importlib import resources

import torch

from revode_lab.data import load


def test_the_split_is_fixed_and_stratified() -> None:
    data = load("digits")
    assert data.test is not None
    assert (len(data.train), len(data.test)) == (data.num_train, data.num_test) == (1437, 360)
    assert torch.bincount(data.test.labels).tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]
    test_bytes = data.test.images.numpy().tobytes() + data.test.labels.numpy().tobytes()
    assert hashlib.sha1(test_bytes).hexdigest() == "e088ed2f64f24a620d5e21d55200ce09bda21119"


def test_no_image_is_in_both_splits_by_position() -> None:
    data = load("digits")
    assert data.test is not None
    total = torch.bincount(data.train.labels) + torch.bincount(data.test.labels)
    assert total.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_pixels_use_the_whole_range() -> None:
    images = load("digits").train.images
    assert images.shape[1:] == (1, 8, 8)
    assert len(images.unique()) == 17
    assert (images.min(), images.max()) == (0, 255)


def test_the_attribution_lies_beside_the_data() -> None:
    folder = resources.files("revode_lab.data")
    text = folder.joinpath("digits.txt").read_text()
    assert "CC BY 4.0" in text
    assert "Alpaydin" in text
    assert len(folder.joinpath("digits.npz").read_bytes()) < 60_000
