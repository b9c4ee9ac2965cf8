"""The choice under a budget, beside all choices that there are."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.quantize.bit_allocation import Option, allocate

OPTIONS = st.lists(
    st.builds(Option, st.integers(1, 12), st.integers(0, 40).map(float)), min_size=1, max_size=4
)


def bits_and_cost(items, chosen) -> tuple[int, float]:
    taken = [options[i] for options, i in zip(items, chosen, strict=True)]
    return sum(option.bits for option in taken), sum(option.cost for option in taken)


def best_cost(items, budget) -> float:
    found = (bits_and_cost(items, chosen) for chosen in product(*(range(len(o)) for o in items)))
    return min(cost for bits, cost in found if bits <= budget)


@given(st.lists(OPTIONS, min_size=1, max_size=4), st.integers(0, 30))
def test_near_the_best_there_is(items, more):
    budget = sum(min(option.bits for option in options) for options in items) + more
    bits, cost = bits_and_cost(items, allocate(items, budget))
    assert bits <= budget
    # The best cannot gain more than the step that did not fit would have.
    largest_step = max(
        max(o.cost for o in options) - min(o.cost for o in options) for options in items
    )
    assert best_cost(items, budget) <= cost <= best_cost(items, budget) + largest_step


@given(st.lists(OPTIONS, min_size=1, max_size=4), st.integers(0, 30))
def test_what_fills_a_hull_is_the_best(items, more):
    """A choice that spends its budget to the last bit by steps of the hulls alone is optimal: so is
    that of any choice's own size, where it came without filling."""
    slope = more / 3
    chosen = [
        min(range(len(o)), key=lambda i: (o[i].cost + slope * o[i].bits, o[i].bits)) for o in items
    ]
    budget, cost = bits_and_cost(items, chosen)
    assert cost == best_cost(items, budget)  # Lagrange's choice for a price of bits
    assert bits_and_cost(items, allocate(items, budget))[1] == pytest.approx(cost)


def test_bits_go_where_they_gain_most():
    dear, cheap = [Option(4, 8.0), Option(8, 0.0)], [Option(4, 1.0), Option(8, 0.0)]
    assert allocate([cheap, dear], 8) == [0, 0]
    assert allocate([cheap, dear], 12) == [0, 1]
    assert allocate([cheap, dear], 16) == [1, 1]


def test_what_a_mix_of_others_beats_is_passed_over_but_may_fill():
    bent = [Option(4, 10.0), Option(5, 9.5), Option(6, 0.0)]
    assert allocate([bent], 6) == [2]
    assert allocate([bent], 5) == [1]


def test_more_bits_that_gain_nothing_are_not_taken():
    assert allocate([[Option(4, 1.0), Option(8, 1.0), Option(16, 2.0)]], 100) == [0]


def test_of_equal_sizes_the_least_cost():
    assert allocate([[Option(4, 3.0), Option(4, 1.0), Option(4, 2.0)]], 4) == [1]


def test_too_small_a_budget():
    with pytest.raises(ValueError, match="3 bits more than 9"):
        allocate([[Option(4, 1.0)], [Option(8, 1.0), Option(16, 0.0)]], 9)


def test_an_item_that_is_much_of_all_is_tried_in_every_size():
    """Greedily, small steps would come first, and leave no room for the large one."""
    large = [Option(100, 9.0), Option(180, 0.0)]
    small = [[Option(10, 1.5), Option(20, 0.0)] for _ in range(4)]
    assert allocate([large, *small], 220) == [1, 0, 0, 0, 0]
    assert allocate([large, *small], 219) == [0, 1, 1, 1, 1]


def test_no_items():
    assert allocate([], 5) == []
