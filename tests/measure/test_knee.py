from __future__ import annotations

import math

import pytest

from octavo.measure.knee import find_knee
from octavo.measure.statistics import MedianRange

DOUBLING = (1, 2, 4, 8, 16, 32, 64)


def spreads(values, noise=0.01):
    return [MedianRange(value, value * (1 - noise), value * (1 + noise)) for value in values]


def test_the_corner_of_a_roofline_is_its_knee():
    knee = find_knee(DOUBLING, spreads(10 * min(n, 8) for n in DOUBLING))
    assert (knee.verdict, knee.concurrency, knee.share) == ("knee", 8, 1.0)


def test_a_smooth_curve_bends_where_it_stands_highest_above_its_chord():
    # n / (4 + n): heights above the chord by hand are 0, .013, .072, .132, .145, .097, 0.
    knee = find_knee(DOUBLING, spreads(n / (4 + n) for n in DOUBLING))
    assert (knee.verdict, knee.concurrency) == ("knee", 16)
    assert knee.height == pytest.approx((0.8 - 0.2) / (64 / 68 - 0.2) - 4 / 6)
    assert knee.share == pytest.approx(0.8 / (64 / 68))


def test_load_that_makes_it_worse_does_not_move_the_knee():
    falling = find_knee(DOUBLING, spreads([10, 20, 40, 42, 40, 30, 15]))
    flat = find_knee(DOUBLING, spreads([10, 20, 40, 42, 42, 42, 42]))
    assert falling.concurrency == flat.concurrency == 4


@pytest.mark.parametrize(
    "values",
    [
        [10 * n for n in DOUBLING],
        [1 + math.log2(n) for n in DOUBLING],  # its chord itself
        [n / (64 + n) for n in DOUBLING],
    ],
    ids=["linear", "logarithmic", "far from its limit"],
)
def test_a_curve_that_still_rises_has_none(values):
    knee = find_knee(DOUBLING, spreads(values))
    assert (knee.verdict, knee.concurrency) == ("rising", None)
    assert "still rises" in str(knee)


@pytest.mark.parametrize("values", [[100] * 7, [100, 104, 99, 103, 101, 98, 105]])
def test_a_flat_curve_needs_but_its_first_point(values):
    knee = find_knee(DOUBLING, spreads(values))
    assert (knee.verdict, knee.concurrency) == ("flat", 1)


def test_what_is_no_larger_than_the_noise_is_no_knee():
    bent = [100, 112, 130, 142, 147, 150, 151]
    assert find_knee(DOUBLING, spreads(bent, noise=0.01)).verdict == "knee"
    assert find_knee(DOUBLING, spreads(bent, noise=0.12)).verdict == "unclear"
    assert find_knee(DOUBLING, spreads(bent, noise=0.4)).verdict == "flat"


def test_uneven_steps_are_judged_on_the_axis_of_doublings():
    uneven = (1, 3, 8, 11, 64)
    knee = find_knee(uneven, spreads(10 * min(n, 8) for n in uneven))
    assert knee.concurrency == 8


def test_two_points_are_too_few():
    assert find_knee((1, 2), spreads([1, 2])).verdict == "too few points"
