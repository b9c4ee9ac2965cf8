from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.measure.request_record import RequestRecord
from octavo.planner.slo import parse_slo
from octavo.tuning.outcome import LoadOutcome, first_best, load_outcome

SLO = parse_slo("ttft_p50=100,tpot_mean=20")


def outcome(strain: float, score: float = 100.0) -> LoadOutcome:
    return LoadOutcome({}, strain, "ttft_p50", 1.0, 1.0, 1.0, score)


def test_limits_are_of_all_runs_together(answered):
    runs = [[answered(0.05), answered(0.09)], [answered(0.07, tpot=0.025)]]
    made = load_outcome(runs, SLO)
    assert made.seconds_of == pytest.approx({"ttft_p50": 0.07, "tpot_mean": 0.015})
    assert (made.binding, made.strain) == ("tpot_mean", pytest.approx(0.75))
    assert made.holds and made.rate is None
    # The runs took 0.19 and 0.32 s; the gaps of one request are longer than their mean may be.
    assert made.attainment == pytest.approx(2 / 3) and made.score == 67
    assert made.goodput == pytest.approx(2 / 0.51)
    assert made.output_throughput == pytest.approx(33 / 0.51)


def test_of_two_limits_of_a_metric_each_request_keeps_the_looser(answered):
    slo = parse_slo("ttft_p50=60,ttft_p99=200")
    made = load_outcome([[answered(0.05), answered(0.05), answered(0.15)]], slo)
    assert made.holds and made.attainment == 1.0


def test_nothing_holds_where_a_request_has_failed(answered):
    failed = RequestRecord("x", 0.0, 0.0, 1.0, error="the queue is full")
    made = load_outcome([[answered(0.01), failed]], SLO)
    assert not made.holds and made.attainment == 0.5
    assert made.as_json()["strain"] is None and made.as_json()["ttft_p50_ms"] is None


def test_answers_of_one_token_have_no_time_between_tokens(answered):
    made = load_outcome([[answered(0.05, tokens=1)]], SLO)
    assert made.seconds_of["tpot_mean"] == 0.0 and made.binding == "ttft_p50"


def test_what_holds_comes_before_what_scores_and_that_before_strain():
    mixed = [outcome(0.9, 80), outcome(1.1, 100), outcome(0.5, 90), outcome(0.95, 80)]
    ordered = sorted(mixed, key=lambda each: each.rank, reverse=True)
    assert [each.strain for each in ordered] == [0.5, 0.9, 0.95, 1.1]


def test_what_cannot_be_noticed_is_not_better():
    usual = outcome(0.8, 90)
    assert not outcome(0.77, 90).is_better_than(usual)
    assert not outcome(0.1, 90).is_better_than(outcome(0.14, 90))  # of limits far away
    assert not outcome(2.9, 90).is_better_than(outcome(3.0, 90))
    assert outcome(2.8, 90).is_better_than(outcome(3.0, 90))
    assert not outcome(0.8, 92).is_better_than(usual)
    assert outcome(0.7, 92).is_better_than(usual)
    assert outcome(0.9, 98).is_better_than(usual)
    assert outcome(0.99, 50).is_better_than(outcome(1.01, 99))
    assert not usual.is_better_than(usual)
    assert not outcome(math.inf).is_better_than(outcome(math.inf))


strains = st.floats(0.01, 3.0) | st.just(math.inf)
outcomes = st.builds(outcome, strains, st.floats(0, 100))


@given(outcomes, outcomes)
def test_not_each_is_better_than_the_other(one, other):
    assert not (one.is_better_than(other) and other.is_better_than(one))


@given(st.lists(outcomes, min_size=1, max_size=6))
def test_the_first_stays_unless_another_is_better(made):
    best = first_best(dict(enumerate(made)), LoadOutcome.is_better_than)
    beaten = [number for number in range(1, len(made)) if made[number].is_better_than(made[0])]
    assert best == 0 if not beaten else best >= beaten[0]
