"""The report on a load test, from its records, whether a server or a simulator answered."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.measure.concurrency import TimeWindow, steady_window
from octavo.measure.metrics import LoadMetrics, bootstrap_intervals, summarize
from octavo.measure.request_record import RequestRecord
from octavo.measure.saturation import Saturation, saturation
from octavo.measure.slo import Goodput, RequestSlo, goodput
from octavo.measure.statistics import percentile

_LAG_SHARE = 0.1  # of the median TTFT that the 99th percentile of the send lag may be


@dataclass(frozen=True)
class SteadyStateMetrics:
    """Metrics of the part of a run with a steady load.

    ``metrics`` are those of the requests that are wholly in it. Its rates count every token and
    completion in the window, whichever request it belongs to: no work is left out at its edges.
    """

    window: TimeWindow
    metrics: LoadMetrics
    request_throughput: float
    output_throughput: float

    @classmethod
    def of(
        cls, records: Sequence[RequestRecord], percents: Sequence[float], share: float
    ) -> SteadyStateMetrics | None:
        window = steady_window(records, share)
        if window is None or window.length <= 0:
            return None
        tokens = completions = 0
        for record in records:
            completions += record.completed and window.begin < record.ended <= window.end
            first = bisect_right(record.event_times, window.begin)
            last = bisect_right(record.event_times, window.end)
            tokens += sum(record.tokens_of_events()[first:last])
        inside = [record for record in records if window.holds(record)]
        return cls(
            window,
            summarize(inside, percents, window.length),
            completions / window.length,
            tokens / window.length,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "begin_s": self.window.begin,
            "end_s": self.window.end,
            "requests": self.metrics.completed,
            "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput,
            **{f"{name}_ms": each.as_json() for name, each in self.metrics.latencies.items()},
        }


@dataclass(frozen=True)
class LoadReport:
    """Metrics of a run, with how far they can be trusted."""

    records: Sequence[RequestRecord]
    metrics: LoadMetrics
    intervals: dict[str, tuple[float, float]]
    steady_state: SteadyStateMetrics | None
    saturation: Saturation
    goodput: Goodput | None
    goodput_from_scheduled: Goodput | None
    errors: Counter[str]
    warnings: list[str]

    @property
    def limits_ms(self) -> dict[str, float]:
        """Limits of the SLO, by the upper-case names of latencies; empty without an SLO."""
        slo = self.goodput.slo.as_json() if self.goodput else {}
        return {name.removesuffix("_ms").upper(): limit for name, limit in slo.items()}

    @property
    def output_tokens_from(self) -> dict[str, int]:
        """Number of answers whose tokens were counted by the server, by a tokenizer, or by their
        events."""
        return dict(Counter(each.output_tokens_from for each in self.records if each.completed))


def create_report(
    records: Sequence[RequestRecord],
    *,
    is_open_loop: bool,
    percents: Sequence[float] = (50, 90, 99),
    slo: RequestSlo | None = None,
    steady_share: float = 0.8,
    seed: int = 0,
) -> LoadReport:
    """Return the report on a run.

    Args:
        is_open_loop: requests came by a schedule, and not when others had ended.
        percents: which percentiles are told, 0 to 100.
        steady_share: of the peak's requests in flight that makes a state steady.
        seed: of the bootstrap.
    """
    metrics = summarize(records, percents)
    errors = Counter(error_line(each) for each in records if each.error and not each.unfinished)
    report = LoadReport(
        records,
        metrics,
        bootstrap_intervals(records, percents, seed),
        SteadyStateMetrics.of(records, percents, steady_share),
        saturation(records, is_open_loop=is_open_loop),
        goodput(records, slo, metrics.duration) if slo else None,
        goodput(records, slo, metrics.duration, from_scheduled=True) if slo else None,
        errors,
        [],
    )
    report.warnings.extend(_doubts(report))
    return report


def error_line(record: RequestRecord) -> str:
    """Describe an error: ``HTTP 429: too many requests``."""
    status = "" if record.status in (0, 200) else f"HTTP {record.status}: "
    return status + " ".join((record.error or "").split())


def _doubts(report: LoadReport) -> list[str]:
    """Return reasons to doubt the figures, a line each."""
    found = []
    metrics, latencies = report.metrics, report.metrics.latencies
    if metrics.failed:
        found.append(f"{metrics.failed} of {len(report.records)} requests failed")
    if metrics.unfinished:
        found.append(f"interrupted: {metrics.unfinished} requests were given up")
    if "ttft" in latencies:
        lag = percentile([record.send_lag for record in report.records], 99)
        median = latencies["ttft"].median
        if lag > _LAG_SHARE * median:
            found.append(
                f"the load generator itself was late: by {lag * 1e3:.1f} ms at the 99th percentile,"
                f" with a median TTFT of {median * 1e3:.1f} ms"
            )
    if events := report.output_tokens_from.get("events"):
        found.append(
            f"the server did not tell the output tokens of {events} requests: events were counted"
        )
    return found
