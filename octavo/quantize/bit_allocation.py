"""Which of its options each item takes, so that costs are least and sizes fit a budget.

The problem is the multiple-choice knapsack. It is solved greedily along convex hulls: of an item's
options only those count that no mix of two others beats, and going from one to the next larger
gains less and less for each bit. So all steps of all items are taken in the order of what they gain
for a bit, which is Lagrange's solution for one budget after the other; a step that does not fit is
left out, and what remains of the budget is filled with any that do.

That is near the best where steps are small beside the budget. An embedding may be a quarter of a
model, so each option of the largest item is tried, with the greedy choice for all others.

Source: Sinha and Zoltners 1979, "The Multiple-Choice Knapsack Problem".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """``bits``: the size. ``cost``: what is to be small in the sum, not negative."""

    bits: int
    cost: float


class _Step(NamedTuple):
    """From one option of an item to a larger one of less cost."""

    gain_per_bit: float
    bits: int
    item: int
    source: int
    target: int


def allocate(items: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """For each item the index of its option. The same input has the same answer on any machine.

    The sum of costs is that of the best choice there is, or above it by no more than what a single
    step gains, of items but the largest: of hundreds of items, that is next to nothing.

    Raises ValueError if the smallest options do not fit the budget together.
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
    """Bits and costs of a choice."""
    taken = [options[i] for options, i in zip(items, chosen, strict=True)]
    return sum(option.bits for option in taken), sum(option.cost for option in taken)


def _greedy(items: Sequence[Sequence[Option]], budget: int) -> list[int] | None:
    """The steps that gain most for a bit, while they fit; None if nothing does."""
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
    """The most for a bit first; of equals the longest."""
    return -step.gain_per_bit, -step.bits, step.item


def _smallest(options: Sequence[Option]) -> int:
    return min(range(len(options)), key=lambda i: options[i])


def _hull(item: int, options: Sequence[Option]) -> Iterator[_Step]:
    """The steps from the smallest option to the least cost, each gaining less for a bit."""
    at = _smallest(options)
    while steps := list(_steps(item, options, at)):
        step = min(steps, key=_by_gain)
        yield step
        at = step.target


def _steps(item: int, options: Sequence[Option], source: int) -> Iterator[_Step]:
    """All steps from an option to those that are larger and cost less."""
    for target, (bits, cost) in enumerate(options):
        more, gain = bits - options[source].bits, options[source].cost - cost
        if more > 0 and gain > 0:
            yield _Step(gain / more, more, item, source, target)
