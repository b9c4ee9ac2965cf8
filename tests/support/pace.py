"""How fast this machine is at this moment: what bounds of time are measured against.

No test compares a time with a number of seconds, for the next machine is slower, and this one will
be when somebody else has its other cores. A bound is a multiple of what was measured a moment
before: of the same work on less, or without what is said to disturb it, or else of plain Python.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

Clock = Callable[[], float]

_ROUNDS = 10_000  # of a measurement: a millisecond, or less
_REPEATS = 5
_SLEEP = 0.005


def python_seconds(rounds: float, clock: Clock = time.process_time) -> float:
    """Seconds that ``rounds`` of a plain loop in Python take now: 50 to 100 ns each.

    By ``time.perf_counter``, a machine that is busy takes longer; by the other clocks, one that is
    slow.
    """
    return rounds * min(_seconds_of_a_round(clock) for _ in range(_REPEATS))


def least_seconds(work: Callable[[], object], repeats: int = 3, clock: Clock = time.process_time):
    """Seconds of the quickest of some times that ``work`` is done."""
    return min(_seconds_of(work, clock) for _ in range(repeats))


def lateness(sleeps: int = 15) -> float:
    """By how many seconds a thread that sleeps goes on too late, in the median: hardly any where a
    core is free, and tens of milliseconds where many others wait for one."""
    found = []
    for _ in range(sleeps):
        begin = time.perf_counter()
        time.sleep(_SLEEP)
        found.append(time.perf_counter() - begin - _SLEEP)
    return statistics.median(found)


def _seconds_of(work: Callable[[], object], clock: Clock) -> float:
    begin = clock()
    work()
    return clock() - begin


def _seconds_of_a_round(clock: Clock) -> float:
    begin = clock()
    total, slots = 0, {}
    for index in range(_ROUNDS):
        slots[index % 7] = total
        total += index
    return (clock() - begin) / _ROUNDS
