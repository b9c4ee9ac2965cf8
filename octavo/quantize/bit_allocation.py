"""Allocates a budget of bits, choosing an option for each item for the least total cost.

This is the multiple-choice knapsack problem, solved greedily along convex hulls: only options on
the lower convex hull of an item's (bits, cost) are used, so going from one to the next larger gains
less and less cost for a bit. All steps of all items are taken in the order of their gain for a bit,
which is the Lagrangian solution for growing budgets. A step that does not fit is skipped, and the
rest of the budget is filled with any steps that fit.

That is nearly optimal if steps are small beside the budget. An embedding can be a quarter of a
model, so each option of the largest item is tried, with the greedy choice for the others.

Source: Sinha and Zoltners 1979, "The Multiple-Choice Knapsack Problem".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """An option of an item: its size in ``bits``, and its ``cost``, which is not negative."""

    bits: int
    cost: float


class _Step(NamedTuple):
    """A step from one option of an item to a larger one of less cost."""

    gain_per_bit: float
    bits: int
    item: int
    source: int
    target: int


def allocate(items: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """Choose the index of an option for each item. The result is deterministic.

    The total cost exceeds the optimum by at most the gain of a single step of an item other than
    the largest: with hundreds of items, that is next to nothing.

    Raises:
        ValueError: the smallest options exceed the budget.
    """
    missing = sum(min(option.bits for option in options) for options in items) - budget
    if missing > 0:
        raise ValueError(f"the smallest options take {missing} bits more than {budget}")
    largest = max(range(len(items)), key=lambda item: _spread(items[item]), default=None)
    if largest is None:
        return []
    found = []
    for index, option in enumerate(items[largest]):
        others = [*items[:largest], [option], *items[largest + 1 :]]
        chosen = _greedy(others, budget)
        if chosen is not None:
            bits, cost = _sums(others, chosen)
            chosen[largest] = index
            found.append((cost, bits, chosen))
    return min(found)[2]


def _spread(options: Sequence[Option]) -> int:
    return max(option.bits for option in options) - min(option.bits for option in options)


def _sums(items: Sequence[Sequence[Option]], chosen: Sequence[int]) -> tuple[int, float]:
    """Total bits and cost of a choice."""
    taken = [options[i] for options, i in zip(items, chosen, strict=True)]
    return sum(option.bits for option in taken), sum(option.cost for option in taken)


def _greedy(items: Sequence[Sequence[Option]], budget: int) -> list[int] | None:
    """Choose by steps of the greatest gain for a bit that fit; None if the smallest options do
    not fit."""
    chosen = [_smallest(options) for options in items]
    left = budget - _sums(items, chosen)[0]
    if left < 0:
        return None
    steps = [step for item, options in enumerate(items) for step in _hull(item, options)]
    for step in sorted(steps, key=_by_gain):
        if step.bits <= left and step.source == chosen[step.item]:
            chosen[step.item], left = step.target, left - step.bits
    while fitting := [
        step
        for item, options in enumerate(items)
        for step in _steps(item, options, chosen[item])
        if step.bits <= left
    ]:
        step = min(fitting, key=_by_gain)
        chosen[step.item], left = step.target, left - step.bits
    return chosen


def _by_gain(step: _Step) -> tuple[float, int, int]:
    """Sort key: the greatest gain for a bit first, the longest step first among equals."""
    return -step.gain_per_bit, -step.bits, step.item


def _smallest(options: Sequence[Option]) -> int:
    return min(range(len(options)), key=lambda i: options[i])


def _hull(item: int, options: Sequence[Option]) -> Iterator[_Step]:
    """Yield the steps along the convex hull from the smallest option to the least cost."""
    at = _smallest(options)
    while steps := list(_steps(item, options, at)):
        step = min(steps, key=_by_gain)
        yield step
        at = step.target


def _steps(item: int, options: Sequence[Option], source: int) -> Iterator[_Step]:
    """Yield all steps from an option to larger ones of less cost."""
    for target, (bits, cost) in enumerate(options):
        more, gain = bits - options[source].bits, options[source].cost - cost
        if more > 0 and gain > 0:
            yield _Step(gain / more, more, item, source, target)
