"""Faults on demand: named points in the code at which a test can make something go wrong.

    with faults.armed({"scheduler.preempt": faults.every(3)}):
        ...                     # every third step preempts somebody who need not be preempted

A point that is not armed costs one comparison. The points:

    scheduler.preempt   a running request that has made progress loses its blocks
    runner.nan          the first row of a batch turns to NaN
    executor.submit     a step raises
    store.write         the disk is full
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

POINTS = ("executor.submit", "runner.nan", "scheduler.preempt", "store.write")

# Says whether the fault happens this time.
Trigger = Callable[[], bool]

_armed: Mapping[str, Trigger] | None = None


def hit(point: str) -> bool:
    """Whether the fault at ``point`` happens now. False unless a test has armed it."""
    if _armed is None:
        return False
    trigger = _armed.get(point)
    return trigger is not None and trigger()


@contextmanager
def armed(triggers: Mapping[str, Trigger]) -> Iterator[None]:
    """Arm points for the length of a ``with`` block. Unknown names are refused."""
    global _armed
    unknown = set(triggers) - set(POINTS)
    if unknown:
        raise ValueError(f"no such fault points: {sorted(unknown)}")
    before, _armed = _armed, triggers
    try:
        yield
    finally:
        _armed = before


def every(count: int) -> Trigger:
    """Each ``count``-th time."""
    calls = 0

    def trigger() -> bool:
        nonlocal calls
        calls += 1
        return calls % count == 0

    return trigger


def sometimes(rate: float, seed: int) -> Trigger:
    """With probability ``rate``, from ``seed``."""
    rng = random.Random(seed)
    return lambda: rng.random() < rate
