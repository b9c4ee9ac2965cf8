"""The same requests, simulated and live: how far what is foreseen is from what comes.

Every trace is run several times, each time with other requests, and simulated with just those. A
simulation is run three times: with what steps take, and with the least and the most that they may;
what is measured should lie in between nine times out of ten.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.calibration.live import run_live
from octavo.cost.step_cost import StepModel
from octavo.errors import BenchmarkError
from octavo.measure.metrics import summarize
from octavo.measure.request_record import RequestRecord
from octavo.sim.demand import asks_of_requests
from octavo.sim.fleet import FleetSpec
from octavo.sim.replica import Cost, ReplicaSpec
from octavo.sim.simulation import simulate
from octavo.workload.arrivals import arrival_times
from octavo.workload.datasets import random_requests
from octavo.workload.plan import LoadPlan
from octavo.workload.requests import WorkloadRequest

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession

_RANGE = 0.25  # of lengths, around their mean
_FULL = 4  # times as many requests as an engine runs at once show what it gets through

METRICS = ("output_throughput", "mean_tpot_ms", "mean_ttft_ms", "p99_ttft_ms")


@dataclass(frozen=True, slots=True)
class Trace:
    """Random prompts at a rate.

    Args:
        load: the rate, as a share of what the engine can do at most. burstiness: as of
            ``LoadSettings``.
        input_len, output_len: mean tokens; lengths vary by a quarter of that.
        prefix_len: tokens that all prompts begin with, besides.
    """

    name: str
    load: float
    burstiness: float = 1.0
    input_len: int = 128
    output_len: int = 64
    prefix_len: int = 0

    def requests(self, count: int, vocab_size: int, seed: int) -> list[WorkloadRequest]:
        return random_requests(
            count,
            vocab_size,
            self.input_len,
            self.output_len,
            range_ratio=_RANGE,
            prefix_len=self.prefix_len,
            seed=seed,
        )


TRACES = (
    Trace("half of capacity", 0.5),
    Trace("85 % of capacity", 0.85),
    Trace("bursts", 0.6, burstiness=0.25),
    Trace("shared prefix", 0.6, input_len=64, prefix_len=256),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one run. ``error``: simulated to live, less one."""

    trace: str
    repeat: int
    metric: str
    live: float
    simulated: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.simulated / self.live - 1

    @property
    def is_inside(self) -> bool:
        return self.low <= self.live <= self.high

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error, "inside": self.is_inside}


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By metric: errors as shares, and how often what came was in the interval."""
    found = {}
    for metric in dict.fromkeys(row.metric for row in rows):
        own = [row for row in rows if row.metric == metric]
        errors = [abs(row.error) for row in own]
        found[metric] = {
            "mean_abs_error": statistics.fmean(errors),
            "max_abs_error": max(errors),
            "inside_interval": statistics.fmean(row.is_inside for row in own),
        }
    return found


Progress = Callable[[str, int, int], None]
"""Is told what runs, and which it is of how many."""


class Case(NamedTuple):
    """Requests, and the seconds from the start at which they are sent, in order."""

    trace: str
    repeat: int
    requests: Sequence[WorkloadRequest]
    times: Sequence[float]


def cases(
    session: OfflineSession,
    model: StepModel,
    *,
    repeats: int = 3,
    num_requests: int = 60,
    seed: int = 0,
    traces: Sequence[Trace] = TRACES,
) -> Iterator[Case]:
    """All traces, drawn anew for each repeat."""
    for trace in traces:
        rate = trace.load * _capacity(session, model, trace)
        for repeat in range(repeats):
            drawn = seed + repeat
            requests = trace.requests(num_requests, session.vocab_size, drawn)
            times = arrival_times(
                len(requests), rate, burstiness=trace.burstiness, seed=drawn, rescaled=False
            )
            yield Case(trace.name, repeat, requests, times)


def validate(
    session: OfflineSession,
    model: StepModel,
    cases: Sequence[Case],
    progress: Progress = lambda what, done, total: None,
) -> list[Row]:
    """Run all cases live on the engine of a session, and simulated by a model of its steps.

    Raises:
        BenchmarkError: a request failed. QueueFullError: a case is more than the engine takes.
    """
    rows: list[Row] = []
    for number, case in enumerate(cases):
        progress(case.trace, number, len(cases))
        salt = f"{case.trace} {case.repeat}"
        live = run_live(session, case.requests, case.times, cache_salt=salt)
        foreseen = [
            _figures(_records(session, cost, case.requests, case.times)) for cost in _costs(model)
        ]
        rows += _rows(case, _figures(_completed(live)), foreseen)
    return rows


class _Costs(NamedTuple):
    value: Cost
    low: Cost
    high: Cost


def _costs(model: StepModel) -> _Costs:
    return _Costs(
        model.seconds,
        lambda batch: model.cost(batch.items, batch.num_rounds).total.low,
        lambda batch: model.cost(batch.items, batch.num_rounds).total.high,
    )


def _rows(
    case: Case, live: Mapping[str, float], foreseen: Sequence[Mapping[str, float]]
) -> Iterator[Row]:
    for metric in METRICS:
        if metric in live:
            values = [figures[metric] for figures in foreseen]
            yield Row(
                *(case.trace, case.repeat, metric, live[metric]),
                *(values[0], min(values), max(values)),
            )


def _capacity(session: OfflineSession, model: StepModel, trace: Trace) -> float:
    """Requests a second that the simulated engine gets through when all are there at once."""
    count = _FULL * session.loaded.config.scheduler.max_num_seqs
    requests = trace.requests(count, session.vocab_size, seed=0)
    records = _records(session, model.seconds, requests, [0.0] * count)
    return count / max(record.ended for record in records)


def _records(
    session: OfflineSession,
    cost: Cost,
    requests: Sequence[WorkloadRequest],
    times: Sequence[float],
) -> list[RequestRecord]:
    replica = ReplicaSpec(session.loaded.config, cost)
    result = simulate(asks_of_requests(requests), LoadPlan(times), FleetSpec(replica))
    return _completed(result.records)


def _completed(records: list[RequestRecord]) -> list[RequestRecord]:
    for record in records:
        if not record.completed:
            raise BenchmarkError(f"request {record.request_id} failed: {record.error}")
    return records


def _figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    begin = min(record.sent for record in records)
    metrics = summarize(records, (99.0,), max(record.ended for record in records) - begin)
    figures = {"output_throughput": metrics.output_throughput}
    if "tpot" in metrics.latencies:  # answers of one token have none
        figures["mean_tpot_ms"] = 1e3 * metrics.latencies["tpot"].mean
    ttft = metrics.latencies["ttft"]
    return {
        **figures,
        "mean_ttft_ms": 1e3 * ttft.mean,
        "p99_ttft_ms": 1e3 * ttft.percentiles[99.0],
    }
