"""Which cases of a grid run every time, and which with ``-m long``.

A test with several parameters is run for all combinations of their values, though a defect rarely
needs more than one value, or two together. Marked ``thinned(1)``, a test runs every time for so
many combinations that each value is there once; marked ``thinned(2)``, that each pair of values of
two parameters is. ``thinned(1, most=3)`` takes three of those, far apart, for what is costly and
compared elsewhere. All others get the mark ``long``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations

import pytest

Case = Sequence[object]  # a value, or its number, for each parameter


def covering(cases: Sequence[Case], strength: int) -> list[int]:
    """Indices of cases that have among them, of each ``strength`` parameters, all combinations of
    values that any case has. Greedy: always the case next that adds most of them, and of equals the
    one whose values have been taken least, so that costly ones are not taken again and again."""
    parts = [
        {tuple((at, case[at]) for at in ats) for ats in combinations(range(len(case)), strength)}
        for case in cases
    ]
    if not cases or len(cases[0]) <= strength:
        return list(range(len(cases)))
    left, found = set().union(*parts), []
    taken: Counter[tuple[int, object]] = Counter()
    while left:
        adds = [len(part & left) for part in parts]
        most = max(adds)
        index = min(
            (index for index, number in enumerate(adds) if number == most),
            key=lambda index: sum(taken[value] for value in enumerate(cases[index])),
        )
        found.append(index)
        left -= parts[index]
        taken.update(enumerate(cases[index]))
    return sorted(found)


def kept(cases: Sequence[Case], strength: int, most: int | None = None) -> list[int]:
    found = covering(cases, strength)
    if most is None or len(found) <= most:
        return found
    step = (len(found) - 1) / max(1, most - 1)
    return [found[round(step * i)] for i in range(most)]


def thin(items: Sequence[pytest.Item], strength: int, most: int | None = None) -> None:
    """Give those of one test's cases that need not run every time the mark ``long``."""
    params = [item.callspec.params for item in items]  # type: ignore[attr-defined]
    columns = [number(tuple(each[name] for each in params)) for name in params[0]]
    # Parameters that are always given together are one, and what never differs is none.
    grid = [column for column in dict.fromkeys(columns) if len(set(column)) > 1]
    wanted = set(kept(list(zip(*grid, strict=True)), strength, most)) if grid else {0}
    for index, item in enumerate(items):
        if index not in wanted:
            item.add_marker(pytest.mark.long)


def number(values: Sequence[object]) -> tuple[int, ...]:
    """Equal values have equal numbers."""
    known: dict[str, int] = {}
    # Not by ==, which arrays answer with arrays, and by which True is 1.
    return tuple(known.setdefault(repr(value), len(known)) for value in values)


def by_function(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """Cases of each test that has any, but for those that are not run everywhere or every time."""
    found: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("long", "cuda"))):
            found[item.nodeid.partition("[")[0]].append(item)
    return list(found.values())


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for cases in by_function(items):
        if mark := cases[0].get_closest_marker("thinned"):
            thin(cases, *mark.args, **mark.kwargs)
