"""Ratios, intervals and the power law against cases whose answer is known."""

from __future__ import annotations

import math
import random

import pytest

from sglang_ssd.bench.intervals import paired_ratio, percentiles, power_law


def test_the_mean_is_geometric_and_the_interval_holds_it() -> None:
    ratio = paired_ratio([2.0, 0.5, 1.0, 1.0])
    assert ratio is not None
    assert ratio.mean == pytest.approx(1.0)
    assert 0.5 <= ratio.low < 1.0 < ratio.high <= 2.0


def test_equal_blocks_have_an_interval_of_no_width() -> None:
    ratio = paired_ratio([1.3] * 5)
    assert ratio is not None
    assert (ratio.low, ratio.high) == (pytest.approx(1.3), pytest.approx(1.3))


def test_two_blocks_have_no_interval_and_none_have_no_ratio() -> None:
    few = paired_ratio([1.0, 2.0])
    assert few is not None
    assert not few.has_interval
    assert math.isnan(few.low)
    assert paired_ratio([]) is None


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Twelve blocks of log-normal noise, 300 times. The seed is fixed; a percentile bootstrap covers a little less."""
    chance = random.Random(5)
    inside = 0
    for _ in range(300):
        ratio = paired_ratio([1.2 * math.exp(chance.gauss(0, 0.1)) for _ in range(12)])
        assert ratio is not None
        inside += ratio.low <= 1.2 <= ratio.high
    assert 255 <= inside <= 297


def test_a_power_law_is_found_again() -> None:
    x = [1.0, 2.0, 4.0, 8.0, 16.0]
    law = power_law(x, [0.6 * value**-0.7 for value in x])
    assert law == (pytest.approx(0.6), pytest.approx(0.7))
    assert power_law([1.0, 1.0], [0.5, 0.4]) is None
    assert power_law([1.0, 2.0], [0.5, 0.0]) is None


def test_percentiles() -> None:
    assert percentiles([float(value) for value in range(101)]) == (50.0, 95.0, 99.0)
    assert percentiles([]) is None
