"""tests/support/thinning.py: the cases that are run every time."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
from thinning import covering, kept, number

GRID = list(product(range(2), range(3), range(5)))


@pytest.mark.parametrize("strength, count", [(1, 5), (2, 15)])
def test_every_combination_of_so_many_values_is_there(strength, count):
    found = [GRID[index] for index in covering(GRID, strength)]
    for ats in combinations(range(3), strength):
        wanted = {tuple(case[at] for at in ats) for case in GRID}
        assert {tuple(case[at] for at in ats) for case in found} == wanted
    assert len(found) == count  # no grid of these sizes takes fewer


def test_no_value_is_taken_more_often_than_it_has_to():
    """All models with the slowest kernels would be too much of these."""
    taken = Counter(GRID[index][1] for index in covering(GRID, 1))
    assert max(taken.values()) - min(taken.values()) <= 1


def test_those_that_are_kept_lie_far_apart():
    cases = [(index,) * 2 for index in range(9)]
    assert kept(cases, 1, 3) == [0, 4, 8]


def test_values_are_one_if_they_look_alike():
    assert number([1, True, "1", 1, [2], [2]]) == (0, 1, 2, 0, 3, 3)
