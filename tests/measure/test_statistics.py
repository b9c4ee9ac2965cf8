"""Percentiles, spreads and intervals, against other people's figures."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from octavo.measure.statistics import MedianRange, bootstrap_interval, percentile, wilson_interval


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_percentiles_are_those_of_numpy(count):
    draws = random.Random(count)
    values = [draws.uniform(-5, 5) for _ in range(count)]
    for percent in (0, 1, 10, 25, 50, 75, 90, 99, 99.9, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_percentiles_by_hand():
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 90) == pytest.approx(4.6)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 100.1)])
def test_percentiles_of_nothing_are_refused(values, percent):
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_a_spread_is_median_and_range():
    spread = MedianRange.of([3.0, 1.0, 2.0, 10.0])
    assert spread.as_json() == {"median": 2.5, "min": 1.0, "max": 10.0}
    assert spread.scaled(2) == MedianRange(5.0, 2.0, 20.0)


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [  # Newcombe 1998, table I, method 3
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0000, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_wilson_intervals_are_those_of_the_literature(successes, trials, expected):
    assert wilson_interval(successes, trials) == pytest.approx(expected, abs=5e-5)


def test_wilson_intervals_stay_within_0_and_1():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    for trials in (1, 5, 50):
        assert wilson_interval(0, trials)[0] == 0.0
        assert wilson_interval(trials, trials)[1] == pytest.approx(1.0)


def test_a_bootstrap_interval_holds_the_mean_as_often_as_it_says():
    draws = random.Random(1)
    held = 0
    for seed in range(100):
        values = [draws.gauss(0.0, 1.0) for _ in range(40)]
        low, high = bootstrap_interval(values, statistics.fmean, seed=seed)
        held += low <= 0.0 <= high
    assert 85 <= held <= 100


def test_a_bootstrap_is_repeatable():
    values = [1.0, 2.0, 5.0, 3.0]
    first = bootstrap_interval(values, statistics.fmean, seed=7)
    assert first == bootstrap_interval(values, statistics.fmean, seed=7)
    assert first != bootstrap_interval(values, statistics.fmean, seed=8)
