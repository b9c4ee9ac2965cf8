"""When replicas come and go: a policy, told of made-up loads at made-up times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.scaling import Change, Load, ScalingLimits, ScalingPolicy

LIMITS = ScalingLimits(1, 4, target_ttft=1.0, up_after=2.0, down_after=60.0)
BUSY = Load(num_ready=1, num_coming=0, num_samples=30, places=8, predicted_ttft=3.0)
QUIET = Load(num_ready=3, num_coming=0, num_samples=2, places=8, predicted_ttft=0.1)


def changes(loads, limits=LIMITS, seconds=0.5):
    """The decisions for loads that are so many seconds apart."""
    policy = ScalingPolicy(limits)
    return [policy.decide(seconds * turn, load) for turn, load in enumerate(loads)]


def test_one_more_when_the_prediction_stays_over_its_target():
    decided = changes([BUSY] * 5)
    assert decided == [Change.NOTHING] * 4 + [Change.UP]


def test_a_burst_starts_nothing():
    assert set(changes([BUSY, BUSY, BUSY, QUIET] * 20)) == {Change.NOTHING}


def test_nothing_is_started_while_one_is_coming():
    assert set(changes([BUSY._replace(num_coming=1)] * 100)) == {Change.NOTHING}


def test_one_request_that_is_slow_by_itself_starts_nothing():
    """Another replica would not make it any faster."""
    assert set(changes([BUSY._replace(num_samples=1)] * 100)) == {Change.NOTHING}


def test_an_unknown_prediction_starts_nothing():
    assert set(changes([BUSY._replace(predicted_ttft=None)] * 100)) == {Change.NOTHING}


def test_one_less_after_a_long_while_in_which_one_less_had_done():
    decided = changes([QUIET] * 121)
    assert decided == [Change.NOTHING] * 120 + [Change.DOWN]


def test_a_slow_prediction_of_requests_that_are_alone_keeps_nothing():
    assert Change.DOWN in changes([QUIET._replace(predicted_ttft=9.0)] * 121)


def test_each_change_begins_the_wait_anew():
    decided = changes([QUIET] * 242)
    assert [turn for turn, change in enumerate(decided) if change is Change.DOWN] == [120, 241]


@pytest.mark.parametrize(
    "load",
    [
        QUIET._replace(num_samples=3, predicted_ttft=0.6),  # more than half of the target
        QUIET._replace(num_samples=9),  # more than half of the places of two
        QUIET._replace(num_coming=1),
    ],
    ids=["prediction", "samples", "one is coming"],
)
def test_between_the_thresholds_nothing_happens(load):
    assert set(changes([load] * 1000)) == {Change.NOTHING}


def test_what_has_gone_is_replaced_at_once():
    limits = replace(LIMITS, least=2)
    assert changes([Load(1, 0, 0, 8, None)], limits) == [Change.UP]
    assert changes([Load(1, 1, 0, 8, None)], limits) == [Change.NOTHING]


loads = st.builds(
    Load,
    st.integers(0, 6),
    st.integers(0, 2),
    st.integers(0, 100),
    st.integers(1, 16),
    st.none() | st.floats(0, 10),
)


@given(st.lists(st.tuples(st.floats(0.1, 100), loads), max_size=60))
def test_numbers_stay_within_bounds(story):
    """Whatever comes: over the bounds nothing is added, and under them nothing is drained."""
    limits, now = replace(LIMITS, least=2, most=4), 0.0
    policy = ScalingPolicy(limits)
    for seconds, load in story:
        now += seconds
        number = load.num_ready + load.num_coming
        change = policy.decide(now, load)
        assert change is not Change.UP or number < limits.most
        assert change is not Change.DOWN or number > limits.least


@given(loads, st.integers(1, 400))
def test_a_load_that_stays_the_same_is_answered_in_one_direction(load, turns):
    decided = set(changes([load] * turns)) - {Change.NOTHING}
    assert len(decided) <= 1


@given(st.integers(1, 8), st.floats(0.2, 50))
def test_replicas_settle_under_a_steady_load(num_start, work):
    """A made-up server whose prediction is its load by replica: it settles, and does not swing."""
    limits = ScalingLimits(1, 8, target_ttft=1.0, up_after=1.0, down_after=10.0)
    policy, number, steps = ScalingPolicy(limits), num_start, []
    for turn in range(600):
        samples = round(4 * work)
        load = Load(number, 0, samples, 8, work / number if samples > number else 0.0)
        change = policy.decide(0.5 * turn, load)
        number += {Change.UP: 1, Change.DOWN: -1}.get(change, 0)
        steps += [change] * (change is not Change.NOTHING)
    assert len(set(steps)) <= 1, steps
    assert len(steps) <= 7
