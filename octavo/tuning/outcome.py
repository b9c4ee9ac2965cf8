"""Outcomes of a load under some settings, and how they compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.base.json_values import finite_or_none
from octavo.measure.metrics import latency_values, run_duration
from octavo.measure.request_record import RequestRecord
from octavo.measure.slo import RequestSlo, goodput
from octavo.measure.statistics import mean_or_percentile
from octavo.planner.slo import Limit, Slo

K = TypeVar("K")
V = TypeVar("V")

# Relative differences of a score, or of a limit, below which outcomes count as equal: runs of one
# engine differ by as much, and simulations are off by more.
NOTICEABLE = 0.05


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """Latencies and throughput of a load, live or simulated.

    Args:
        seconds_of: the latency of each limit; infinite where a request has failed.
        strain: the largest share of a limit that was used up; all limits hold up to 1.
        binding: the name of that limit.
        attainment: the share of the requests that kept their limits: of limits of one metric,
            the loosest, since the stricter ones are of fewer requests, or of their mean.
        goodput, output_throughput: those requests, and tokens of all requests, per second.
        score: to be as large as possible, among outcomes of one objective; by default the
            attainment in whole per cent.
        rate: at which requests were sent, where an objective has chosen that.
    """

    seconds_of: Mapping[str, float]
    strain: float
    binding: str
    attainment: float
    goodput: float
    output_throughput: float
    score: float
    rate: float | None = None

    @property
    def holds(self) -> bool:
        return self.strain <= 1.0

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort key; larger is better."""
        return self.holds, self.score, -self.strain

    def is_better_than(self, other: LoadOutcome) -> bool:
        """True if it ranks higher by a noticeable difference."""
        if self.holds != other.holds:
            return self.holds
        if abs(self.score - other.score) > NOTICEABLE * other.score:
            return self.score > other.score
        return self.strain + NOTICEABLE * max(1.0, other.strain) < other.strain

    def as_json(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "goodput": self.goodput,
            "attainment": self.attainment,
            "output_throughput": self.output_throughput,
            "request_rate": self.rate,
            "strain": finite_or_none(self.strain),
            **{
                f"{name}_ms": finite_or_none(1e3 * value) for name, value in self.seconds_of.items()
            },
        }


def first_best(figures: Mapping[K, V], is_better: Callable[[V, V], bool]) -> K:
    """Return the first, unless a later one is better."""
    best, *others = figures
    for each in others:
        if is_better(figures[each], figures[best]):
            best = each
    return best


def load_outcome(
    runs: Sequence[Sequence[RequestRecord]], slo: Slo, rate: float | None = None
) -> LoadOutcome:
    """Return the outcome of runs of the same load, whose latencies are taken together. No limit
    holds where a request has failed."""
    records = [record for run in runs for record in run]
    completed = [record for record in records if record.completed]
    seconds_of = {limit.name: math.inf for limit in slo}
    if len(completed) == len(records):
        values = latency_values(completed)
        seconds_of = {limit.name: _reached(values, limit) for limit in slo}
    strains = {limit.name: seconds_of[limit.name] / limit.seconds for limit in slo}
    binding = max(strains, key=strains.__getitem__)
    duration = sum(map(run_duration, runs))
    good = goodput(records, _of_requests(slo), duration)
    share = good.attainment.share or 0.0
    return LoadOutcome(
        seconds_of,
        strains[binding],
        binding,
        share,
        good.request_goodput,
        sum(record.output_tokens for record in completed) / duration if duration else 0.0,
        score=round(100 * share),
        rate=rate,
    )


def _reached(values: Mapping[str, Sequence[float]], limit: Limit) -> float:
    """Return the latency that a limit is of; 0 where no request has one, as answers of one token
    have no time between tokens."""
    own = values.get(limit.latency)
    return mean_or_percentile(own, limit.percentile) if own else 0.0


def _of_requests(slo: Slo) -> RequestSlo:
    loosest: dict[str, float] = {}
    for limit in slo:
        loosest[limit.latency] = max(limit.seconds, loosest.get(limit.latency, 0.0))
    return RequestSlo(**loosest)
