from __future__ import annotations

import json
import math
import re
from datetime import datetime

import pytest

from octavo.base.errors import BenchmarkError
from octavo.measure.load_report import create_report
from octavo.measure.serve_report import ServeSummary, save_result, to_json, to_text
from octavo.measure.slo import RequestSlo

SUMMARY = ServeSummary(
    backend="openai",
    model_id="org/tiny",
    tokenizer_id="tiny",
    num_prompts=4,
    request_rate=2.0,
    max_concurrency=8,
    metadata={"gpu": "none"},
    date=datetime(2026, 1, 2, 3, 4, 5),
)


@pytest.fixture
def report(record):
    records = [
        record(0.0, 0.1, 0.2, 0.4, prompt_tokens=10, cached_tokens=3, text="abc"),
        record(0.5, 0.8, 1.0, prompt_tokens=20, queue_time=0.25, scheduled=0.25),
        record(1.0, 1.1, prompt_tokens=30, output_tokens=1),
        record(1.5, ended=2.0),
    ]
    return create_report(
        records, is_open_loop=True, percents=(90, 99.9), slo=RequestSlo(ttft=0.2, e2el=0.45)
    )


def figures(text: str) -> dict[str, str]:
    lines = (re.fullmatch(r"(.+?): {2,}(\S.*)", line) for line in text.splitlines())
    return {line[1]: line[2] for line in lines if line}


def test_lines_are_those_of_vllm(report):
    """Names, order, width and digits as ``vllm bench serve`` prints them."""
    text = to_text(report, SUMMARY, ("ttft", "tpot", "itl", "e2el", "client_queue_time"))
    lines = text.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    assert lines[1] == "Successful requests:                     3"
    assert lines[5] == "Benchmark duration (s):                  2.00"
    found = figures(text)
    assert list(found)[:14] == [
        "Successful requests",
        "Failed requests",
        "Maximum request concurrency",
        "Request rate configured (RPS)",
        "Benchmark duration (s)",
        "Total input tokens",
        "Total generated tokens",
        "Request throughput (req/s)",
        "Request goodput (req/s)",
        "Output token throughput (tok/s)",
        "Peak output token throughput (tok/s)",
        "Peak concurrent requests",
        "Total token throughput (tok/s)",
        "Mean TTFT (ms)",
    ]
    expected = {
        "Failed requests": "1",
        "Total input tokens": "60",
        "Total generated tokens": "6",
        "Request throughput (req/s)": "1.50",
        "Request goodput (req/s)": "1.00",
        "Output token throughput (tok/s)": "3.00",
        "Peak concurrent requests": "1.00",
        "Total token throughput (tok/s)": "33.00",
        "Mean TTFT (ms)": "166.67",
        "Median TTFT (ms)": "100.00",
        "P90 TTFT (ms)": "260.00",
        "P99.9 TTFT (ms)": "299.60",
        "Mean TPOT (ms)": "175.00",
        "Mean ITL (ms)": "166.67",
        "Mean E2EL (ms)": "333.33",
        "Mean Client Queue Time (ms)": "83.33",
        "Mean TTFT from scheduled (ms)": "250.00",
        "Output token goodput (tok/s)": "2.00",
        "Total cached input tokens": "3",
        "Verdict": "cannot say",
    }
    assert {name: found[name] for name in expected} == expected
    assert found["SLO attainment (%)"].startswith("50.00 [15.0, 85.0]")
    assert "1 x HTTP 429: refused" in lines
    assert text.index("---------------Time to First Token----------------") > 0
    for name in ("TTFT", "TPOT", "ITL", "E2EL"):  # scripts look for these, and must find one
        assert text.count(f"Mean {name} (ms):") == 1


def test_only_what_applies_is_printed(report):
    summary = ServeSummary("openai", "m", None, 4, math.inf)
    found = figures(to_text(report, summary, ("ttft",)))
    assert "Request rate configured (RPS)" not in found
    assert "Maximum request concurrency" not in found and "Mean TPOT (ms)" not in found


def test_keys_are_those_of_vllm(report):
    document = to_json(report, SUMMARY, {"date": "x"})
    assert list(document)[:16] == [
        *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
        *("gpu", "request_rate", "burstiness", "max_concurrency", "duration", "completed"),
        *("failed", "total_input_tokens", "total_output_tokens"),
    ]
    expected = {
        "date": "20260102-030405",
        "request_rate": 2.0,
        "request_throughput": 1.5,
        "request_goodput": 1.0,
        "output_throughput": 3.0,
        "total_token_throughput": 33.0,
        "max_concurrent_requests": 1,
        "mean_ttft_ms": pytest.approx(500 / 3),
        "p90_ttft_ms": pytest.approx(260),
        "p99.9_e2el_ms": pytest.approx(499.8),
        "std_tpot_ms": pytest.approx(25),
        "mean_client_queue_time_ms": pytest.approx(250 / 3),
        "mean_e2el_including_client_queue_ms": pytest.approx(1250 / 3),
    }
    assert {name: document[name] for name in expected} == expected
    names = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
    for name in names:
        for statistic in ("mean", "median", "std", "p90", "p99.9"):
            assert f"{statistic}_{name}_ms" in document
    assert "ttfts" not in document

    ours = document["octavo"]
    assert ours["schema"] == 1 and document["run"] == {"date": "x"}
    assert document["goodput_attainment"] == 0.5
    assert all(f"{each}_send_lag_ms" in document for each in ("mean", "median", "std", "p90"))
    assert ours["slo"] == pytest.approx({"ttft_ms": 200, "e2el_ms": 450})
    assert ours["goodput"]["attainment"]["share"] == 0.5
    assert ours["ttft_from_scheduled_ms"]["mean"] == pytest.approx(250)
    assert ours["intervals"]["mean_ttft_ms"][0] <= document["mean_ttft_ms"]
    assert ours["saturation"]["verdict"] == "cannot say"
    assert ours["errors"] == {"HTTP 429: refused": 1}
    assert ours["output_tokens_from"] == {"events": 3}
    assert any("1 of 4 requests failed" in warning for warning in ours["warnings"])
    json.dumps(document, allow_nan=False)


def test_details_are_arrays(report):
    document = to_json(report, SUMMARY, is_detailed=True)
    assert document["input_lens"] == [10, 20, 30, 0] and document["output_lens"] == [3, 2, 1, 0]
    assert document["ttfts"] == pytest.approx([0.1, 0.3, 0.1, 0.0])
    assert document["itls"][0] == pytest.approx([0.1, 0.2]) and document["itls"][2:] == [[], []]
    assert document["latencies"] == pytest.approx([0.4, 0.5, 0.1, 0.0])
    assert document["start_times"] == [0.0, 0.5, 1.0, 1.5]
    assert document["queue_times"] == [0.0, 0.25, 0.0, 0.0]
    assert document["generated_texts"] == ["abc", "", "", ""]
    assert document["errors"] == ["", "", "", "refused"]


def test_what_was_not_measured_is_null(record):
    report = create_report([record(0.0, 0.5)], is_open_loop=False)
    summary = ServeSummary("vllm", "m", None, 1, math.inf)
    document = to_json(report, summary)
    assert document["mean_tpot_ms"] is None and document["request_goodput"] is None
    assert document["request_rate"] == "inf" and document["mean_ttft_ms"] == 500
    assert figures(to_text(report, summary))["Mean TPOT (ms)"] == "n/a"
    nothing = create_report([], is_open_loop=True)
    json.dumps(to_json(nothing, summary, is_detailed=True), allow_nan=False)
    assert figures(to_text(nothing, summary))["Mean TTFT (ms)"] == "n/a"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "openai-2.0qps-tiny-20260102-030405.json"),
        ({"max_concurrency": 8}, "openai-2.0qps-concurrency8-tiny-20260102-030405.json"),
        ({"request_rate": math.inf, "label": "a/b"}, "a_b-infqps-tiny-20260102-030405.json"),
        (
            {"ramp_up": {"s": "linear", "a": 1, "b": 9}},
            "openai-ramp-up-linear-1qps-9qps-tiny-20260102-030405.json",
        ),
    ],
)
def test_names_of_files_are_those_of_vllm(changes, name):
    fields = {"max_concurrency": None, "request_rate": 2.0, **changes}
    given = {field: getattr(SUMMARY, field) for field in ("backend", "model_id", "date")}
    summary = ServeSummary(**given, tokenizer_id=None, num_prompts=1, **fields)
    assert summary.file_name() == name


def test_results_are_saved_and_appended(tmp_path):
    path = save_result({"a": 1}, SUMMARY, tmp_path / "new")
    assert path == tmp_path / "new" / SUMMARY.file_name()
    assert json.loads(path.read_text()) == {"a": 1}
    for value in (1, 2, 3):
        path = save_result({"a": value}, SUMMARY, tmp_path, "all.jsonl", append=True)
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2, 3]
    (tmp_path / "odd").write_text('{"a": 0}')  # as vLLM leaves it: without a line's end
    save_result({"a": 1}, SUMMARY, tmp_path, "odd", append=True)
    assert (tmp_path / "odd").read_text() == '{"a": 0}\n{"a": 1}\n'
    with pytest.raises(BenchmarkError, match="cannot be"):
        save_result({}, SUMMARY, tmp_path, "new", append=True)


def test_a_late_load_generator_is_told(record):
    late = [record(i + 0.05, i + 0.15, scheduled=float(i)) for i in range(5)]
    found = create_report(late, is_open_loop=True)
    assert any("late: by 50.0 ms" in warning for warning in found.warnings)
    punctual = [record(i + 0.005, i + 0.15, scheduled=float(i)) for i in range(5)]
    warnings = create_report(punctual, is_open_loop=True).warnings
    assert not any("late" in warning for warning in warnings)
