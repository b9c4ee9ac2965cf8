from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from octavo.draft_training.medusa_tree import grow

rates = st.lists(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4).map(lambda r: sorted(r, reverse=True)),
    min_size=1,
    max_size=3,
)


def value(accuracy, path):
    return prod(accuracy[head][rank] for head, rank in enumerate(path))


@given(rates, st.integers(0, 30))
def test_the_tree_has_the_nodes_of_most_value(accuracy, size):
    nodes = grow(accuracy, size)
    every = [
        path
        for depth in range(1, len(accuracy) + 1)
        for path in product(*(range(len(each)) for each in accuracy[:depth]))
        if value(accuracy, path) > 0
    ]
    assert len(set(nodes)) == len(nodes) == min(size, len(every))
    best = sorted((value(accuracy, path) for path in every), reverse=True)[:size]
    got = [value(accuracy, path) for path in nodes]
    assert all(abs(a - b) <= 1e-9 for a, b in zip(got, best, strict=True))


@given(rates, st.integers(1, 30))
def test_any_beginning_of_it_is_a_tree(accuracy, size):
    seen = {()}
    for path in grow(accuracy, size):
        assert path[:-1] in seen
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in seen
        seen.add(path)
