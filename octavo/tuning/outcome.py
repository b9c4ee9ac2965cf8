"""What a load made of some settings, and which of two outcomes is the better one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.measure.metrics import latency_values, run_duration
from octavo.measure.request_record import RequestRecord
from octavo.measure.slo import RequestSlo as RequestLimits
from octavo.measure.slo import goodput
from octavo.measure.statistics import percentile
from octavo.planner.slo import Limit, Slo

K = TypeVar("K")
V = TypeVar("V")

# Of the records of requests, by the name of a limit's metric.
_LATENCIES = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}
# Shares of a score, or of a limit, that say nothing: runs of one engine differ by as much, and
# simulations are off by more.
NOTICEABLE = 0.05


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """Of a load that was served, in earnest or in simulation.

    Args:
        seconds_of: what each limit is of, by its name; infinite where a request has failed.
        strain: the largest share of a limit that was used up; all limits hold up to 1.
        binding: the name of that limit.
        attainment: the share of the requests that kept their limits: of limits of one metric, the
            loosest, since the stricter ones are of fewer requests, or of their mean.
        goodput: those requests, and output_throughput: tokens of all, each second.
        score: what is to be as large as can be, among outcomes of one objective; here it is the
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
        """Larger is better."""
        return self.holds, self.score, -self.strain

    def is_better_than(self, other: LoadOutcome) -> bool:
        """Whether it is ranked higher, and by what can be noticed."""
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
            "strain": _finite(self.strain),
            **{f"{name}_ms": _finite(1e3 * value) for name, value in self.seconds_of.items()},
        }


def first_best(figures: Mapping[K, V], is_better: Callable[[V, V], bool]) -> K:
    """The first, unless one that comes later is better."""
    best, *others = figures
    for each in others:
        if is_better(figures[each], figures[best]):
            best = each
    return best


def load_outcome(
    runs: Sequence[Sequence[RequestRecord]], slo: Slo, rate: float | None = None
) -> LoadOutcome:
    """Of runs of the same load, whose latencies are taken together. Nothing holds where a request
    has failed."""
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
    """What a limit is of; 0 where no request has such a latency, as answers of one token have no
    time between tokens."""
    own = values.get(_LATENCIES[limit.metric])
    if not own:
        return 0.0
    if limit.percentile is None:
        return sum(own) / len(own)
    return percentile(own, limit.percentile)


def _of_requests(slo: Slo) -> RequestLimits:
    loosest: dict[str, float] = {}
    for limit in slo:
        name = _LATENCIES[limit.metric]
        loosest[name] = max(limit.seconds, loosest.get(name, 0.0))
    return RequestLimits(**loosest)


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
