from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.measure.request_record import RequestRecord
from octavo.planner.slo import parse_slo
from octavo.tuning.objective import QUEUE, GivenLoad, HighestRate, highest

SLO = parse_slo("ttft_p99=500")
TIMES = [0.5 * number for number in range(1, 101)]


@given(st.integers(-40, 40), st.integers(0, 60), st.data())
def test_the_highest_number_is_found_from_wherever_one_starts(lowest, count, data):
    top = lowest + count
    start = data.draw(st.integers(lowest, top))
    limit = data.draw(st.integers(lowest - 1, top + 5))
    asked = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= limit

    found = highest(holds, start, lowest, top)
    assert found == (None if limit < lowest else min(limit, top))
    assert len(asked) == len(set(asked)) and all(lowest <= each <= top for each in asked)
    assert len(asked) <= 2 * math.log2(count + 2) + 4


class Server:
    """One request at a time; each takes so long until its first token, and then ten gaps."""

    def __init__(self, answered, seconds: float):
        self._answered = answered
        self._seconds = seconds
        self.num_runs = 0

    def __call__(self, times):
        self.num_runs += 1
        free = 0.0
        records = []
        for time in times:
            free = max(free, time) + self._seconds
            records.append(self._answered(free - time, tpot=0.0, sent=time))
        return records


def test_a_given_load_is_sent_as_it_is(answered):
    objective = GivenLoad(SLO, TIMES)
    made = objective.judge(Server(answered, 0.1), 20)
    assert made.seconds_of == pytest.approx({"ttft_p99": 0.1}) and made.score == 100
    assert made.rate is None
    assert list(objective.trials(made)) == [TIMES]
    assert not objective.judge(Server(answered, 0.6), 20).holds


def test_the_highest_rate_is_just_below_where_a_queue_grows(answered):
    objective = HighestRate(SLO, TIMES)
    quick = objective.judge(Server(answered, 0.1), 100)
    # Two requests come in each unit of time, and ten a second are served. With so few requests, a
    # queue may grow a little.
    assert 4.7 < quick.rate < 5.3 and quick.score == quick.rate
    slow = objective.judge(Server(answered, 0.2), 100)
    assert quick.score > 1.9 * slow.score


def test_what_binds_is_what_does_not_hold_at_the_next_rate(answered):
    tight = HighestRate(parse_slo("ttft_p99=101"), TIMES).judge(Server(answered, 0.1), 100)
    loose = HighestRate(parse_slo("ttft_p99=3600s"), TIMES)
    assert tight.binding == "ttft_p99"
    assert loose.judge(Server(answered, 0.1), 100).binding == QUEUE


def test_a_limit_that_nothing_meets_is_said_at_the_lowest_rate(answered):
    made = HighestRate(SLO, TIMES).judge(Server(answered, 0.6), 50)
    assert not made.holds and made.score == 0 and made.binding == "ttft_p99"
    assert made.rate < 0.05


def test_where_nothing_is_answered_there_is_no_rate():
    def refuse(times):
        return [RequestRecord("x", time, time, time, error="too long") for time in times]

    made = HighestRate(SLO, TIMES).judge(refuse, 30)
    assert not made.holds and made.score == 0 and made.rate is None


def test_what_was_found_once_is_found_with_fewer_runs_again(answered):
    objective, server = HighestRate(SLO, TIMES), Server(answered, 0.1)
    first = objective.judge(server, 50)
    runs = server.num_runs
    assert objective.judge(server, 50) == first
    assert server.num_runs - runs < runs


def test_live_rates_go_down_from_what_was_simulated(answered):
    objective = HighestRate(SLO, TIMES)
    made = objective.judge(Server(answered, 0.1), 100)
    plans = [list(plan) for plan in objective.trials(made)]
    assert plans[0] == pytest.approx([time / (0.9 * made.rate) for time in TIMES])
    assert plans[0][-1] < plans[1][-1]
