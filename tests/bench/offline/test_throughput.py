"""Throughput of many requests: figures by hand, and a small model."""

from __future__ import annotations

import json

import pytest

from octavo.base.errors import BenchmarkError, ConfigError
from octavo.bench import record
from octavo.bench.noise import NoiseProbe
from octavo.bench.offline import throughput
from octavo.bench.offline.session import OfflineSession, RunTiming, StepTiming
from octavo.bench.offline.throughput import (
    ThroughputPlan,
    find_requests,
    measure_throughput,
)
from octavo.core.stats import RequestStats
from octavo.settings.engine import EngineArgs


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch):
    """The probes of the machine have tests of their own."""
    monkeypatch.setattr(record, "probe_machine", lambda threads: NoiseProbe(30.0, 200.0))


@pytest.fixture(scope="module")
def session(tiny_model):
    args = EngineArgs(model=str(tiny_model), kernels="reference", threads=1, max_num_seqs=4)
    with OfflineSession(args) as session:
        yield session


def test_figures_by_hand():
    timing = RunTiming(
        4.0,
        [RequestStats(0.0, 10, 6, num_preemptions=2), RequestStats(0.0, 20, 2)],
        [],
        [
            StepTiming(2, 30, False, 1, wall_s=3.0, kernel_s=2.0, kv_utilisation=0.5),
            StepTiming(1, 1, True, 1, wall_s=1.0, kernel_s=0.5, kv_utilisation=0.25),
        ],
    )
    sample = throughput._sample(timing)
    assert sample.elapsed_s == 4.0
    assert sample.requests_per_s == pytest.approx(2 / 4)
    assert sample.output_tps == pytest.approx(8 / 4)
    assert sample.total_tps == pytest.approx(38 / 4)
    assert sample.num_preemptions == 2
    assert sample.mean_batch == pytest.approx((2 * 3 + 1 * 1) / 4)
    assert sample.kv_use == 0.5


def test_a_result_has_the_keys_that_were_agreed_on(session):
    calls = []
    plan = ThroughputPlan(num_prompts=6, input_len=10, output_len=5, repeat=3)
    result = measure_throughput(session, plan, {"a": 1}, lambda: calls.append(1))
    assert len(calls) == 4
    document = json.loads(json.dumps(result.as_json(), allow_nan=False))
    elapsed = document["elapsed_s"]
    assert document["requests_per_s"] == pytest.approx(6 / elapsed)
    assert document["output_tps"] == pytest.approx(6 * 5 / elapsed)
    assert document["total_tps"] == pytest.approx(6 * 15 / elapsed)
    assert document["num_preemptions"] == 0 and document["peak_rss_bytes"] > 0
    assert document["elapsed_time"] == elapsed and document["num_requests"] == 6
    assert document["total_num_tokens"] == 90
    assert document["requests_per_second"] == document["requests_per_s"]
    assert document["tokens_per_second"] == document["total_tps"]
    assert 0 < document["ttft_ms"]["p50"] <= document["ttft_ms"]["p99"]
    assert 0 < document["tpot_ms"]["p50"] <= document["tpot_ms"]["p99"]
    assert 1 <= document["mean_batch"] <= 4 and 0 < document["kv_use"] <= 1
    assert document["spread"]["elapsed_s"]["median"] == elapsed
    assert document["roofline"]["prefill"]["steps"] >= 3
    assert document["run"]["samples"]["elapsed_s"][1] > 0


def test_no_repetition_finds_the_prefixes_of_another(session):
    plan = ThroughputPlan(num_prompts=3, input_len=64, output_len=2, repeat=2, warmup=1)
    assert session.args.enable_prefix_caching
    document = measure_throughput(session, plan, {}).as_json()
    # All prompt tokens were computed in both.
    ops = document["roofline"]["prefill"]["ops"]
    once = measure_throughput(session, ThroughputPlan(
        num_prompts=3, input_len=64, output_len=2, repeat=1, warmup=0, seed=9
    ), {}).as_json()["roofline"]["prefill"]["ops"]  # fmt: skip
    assert ops == pytest.approx(2 * once, rel=0.01)


def test_one_token_each_has_no_pace(session):
    plan = ThroughputPlan(num_prompts=2, input_len=5, output_len=1, repeat=1)
    assert measure_throughput(session, plan, {}).as_json()["tpot_ms"] is None


def test_the_same_seed_asks_the_same(session):
    def prompts(seed: int):
        found, _ = find_requests(session, ThroughputPlan(num_prompts=3, input_len=9, seed=seed))
        return [request.prompt_token_ids for request in found]

    assert prompts(1) == prompts(1) != prompts(2)
    assert len(find_requests(session, ThroughputPlan(input_len=9))[0]) == 64


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [
        {"prompt": "how are you?", "output_len": 3},
        {"messages": [{"role": "user", "content": "hi"}], "output_len": 5},
        {"prompt": "x" * 300, "output_len": 5},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_of_requests(session, questions):
    plan = ThroughputPlan("auto", questions, repeat=1)
    result = measure_throughput(session, plan, {})
    assert result.num_requests == 2 and result.num_output_tokens == 8
    assert any(
        "1 of 3 requests are longer than the engine's context of 256" in warning
        for warning in result.run["warnings"]
    )


def test_a_sharegpt_file(session, tmp_path):
    turns = [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "well, hello"}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "a", "conversations": turns}]))
    requests, left_out = find_requests(session, ThroughputPlan("auto", path, num_prompts=2))
    assert [request.output_len for request in requests] == [11, 11] and left_out == 0
    (short, _), _ = find_requests(session, ThroughputPlan("sharegpt", path, 2, output_len=4))
    assert short.output_len == 4


def test_what_does_not_fit_is_refused(session, questions, tmp_path):
    with pytest.raises(ConfigError, match=r"300 prompt and 128 output tokens are 428.*is 256"):
        find_requests(session, ThroughputPlan(input_len=300))
    with pytest.raises(BenchmarkError, match="all 3 requests are longer than .* 256 tokens"):
        find_requests(session, ThroughputPlan("auto", questions, output_len=256))
    with pytest.raises(BenchmarkError, match="nowhere"):
        find_requests(session, ThroughputPlan("jsonl", tmp_path / "nowhere.jsonl"))
