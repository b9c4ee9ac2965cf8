"""Metrics of a load test, from the records of its requests: latencies and throughputs.

The definitions are those of ``vllm bench serve``, so that figures can be compared, except where
those are known to be wrong: peak throughput counts tokens and not chunks, and peak concurrency is
exact and not by whole seconds. docs/metrics.md has them all. Nothing here reads a clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from octavo.measure.concurrency import concurrency_curve
from octavo.measure.request_record import RequestRecord
from octavo.measure.statistics import bootstrap, percentile, resamples

# The latencies of a report, by the names that they have in it.
LATENCIES = (
    *("ttft", "tpot", "itl", "e2el"),
    *("client_queue_time", "e2el_including_client_queue"),
    *("ttft_from_scheduled", "e2el_from_scheduled", "normalized_latency", "send_lag"),
)


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of one value or more, in their unit. ``std`` is that of a population."""

    count: int
    mean: float
    median: float
    std: float
    min: float
    max: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, values: Sequence[float], percents: Sequence[float]) -> Distribution:
        ordered = sorted(values)
        mean = statistics.fmean(ordered)
        return cls(
            len(ordered),
            mean,
            statistics.median(ordered),
            # As statistics.pstdev, which computes with fractions, and takes long.
            math.sqrt(math.fsum([(value - mean) ** 2 for value in ordered]) / len(ordered)),
            ordered[0],
            ordered[-1],
            {percent: percentile(ordered, percent) for percent in percents},
        )

    def as_json(self, scale: float = 1e3) -> dict[str, Any]:
        """Return the figures, by default in milliseconds, of seconds."""
        return {
            "count": self.count,
            "mean": self.mean * scale,
            "median": self.median * scale,
            "std": self.std * scale,
            "min": self.min * scale,
            "max": self.max * scale,
            **{percent_name(each): value * scale for each, value in self.percentiles.items()},
        }


def percent_name(percent: float) -> str:
    """Name a percentile: p99, p99.9."""
    return f"p{percent:g}"


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """Metrics of a run, or of a part of it. Seconds, and rates per second.

    ``latencies`` lacks those that no request has, such as TPOT where all answers are one token.
    """

    duration: float
    completed: int
    failed: int
    unfinished: int
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int | None  # None if the server does not tell
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    latencies: dict[str, Distribution]

    @property
    def request_throughput(self) -> float:
        return self._rate(self.completed)

    @property
    def output_throughput(self) -> float:
        return self._rate(self.total_output_tokens)

    @property
    def total_token_throughput(self) -> float:
        return self._rate(self.total_input_tokens + self.total_output_tokens)

    def _rate(self, count: int) -> float:
        return count / self.duration if self.duration else 0.0


def summarize(
    records: Sequence[RequestRecord],
    percents: Sequence[float] = (50, 90, 99),
    duration: float | None = None,
) -> LoadMetrics:
    """Return the metrics of these requests.

    Tokens and latencies are those of completed requests. ``duration`` is that of the run, from the
    first sending to the last answer, if not given.
    """
    completed = [record for record in records if record.completed]
    unfinished = sum(record.unfinished for record in records)
    cached = [each.cached_tokens for each in completed if each.cached_tokens is not None]
    if duration is None:
        duration = run_duration(records)
    return LoadMetrics(
        duration=duration,
        completed=len(completed),
        failed=len(records) - len(completed) - unfinished,
        unfinished=unfinished,
        total_input_tokens=sum(record.prompt_tokens or 0 for record in completed),
        total_output_tokens=sum(record.output_tokens for record in completed),
        total_cached_tokens=sum(cached) if cached else None,
        max_output_tokens_per_s=peak_output_rate(completed, duration),
        max_concurrent_requests=max((n for _, n in concurrency_curve(records)), default=0),
        latencies={
            name: Distribution.of(values, percents)
            for name, values in latency_values(records).items()
            if values
        },
    )


def run_duration(records: Sequence[RequestRecord]) -> float:
    """Seconds from the first sending to the last answer, or failure."""
    if not records:
        return 0.0
    ends = (record.last_token if record.completed else record.ended for record in records)
    return max(end for end in ends if end is not None) - min(record.sent for record in records)


def latency_values(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return seconds, one value for each completed request; for ITL one for each gap, of all
    requests together; for the send lag one for each that was sent."""
    completed = [record for record in records if record.completed]
    return {
        "ttft": [record.ttft for record in completed],
        "tpot": [tpot for record in completed if (tpot := record.tpot) is not None],
        "itl": [gap for record in completed for gap in record.itls],
        "e2el": [record.e2el for record in completed],
        "client_queue_time": [record.queue_time for record in completed],
        "e2el_including_client_queue": [record.e2el + record.queue_time for record in completed],
        "ttft_from_scheduled": [record.ttft + record.delay for record in completed],
        "e2el_from_scheduled": [record.e2el + record.delay for record in completed],
        "normalized_latency": [
            latency for record in completed if (latency := record.normalized_latency) is not None
        ],
        "send_lag": [record.send_lag for record in records],
    }


def peak_output_rate(completed: Sequence[RequestRecord], duration: float) -> float:
    """Return the most output tokens of any second since the first sending; a run that is shorter
    than a second is one bin."""
    if not completed or not duration:
        return 0.0
    begin = min(record.sent for record in completed)
    width = min(1.0, duration)
    last = max(0, int(duration / width) - 1) if duration <= 1.0 else int(duration)
    bins = [0] * (last + 1)
    for record in completed:
        for time, tokens in zip(record.event_times, record.tokens_of_events(), strict=True):
            bins[min(last, int((time - begin) / width))] += tokens
    return max(bins) / width


def bootstrap_intervals(
    records: Sequence[RequestRecord], percents: Sequence[float], seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Return 95 % intervals of means, medians and percentiles, by resampling the requests.

    Keys are as in the report: ``mean_ttft_ms``; values are in milliseconds. The gaps of one request
    belong together, so that of ITL only the mean has one. Empty for fewer than two requests.
    """
    found: dict[str, tuple[float, float]] = {}
    completed = [record for record in records if record.completed]
    rounds = max(40, min(200, 400_000 // max(1, len(completed))))
    samples = cache(partial(resamples, rounds=rounds, seed=seed))  # the same for all figures
    values = latency_values(completed)
    for name in ("ttft", "tpot", "e2el"):
        seconds = values[name]
        if len(seconds) < 2:
            continue
        wanted = {"median": 50.0} | {percent_name(percent): percent for percent in percents}
        of_sample: dict[str, Callable[[Sequence[float]], float]] = {
            f"mean_{name}_ms": statistics.fmean
        }
        for statistic, percent in wanted.items():
            of_sample[f"{statistic}_{name}_ms"] = partial(percentile, percent=percent)
        found |= bootstrap([value * 1e3 for value in seconds], of_sample, samples(len(seconds)))
    gaps = [itls for record in completed if (itls := record.itls)]
    if len(gaps) >= 2:
        totals, counts = [sum(itls) * 1e3 for itls in gaps], [len(itls) for itls in gaps]

        def mean_gap(drawn: Sequence[float]) -> float:
            chosen = [int(index) for index in drawn]
            return sum([totals[i] for i in chosen]) / sum([counts[i] for i in chosen])

        found |= bootstrap(range(len(gaps)), {"mean_itl_ms": mean_gap}, samples(len(gaps)))
    return found
