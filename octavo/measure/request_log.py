"""A log file with one JSON object for each request of a load test."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo.measure.request_record import RequestRecord
from octavo.measure.results import write_json_lines

FORMATS = ("octavo", "aiperf")


def write_request_log(
    path: str | Path, records: Iterable[RequestRecord], log_format: str = "octavo"
) -> None:
    """Write the records, in the order in which they were sent.

    Args:
        log_format: "octavo": the fields of RequestRecord, times in seconds.
            "aiperf": lines as in the ``profile_export.jsonl`` of NVIDIA's AIPerf.

    Raises:
        BenchmarkError: the file cannot be written.
    """
    as_json = {"octavo": RequestRecord.as_json, "aiperf": to_aiperf}[log_format]
    write_json_lines(path, map(as_json, sorted(records, key=lambda record: record.sent)))


def to_aiperf(record: RequestRecord) -> dict[str, Any]:
    """Return ``{metadata, metrics: {name: {value, unit}}, error}``; times in the metadata
    are ns."""
    metrics: dict[str, tuple[float | list[float] | None, str]] = {}
    if record.completed:
        metrics = {
            "time_to_first_token": (record.ttft * 1e3, "ms"),
            "request_latency": (record.e2el * 1e3, "ms"),
            "inter_token_latency": (_ms(record.tpot), "ms"),
            "inter_chunk_latency": ([gap * 1e3 for gap in record.itls], "ms"),
            "input_sequence_length": (record.prompt_tokens, "tokens"),
            "output_sequence_length": (record.output_tokens, "tokens"),
        }
    return {
        "metadata": {
            "x_request_id": record.request_id,
            "benchmark_phase": "profiling",
            "credit_issued_ns": _ns(record.scheduled),
            "request_start_ns": _ns(record.sent),
            "request_end_ns": _ns(record.ended),
            "was_cancelled": record.unfinished,
        },
        "metrics": {
            name: {"value": value, "unit": unit}
            for name, (value, unit) in metrics.items()
            if value is not None
        },
        "error": None
        if record.error is None
        else {"code": record.status or None, "message": record.error},
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
