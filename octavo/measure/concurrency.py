"""Requests in flight over a run, and its steady state.

A run begins with an empty server and ends with an idle one; the part in between, under load, shows
a server that is always on.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from octavo.measure.request_record import RequestRecord

# A closed loop replaces a request only when it has ended: dips shorter than this share of a request
# are no change of the load.
_BRIDGED_SHARE = 0.1


def powers_of_two(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … and ``limit`` itself."""
    powers = [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit]
    return tuple(powers if powers[-1] == limit else [*powers, limit])


def concurrency_curve(
    records: Iterable[RequestRecord], *, from_scheduled: bool = False
) -> list[tuple[float, int]]:
    """Return pairs (time, requests in flight from then on), in order of time; one for each time.

    ``from_scheduled``: count from the time of schedule, with requests that wait to be sent.
    """
    changes: dict[float, int] = {}
    for record in records:
        begin = record.scheduled if from_scheduled else record.sent
        changes[begin] = changes.get(begin, 0) + 1
        changes[record.ended] = changes.get(record.ended, 0) - 1
    curve, number = [], 0
    for time in sorted(changes):
        number += changes[time]
        curve.append((time, number))
    return curve


def mean_concurrency(curve: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Return the mean over time; 0 before the curve begins and after it ends."""
    if end <= begin:
        return 0.0
    area = 0.0
    for (time, number), (until, _) in pairwise(curve):
        area += number * max(0.0, min(until, end) - max(time, begin))
    return area / (end - begin)


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A part of a run, in seconds of its clock."""

    begin: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.begin

    def holds(self, record: RequestRecord) -> bool:
        """True if the whole request is in it."""
        return record.sent >= self.begin and record.ended <= self.end


def steady_window(records: Sequence[RequestRecord], share: float = 0.8) -> TimeWindow | None:
    """Return the longest interval with at least ``share`` of the peak's requests in flight.

    Dips that last less than a tenth of the median request are passed over. None without requests.
    """
    curve = concurrency_curve(records)
    if not curve:
        return None
    least = share * max(number for _, number in curve)
    bridge = _BRIDGED_SHARE * statistics.median(record.ended - record.sent for record in records)
    spans: list[TimeWindow] = []
    for (time, number), (until, _) in pairwise(curve):
        if number < least:
            continue
        if spans and time - spans[-1].end <= bridge:
            spans[-1] = TimeWindow(spans[-1].begin, until)
        else:
            spans.append(TimeWindow(time, until))
    return max(spans, key=lambda span: span.length, default=None)
