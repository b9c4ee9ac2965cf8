"""Objectives of tuning, such as the best service of a given load, or the highest rate at which all
limits hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from octavo.measure.request_record import RequestRecord
from octavo.measure.saturation import SATURATED, saturation
from octavo.planner.slo import Slo
from octavo.tuning.outcome import LoadOutcome, load_outcome

LoadRunner = Callable[[Sequence[float]], Sequence[RequestRecord]]
"""Sends the first requests of a load at the given times, one for each."""

QUEUE = "a queue that grows"

# Rates that are tried, and how far below the throughput of a burst they are searched.
_PER_DOUBLING = 24
_MOST_DOUBLINGS = 7
# Shares of the highest rate in simulation that are tried live: it may be too high.
_LIVE_SHARES = (0.9, 0.6)


class Objective(Protocol):
    def judge(self, run: LoadRunner, count: int) -> LoadOutcome:
        """Return the outcome of some settings on the first ``count`` requests."""
        ...

    def trials(self, best: LoadOutcome) -> Iterator[Sequence[float]]:
        """Yields when to send requests to real engines, by the simulated outcome of the best one:
        one plan after the other, until an engine keeps the limits."""
        ...


@dataclass(frozen=True, slots=True)
class GivenLoad:
    """Requests at given times: the more that keep their limits, the better."""

    slo: Slo
    times: Sequence[float]

    def judge(self, run: LoadRunner, count: int) -> LoadOutcome:
        return load_outcome([run(self.times[:count])], self.slo)

    def trials(self, best: LoadOutcome) -> Iterator[Sequence[float]]:
        yield self.times


class HighestRate:
    """The highest rate of requests at which all limits hold and no queue grows.

    Rates are those of a fixed grid, so that rates that hardly differ are the same. None is above
    the throughput of requests that are sent all at once.

    Args:
        unit_times: when requests are sent at a rate of 1; at other rates, they are sent in the
            same rhythm.
    """

    def __init__(self, slo: Slo, unit_times: Sequence[float]):
        self._slo = slo
        self._unit_times = unit_times
        self._near: int | None = None  # the last result: the next one is seldom far

    def judge(self, run: LoadRunner, count: int) -> LoadOutcome:
        """Return the outcome at the highest rate that holds; where none does, at the lowest that
        was tried.

        ``binding`` is the limit that fails at the next rate.
        """
        burst = run([0.0] * count)
        served = [record.ended for record in burst if record.completed]
        if not served:
            return replace(load_outcome([burst], self._slo), score=0.0)
        top = _step_of(len(served) / max(served))
        lowest = top - _MOST_DOUBLINGS * _PER_DOUBLING
        seen: dict[int, LoadOutcome] = {}

        def holds(step: int) -> bool:
            seen[step] = self._at(run, _rate_of(step), count)
            return seen[step].holds

        start = top if self._near is None else min(max(self._near, lowest), top)
        found = highest(holds, start, lowest, top)
        if found is None:
            return replace(seen[lowest], score=0.0)
        self._near = found
        beyond = seen.get(found + 1)
        binding = QUEUE if beyond is None else beyond.binding
        return replace(seen[found], binding=binding, score=_rate_of(found))

    def trials(self, best: LoadOutcome) -> Iterator[Sequence[float]]:
        for share in _LIVE_SHARES:
            yield self._times((best.rate or 1.0) * share)

    def _times(self, rate: float) -> list[float]:
        return [time / rate for time in self._unit_times]

    def _at(self, run: LoadRunner, rate: float, count: int) -> LoadOutcome:
        records = run(self._times(rate)[:count])
        outcome = load_outcome([records], self._slo, rate)
        if outcome.holds and saturation(records, is_open_loop=True).verdict == SATURATED:
            return replace(outcome, strain=math.inf, binding=QUEUE)
        return outcome


def highest(holds: Callable[[int], bool], start: int, lowest: int, top: int) -> int | None:
    """Return the highest number for which something holds that holds below it, too; None if it does
    not hold for the lowest. Steps away from the start grow, and then are halved."""
    good, bad, at, gap = lowest - 1, top + 1, start, 2
    while bad - good > 1:
        if holds(at):
            good = at
        else:
            bad = at
        if good >= lowest and bad <= top:
            at = (good + bad) // 2
        elif good >= lowest:
            at = min(good + gap, top)
        else:
            at = max(bad - gap, lowest)
        gap *= 2
    return good if good >= lowest else None


def _rate_of(step: int) -> float:
    return float(2 ** (step / _PER_DOUBLING))


def _step_of(rate: float) -> int:
    return math.floor(math.log2(rate) * _PER_DOUBLING)
