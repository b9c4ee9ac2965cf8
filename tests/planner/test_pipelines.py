"""Plans of pipelines promise what the engine's own scheduler does in a simulation."""

from __future__ import annotations

import pytest

from octavo.core.prompt_chunks import PromptChunks, with_step_of
from octavo.cost.pipeline import StageTimes
from octavo.planner import Traffic, plan
from octavo.planner.latency import prompt_chunks
from octavo.sim import FleetSettings, LoadSettings, Workload, prepare

MODEL = "llama-3.1-8b"


def simulated(pp: int, traffic: Traffic, num_prompts: int) -> dict:
    fleet = FleetSettings(hardware=f"h100-sxm:{pp}", pp=pp)
    workload = Workload(
        num_prompts=num_prompts, input_len=traffic.input_len, output_len=traffic.output_len
    )
    load = LoadSettings(max_concurrency=num_prompts)
    if traffic.rate is not None:
        load = LoadSettings(request_rate=traffic.rate)
    return prepare(MODEL, fleet, workload, load).run().as_json()


def planned(pp: int, traffic: Traffic) -> tuple[float, float, float]:
    """Milliseconds to the first token and between tokens, and output tokens a second."""
    service = plan(MODEL, f"h100-sxm:{pp}", traffic, pp=pp).service
    assert service is not None
    latency = service.latency()
    rate = service.requests_per_second.value * traffic.output_len
    return 1e3 * latency.ttft.value, 1e3 * latency.tpot.value, rate


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("input_len", [100, 1024, 20_000])
def test_a_lone_prompt_takes_as_long_as_its_steps(pp, input_len):
    traffic = Traffic(input_len, 2, concurrency=1)
    ttft, tpot, rate = planned(pp, traffic)
    found = simulated(pp, traffic, num_prompts=1)
    assert ttft == pytest.approx(found["mean_ttft_ms"], rel=1e-3)
    assert tpot == pytest.approx(found["mean_tpot_ms"], rel=1e-3)
    assert rate == pytest.approx(found["output_throughput"], rel=1e-3)
    alone = plan(MODEL, f"h100-sxm:{pp}", traffic, pp=pp)
    assert ttft == pytest.approx(1e3 * alone.prefill.value)
    assert tpot == pytest.approx(1e3 * alone.decode_step.value)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize(
    "input_len, output_len, num",
    [(8, 64, 256), (1000, 100, 64), (716, 1, 12), (500, 50, 2), (500, 50, 3)],
)
def test_requests_that_begin_together(pp, input_len, output_len, num):
    traffic = Traffic(input_len, output_len, concurrency=num)
    ttft, tpot, rate = planned(pp, traffic)
    found = simulated(pp, traffic, num)
    assert rate == pytest.approx(found["output_throughput"], rel=0.015)
    assert tpot == pytest.approx(found["mean_tpot_ms"] or 0.0, rel=0.015)
    assert ttft == pytest.approx(found["mean_ttft_ms"], rel=0.015)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("input_len, rate", [(1000, 6.0), (4000, 2.0)])
def test_requests_at_a_moderate_rate(pp, input_len, rate):
    traffic = Traffic(input_len, 50, rate=rate * pp)
    ttft, tpot, _ = planned(pp, traffic)
    found = simulated(pp, traffic, 250)
    assert ttft == pytest.approx(found["mean_ttft_ms"], rel=0.06)
    assert tpot == pytest.approx(found["mean_tpot_ms"], rel=0.05)


def test_more_stages_bring_first_tokens_sooner():
    firsts = [planned(pp, Traffic(8192, 50, rate=0.5))[0] for pp in (1, 2, 4)]
    assert firsts[1] < 0.75 * firsts[0] and firsts[2] < 0.75 * firsts[1]


class Stages:
    """Four that take as long as their tokens, and 100 more."""

    count = 4
    prompt_chunks = PromptChunks(4, 4096, with_step_of(100))

    def times(self, chunks) -> StageTimes:
        return StageTimes([100.0 + sum(chunk.num_tokens for chunk in chunks)] * 4)


def test_a_prompt_is_cut_so_that_it_is_soonest_through():
    chunks = prompt_chunks(2000, 4096, Stages())
    assert [chunk.num_tokens for chunk in chunks] == [250] * 8
    assert [chunk.num_sampled for chunk in chunks] == [0] * 7 + [1]
    assert [chunk.num_tokens for chunk in prompt_chunks(2000, 900)] == [900, 900, 200]
