from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from revode_lab.data import INFOS, DatasetInfo, data_root, describe, load
from revode_lab.data.catalogue import LAYOUTS

FILE_SETS = list(LAYOUTS)
OFFICIAL = {"digits": (10, 1, False), "cifar10": (10, 4, True), "cifar100": (100, 4, True), "stl10": (10, 12, True)}


@pytest.mark.parametrize("info", INFOS.values(), ids=lambda info: info.name)
def test_facts_are_complete(info: DatasetInfo) -> None:
    assert len(info.mean) == len(info.std) == info.channels
    assert info.num_classes == len(set(info.class_names)) >= 2
    assert min(info.std) > 0
    assert min(info.num_train, info.num_test) > 0
    if info.name in OFFICIAL:
        assert (info.num_classes, info.pad, info.flip) == OFFICIAL[info.name]


@pytest.mark.parametrize("name", FILE_SETS)
def test_counts_of_images_are_those_of_the_official_files(name: str) -> None:
    info, layout = describe(name), LAYOUTS[name]
    image = info.channels * info.image_size**2 + max(1, len(layout.label_keys))  # with its label bytes
    sizes = [sum(file.size for file in files) for files in (layout.train, layout.test)]
    assert sizes == [info.num_train * image, info.num_test * image]


def test_an_unknown_name_lists_the_choices_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown data set 'cifar-10'; nearest: cifar10, .*; choose one of digits, "):
        describe("cifar-10")


def test_cifar10_pixels_are_planes_and_labels_one_byte(laid_out: Callable[[str], Path]) -> None:
    root = laid_out("cifar10")
    data = load("cifar10", root)
    assert data.test is not None
    assert (len(data.train), len(data.test)) == (100, 20)
    record = (root / "cifar-10-batches-bin" / "data_batch_2.bin").read_bytes()[3 * 3073 : 4 * 3073]
    assert data.train.labels[23] == record[0]
    assert data.train.images[23, 1, 5, 7] == record[1 + 1024 + 5 * 32 + 7]


def test_cifar100_takes_the_fine_label(laid_out: Callable[[str], Path]) -> None:
    data = load("cifar100", laid_out("cifar100"))
    assert data.train.labels.tolist() == [n % 10 for n in range(20)]


def test_stl10_is_column_major_and_counts_from_one(laid_out: Callable[[str], Path]) -> None:
    root = laid_out("stl10")
    data = load("stl10", root)
    pixels = (root / "stl10_binary" / "train_X.bin").read_bytes()
    column, row = 11, 90
    assert data.train.images[2, 1, row, column] == pixels[((2 * 3 + 1) * 96 + column) * 96 + row]
    assert data.train.labels.tolist() == [n % 10 for n in range(20)]
    assert data.train.images.is_contiguous()


def test_stl10_trains_without_its_test_files(laid_out: Callable[[str], Path]) -> None:
    root = laid_out("stl10")
    for name in ("test_X.bin", "test_y.bin"):
        (root / "stl10_binary" / name).unlink()
    data = load("stl10", root)
    assert data.test is None
    with pytest.raises(FileNotFoundError, match=r"test split of stl10 is not in the data root.*revode data get stl10"):
        data.split("test")


def test_stl10_with_half_a_test_split_is_an_error(laid_out: Callable[[str], Path]) -> None:
    root = laid_out("stl10")
    (root / "stl10_binary" / "test_y.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"test_y.bin is missing"):
        load("stl10", root)


@pytest.mark.parametrize("name", FILE_SETS)
def test_a_missing_file_is_named_with_the_command_that_gets_it(laid_out: Callable[[str], Path], name: str) -> None:
    root = laid_out(name)
    file = root / LAYOUTS[name].folder / LAYOUTS[name].train[-1].name
    file.unlink()
    with pytest.raises(FileNotFoundError) as caught:
        load(name, root)
    assert str(caught.value) == f"{file} is missing; get it with `revode data get {name} --data-root {root}`"


@pytest.mark.parametrize("name", FILE_SETS)
def test_one_changed_bit_is_found(laid_out: Callable[[str], Path], name: str) -> None:
    root = laid_out(name)
    file = root / LAYOUTS[name].folder / LAYOUTS[name].train[0].name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf"{file.name} has .* instead of .*damaged; .*revode data get {name}"):
        load(name, root)


@pytest.mark.parametrize("kept", [0, 1, 1000])
def test_a_truncated_file_is_found(laid_out: Callable[[str], Path], kept: int) -> None:
    root = laid_out("cifar10")
    file = root / "cifar-10-batches-bin" / "test_batch.bin"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"test_batch.bin has {kept:,} bytes instead of 61,460"):
        load("cifar10", root)


def test_an_unreadable_file_is_an_error_in_words(laid_out: Callable[[str], Path]) -> None:
    root = laid_out("cifar10")
    file = root / "cifar-10-batches-bin" / "data_batch_1.bin"
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match=r"data_batch_1.bin cannot be read"):
        load("cifar10", root)


def test_an_empty_root_names_the_first_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data_batch_1.bin is missing"):
        load("cifar10", tmp_path)


def test_the_root_follows_argument_environment_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("REVODE_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data_root() == tmp_path / "home" / ".cache" / "revode"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root() == tmp_path / "cache" / "revode"
    monkeypatch.setenv("REVODE_DATA", str(tmp_path / "data"))
    assert data_root() == tmp_path / "data"
    assert data_root("~/mine") == tmp_path / "home" / "mine"
    with pytest.raises(FileNotFoundError, match=r"get it with `revode data get cifar10`$"):
        load("cifar10")


def test_digit_statistics_are_those_of_the_training_split() -> None:
    _assert_statistics(load("digits"))


@pytest.mark.real_data
@pytest.mark.parametrize("name", FILE_SETS)
def test_real_data_load_quickly_and_have_the_stated_statistics(real_root: Callable[[str], Path], name: str) -> None:
    root = real_root(name)
    data = load(name, root)

    def seconds() -> float:
        start = time.thread_time()  # of the processor: a busy machine is no fault
        load(name, root)
        return time.thread_time() - start

    assert min(seconds() for _ in range(2)) < 2
    assert len(data.train) == (5_000 if name == "stl10" else 50_000)
    assert torch.bincount(data.train.labels).unique().tolist() == [len(data.train) // data.num_classes]
    _assert_statistics(data)


def _assert_statistics(data: DatasetInfo) -> None:
    for channel in range(data.channels):
        pixels = data.train.images[:, channel].numpy()
        counts = np.bincount(pixels.ravel(), minlength=256)
        values = np.arange(256) / 255
        mean = (counts @ values) / counts.sum()
        std = np.sqrt((counts @ (values - mean) ** 2) / counts.sum())
        assert (round(mean, 5), round(std, 5)) == (data.mean[channel], data.std[channel])
