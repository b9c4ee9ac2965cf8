"""The report on a simulation, as that of the load benchmark, with what only a simulation knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.measure.load_report import LoadReport, create_report
from octavo.measure.results import write_json, write_text
from octavo.measure.serve_report import ServeSummary, to_json, to_text
from octavo.measure.slo import RequestSlo
from octavo.sim.replica import ReplicaTotals
from octavo.sim.simulation import SimulationResult
from octavo.sim.tenant_report import tenants, tenants_text
from octavo.sim.timeline import Timeline, series_csv, trace_json
from octavo.workload.settings import LoadSettings

# The virtual clock begins here, so that a report depends on nothing but what was asked for.
_BEGINNING = datetime(1970, 1, 1)
_PERCENTS = (90.0, 99.0)  # as `octavo bench serve` tells by default


@dataclass(frozen=True)
class SimulationReport:
    """A result, in the form of `octavo bench serve`.

    ``setting``: what was simulated, as JSON: hardware, replicas, limits.
    """

    result: SimulationResult
    report: LoadReport
    summary: ServeSummary
    setting: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self, *, is_detailed: bool = False) -> dict[str, Any]:
        """Return the keys of ``bench serve --json``, ``"simulated": true``, and "simulation"."""
        document = to_json(self.report, self.summary, is_detailed=is_detailed)
        document["simulated"] = True
        document["simulation"] = {**self.setting, **_simulation_json(self.result)}
        return document

    def as_text(self) -> str:
        shown = ("ttft", "tpot", "itl", "e2el")
        return to_text(self.report, self.summary, shown) + tenants_text(tenants(self.result))

    def write(self, folder: str | Path, timeline: Timeline) -> list[Path]:
        """Write result.json, series.csv and timeline.json, each whole or not at all; return their
        paths.

        The files depend on the arguments of the simulation alone.

        Raises:
            BenchmarkError: a file cannot be written.
        """
        at = Path(folder).expanduser()
        series = timeline.series(self.result.makespan_s)
        write_json(at / "result.json", self.as_json(is_detailed=True))
        write_text(at / "series.csv", series_csv(series))
        write_text(at / "timeline.json", trace_json(timeline.trace(self.result.requests)))
        return [at / name for name in ("result.json", "series.csv", "timeline.json")]


def report_on(
    result: SimulationResult,
    model: str,
    load: LoadSettings,
    *,
    is_open_loop: bool,
    setting: Mapping[str, Any] | None = None,
    slo: RequestSlo | None = None,
    seed: int = 0,
) -> SimulationReport:
    """Return the report on a simulation of requests that were sent as ``load`` says."""
    return SimulationReport(
        result,
        create_report(
            result.records, is_open_loop=is_open_loop, percents=_PERCENTS, slo=slo, seed=seed
        ),
        ServeSummary(
            backend="simulated",
            model_id=model,
            tokenizer_id=None,
            num_prompts=len(result.requests),
            request_rate=load.request_rate,
            burstiness=load.burstiness,
            max_concurrency=load.max_concurrency,
            ramp_up=load.ramp_up,
            date=_BEGINNING,
        ),
        setting or {},
    )


def _simulation_json(result: SimulationResult) -> dict[str, Any]:
    queried = sum(each.prefix_tokens_queried for each in result.replicas)
    hit = sum(each.prefix_tokens_hit for each in result.replicas)
    return {
        "makespan_s": result.makespan_s,
        "num_preemptions": result.num_preemptions,
        "prefix_hit_rate": hit / queried if queried else None,
        "tenants": [each.as_json() for each in tenants(result)],
        "times_sent_again": sum(request.times_sent - 1 for request in result.requests),
        "replicas": [_replica_json(each, result.makespan_s) for each in result.replicas],
    }


def _replica_json(totals: ReplicaTotals, makespan_s: float) -> dict[str, Any]:
    return {**asdict(totals), "idle_s": makespan_s - totals.busy_s}
