"""Validates predictions, by the same requests simulated and live.

Every trace is run several times, each time with other requests, and simulated with just those. A
simulation is run three times: with predicted step times, and with their lower and upper bounds;
measured figures should lie in between nine times out of ten.

Before and after each run a second of other work measures the speed of the machine at that time
(`slowness`), and the simulation is of that speed. The prediction for the machine as it was
calibrated is told beside it: the difference is due to the machine, not to the model of steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.base.errors import BenchmarkError
from octavo.calibration.live_run import run_live
from octavo.calibration.slowness import between, slowness_now
from octavo.cost.hardware import Device
from octavo.cost.measured_steps import MeasuredSteps, calibrated
from octavo.measure.metrics import summarize
from octavo.measure.request_record import RequestRecord
from octavo.sim.costs import BatchCost, BatchCosts, batch_costs
from octavo.sim.fleet import FleetSpec
from octavo.sim.prompts import prompts_of_requests
from octavo.sim.replica import ReplicaSpec
from octavo.sim.simulation import simulate
from octavo.workload.arrivals import arrival_times
from octavo.workload.datasets import random_requests
from octavo.workload.plan import LoadPlan
from octavo.workload.requests import WorkloadRequest

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession

_RANGE = 0.25  # of lengths, around their mean
_FULL = 4  # times the requests that an engine runs at once are enough to measure its throughput

METRICS = ("output_throughput", "mean_tpot_ms", "mean_ttft_ms", "p99_ttft_ms")


@dataclass(frozen=True, slots=True)
class ValidationTrace:
    """Random prompts at a rate.

    Args:
        load: the rate, as a share of the throughput of the engine.
        burstiness: as of ``LoadSettings``.
        input_len, output_len: mean tokens; lengths vary by a quarter of that.
        prefix_len: number of tokens that all prompts begin with, besides.
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
    ValidationTrace("half of capacity", 0.5),
    ValidationTrace("85 % of capacity", 0.85),
    ValidationTrace("bursts", 0.6, burstiness=0.25),
    ValidationTrace("shared prefix", 0.6, input_len=64, prefix_len=256),
)


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """One figure of one run.

    Args:
        simulated, low, high: of the machine as it was then.
        as_calibrated: of the machine as it was calibrated.
    """

    trace: str
    repeat: int
    metric: str
    live: float
    simulated: float
    low: float
    high: float
    as_calibrated: float

    @property
    def error(self) -> float:
        """Simulated over live, less one."""
        return self.simulated / self.live - 1

    @property
    def error_as_calibrated(self) -> float:
        return self.as_calibrated / self.live - 1

    @property
    def is_inside(self) -> bool:
        return self.low <= self.live <= self.high

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "error": self.error,
            "error_as_calibrated": self.error_as_calibrated,
            "inside": self.is_inside,
        }


def summary(rows: Sequence[ValidationRow]) -> dict[str, dict[str, float]]:
    """Return, by metric, relative errors, and the share of live figures inside of their
    intervals."""
    found = {}
    for metric in dict.fromkeys(row.metric for row in rows):
        own = [row for row in rows if row.metric == metric]
        errors = [abs(row.error) for row in own]
        found[metric] = {
            "mean_abs_error": statistics.fmean(errors),
            "max_abs_error": max(errors),
            "inside_interval": statistics.fmean(row.is_inside for row in own),
            "mean_abs_error_as_calibrated": statistics.fmean(
                abs(row.error_as_calibrated) for row in own
            ),
        }
    return found


Progress = Callable[[str, int, int], None]
"""Called with the name of a trace, its number, and how many there are."""


class ValidationCase(NamedTuple):
    """Requests, and the seconds from the start at which they are sent, in order."""

    trace: str
    repeat: int
    requests: Sequence[WorkloadRequest]
    times: Sequence[float]


def validation_cases(
    session: OfflineSession,
    device: Device,
    steps: MeasuredSteps,
    *,
    repeats: int = 3,
    num_requests: int = 100,
    seed: int = 0,
    traces: Sequence[ValidationTrace] = TRACES,
) -> Iterator[ValidationCase]:
    """Yields all traces, drawn anew for each repeat."""
    for trace in traces:
        rate = trace.load * _capacity(session, device, steps, trace)
        for repeat in range(repeats):
            drawn = seed + repeat
            requests = trace.requests(num_requests, session.vocab_size, drawn)
            times = arrival_times(
                len(requests), rate, burstiness=trace.burstiness, seed=drawn, rescaled=False
            )
            yield ValidationCase(trace.name, repeat, requests, times)


def validate(
    session: OfflineSession,
    device: Device,
    steps: MeasuredSteps,
    validation_cases: Sequence[ValidationCase],
    progress: Progress = lambda what, done, total: None,
) -> list[ValidationRow]:
    """Run all cases live on the engine of a session, and simulate them with its step times.

    Raises:
        BenchmarkError: a request failed.
        QueueFullError: a case is more than the engine takes.
    """
    rows: list[ValidationRow] = []
    before = slowness_now(session, steps, seed=-1)
    for number, case in enumerate(validation_cases):
        progress(case.trace, number, len(validation_cases))
        salt = f"{case.trace} {case.repeat}"
        live = _figures(_completed(run_live(session, case.requests, case.times, cache_salt=salt)))
        after = slowness_now(session, steps, seed=number)
        then = replace(steps, slowness=between(before, after))
        before = after
        rows += _rows(
            case,
            live,
            [_simulated(session, case, cost) for cost in _costs(session, device, then)],
            _simulated(session, case, _costs(session, device, steps).value),
        )
    return rows


def _rows(
    case: ValidationCase,
    live: Mapping[str, float],
    predicted: Sequence[Mapping[str, float]],
    as_calibrated: Mapping[str, float],
) -> Iterator[ValidationRow]:
    for metric in METRICS:
        if metric in live:
            values = [figures[metric] for figures in predicted]
            yield ValidationRow(
                *(case.trace, case.repeat, metric, live[metric]),
                *(values[0], min(values), max(values), as_calibrated[metric]),
            )


def _capacity(
    session: OfflineSession, device: Device, steps: MeasuredSteps, trace: ValidationTrace
) -> float:
    """Requests per second of the simulated engine when all are sent at once."""
    count = _FULL * session.loaded.config.scheduler.max_num_seqs
    requests = trace.requests(count, session.vocab_size, seed=0)
    cost = _costs(session, device, steps).value
    records = _records(session, cost, requests, [0.0] * count)
    return count / max(record.ended for record in records)


def _costs(session: OfflineSession, device: Device, steps: MeasuredSteps) -> BatchCosts:
    model = calibrated(session.rank_model, device, steps)
    return batch_costs(model, session.loaded.config.cache.block_size)


def _simulated(session: OfflineSession, case: ValidationCase, cost: BatchCost) -> dict[str, float]:
    return _figures(_records(session, cost, case.requests, case.times))


def _records(
    session: OfflineSession,
    cost: BatchCost,
    requests: Sequence[WorkloadRequest],
    times: Sequence[float],
) -> list[RequestRecord]:
    replica = ReplicaSpec(session.loaded.config, cost)
    result = simulate(prompts_of_requests(requests), LoadPlan(times), FleetSpec(replica))
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
