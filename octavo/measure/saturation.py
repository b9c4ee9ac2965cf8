"""Tells whether the server kept up with its load, or a queue grew.

Latencies of a run with more load than the server can bear depend on the length of the run, and on
nothing else: the queue grows for as long as requests are sent. Three signs show it; one of them
alone may be chance.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.measure.concurrency import concurrency_curve, mean_concurrency
from octavo.measure.request_record import RequestRecord
from octavo.measure.statistics import percentile

KEEPING_UP, SATURATED, CANNOT_SAY = "keeping up", "saturated", "cannot say"

_MIN_REQUESTS = 20
_MIN_WINDOW = 3.0  # times a request without a queue
_MAX_DEFICIT = 0.1
_MAX_GROWTH = 1.5  # from the first half to the second
_LEAST_REQUESTS, _LEAST_SECONDS = 2.0, 0.01  # growth below that is no growth


@dataclass(frozen=True, slots=True)
class Trend:
    """A quantity in the first and in the second half of the window, and its slope per second."""

    first: float
    second: float
    slope: float

    def grows(self, least: float) -> bool:
        return self.second > _MAX_GROWTH * self.first and self.second - self.first > least

    def as_json(self, scale: float = 1.0) -> dict[str, float]:
        return {
            "first_half": self.first * scale,
            "second_half": self.second * scale,
            "slope_per_s": self.slope * scale,
        }


@dataclass(frozen=True, slots=True)
class Saturation:
    """The verdict, its reason and its figures, which are None where nothing can be said.

    ``deficit``: 1 - completions / arrivals while requests were sent. TTFT is from the scheduled
    time, in seconds; ``concurrency`` counts requests that wait in the load generator, too.
    """

    verdict: str
    reason: str
    arrival_rate: float | None = None
    completion_rate: float | None = None
    deficit: float | None = None
    ttft: Trend | None = None
    concurrency: Trend | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "arrival_rate": self.arrival_rate,
            "completion_rate": self.completion_rate,
            "completion_deficit": self.deficit,
            "ttft_ms": self.ttft and self.ttft.as_json(1e3),
            "concurrency": self.concurrency and self.concurrency.as_json(),
        }


def saturation(records: Sequence[RequestRecord], *, is_open_loop: bool) -> Saturation:
    """Return the verdict on a run.

    Args:
        is_open_loop: requests came by a schedule, not when others had ended.
    """
    if not is_open_loop:
        return Saturation(
            CANNOT_SAY, "a request is only sent when another has ended, so that no queue can grow"
        )
    if len(records) < _MIN_REQUESTS:
        return Saturation(CANNOT_SAY, f"there are fewer than {_MIN_REQUESTS} requests")
    begin = min(record.scheduled for record in records)
    end = max(record.scheduled for record in records)
    completed = [record for record in records if record.completed]
    if end <= begin:
        return Saturation(CANNOT_SAY, "all requests were sent at once")
    if not completed:
        return Saturation(CANNOT_SAY, "no request was completed")
    return _judge(records, completed, begin, end)


def _judge(
    records: Sequence[RequestRecord], completed: Sequence[RequestRecord], begin: float, end: float
) -> Saturation:
    arrivals = len(records) - 1  # the last one ends the window
    completions = sum(record.ended <= end for record in completed)
    deficit = 1 - completions / arrivals
    ttft, concurrency = _ttft_trend(completed, begin, end), _concurrency_trend(records, begin, end)
    signs = []
    if deficit > _MAX_DEFICIT:
        signs.append(f"{deficit:.0%} fewer requests were completed than came")
    if concurrency.grows(_LEAST_REQUESTS):
        signs.append(f"{concurrency.first:.1f} requests in flight became {concurrency.second:.1f}")
    if ttft is not None and ttft.grows(_LEAST_SECONDS):
        signs.append(f"TTFT grew from {ttft.first * 1e3:.0f} to {ttft.second * 1e3:.0f} ms")
    unloaded = percentile([record.ended - record.sent for record in completed], 10)
    if end - begin < _MIN_WINDOW * unloaded:
        verdict = CANNOT_SAY
        reason = (
            f"requests were sent for {end - begin:.1f} s, and one takes {unloaded:.1f} s: "
            "send for longer"
        )
    elif len(signs) >= 2:
        verdict, reason = SATURATED, "; ".join(signs)
    elif signs:
        verdict, reason = CANNOT_SAY, f"{signs[0]}, but nothing else tells of a queue"
    else:
        verdict, reason = KEEPING_UP, "as many requests were completed as came, and none waited"
        if ttft is not None:
            reason = (
                f"all but {max(0.0, deficit):.0%} of the requests were completed as they came, and "
                f"TTFT did not grow ({ttft.first * 1e3:.0f} to {ttft.second * 1e3:.0f} ms)"
            )
    length = end - begin
    return Saturation(
        verdict, reason, arrivals / length, completions / length, deficit, ttft, concurrency
    )


def _ttft_trend(completed: Sequence[RequestRecord], begin: float, end: float) -> Trend | None:
    middle = (begin + end) / 2
    points = [(record.scheduled, record.ttft + record.delay) for record in completed]
    first = [ttft for scheduled, ttft in points if scheduled < middle]
    second = [ttft for scheduled, ttft in points if scheduled >= middle]
    if not first or not second:
        return None
    return Trend(statistics.median(first), statistics.median(second), _slope(points))


def _concurrency_trend(records: Sequence[RequestRecord], begin: float, end: float) -> Trend:
    curve = concurrency_curve(records, from_scheduled=True)
    middle = (begin + end) / 2
    parts = 20
    edges = [begin + (end - begin) * part / parts for part in range(parts + 1)]
    points = [
        ((edges[i] + edges[i + 1]) / 2, mean_concurrency(curve, edges[i], edges[i + 1]))
        for i in range(parts)
    ]
    return Trend(
        mean_concurrency(curve, begin, middle), mean_concurrency(curve, middle, end), _slope(points)
    )


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Slope of the line of least squares; 0 where it would be vertical."""
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
