"""Names that are nearly right, and units."""

from __future__ import annotations

import pytest

from revode.errors import nearest, unknown
from revode_lab.system import human_bytes, human_time, processor


def test_an_unknown_name_is_refused_with_the_nearest_and_all_choices() -> None:
    text = str(unknown("data set", "cifra10", ["digits", "cifar10", "stl10"]))
    assert text == "unknown data set 'cifra10'; nearest: cifar10; choose one of digits, cifar10, stl10"
    assert str(unknown("network", "x", ["abc"], "`revode models` lists all")).endswith("'x'; `revode models` lists all")
    assert nearest("zzz", ["abc"]) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999.4, "999 B"), (999.9, "1 kB"), (4.456e6, "4.46 MB"), (2.96e9, "2.96 GB"), (2.5e12, "2.5 TB")],
)
def test_bytes_have_three_digits(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_durations() -> None:
    assert [human_time(seconds) for seconds in (3, 600, 36_000)] == ["3 s", "10 min", "10.0 h"]


def test_the_processor_has_a_name() -> None:
    assert processor()
