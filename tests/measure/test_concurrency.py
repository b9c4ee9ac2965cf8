from __future__ import annotations

import pytest

from octavo.measure.concurrency import (
    TimeWindow,
    concurrency_curve,
    mean_concurrency,
    steady_window,
)
from octavo.measure.load_report import SteadyStateMetrics


def test_the_curve(record):
    records = [record(0.0, 2.0), record(1.0, 3.0, scheduled=0.5), record(2.0, 4.0)]
    curve = concurrency_curve(records)
    # At 2.0 one ends and one begins: a place that is passed on is no third request.
    assert curve == [(0.0, 1), (1.0, 2), (2.0, 2), (3.0, 1), (4.0, 0)]
    assert concurrency_curve(records, from_scheduled=True)[1] == (0.5, 2)
    assert concurrency_curve([]) == []


def test_its_mean():
    curve = [(0.0, 1), (1.0, 3), (2.0, 0)]
    assert mean_concurrency(curve, 0.0, 2.0) == 2.0
    assert mean_concurrency(curve, 0.5, 1.5) == 2.0
    assert mean_concurrency(curve, 0.5, 4.5) == pytest.approx(3.5 / 4)
    assert mean_concurrency(curve, 1.0, 1.0) == 0.0


def test_the_steady_state_is_the_longest_time_near_the_peak(record):
    """Four from 1 to 2, one until 3, four from 3 to 5; the peak is 4, and 80 % of it 3.2."""
    records = [
        *[record(1.0, 2.0) for _ in range(3)],
        record(0.0, 5.0),
        *[record(3.0, 5.0) for _ in range(3)],
    ]
    assert steady_window(records) == TimeWindow(3.0, 5.0)
    assert steady_window(records, 0.25) == TimeWindow(0.0, 5.0)
    assert steady_window([]) is None


def test_a_closed_loop_is_steady_although_it_takes_time_to_ask_again(record):
    """Two clients, each of whom pauses 10 ms between requests of a second."""
    first = [record(1.01 * i, 1.01 * i + 1) for i in range(5)]
    second = [record(0.5 + 1.01 * i, 1.5 + 1.01 * i) for i in range(5)]
    window = steady_window([*first, *second])
    assert window.begin == 0.5 and window.end == pytest.approx(5.04)
    longer = [record(1.2 * i, 1.2 * i + 1) for i in range(5)]  # pauses of 200 ms are pauses
    assert steady_window([*longer, *second]).length < 3


def test_what_is_in_the_steady_state(record):
    """Rates are of what came in the window; latencies of the requests that are wholly in it."""
    records = [
        record(0.0, 1.0, 3.0, 5.0),  # outside: it began before the peak
        record(1.0, 2.0, 4.0),
        record(4.0, 4.5, 5.5, 6.0),  # outside: it ended after
        record(1.5, 2.0, 3.0, 3.5, ended=5.0, unfinished=True, error="interrupted"),
    ]
    steady = SteadyStateMetrics.of(records, (99,), 1.0)
    assert steady.window == TimeWindow(1.5, 5.0)
    assert steady.metrics.completed == 0
    # Tokens after 1.5, up to 5.0: 3.0 5.0 | 2.0 4.0 | 4.5 | 2.0 3.0 3.5; answers: at 4.0 and 5.0.
    assert steady.output_throughput == pytest.approx(8 / 3.5)
    assert steady.request_throughput == pytest.approx(2 / 3.5)
    inside = SteadyStateMetrics.of([record(0.0, 1.0, 2.0), record(0.0, 1.5, 2.0)], (99,), 1.0)
    assert inside.metrics.completed == 2
    assert inside.as_json()["ttft_ms"]["mean"] == pytest.approx(1250)
    assert SteadyStateMetrics.of([], (99,), 1.0) is None
