"""Several replicas: routing, failures, prompts apart from answers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
from simulating import at_times, different_asks, fleet_spec

from octavo.sim.fleet import Disaggregation
from octavo.sim.prompts import PromptSpec
from octavo.sim.settings import ROUTER_NAMES, Outage
from octavo.workload.arrivals import arrival_times


def served_by(result) -> list[str]:
    return [request.replica for request in result.requests]


def test_round_robin_takes_turns():
    result = at_times(
        different_asks(6), [0.0] * 6, fleet_spec(num_replicas=3, router="round_robin")
    )
    assert served_by(result) == ["replica 0", "replica 1", "replica 2"] * 2


def test_least_loaded_avoids_who_is_busy():
    prompts = different_asks(4, 10, 5)
    prompts[0] = replace(prompts[0], output_len=500)
    result = at_times(prompts, [0.0, 1.0, 2.0, 3.0], fleet_spec(num_replicas=2))
    assert served_by(result) == ["replica 0"] + ["replica 1"] * 3


def test_prefix_aware_goes_where_the_prefix_is():
    shared = [range(10**6 * kind, 10**6 * kind + 800) for kind in (1, 2)]
    prompts = [
        PromptSpec(str(index), (shared[index // 2 % 2], range(index * 100, index * 100 + 20)), 5)
        for index in range(40)
    ]
    times = [0.4 * index for index in range(40)]
    hits = {}
    for router in ROUTER_NAMES:
        # Both prefixes do not fit into one pool.
        spec = fleet_spec(num_replicas=2, router=router, num_blocks=80, max_model_len=1024)
        result = at_times(prompts, times, spec)
        hits[router] = sum(record.cached_tokens for record in result.records)
    assert hits["prefix_aware"] == hits["prefix_oracle"] == 38 * 800
    assert hits["prefix_aware"] > 1.5 * hits["least_loaded"]


@pytest.mark.parametrize("router", ROUTER_NAMES)
def test_twice_the_replicas_serve_twice_the_load(router):
    prompts = different_asks(300)
    unit = arrival_times(300, 1.0, seed=1)
    one, two = (
        at_times(
            prompts,
            [time / (rate * num) for time in unit],
            fleet_spec(num_replicas=num, router=router, max_num_seqs=4),
        )
        for num, rate in ((1, 8.0), (2, 8.0))
    )
    assert fmean(r.e2el for r in two.records) < 1.1 * fmean(r.e2el for r in one.records)
    assert min(Counter(served_by(two)).values()) > 100


# -- failures -------------------------------------------------------------------------------------


def test_who_was_at_a_replica_that_fails_is_served_by_another():
    prompts = different_asks(4, 50, 30)
    times = [0.0, 0.0, 0.0, 1.0]
    calm = at_times(prompts, times, fleet_spec(num_replicas=2))
    spec = fleet_spec(num_replicas=2, outages=[Outage(0, 0.2)])
    result = at_times(prompts, times, spec)
    assert [record.output_tokens for record in result.records] == [30] * 4
    assert [request.times_sent for request in result.requests] == [2, 1, 2, 1]
    assert set(served_by(result)) == {"replica 1"}
    hit = result.records[0]
    assert hit.first_token > 0.2 and hit.ttft > calm.records[0].ttft  # what came before is lost
    assert [totals.num_failures for totals in result.replicas] == [1, 0]


def test_a_replica_comes_back_without_its_cache():
    prompt = PromptSpec("0", (range(160),), 5)
    prompts = [replace(prompt, request_id=str(index)) for index in range(3)]
    spec = fleet_spec(outages=[Outage(0, 5.0, 3.0)])
    first, waits, after = at_times(prompts, [0.0, 6.0, 9.0], spec).requests
    assert first.record.cached_tokens == 0
    assert waits.first_scheduled == 8.0 and waits.record.cached_tokens == 0
    assert after.record.cached_tokens > 0


def test_if_nobody_comes_back_the_rest_has_failed():
    result = at_times(different_asks(2), [0.0, 9.0], fleet_spec(outages=[Outage(0, 5.0)]))
    served, lost = result.records
    assert served.completed
    assert (lost.status, lost.error) == (503, "no replica was left to serve it")
    assert lost.ended < math.inf


# -- prompts apart from answers -------------------------------------------------------------------


def test_answers_begin_where_prompts_are_and_go_on_elsewhere():
    apart = Disaggregation(1, lambda tokens: 1.0 + tokens / 100)
    spec = fleet_spec(lambda batch: batch.num_tokens * 0.01, num_replicas=2, apart=apart)
    (request,) = at_times(different_asks(1, 100, 4), [0.0], spec).requests
    record = request.record
    assert record.ttft == pytest.approx(1.0)  # a hundred tokens
    # The transfer; then the tokens after the last whole block, and the first one of the answer.
    assert record.itls == pytest.approx([2.0 + 0.01 * (100 % 16 + 1), 0.01, 0.01])
    assert request.replica == "replica 1" and record.output_tokens == 4


def test_prompts_of_others_do_not_hold_up_answers_that_are_apart():
    prompts = different_asks(60, 1500, 60)
    times = [0.2 * index for index in range(60)]
    apart = Disaggregation(1, lambda tokens: 0.01)
    together = at_times(prompts, times, fleet_spec(num_replicas=2))
    separate = at_times(prompts, times, fleet_spec(num_replicas=2, apart=apart))
    worst = [max(max(record.itls[1:]) for record in r.records) for r in (together, separate)]
    assert worst[1] < 0.2 * worst[0]
    assert all(record.output_tokens == 60 for record in separate.records)


def test_one_token_needs_no_transfer():
    def refuse(tokens: int) -> float:
        raise AssertionError("there is nothing to go on with")

    spec = fleet_spec(num_replicas=2, apart=Disaggregation(1, refuse))
    (request,) = at_times(different_asks(1, 10, 1), [0.0], spec).requests
    assert request.replica == "replica 0" and request.record.output_tokens == 1
