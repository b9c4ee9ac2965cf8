"""Which of its options each item takes, so that costs are least and sizes fit a budget.

The problem is the multiple-choice knapsack. It is solved greedily along convex hulls: of an item's
options only those count that no mix of two others beats, and going from one to the next larger
gains less and less for each bit. So all steps of all items are taken in the order of what they gain
for a bit, which is Lagrange's solution for one budget after the other; where a step does not fit,
the rest of the budget is filled with what does.

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
    """From what an item has to a larger option."""

    gain_per_bit: float
    bits: int
    item: int
    option: int


def allocate(items: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """For each item the index of its option. The same input has the same answer on any machine.

    The sum of costs is that of the best choice there is, or above it by no more than what the first
    step that did not fit would have gained; of hundreds of items, that is next to nothing.

    Raises ValueError if the smallest options do not fit the budget together.
    """
    chosen = [min(range(len(options)), key=lambda i: options[i]) for options in items]
    left = budget - sum(options[i].bits for options, i in zip(items, chosen, strict=True))
    if left < 0:
        raise ValueError(f"the smallest options take {-left} bits more than {budget}")
    steps = [step for item, options in enumerate(items) for step in _hull(item, options)]
    for step in sorted(steps, key=lambda step: (-step.gain_per_bit, step.item)):
        if step.bits > left:
            break
        chosen[step.item], left = step.option, left - step.bits
    _fill(items, chosen, left)
    return chosen


def _hull(item: int, options: Sequence[Option]) -> Iterator[_Step]:
    """The steps from the smallest option to the least cost, each gaining less for a bit."""
    at = min(range(len(options)), key=lambda i: options[i])
    while steps := list(_steps(item, options, at)):
        best = max(steps, key=lambda step: (step.gain_per_bit, step.bits))
        yield best
        at = best.option


def _steps(item: int, options: Sequence[Option], at: int) -> Iterator[_Step]:
    """All steps from an option to those that cost less. They are larger, if it is on the hull."""
    for option, (bits, cost) in enumerate(options):
        more, gain = bits - options[at].bits, options[at].cost - cost
        if more > 0 and gain > 0:
            yield _Step(gain / more, more, item, option)


def _fill(items: Sequence[Sequence[Option]], chosen: list[int], left: int) -> None:
    """Take what still fits, the step that gains most first, until nothing does."""
    while True:
        fitting = [
            step
            for item, options in enumerate(items)
            for step in _steps(item, options, chosen[item])
            if step.bits <= left
        ]
        if not fitting:
            return
        best = max(fitting, key=lambda step: (step.gain_per_bit * step.bits, -step.item))
        chosen[best.item], left = best.option, left - best.bits
