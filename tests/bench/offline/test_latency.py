"""Latency of one batch: figures by hand, and a small model."""

from __future__ import annotations

import json

import pytest

from octavo.base.errors import ConfigError
from octavo.bench import record
from octavo.bench.noise import NoiseProbe
from octavo.bench.offline import latency
from octavo.bench.offline.latency import LatencyPlan, measure_latency
from octavo.bench.offline.session import OfflineSession, RunTiming, StepTiming
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


def stats(arrival: float, scheduled: float, first: float, last: float, prompt: int, output: int):
    return RequestStats(
        arrival,
        prompt,
        output,
        first_scheduled_time=scheduled,
        first_token_time=first,
        last_token_time=last,
    )


def test_figures_by_hand():
    timing = RunTiming(
        8.0,
        [stats(0, 1, 2, 6, prompt=10, output=5), stats(0, 2, 4, 8, prompt=20, output=3)],
        [],
        [
            StepTiming(1, 10, False, 1, wall_s=1.0, kernel_s=0.9),
            StepTiming(2, 21, False, 1, wall_s=2.0, kernel_s=1.9),
            StepTiming(2, 2, True, 1, wall_s=1.0, kernel_s=0.6, num_new_tokens=2),
            StepTiming(2, 2, True, 1, wall_s=2.0, kernel_s=1.9, num_new_tokens=2),
            StepTiming(1, 1, True, 2, wall_s=1.0, kernel_s=0.4, num_new_tokens=2),
        ],
    )
    sample = latency._sample(timing)
    assert sample.ttft_ms == pytest.approx((2 + 4) / 2 * 1e3)
    assert sample.tpot_ms == pytest.approx((4 / 4 + 4 / 2) / 2 * 1e3)
    assert sample.prefill_tps == pytest.approx(30 / (4 - 1))
    assert sample.decode_tps == pytest.approx((2 + 2 + 2) / 4.0)
    assert sample.e2e_ms == 8000
    # outside of the kernels: 0.4, 0.1, and 0.6 for two tokens
    assert sample.step_overhead_us == pytest.approx(0.3e6)


def test_cached_tokens_are_not_computed():
    cached = stats(0, 0, 2, 2, prompt=10, output=1)
    cached.num_cached_tokens = 6
    assert latency._sample(RunTiming(2.0, [cached], [])).prefill_tps == pytest.approx(4 / 2)


def test_a_result_has_the_keys_that_were_agreed_on(session):
    calls = []
    plan = LatencyPlan(input_len=20, output_len=6, batch_size=3, repeat=3, warmup=2)
    result = measure_latency(session, plan, {"a": 1}, lambda: calls.append(1))
    assert len(calls) == 5
    document = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert (document["input_len"], document["output_len"], document["batch_size"]) == (20, 6, 3)
    spreads = ("ttft_ms", "tpot_ms", "prefill_tps", "decode_tps", "e2e_ms", "step_overhead_us")
    for name in spreads:
        spread = document[name]
        assert set(spread) == {"median", "min", "max"}
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert document["ttft_ms"]["max"] < document["e2e_ms"]["max"]
    assert document["peak_rss_bytes"] > 0
    assert document["roofline"]["decode"]["bound"] in ("memory", "compute")
    assert len(document["latencies"]) == 3
    assert document["avg_latency"] == pytest.approx(sum(document["latencies"]) / 3)
    assert document["percentiles"]["50"] == pytest.approx(document["e2e_ms"]["median"] / 1e3)
    assert set(document["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    run = document["run"]
    assert run["settings"] == {"a": 1} and run["engine"] == document["engine"]
    assert set(run["samples"]) == set(spreads)
    assert all(len(values) == 3 for values in run["samples"].values())


def test_decode_of_one_request_is_the_inverse_of_tpot(session):
    plan = LatencyPlan(input_len=8, output_len=60, repeat=1)
    (sample,) = measure_latency(session, plan, {}).samples
    assert sample.tpot_ms is not None
    assert sample.decode_tps == pytest.approx(1e3 / sample.tpot_ms, rel=0.15)


def test_one_token_has_no_pace(session):
    plan = LatencyPlan(input_len=8, output_len=1, repeat=2, warmup=0)
    document = measure_latency(session, plan, {}).as_json()
    assert document["tpot_ms"] is document["decode_tps"] is document["step_overhead_us"] is None
    assert document["roofline"]["decode"] is None
    assert document["ttft_ms"]["median"] > 0


def test_no_prompt_comes_twice(session, monkeypatch):
    prompts = []
    run = session.run

    def spy(requests):
        prompts.extend(request.prompt_token_ids for request in requests)
        return run(requests)

    monkeypatch.setattr(session, "run", spy)
    plan = LatencyPlan(input_len=30, output_len=1, batch_size=2, repeat=3, warmup=1, seed=5)
    measure_latency(session, plan, {})
    assert len(prompts) == len(set(prompts)) == 8
    first = list(prompts)
    prompts.clear()
    measure_latency(session, plan, {})
    assert prompts == first  # the same seed


def test_what_the_engine_cannot_hold_is_refused(session):
    with pytest.raises(ConfigError, match=r"250 prompt and 10 output tokens are 260.*is 256"):
        measure_latency(session, LatencyPlan(input_len=250, output_len=10), {})
    with pytest.raises(ConfigError, match="a batch of 5 needs max_num_seqs of as many.* is 4"):
        measure_latency(session, LatencyPlan(input_len=5, output_len=5, batch_size=5), {})


def test_preemptions_are_warned_of(tiny_model):
    args = EngineArgs(model=str(tiny_model), kernels="reference", threads=1, num_blocks=16)
    with OfflineSession(args) as session:
        plan = LatencyPlan(input_len=100, output_len=40, batch_size=2, repeat=1, warmup=0)
        run = measure_latency(session, plan, {}).run
    assert any("requests were preempted: the KV pool is too small" in w for w in run["warnings"])
