"""The service that each tenant of a simulated load got: requests, tokens, latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.measure.metrics import LoadMetrics, summarize
from octavo.measure.request_record import RequestRecord
from octavo.sim.simulation import SimulationResult

_PERCENTS = (90.0, 99.0)
_LATENCIES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class TenantReport:
    """The requests of one tenant. ``share``: of the tokens of all prompts and answers."""

    tenant: str
    metrics: LoadMetrics
    share: float

    def as_json(self) -> dict[str, Any]:
        metrics = self.metrics
        latencies = {name: metrics.latencies.get(name) for name in _LATENCIES}
        return {
            "tenant": self.tenant,
            "completed": metrics.completed,
            "failed": metrics.failed,
            "total_input_tokens": metrics.total_input_tokens,
            "total_output_tokens": metrics.total_output_tokens,
            "token_share": self.share,
            **{f"{name}_ms": each and each.as_json() for name, each in latencies.items()},
        }


def tenants(result: SimulationResult) -> list[TenantReport]:
    """Return the reports by name; none if no request has a tenant."""
    records: dict[str, list[RequestRecord]] = {}
    for request in result.requests:
        records.setdefault(request.prompt.tenant, []).append(request.record)
    if not any(records):
        return []
    found = {name: summarize(records[name], _PERCENTS) for name in sorted(records)}
    tokens = {name: _tokens(metrics) for name, metrics in found.items()}
    total = max(1, sum(tokens.values()))
    return [TenantReport(name, found[name], tokens[name] / total) for name in found]


def _tokens(metrics: LoadMetrics) -> int:
    return metrics.total_input_tokens + metrics.total_output_tokens


def tenants_text(reports: Sequence[TenantReport]) -> str:
    """Return a table with a line for each tenant; empty without any."""
    if not reports:
        return ""
    width = max(len("tenant"), *(len(each.tenant) for each in reports))
    lines = [
        "",
        f"{'tenant':<{width}}  completed  failed   tokens  share  median TTFT  p99 TTFT (ms)",
    ]
    for each in reports:
        ttft = each.metrics.latencies.get("ttft")
        median, p99 = (
            (f"{ttft.median * 1e3:.1f}", f"{ttft.percentiles[99.0] * 1e3:.1f}")
            if ttft is not None
            else ("-", "-")
        )
        lines.append(
            f"{each.tenant:<{width}}  {each.metrics.completed:>9}  {each.metrics.failed:>6}  "
            f"{_tokens(each.metrics):>7}  {each.share:>5.2f}  {median:>11}  {p99:>8}"
        )
    return "\n".join(lines)
