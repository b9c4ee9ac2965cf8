"""Queues whose waiting times are known in closed form."""

from __future__ import annotations

import heapq
import math
import random
from statistics import fmean

import pytest
from simulating import at_times, different_asks, fleet_spec

from octavo.sim.simulation import simulate
from octavo.workload.arrivals import arrival_times
from octavo.workload.plan import LoadPlan

SERVICE_S = 0.1


def waits(rate: float, num: int, service_s: float = SERVICE_S) -> list[float]:
    """Of Poisson arrivals at one server that takes one at a time, always for as long."""
    spec = fleet_spec(lambda batch: service_s, max_num_seqs=1, prefix_caching=False)
    result = at_times(
        different_asks(num, input_len=1, output_len=1), arrival_times(num, rate, seed=3), spec
    )
    return [record.e2el - service_s for record in result.records]


@pytest.mark.parametrize(
    "rate, wait_s", [(2, 0.0125), (5, 0.05), pytest.param(8, 0.2, marks=pytest.mark.long)]
)
def test_constant_service_waits_as_in_an_m_d_1_queue(rate, wait_s):
    """Pollaczek and Khinchine: rho D / (2 (1 - rho))."""
    rho = rate * SERVICE_S
    assert wait_s == pytest.approx(rho * SERVICE_S / (2 * (1 - rho)))
    num = 60_000 if rate == 8 else 8_000
    assert fmean(waits(rate, num)) == pytest.approx(wait_s, rel=0.05)


def erlang_c(servers: int, offered: float) -> float:
    """The probability that who comes has to wait."""
    terms = [offered**k / math.factorial(k) for k in range(servers)]
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return last / (sum(terms) + last)


def run_m_m_k(servers: int, rate: float, num: int):
    """Arrivals, service times and waits: so many replicas with one slot each, and one queue, which
    is with the clients."""
    rng = random.Random(7)
    seconds = [rng.expovariate(1 / SERVICE_S) for _ in range(num)]

    def cost(batch) -> float:
        return seconds[batch.items[0].request.seed]

    spec = fleet_spec(cost, num_replicas=servers, max_num_seqs=1, prefix_caching=False)
    times = arrival_times(num, rate, seed=4)
    prompts = different_asks(num, input_len=1, output_len=1)
    records = simulate(prompts, LoadPlan(times, max_concurrency=servers), spec).records
    assert [record.e2el for record in records] == pytest.approx(seconds)
    return times, seconds, [record.queue_time for record in records]


@pytest.mark.parametrize("servers, rate", [(1, 8.0), (3, 25.0)])
def test_each_request_waits_for_the_first_server_that_is_free(servers, rate):
    """The recursion of Kiefer and Wolfowitz (1955), request by request."""
    times, seconds, waited = run_m_m_k(servers, rate, 1500)
    free_at = [0.0] * servers
    for time, service, wait in zip(times, seconds, waited, strict=True):
        begin = max(time, heapq.heappop(free_at))
        assert wait == pytest.approx(begin - time, abs=1e-9)
        heapq.heappush(free_at, begin + service)


@pytest.mark.slow
def test_random_service_from_one_queue_waits_as_erlang_says():
    servers, rate = 4, 24.0
    _, _, waited = run_m_m_k(servers, rate, 40_000)
    offered = rate * SERVICE_S
    expected = erlang_c(servers, offered) * SERVICE_S / (servers - offered)
    assert fmean(waited) == pytest.approx(expected, rel=0.05)


def test_latency_rises_with_load_under_the_same_random_numbers():
    prompts = different_asks(400)
    unit = arrival_times(400, 1.0, seed=9)
    means = []
    for rate in (1.0, 4.0, 16.0, 64.0):
        result = at_times(prompts, [time / rate for time in unit], fleet_spec(max_num_seqs=8))
        means.append(fmean(record.ttft for record in result.records))
    assert means == sorted(means) and means[-1] > 5 * means[0]
