"""The report of ``octavo bench serve`` as text, as JSON and as files.

Names of lines, keys and files are those of ``vllm bench serve``, so that programs that read its
results read these. Figures that it does not have are in sections, and under a key, of their own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.base.errors import BenchmarkError
from octavo.measure.load_report import LoadReport
from octavo.measure.metrics import LATENCIES, Distribution, percent_name
from octavo.measure.results import write_json, write_text
from octavo.measure.slo import Attainment

SCHEMA = 1
SECTIONS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client Queue Time"),
    "e2el_including_client_queue": (
        "E2EL incl. Client Queue",
        "End-to-end Latency incl. Client Queue",
    ),
}
QUEUE_LATENCIES = ("client_queue_time", "e2el_including_client_queue")
_VLLM_LATENCIES = tuple(SECTIONS)
_VLLM_METRICS = (
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
)
_WIDTH = 50
_FEW_REQUESTS = 10


@dataclass(frozen=True)
class ServeSummary:
    """The settings of a run, as a result tells them."""

    backend: str
    model_id: str
    tokenizer_id: str | None
    num_prompts: int
    request_rate: float
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up: Mapping[str, Any] | None = None  # vLLM's keys: ramp_up_strategy, …
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    date: datetime = field(default_factory=datetime.now)

    @property
    def rate(self) -> float | str:
        return self.request_rate if math.isfinite(self.request_rate) else "inf"

    def file_name(self) -> str:
        """Return a name of vLLM's pattern:
        ``{label}-{rate}qps[-concurrencyN]-{model}-{date}.json``."""
        rate = f"{float(self.request_rate)}qps"
        if self.ramp_up is not None:
            strategy, start, end = self.ramp_up.values()
            rate = f"ramp-up-{strategy}-{start}qps-{end}qps"
        limit = "" if self.max_concurrency is None else f"-concurrency{self.max_concurrency}"
        model = self.model_id.rstrip("/").rpartition("/")[2]
        name = f"{self.label or self.backend}-{rate}{limit}-{model}-{self.date:%Y%m%d-%H%M%S}.json"
        return name.replace("/", "_")


# -- text -----------------------------------------------------------------------------------------


def to_text(
    report: LoadReport, summary: ServeSummary, shown: tuple[str, ...] = ("ttft", "tpot", "itl")
) -> str:
    """Return the block that ``vllm bench serve`` prints, with our own sections after it.

    Args:
        shown: the latencies of ``SECTIONS`` that get a section; those with the wait in the client
            do where there was one.
    """
    if any(record.queue_time for record in report.records):
        shown = tuple(dict.fromkeys((*shown, *QUEUE_LATENCIES)))
    lines = [_title(" Serving Benchmark Result ", "="), *_totals(report, summary)]
    for name in shown:
        short, title = SECTIONS[name]
        lines.append(_title(title, "-"))
        lines += _latency(short, report.metrics.latencies.get(name))
    lines += _octavo_sections(report)
    return "\n".join([*lines, "=" * _WIDTH])


def _title(text: str, fill: str) -> str:
    return f"{text:{fill}^{_WIDTH}}"


def _line(name: str, value: float | str | None) -> str:
    if value is None:
        value = "n/a"
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
    return f"{name + ':':<40} {shown}".rstrip()


def _totals(report: LoadReport, summary: ServeSummary) -> list[str]:
    metrics = report.metrics
    rows: list[tuple[str, float | str | None]] = [
        ("Successful requests", metrics.completed),
        ("Failed requests", metrics.failed),
    ]
    if summary.max_concurrency is not None:
        rows.append(("Maximum request concurrency", summary.max_concurrency))
    if math.isfinite(summary.request_rate):
        rows.append(("Request rate configured (RPS)", float(summary.request_rate)))
    rows += [
        ("Benchmark duration (s)", metrics.duration),
        ("Total input tokens", metrics.total_input_tokens),
        ("Total generated tokens", metrics.total_output_tokens),
        ("Request throughput (req/s)", metrics.request_throughput),
    ]
    if report.goodput is not None:
        rows.append(("Request goodput (req/s)", report.goodput.request_goodput))
    rows += [
        ("Output token throughput (tok/s)", metrics.output_throughput),
        ("Peak output token throughput (tok/s)", metrics.max_output_tokens_per_s),
        ("Peak concurrent requests", float(metrics.max_concurrent_requests)),
        ("Total token throughput (tok/s)", metrics.total_token_throughput),
    ]
    return [_line(*row) for row in rows]


def _latency(short: str, distribution: Distribution | None) -> list[str]:
    if distribution is None:
        return [_line(f"{each} {short} (ms)", None) for each in ("Mean", "Median")]
    rows = {"Mean": distribution.mean, "Median": distribution.median}
    rows |= {percent_name(p).upper(): value for p, value in distribution.percentiles.items()}
    return [_line(f"{name} {short} (ms)", value * 1e3) for name, value in rows.items()]


def _octavo_sections(report: LoadReport) -> list[str]:
    lines = [_title("From the scheduled time", "-")]
    latencies = report.metrics.latencies
    for name, short in (
        ("ttft_from_scheduled", "TTFT from scheduled"),
        ("e2el_from_scheduled", "E2EL from scheduled"),
        ("send_lag", "send lag"),
    ):
        lines += _latency(short, latencies.get(name))
    normalized = latencies.get("normalized_latency")
    value = None if normalized is None else normalized.mean * 1e3
    lines.append(_line("Mean normalized latency (ms/token)", value))
    if report.metrics.total_cached_tokens is not None:
        lines.append(_line("Total cached input tokens", report.metrics.total_cached_tokens))
    if report.goodput is not None and report.goodput_from_scheduled is not None:
        lines += [_title("Goodput", "-"), *_goodput(report)]
    if report.steady_state is not None:
        lines += [_title("Steady state", "-"), *_steady_state(report)]
    lines += [
        _title("Saturation", "-"),
        _line("Verdict", report.saturation.verdict),
        f"  {report.saturation.reason}",
    ]
    if report.errors:
        lines.append(_title("Errors", "-"))
        lines += [f"{count} x {error}" for error, count in report.errors.most_common(5)]
    if report.warnings:
        lines.append(_title("Warnings", "-"))
        lines += [f"- {warning}" for warning in report.warnings]
    return lines


def _goodput(report: LoadReport) -> list[str]:
    good, scheduled = report.goodput, report.goodput_from_scheduled
    assert good is not None and scheduled is not None
    slo = good.slo.as_json()
    lines = [_line("Output token goodput (tok/s)", good.token_goodput)]
    lines.append(_line("SLO attainment (%)", _percent(good.attainment)))
    for name, each in good.attainment_by_limit.items():
        lines.append(_line(f"  {name.upper()} <= {slo[name + '_ms']:g} ms (%)", _percent(each)))
    lines.append(_line("Goodput from scheduled (req/s)", scheduled.request_goodput))
    lines.append(_line("Attainment from scheduled (%)", _percent(scheduled.attainment)))
    return lines


def _percent(attainment: Attainment) -> str:
    if attainment.share is None:
        return "n/a"
    low, high = (edge * 100 for edge in attainment.interval)
    return f"{attainment.share * 100:.2f} [{low:.1f}, {high:.1f}]"


def _steady_state(report: LoadReport) -> list[str]:
    steady = report.steady_state
    assert steady is not None
    window = steady.window
    lines = [
        _line("Steady state (s)", f"{window.begin:.2f} to {window.end:.2f}"),
        _line("Steady-state requests", steady.metrics.completed),
    ]
    if steady.metrics.completed < _FEW_REQUESTS:
        return [*lines, "  too few requests to tell how it was"]
    lines += [
        _line("Steady-state throughput (req/s)", steady.request_throughput),
        _line("Steady-state output (tok/s)", steady.output_throughput),
    ]
    for name in ("ttft", "tpot", "itl", "e2el"):
        if (each := steady.metrics.latencies.get(name)) is not None:
            lines.append(_line(f"Steady-state {name.upper()}, median (ms)", each.median * 1e3))
    return lines


# -- JSON -----------------------------------------------------------------------------------------


def to_json(
    report: LoadReport,
    summary: ServeSummary,
    run: Mapping[str, Any] | None = None,
    *,
    is_detailed: bool = False,
) -> dict[str, Any]:
    """The result with vLLM's keys; ours are attainment, send lag, "run", and all under "octavo".

    Times with the suffix ``_ms`` are in milliseconds, arrays in seconds. What could not be measured
    is null.

    Args:
        run: what surrounds the measurement; see `record.Recorder`.
        is_detailed: with an entry for each request in the arrays.
    """
    metrics = report.metrics
    document: dict[str, Any] = {
        "date": f"{summary.date:%Y%m%d-%H%M%S}",
        "endpoint_type": summary.backend,
        **{
            name: getattr(summary, name)
            for name in ("backend", "label", "model_id", "tokenizer_id", "num_prompts")
        },
        **summary.metadata,
        "request_rate": summary.rate,
        "burstiness": summary.burstiness,
        "max_concurrency": summary.max_concurrency,
        **(summary.ramp_up or {}),
        **{name: getattr(metrics, name) for name in _VLLM_METRICS},
        "request_goodput": report.goodput and report.goodput.request_goodput,
    }
    if is_detailed:
        document |= _arrays(report)
    for name in _VLLM_LATENCIES:
        document |= _latency_keys(name, metrics.latencies.get(name))
    document["goodput_attainment"] = report.goodput and report.goodput.attainment.share
    document |= _latency_keys("send_lag", metrics.latencies.get("send_lag"))
    document["octavo"] = _octavo_json(report)
    document["run"] = run
    return document


def _latency_keys(name: str, distribution: Distribution | None) -> dict[str, float | None]:
    if distribution is None:
        return {f"{each}_{name}_ms": None for each in ("mean", "median", "std")}
    values = distribution.as_json()
    return {
        f"{each}_{name}_ms": value
        for each, value in values.items()
        if each not in ("count", "min", "max")
    }


def _arrays(report: LoadReport) -> dict[str, Any]:
    """Arrays in the order of sending; zeros and an error for requests that failed, as in vLLM."""
    done = [(record, record.completed) for record in report.records]
    return {
        "input_lens": [record.prompt_tokens or 0 for record, _ in done],
        "output_lens": [record.output_tokens if ok else 0 for record, ok in done],
        "ttfts": [record.ttft if ok else 0.0 for record, ok in done],
        "itls": [record.itls if ok else [] for record, ok in done],
        "latencies": [record.e2el if ok else 0.0 for record, ok in done],
        "start_times": [record.sent for record, _ in done],
        "queue_times": [record.queue_time for record, _ in done],
        "generated_texts": [record.text or "" for record, _ in done],
        "errors": [record.error or "" for record, _ in done],
    }


def _octavo_json(report: LoadReport) -> dict[str, Any]:
    good, scheduled = report.goodput, report.goodput_from_scheduled
    latencies = report.metrics.latencies
    return {
        "schema": SCHEMA,
        "version": __version__,
        "unfinished": report.metrics.unfinished,
        "total_cached_tokens": report.metrics.total_cached_tokens,
        "output_tokens_from": report.output_tokens_from,
        "slo": good and good.slo.as_json(),
        "goodput": good and good.as_json(),
        "goodput_from_scheduled": scheduled and scheduled.as_json(),
        "steady_state": report.steady_state and report.steady_state.as_json(),
        "saturation": report.saturation.as_json(),
        **{
            f"{name}_ms": latencies[name].as_json()
            for name in LATENCIES
            if name not in _VLLM_LATENCIES and name in latencies
        },
        "intervals": {name: list(edges) for name, edges in report.intervals.items()},
        "errors": dict(report.errors),
        "warnings": report.warnings,
    }


# -- files ----------------------------------------------------------------------------------------


def save_result(
    document: Mapping[str, Any],
    summary: ServeSummary,
    folder: str | Path | None = None,
    name: str | None = None,
    *,
    append: bool = False,
) -> Path:
    """Write the result, and return its path.

    Args:
        append: one result a line, after those that are there.

    Raises:
        BenchmarkError: it cannot be written; what was there stays.
    """
    path = Path(folder or ".").expanduser() / (name or summary.file_name())
    if not append:
        write_json(path, document)
        return path
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{path} cannot be read, to append to it: {error}") from error
    if before and not before.endswith("\n"):
        before += "\n"
    line = json.dumps(document, ensure_ascii=False, allow_nan=False)
    write_text(path, f"{before}{line}\n")
    return path
