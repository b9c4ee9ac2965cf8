"""Measures throughput and latencies against the number of requests in flight.

At each point a closed loop keeps so many requests in flight and is measured while it is full
(``closed_loop.py``). The points are gone through over and over (A B C A B C): a machine
that drifts then does the same to all. Throughputs are medians over these repetitions, latencies
percentiles over the requests of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from octavo.bench.offline.closed_loop import staggered
from octavo.measure.knee import Knee, find_knee
from octavo.measure.statistics import OverSamples, percentile
from octavo.workload.datasets import random_requests
from octavo.workload.requests import WorkloadRequest

LATENCIES = ("ttft", "tpot", "itl", "e2e")
PERCENTS = (50.0, 90.0, 99.0)
# Fewer requests are too few for a percentile, however few are in flight.
_LEAST_MEASURED = 4


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The settings of each point. ``waves``: requests measured, for each one in flight."""

    concurrencies: tuple[int, ...]
    input_len: int = 128
    output_len: int = 128
    repeat: int = 3
    waves: int = 1
    seed: int = 0

    def num_measured(self, concurrency: int) -> int:
        return max(self.waves * concurrency, _LEAST_MEASURED)

    def requests(
        self, concurrency: int, repetition: int, vocab_size: int, avoid: Collection[int] = ()
    ) -> list[WorkloadRequest]:
        """Return the ramp, the measured requests, and enough to be in flight with the last of them.

        No prompt comes twice in a sweep: the prefix cache would contain it.
        """
        number = self.num_measured(concurrency) + 3 * concurrency
        seed = (self.seed * 1000 + repetition) * 100_000 + concurrency
        requests = random_requests(
            number, vocab_size, self.input_len, self.output_len, seed=seed, avoid=avoid
        )
        return [*staggered(requests[:concurrency]), *requests[concurrency:]]


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One repetition of one point. Latencies in seconds: a value for each request; for ITL one for
    each gap.

    ``mean_batch`` and ``num_preemptions`` are None where only a server could know them.
    """

    concurrency: int
    elapsed_s: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    latencies: dict[str, list[float]]
    mean_batch: float | None = None
    num_preemptions: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return all but the gaps: they are many, and their percentiles are in the result."""
        kept = {name: values for name, values in self.latencies.items() if name != "itl"}
        return {
            **{name: value for name, value in asdict(self).items() if name != "latencies"},
            **{f"{name}_ms": [value * 1e3 for value in values] for name, values in kept.items()},
        }


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """All repetitions of one concurrency."""

    concurrency: int
    samples: list[LoadSample]

    output_tps = OverSamples[LoadSample](lambda each: each.num_output_tokens / each.elapsed_s)
    total_tps = OverSamples[LoadSample](
        lambda each: (each.num_prompt_tokens + each.num_output_tokens) / each.elapsed_s
    )

    @property
    def mean_batch(self) -> float | None:
        known = [each.mean_batch for each in self.samples if each.mean_batch is not None]
        return sum(known) / len(known) if known else None

    @property
    def num_preemptions(self) -> int | None:
        known = [each.num_preemptions for each in self.samples if each.num_preemptions is not None]
        return sum(known) if known else None

    def latency_ms(self, name: str, percent: float) -> float | None:
        """Return a percentile over the requests of all repetitions; None if answers are of one
        token."""
        values = [value for each in self.samples for value in each.latencies[name]]
        return percentile(values, percent) * 1e3 if values else None

    def as_json(self, percents: Sequence[float] = PERCENTS) -> dict[str, Any]:
        return {
            "concurrency": self.concurrency,
            "output_tps": self.output_tps.as_json(),
            "total_tps": self.total_tps.as_json(),
            "num_requests": sum(each.num_requests for each in self.samples),
            **{
                f"{name}_ms": {
                    f"p{percent:g}": self.latency_ms(name, percent) for percent in percents
                }
                for name in LATENCIES
            },
            "mean_batch": self.mean_batch,
            "num_preemptions": self.num_preemptions,
        }


@dataclass(frozen=True, slots=True)
class LatencyBounds:
    """Milliseconds that a percentile of each latency may take; None is no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    percent: float = 99.0

    def given(self) -> dict[str, float]:
        bounds = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def excesses(self, point: SweepPoint) -> dict[str, float]:
        """Return each bounded latency over its bound: at most 1 meets it."""
        return {
            name: (point.latency_ms(name, self.percent) or 0.0) / bound
            for name, bound in self.given().items()
        }


@dataclass(frozen=True, slots=True)
class ChosenPoint:
    """The best point within bounds; where none is, the nearest to them, by its worst excess."""

    point: SweepPoint
    excesses: dict[str, float]

    @property
    def is_met(self) -> bool:
        return all(excess <= 1 for excess in self.excesses.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "concurrency": self.point.concurrency,
            "output_tps": self.point.output_tps.median,
            "is_met": self.is_met,
            "latency_over_bound": self.excesses,
        }


def choose_point(points: Sequence[SweepPoint], bounds: LatencyBounds) -> ChosenPoint | None:
    """Return the point with the highest output throughput whose latencies meet all bounds; None
    without bounds."""
    if not bounds.given():
        return None
    choices = [ChosenPoint(point, bounds.excesses(point)) for point in points]
    within = [choice for choice in choices if choice.is_met]
    if within:
        return max(within, key=lambda choice: choice.point.output_tps.median)
    return min(choices, key=lambda choice: max(choice.excesses.values()))


@dataclass(frozen=True, slots=True)
class SweepResult:
    """All points, in order of concurrency, with their knee and the best one."""

    plan: SweepPlan
    points: list[SweepPoint]
    bounds: LatencyBounds = field(default_factory=LatencyBounds)

    @property
    def knee(self) -> Knee:
        return find_knee(
            [point.concurrency for point in self.points],
            [point.output_tps for point in self.points],
        )

    @property
    def best(self) -> ChosenPoint | None:
        return choose_point(self.points, self.bounds)

    def as_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "input_len": self.plan.input_len,
            "output_len": self.plan.output_len,
            "points": [
                point.as_json(sorted({*PERCENTS, self.bounds.percent})) for point in self.points
            ],
            "knee": self.knee.as_json(),
            "bounds": asdict(self.bounds),
            "best": best and best.as_json(),
        }


class LoadSource(Protocol):
    """An engine or a server that is put under load; see ``load_sources.py``."""

    def measure(self, plan: SweepPlan, concurrency: int, repetition: int) -> LoadSample: ...


def sweep(
    source: LoadSource,
    plan: SweepPlan,
    bounds: LatencyBounds | None = None,
    advance: Callable[[], None] = lambda: None,
) -> SweepResult:
    """Measure all points, interleaved. ``advance`` is called after each of their repetitions.

    Raises:
        BenchmarkError: a request failed.
        RequestError: a request cannot be served.
    """
    samples: dict[int, list[LoadSample]] = {number: [] for number in sorted(plan.concurrencies)}
    for repetition in range(plan.repeat):
        for concurrency, found in samples.items():
            found.append(source.measure(plan, concurrency, repetition))
            advance()
    points = [SweepPoint(concurrency, found) for concurrency, found in samples.items()]
    return SweepResult(plan, points, bounds or LatencyBounds())


CSV_COLUMNS = (
    "concurrency",
    *(f"{name}_tps{part}" for name in ("output", "total") for part in ("", "_min", "_max")),
    *(f"{name}_p{percent:g}_ms" for name in LATENCIES for percent in PERCENTS),
    "mean_batch",
    "num_preemptions",
)


def to_csv(points: Sequence[SweepPoint]) -> str:
    """Return a header and a line for each point, for spreadsheets; empty where a value is not
    known."""
    rows = [CSV_COLUMNS, *(_csv_row(point) for point in points)]
    return "".join(",".join(map(_csv_cell, row)) + "\n" for row in rows)


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _csv_row(point: SweepPoint) -> list[Any]:
    rates = [
        value
        for spread in (point.output_tps, point.total_tps)
        for value in (spread.median, spread.min, spread.max)
    ]
    latencies = [point.latency_ms(name, percent) for name in LATENCIES for percent in PERCENTS]
    return [point.concurrency, *rates, *latencies, point.mean_batch, point.num_preemptions]
