from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.planner import queueing


def waits(rate: float, services, num_requests: int, num_servers: int = 1, seed: int = 0):
    """Of requests that arrive at random, by walking through them."""
    draw = random.Random(seed)
    now, free_at, found = 0.0, [0.0] * num_servers, []
    for _ in range(num_requests):
        now += draw.expovariate(rate)
        server = min(range(num_servers), key=free_at.__getitem__)
        start = max(now, free_at[server])
        free_at[server] = start + services(draw)
        found.append(start - now)
    return found


@pytest.mark.parametrize("rate, wait", [(2, 0.0125), (5, 0.05), (8, 0.2)])
def test_the_mean_wait_of_one_server(rate, wait):
    """Reference case R33."""
    assert queueing.md1_wait(rate, 0.1) == pytest.approx(wait)


@pytest.mark.parametrize("rate", [2, 5, 8, 9])
def test_the_distribution_of_waits_is_that_of_a_walk(rate):
    walked = sorted(waits(rate, lambda draw: 0.1, 300_000))
    for share in (0.5, 0.9, 0.99):
        foreseen = queueing.md1_wait_quantile(rate, 0.1, share)
        assert walked[int(share * len(walked))] == pytest.approx(foreseen, rel=0.12, abs=0.002)


@settings(max_examples=20, deadline=None)
@given(load=st.floats(0.05, 0.9))
def test_the_distribution_and_the_mean_agree(load):
    """The mean is the area above the distribution."""
    points = 200
    shares = [(index + 0.5) / points for index in range(points)]
    area = sum(queueing.md1_wait_quantile(load, 1.0, share) for share in shares) / points
    assert area == pytest.approx(queueing.md1_wait(load, 1.0), rel=0.03, abs=0.005)


def test_heavy_load_goes_on_where_the_sums_end():
    below, above = (queueing.md1_wait_quantile(load, 1.0, 0.99) for load in (0.9699, 0.9701))
    assert above == pytest.approx(below, rel=0.04)


def test_many_servers():
    assert queueing.erlang_c(1, 0.6) == pytest.approx(0.6)  # of one server, its load
    assert queueing.erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert queueing.mmk_wait(8, 0.1, 1) == pytest.approx(0.4)  # rho / (mu - lambda)
    walked = sorted(waits(25, lambda draw: draw.expovariate(10), 60_000, num_servers=3))
    mean = sum(walked) / len(walked)
    assert mean == pytest.approx(queueing.mmk_wait(25, 0.1, 3), rel=0.1)
    tail = queueing.mmk_wait_quantile(25, 0.1, 3, 0.95)
    assert walked[int(0.95 * len(walked))] == pytest.approx(tail, rel=0.1)


def test_overload_waits_for_ever():
    assert queueing.md1_wait(10, 0.1) == math.inf
    assert queueing.md1_wait_quantile(11, 0.1, 0.5) == math.inf
    assert queueing.mmk_wait(30, 0.1, 3) == queueing.mmk_wait_quantile(30, 0.1, 3, 0) == math.inf
    assert queueing.erlang_c(3, 5) == 1.0


def test_as_many_come_as_are_there():
    """B = rate x length x (10 ms + 1 ms x B)."""
    found = queueing.balance(lambda number: 2 * 100 * (0.010 + 0.001 * number), most=64)
    assert found == pytest.approx(2 * 100 * 0.010 / (1 - 2 * 100 * 0.001))
    assert queueing.balance(lambda number: 6 * 100 * (0.010 + 0.001 * number), most=14) is None
    assert queueing.balance(lambda number: 0.0, most=64) == 0.0


def test_of_two_balances_the_lesser_is_reached_first():
    """Where steps take more than in proportion, too many would be in balance, too."""
    found = queueing.balance(lambda number: 1 + number**2 / 8, most=1024)
    assert found == pytest.approx(4 - math.sqrt(8))


def test_delays_that_bring_further_delays():
    draw = random.Random(1)

    def poisson(mean: float) -> int:
        count, left = 0, draw.expovariate(1)
        while left < mean:
            count, left = count + 1, left + draw.expovariate(1)
        return count

    def meet() -> int:
        met = due = poisson(1.5)
        while due:
            due = poisson(0.4 * due)
            met += due
        return met

    walked = sorted(meet() for _ in range(30_000))
    assert sum(walked) / len(walked) == pytest.approx(1.5 / 0.6, rel=0.03)
    for share in (0.3, 0.5, 0.9, 0.99):
        foreseen = queueing.delays_quantile(1.5, 0.4, share)
        assert abs(walked[int(share * len(walked))] - foreseen) <= 1
    assert queueing.delays_quantile(0.0, 0.4, 0.99) == 0
    assert queueing.delays_quantile(800.0, 0.5, 0.5) == pytest.approx(1600, rel=0.01)
    with pytest.raises(ConfigError, match="no end"):
        queueing.delays_quantile(1.0, 1.0, 0.5)


@pytest.mark.parametrize("rate, service", [(-1, 0.1), (1, -0.1)])
def test_negative_rates_are_refused(rate, service):
    with pytest.raises(ConfigError, match="0 or more"):
        queueing.md1_wait(rate, service)
