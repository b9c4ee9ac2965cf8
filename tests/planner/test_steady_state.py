from __future__ import annotations

import math

import pytest
from simulated_service import figures, line_cost, serve

from octavo.measure.statistics import percentile
from octavo.planner import plan
from octavo.planner.figures import ms_json
from octavo.planner.latency import BatchSlots
from octavo.planner.steady_state import SteadyState, StepTable
from octavo.planner.traffic import Traffic

SEATS = BatchSlots(max_num_seqs=128, max_num_batched_tokens=2048)


def settled(traffic: Traffic, **cost: float) -> SteadyState:
    return SteadyState(StepTable(line_cost(**cost), traffic), traffic, SEATS)


@pytest.mark.parametrize(
    "input_len, output_len, rate",
    [(200, 60, 2), (200, 60, 12), (1000, 50, 4), (4000, 30, 1), (50, 300, 3)],
)
def test_means_are_near_those_of_the_simulator(input_len, output_len, rate):
    traffic = Traffic(input_len, output_len, rate)
    simulated = figures(serve(line_cost(), traffic, SEATS, num_requests=200))
    latency = settled(traffic).latency()
    for metric in ("tpot", "e2e"):
        assert latency.of(metric).value == pytest.approx(simulated[metric], rel=0.1), metric
    assert latency.ttft.value == pytest.approx(simulated["ttft"], rel=0.2)


@pytest.mark.parametrize("input_len, output_len, rate", [(200, 60, 12), (1000, 50, 4)])
def test_of_a_hundred_requests_one_or_two_are_slower(input_len, output_len, rate):
    traffic = Traffic(input_len, output_len, rate)
    requests = serve(line_cost(), traffic, SEATS, num_requests=400)
    latency = settled(traffic).latency(99)
    for metric in ("ttft", "tpot", "e2e"):
        simulated = percentile([getattr(each.stats, metric) for each in requests], 99)
        assert latency.of(metric).value == pytest.approx(simulated, rel=0.3), metric


def test_answers_of_one_token_have_no_time_between():
    service = settled(Traffic(200, 1, rate=5))
    simulated = figures(serve(line_cost(), Traffic(200, 1, rate=5), SEATS, num_requests=200))
    assert service.latency(99).tpot.value == service.latency().tpot.value == 0
    assert service.latency().ttft.value == pytest.approx(simulated["ttft"], rel=0.1)


@pytest.mark.parametrize("traffic", [Traffic(2000, 1, rate=6), Traffic(200, 500, rate=60)])
def test_more_than_can_be_answered_has_no_end(traffic):
    """Too many prompts, and too many streams for the batch slots."""
    service = settled(traffic)
    assert not service.is_stable
    assert service.latency().ttft.value == service.latency(99).e2e.value == math.inf


def test_what_may_be_too_much_may_have_no_end():
    service = settled(Traffic(2000, 1, rate=4.2), spread=0.2)
    ttft = service.latency().ttft
    assert service.is_stable and math.isfinite(ttft.value) and ttft.high == math.inf


def test_everybody_waits_longer_the_more_there_are():
    means = [settled(Traffic(500, 100, rate)).latency() for rate in (1, 3, 6, 9)]
    for metric in ("ttft", "tpot", "e2e"):
        values = [latency.of(metric).value for latency in means]
        assert values == sorted(values)


def test_a_prompt_that_takes_less_than_a_step_delays_nobody():
    traffic = Traffic(1, 100, rate=0.1)
    service = plan("llama-3.1-8b", "h100-sxm", traffic).deployment.serve(traffic)
    assert service.prefill_share == 0
    assert service.latency(99).tpot.value >= service.latency().tpot.value


def test_the_share_of_prompts_is_that_of_the_work():
    """10 requests a second of 20 ms each."""
    service = settled(Traffic(200, 2, rate=10), fixed=0.0, per_key=0.0)
    assert service.prefill_share == pytest.approx(0.2, rel=0.01)
    assert service.requests_per_second.value == 10


def test_what_has_no_end_is_null_in_json():
    ttft = settled(Traffic(2000, 1, rate=4.2), spread=0.2).latency().ttft
    document = ms_json(ttft)
    assert document["high"] is None and document["value"] == pytest.approx(ttft.value * 1e3)
