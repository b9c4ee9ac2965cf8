from __future__ import annotations

import json

import pytest
from calibrations import keep_calibration
from svg import texts_of

from octavo.cli import main
from octavo.workload.traces import TraceEntry, write_trace

BASE = ["simulate", "llama-3.1-8b", "--hardware", "h100-sxm"]
SMALL = [*BASE, "--request-rate", "20", "--num-prompts", "12", "--input-len", "100",
         "--output-len", "8"]  # fmt: skip


def test_json_has_the_keys_of_the_load_benchmark(capsys):
    assert main([*SMALL, "--json", "--goodput", "ttft:500"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["simulated"] is True and document["wall_s"] > 0
    assert document["completed"] == 12 and document["total_output_tokens"] == 96
    assert document["goodput_attainment"] == 1.0
    for key in ("mean_ttft_ms", "p99_tpot_ms", "median_itl_ms", "output_throughput", "octavo"):
        assert document[key] is not None
    assert document["simulation"]["hardware"] == "H100 SXM"


def test_a_folder_gets_the_same_bytes_each_time(capsys, tmp_path):
    for name in ("one", "two"):
        assert main([*SMALL, "--seed", "5", "--out", str(tmp_path / name)]) == 0
    out = capsys.readouterr().out
    assert "Serving Benchmark Result" in out and "simulated: 1 x H100 SXM" in out
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["result.json", "series.csv", "timeline.json"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_picture(tmp_path):
    picture = tmp_path / "run.svg"
    assert main([*SMALL, "--goodput", "tpot:50", "--plot", str(picture)]) == 0
    title = "llama-3.1-8b on 1 × H100 SXM, simulated: 12 requests"
    assert {title, "time, s", "KV pool in use, %", "TTFT, ms", "bound 50 ms"} <= set(
        texts_of(picture)
    )
    assert main([*SMALL, "--patience", "0.001", "--plot", str(picture)]) == 1  # nothing to draw
    assert "TTFT, ms" not in texts_of(picture)


def test_a_trace_on_several_replicas(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    entries = [TraceEntry(0.1 * i, 1000, 5, (i % 2, 10 + i), 512) for i in range(10)]
    write_trace(path, "mooncake", entries)
    flags = ["--trace", str(path), "--replicas", "2", "--router", "prefix_aware", "--json"]
    assert main([*BASE, *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["completed"] == 10
    assert document["octavo"]["total_cached_tokens"] == 8 * 512
    steps = [each["num_steps"] for each in document["simulation"]["replicas"]]
    assert len(steps) == 2 and all(steps)


def test_devices_are_laid_out_as_a_plan_would_and_the_report_says_how(capsys):
    flags = ["--hardware", "h100-sxm:4", "--profile", "vllm"]
    assert main([*SMALL, *flags]) == 0
    told = capsys.readouterr().out
    asked = ["--rate", "20", "--isl", "100", "--osl", "8", "--json"]
    assert main(["plan", "llama-3.1-8b", *flags, *asked]) == 0
    found = json.loads(capsys.readouterr().out)["deployment"]
    layout = f"tp {found['tp']}" if found["replicas"] == 1 else f"{found['replicas']} replicas"
    assert "simulated: 4 x H100 SXM (" in told and layout in told


def test_nothing_that_is_answered_is_a_failure(capsys):
    assert main([*SMALL, "--patience", "0.001"]) == 1
    assert "no request was answered" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, status, message",
    [
        (["--request-rate", "-1"], 2, "request_rate must be above 0"),
        (["--hardware", "h1000"], 1, "h1000"),
        (["--quantization", "int3"], 1, "int3"),
        (["--kernels", "native"], 2, "unrecognized"),
        (["--speculative-config", '{"method": "ngram"}'], 1, "synthetic_acceptance_rates"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(capsys, flags, status, message):
    assert main([*SMALL, *flags]) == status
    assert message in capsys.readouterr().err


def test_drafts_at_rates_that_are_given(capsys):
    rates = '{"synthetic_acceptance_rates": [0.9, 0.9]}'
    means = []
    for flags in ([], ["--speculative-config", rates]):
        assert main([*SMALL, *flags, "--json"]) == 0
        means.append(json.loads(capsys.readouterr().out)["mean_tpot_ms"])
    assert means[1] < 0.7 * means[0]


@pytest.mark.parametrize(
    "flags, step_times",
    [
        ([], "measured"),
        (["--quantization", "int4"], "roofline"),
        (["--kv-cache-dtype", "fp8"], "roofline"),
        (["--kv-cache-dtype", "bf16"], "measured"),
        (["--hardware", "h100-sxm"], "roofline"),
    ],
)
def test_steps_are_as_measured_where_all_is_as_it_was_measured(
    capsys, tiny_model, tmp_path, monkeypatch, flags, step_times
):
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    keep_calibration(tiny_model)
    small = ["--num-prompts", "2", "--input-len", "10", "--output-len", "4"]
    assert main(["simulate", str(tiny_model), *small, *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["simulation"]["step_times"] == step_times
