"""Plans of pipelines promise what the engine's own scheduler does in a simulation."""

from __future__ import annotations

import pytest

from octavo.planner import Traffic, plan
from octavo.planner.latency import pipeline_seconds, prompt_chunks
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
    # Plans have equal stages, and what comes once a step in each of them.
    near = 0.01 if pp == 1 else 0.04
    assert ttft == pytest.approx(found["mean_ttft_ms"], rel=near)
    assert tpot == pytest.approx(found["mean_tpot_ms"], rel=near)
    assert rate == pytest.approx(found["output_throughput"], rel=near)
    (whole,) = [plan(MODEL, f"h100-sxm:{pp}", traffic, pp=pp).prefill.value]
    assert ttft == pytest.approx(1e3 * whole)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("input_len, output_len, num", [(8, 64, 256), (1000, 100, 64)])
def test_requests_that_begin_together(pp, input_len, output_len, num):
    traffic = Traffic(input_len, output_len, concurrency=num)
    ttft, tpot, rate = planned(pp, traffic)
    found = simulated(pp, traffic, num)
    assert rate == pytest.approx(found["output_throughput"], rel=0.07)
    assert tpot == pytest.approx(found["mean_tpot_ms"], rel=0.07)
    # Steps of different stages begin one after the other, which the plan of each stage leaves out.
    slack = 0.1 * found["mean_ttft_ms"] + 5
    assert ttft == pytest.approx(found["mean_ttft_ms"], abs=slack)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("input_len, rate", [(1000, 6.0), (4000, 2.0)])
def test_requests_at_a_moderate_rate(pp, input_len, rate):
    traffic = Traffic(input_len, 50, rate=rate * pp)
    ttft, tpot, _ = planned(pp, traffic)
    found = simulated(pp, traffic, 250)
    assert ttft == pytest.approx(found["mean_ttft_ms"], rel=0.15)
    # Pieces of prompts are longer than other steps, which wait for them in each stage.
    assert tpot == pytest.approx(found["mean_tpot_ms"], rel=0.12)


def test_more_stages_bring_first_tokens_sooner():
    firsts = [planned(pp, Traffic(8192, 50, rate=0.5))[0] for pp in (1, 2, 4)]
    assert firsts[1] < 0.75 * firsts[0] and firsts[2] < 0.75 * firsts[1]


def test_a_step_of_a_pipeline_gets_a_share_of_what_is_left():
    chunks = prompt_chunks(2000, 4096, stages=4)
    assert [chunk.num_tokens for chunk in chunks] == [500, 375, 282, 256, 256, 256, 75]
    assert [chunk.num_sampled for chunk in chunks] == [0] * 6 + [1]
    assert [chunk.num_tokens for chunk in prompt_chunks(2000, 900)] == [900, 900, 200]


@pytest.mark.parametrize(
    "steps, stages, seconds",
    [
        ([4.0, 2.0, 1.0], 1, 7.0),
        ([4.0, 4.0, 4.0], 4, 6.0),  # they begin at 0, 1 and 2
        ([4.0, 1.0], 2, 4.5),  # the second waits for the first, in each stage
        ([4.0, 4.0, 4.0], 2, 8.0),  # the third begins when the first is through
    ],
)
def test_steps_follow_each_other_through_stages(steps, stages, seconds):
    assert pipeline_seconds(steps, stages) == seconds
