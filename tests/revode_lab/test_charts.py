"""Axes say what they show: whole blocks, more than one number, no magnified noise."""

from __future__ import annotations

import re

from revode_lab.charts import lines


def labels(markup: str) -> list[float]:
    """Return the numbers beside the axes of a figure."""
    found = re.findall(r">\s*([-−]?[\d.]+(?:e-?\d+)?)\s*</text>", markup)
    return [float(text.replace("−", "-")) for text in found]


def test_an_axis_of_whole_numbers_has_no_ticks_between_them() -> None:
    markup = lines({"unit 1": ([1, 2, 3, 4], [20.0, 30.0, 50.0, 90.0])}, "block", "error")
    assert [number for number in labels(markup) if number < 5] == [1, 2, 3, 4]


def test_a_logarithmic_axis_has_numbers_within_a_decade() -> None:
    for values in ([12.0, 30.0, 130.0], [0.021, 0.05, 0.089], [2.05, 3.0, 8.3]):
        shown = labels(lines({"gradient": ([1000, 1001, 1002], values)}, "block", "gradient", log_y=True))
        assert sum(values[0] / 2 < number < values[-1] * 1.2 for number in shown) > 2


def test_values_that_hardly_change_are_not_magnified() -> None:
    markup = lines({"growth": ([100, 200, 300], [1.105, 1.135, 1.12])}, "step", "growth")
    across = [number for number in labels(markup) if number < 10]
    assert max(across) - min(across) > 0.1


def test_a_legend_of_long_names_stands_below_the_curves() -> None:
    def height(name: str) -> float:
        markup = lines({f"{name} {i}": ([1, 2], [1.0, 2.0]) for i in range(2)}, "step", "growth")
        return float(re.search(r'viewBox="0 0 \S+ (\S+)"', markup)[1])  # type: ignore[index]

    assert height("hamiltonian-74, change to the next block's weights") > height("short")
