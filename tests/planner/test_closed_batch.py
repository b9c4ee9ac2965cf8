from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_service import figures, line_cost, serve

from octavo.planner.closed_batch import ClosedBatch
from octavo.planner.latency import BatchSlots, decode_time, prefill_time
from octavo.planner.traffic import Traffic


def together(traffic: Traffic, slots: BatchSlots, **cost) -> dict[str, float]:
    service = ClosedBatch(line_cost(**cost), traffic, slots)
    found = {metric: service.latency().of(metric).value for metric in ("ttft", "tpot", "e2e")}
    return {**found, "requests_per_second": service.requests_per_second.value}


@pytest.mark.parametrize("input_len", [256, 512, 1024, 2048, 4096])
def test_without_a_queue_the_plan_is_what_the_simulator_does(input_len):
    """Reference case R34."""
    traffic = Traffic(input_len, output_len=128, concurrency=8)
    slots = BatchSlots(max_num_seqs=64, max_num_batched_tokens=2048)
    simulated = figures(serve(line_cost(), traffic, slots, 8))
    assert together(traffic, slots) == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize(
    "slots", [BatchSlots(3, 512), BatchSlots(8, 100), BatchSlots(2, 64), BatchSlots(8, 3)]
)
def test_who_waits_for_a_seat_and_who_for_tokens_too(slots):
    traffic = Traffic(150, output_len=40, concurrency=8)
    simulated = figures(serve(line_cost(), traffic, slots, 8))
    assert together(traffic, slots) == pytest.approx(simulated, rel=0.01)


@settings(max_examples=100, deadline=None)
@given(
    input_len=st.integers(1, 60),
    output_len=st.integers(1, 20),
    concurrency=st.integers(1, 9),
    max_num_seqs=st.integers(1, 9),
    budget=st.integers(1, 80),
    target=st.sampled_from([0.0, 0.006, 0.02]),
)
def test_whatever_the_shape_it_is_what_the_engine_does(
    input_len, output_len, concurrency, max_num_seqs, budget, target
):
    traffic = Traffic(input_len, output_len, concurrency=concurrency)
    slots = BatchSlots(max_num_seqs, budget, target)
    simulated = figures(serve(line_cost(), traffic, slots, concurrency))
    assert together(traffic, slots) == pytest.approx(simulated, rel=0.01)


def test_answers_of_one_token():
    traffic = Traffic(100, output_len=1, concurrency=4)
    found = together(traffic, BatchSlots(4, 200), fixed=0.0, per_token=1e-3, per_key=0.0)
    assert found == {
        "ttft": pytest.approx(0.3),  # two after 0.2 s, two after 0.4 s
        "tpot": 0.0,
        "e2e": pytest.approx(0.3),
        "requests_per_second": pytest.approx(10),
    }


def test_what_steps_may_cost_is_what_answers_may_take():
    service = ClosedBatch(
        line_cost(spread=0.25), Traffic(100, 20, concurrency=2), BatchSlots(2, 512)
    )
    for percentile in (None, 50.0, 99.0):
        latency = service.latency(percentile)
        for figure in (latency.ttft, latency.tpot, latency.e2e):
            assert figure.high == pytest.approx(1.25 * figure.value)
            assert figure.low == pytest.approx(figure.value / 1.25)
            assert figure.source == "roofline"
    rate = service.requests_per_second
    assert rate.low == pytest.approx(rate.value / 1.25)


def test_streams_and_the_share_of_prompts():
    """Prompts of 100 tokens at 1 ms each, beside 100 steps of 1 ms."""
    cost = line_cost(fixed=0.0, per_token=1e-3, per_key=0.0)
    alone = ClosedBatch(cost, Traffic(100, 101), BatchSlots(1, 512))
    assert alone.prefill_share == pytest.approx(0.5)
    assert alone.streams.value == pytest.approx(1.0)


def test_a_prompt_alone_and_a_step_of_streams():
    cost = line_cost(fixed=1e-3, per_token=1e-4, per_key=0.0)
    assert prefill_time(cost, 1000, budget=400).value == pytest.approx(3e-3 + 0.1)
    assert decode_time(cost, 8, context=100).value == pytest.approx(1.8e-3)
