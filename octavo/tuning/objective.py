"""What is asked for: a given load served as well as can be, or the highest rate at which all limits
hold."""

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
"""Sends the first requests of a load, as many as there are times, at these times."""

QUEUE = "a queue that grows"

# Rates that are tried, and how far below what a burst gets through they are looked for.
_PER_DOUBLING = 24
_MOST_DOUBLINGS = 7
# Of the highest rate in simulation, which may be too high: what is tried live.
_LIVE_SHARES = (0.9, 0.6)


class Objective(Protocol):
    def judge(self, run: LoadRunner, count: int) -> LoadOutcome:
        """What some settings make of the first ``count`` requests."""
        ...

    def trials(self, best: LoadOutcome) -> Iterator[Sequence[float]]:
        """When to send requests to real engines, by what the best one makes of them in simulation:
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
    """The more requests a second, the better, as long as all limits hold and no queue grows.

    Rates are those of a fixed grid, so that what is hardly better is the same. None is above what
    the engine gets through when all requests are there at once.

    Args:
        unit_times: when requests are sent at a rate of 1; at other rates, they are sent in the same
            rhythm.
    """

    def __init__(self, slo: Slo, unit_times: Sequence[float]):
        self._slo = slo
        self._unit_times = unit_times
        self._near: int | None = None  # what was found last: the next is seldom far

    def judge(self, run: LoadRunner, count: int) -> LoadOutcome:
        """At the highest rate that was found. Where that is none, at the lowest that was tried.

        ``binding`` is what does not hold any more at the next rate.
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
    """The highest number for which something holds that holds below it, too; None if it does not
    hold for the lowest. Steps away from the start become ever longer, and then are halved."""
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
