"""The report on a simulation, as that of the load benchmark, with what only a simulation knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.core.disaggregation import Role
from octavo.measure.load_report import LoadReport, create_report
from octavo.measure.metrics import latency_values
from octavo.measure.results import write_json, write_text
from octavo.measure.serve_report import ServeSummary, to_json, to_text
from octavo.measure.slo import RequestSlo
from octavo.measure.statistics import percentile
from octavo.sim.replica import ReplicaTotals
from octavo.sim.simulation import SimulationResult
from octavo.sim.stage_timeline import StageTimeline
from octavo.sim.tenant_report import tenants, tenants_text
from octavo.sim.timeline import Timeline, series_csv, trace_json
from octavo.workload.settings import LoadSettings

# The virtual clock begins here, so that a report depends on nothing but what was asked for.
_BEGINNING = datetime(1970, 1, 1)
_PERCENTS = (90.0, 99.0)  # as `octavo bench serve` tells by default


@dataclass(frozen=True)
class SimulationReport:
    """A result, in the form of `octavo bench serve`.

    Args:
        setting: what was simulated, as JSON: hardware, replicas, limits.
        stages: of pipelines; None where there is none.
    """

    result: SimulationResult
    report: LoadReport
    summary: ServeSummary
    setting: Mapping[str, Any] = field(default_factory=dict)
    stages: StageTimeline | None = None

    def as_json(self, *, is_detailed: bool = False) -> dict[str, Any]:
        """Return the keys of ``bench serve --json``, ``"simulated": true``, and "simulation"."""
        document = to_json(self.report, self.summary, is_detailed=is_detailed)
        document["simulated"] = True
        document["simulation"] = {
            **self.setting,
            **_simulation_json(self.result),
            "pipeline": None if self.stages is None else self.stages.as_json(),
        }
        return document

    def as_text(self) -> str:
        shown = ("ttft", "tpot", "itl", "e2el")
        said = to_text(self.report, self.summary, shown) + tenants_text(tenants(self.result))
        stages = "" if self.stages is None else self.stages.as_text()
        return "\n".join(filter(None, (said, roles_text(self.result), stages)))

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
    stages: StageTimeline | None = None,
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
        stages,
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
        **({"roles": roles} if (roles := roles_json(result)) else {}),
    }


def _replica_json(totals: ReplicaTotals, makespan_s: float) -> dict[str, Any]:
    known = {**asdict(totals), "idle_s": makespan_s - totals.busy_s}
    role = known.pop("role")
    return known if role is None else {**known, "role": role.value}


# The latency that each role decides: prompts are apart so that neither makes the other longer.
_DECIDES = {Role.PREFILL: "ttft", Role.DECODE: "tpot"}


def roles_json(result: SimulationResult) -> dict[str, Any]:
    """Return for each role its replicas, the share of time that they were busy, and the latency
    that they decide, in ms; empty where each replica computes whole requests."""
    values, found = latency_values(result.records), {}
    for role, latency in _DECIDES.items():
        busy = [each.busy_s for each in result.replicas if each.role is role]
        if busy:
            known = [each * 1e3 for each in values[latency]]
            found[role.value] = {
                "replicas": len(busy),
                "busy": sum(busy) / len(busy) / result.makespan_s if result.makespan_s else 0.0,
                **{
                    f"p{percent}_{latency}_ms": percentile(known, percent) if known else None
                    for percent in (50, 99)
                },
            }
    return found


def roles_text(result: SimulationResult) -> str:
    """Return a line for each role; empty where there are none."""
    lines = []
    for (name, about), latency in zip(roles_json(result).items(), _DECIDES.values(), strict=False):
        p50, p99 = (about[f"p{percent}_{latency}_ms"] for percent in (50, 99))
        times = "" if p50 is None else f"; {latency.upper()} {p50:,.1f} ms, p99 {p99:,.1f} ms"
        lines.append(f"{name}: {about['replicas']} replicas, {about['busy']:.0%} busy{times}\n")
    return "".join(lines)
