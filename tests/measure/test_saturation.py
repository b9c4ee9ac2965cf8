from __future__ import annotations

import random

import pytest

from octavo.measure.saturation import CANNOT_SAY, KEEPING_UP, SATURATED, saturation


def queue(record, rate: float, service: float, count: int, seed: int = 0):
    """Poisson arrivals at a server that takes ``service`` seconds for each, one after another."""
    draws = random.Random(seed)
    now = free = 0.0
    records = []
    for _ in range(count):
        now += draws.expovariate(rate)
        begin = max(now, free)
        free = begin + service
        records.append(record(now, begin + service / 2, free))
    return records


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_a_server_with_room_keeps_up(record, rate, seed):
    found = saturation(queue(record, rate, 0.1, 200, seed), is_open_loop=True)
    assert found.verdict == KEEPING_UP
    assert found.deficit < 0.1 and not found.concurrency.grows(2.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [13.0, 30.0])
def test_a_server_with_more_than_it_can_do_is_saturated(record, rate, seed):
    found = saturation(queue(record, rate, 0.1, 200, seed), is_open_loop=True)
    assert found.verdict == SATURATED
    assert "fewer requests were completed" in found.reason and "TTFT grew" in found.reason
    assert found.deficit == pytest.approx(1 - 10 / rate, abs=0.15)
    assert found.arrival_rate == pytest.approx(rate, rel=0.3)
    assert found.completion_rate == pytest.approx(10, rel=0.1)
    assert found.ttft.slope > 0 and found.concurrency.slope > 0


def test_figures_by_hand(record):
    """A request a second from 0 to 20, each of which takes half a second."""
    records = [record(float(i), i + 0.25, i + 0.5) for i in range(21)]
    found = saturation(records, is_open_loop=True)
    assert found.verdict == KEEPING_UP
    assert found.arrival_rate == 1.0 and found.completion_rate == 1.0 and found.deficit == 0.0
    assert found.ttft.first == found.ttft.second == 0.25
    assert found.ttft.slope == pytest.approx(0, abs=1e-12)
    assert found.concurrency.first == found.concurrency.second == 0.5
    assert found.as_json()["ttft_ms"]["first_half"] == 250


def test_refusals_are_no_completions(record):
    records = [record(float(i), *([i + 0.25, i + 0.5] if i % 2 else [])) for i in range(40)]
    found = saturation(records, is_open_loop=True)
    assert found.verdict == CANNOT_SAY and found.deficit == pytest.approx(1 - 19 / 39)
    assert "nothing else tells of a queue" in found.reason


@pytest.mark.parametrize(
    ("records", "is_open_loop", "reason"),
    [
        ([(0.1 * i, 0.1 * i + 0.05) for i in range(40)], False, "when another has ended"),
        ([(0.1 * i, 0.1 * i + 0.05) for i in range(19)], True, "fewer than 20"),
        ([(0.0, 1.0)] * 40, True, "at once"),
        ([(0.1 * i,) for i in range(40)], True, "no request was completed"),
        ([(0.1 * i, 0.1 * i + 2.0) for i in range(40)], True, "send for longer"),
    ],
)
def test_where_nothing_can_be_said_it_says_why(record, records, is_open_loop, reason):
    found = saturation([record(*times) for times in records], is_open_loop=is_open_loop)
    assert found.verdict == CANNOT_SAY and reason in found.reason
