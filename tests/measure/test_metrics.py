"""Every figure here was computed by hand."""

from __future__ import annotations

import math

import pytest

from octavo.measure.metrics import (
    Distribution,
    bootstrap_intervals,
    latency_values,
    peak_output_rate,
    percent_name,
    run_duration,
    summarize,
)

about = pytest.approx


def test_the_metrics_of_one_request(record):
    """Sent at 10 s, two seconds late, with tokens at 10.5, 10.75 and 11.5; done at 11.6."""
    one = record(10.0, 10.5, 10.75, 11.5, scheduled=8.0, ended=11.6, queue_time=1.5)
    assert one.ttft == 0.5 and one.e2el == 1.5 and one.itls == [0.25, 0.75]
    assert one.tpot == 0.5  # (1.5 - 0.5) / 2
    assert one.normalized_latency == 0.5  # 1.5 / 3
    assert one.delay == 2.0 and one.send_lag == 0.5


def test_an_event_may_bring_several_tokens(record):
    """TPOT is of tokens, ITL of events."""
    one = record(0.0, 0.2, 0.6, 1.0, output_tokens=9, event_tokens=[1, 4, 4])
    assert one.tpot == about(0.1) and one.itls == about([0.4, 0.4])
    assert one.tokens_of_events() == [1, 4, 4]
    unknown = record(0.0, 0.2, 0.6, 1.0, output_tokens=10)
    assert unknown.tokens_of_events() == [3, 3, 4]
    partly = record(0.0, 0.2, 0.6, 1.0, output_tokens=10, event_tokens=[None, 5, None])
    assert partly.tokens_of_events() == [2, 5, 3]


def test_one_token_has_no_tpot(record):
    one = record(0.0, 0.3)
    assert one.tpot is None and one.itls == [] and one.e2el == one.ttft == 0.3
    values = latency_values([one, record(0.0, 0.1, 0.3)])
    assert values["tpot"] == about([0.2]) and values["ttft"] == about([0.3, 0.1])


def test_the_metrics_of_a_run(record):
    records = [
        record(1.0, 1.5, 2.0, 2.5, prompt_tokens=10, scheduled=0.5, cached_tokens=4),
        record(1.5, 1.7, 3.7, prompt_tokens=20, queue_time=0.1, scheduled=1.4),
        record(2.0),  # refused
        record(2.0, 4.0, prompt_tokens=5, output_tokens=1, scheduled=2.0),
    ]
    found = summarize(records, (50, 100))
    assert (found.completed, found.failed, found.unfinished) == (3, 1, 0)
    assert found.duration == 3.0  # 1.0 to 4.0
    assert (found.total_input_tokens, found.total_output_tokens) == (35, 6)
    assert found.total_cached_tokens == 4
    assert found.request_throughput == 1.0 and found.output_throughput == 2.0
    assert found.total_token_throughput == about(41 / 3)
    assert found.max_concurrent_requests == 3  # at 2.0; the refused one took no time

    ttft = found.latencies["ttft"]
    assert ttft.mean == about((0.5 + 0.2 + 2.0) / 3) and ttft.median == about(0.5)
    assert ttft.percentiles == about({50: 0.5, 100: 2.0})
    mean = (0.5 + 2.0) / 2  # of TPOT: the request's with 3 tokens, and with 2
    assert found.latencies["tpot"].mean == about(mean)
    assert found.latencies["tpot"].std == about(0.75)  # of a population
    assert found.latencies["itl"].mean == about((0.5 + 0.5 + 2.0) / 3)  # of gaps
    assert found.latencies["e2el"].mean == about((1.5 + 2.2 + 2.0) / 3)
    assert found.latencies["ttft_from_scheduled"].mean == about((1.0 + 0.3 + 2.0) / 3)
    assert found.latencies["e2el_from_scheduled"].mean == about((2.0 + 2.3 + 2.0) / 3)
    assert found.latencies["client_queue_time"].max == about(0.1)
    assert found.latencies["e2el_including_client_queue"].mean == about((1.5 + 2.3 + 2.0) / 3)
    assert found.latencies["normalized_latency"].mean == about((0.5 + 1.1 + 2.0) / 3)
    assert found.latencies["send_lag"].count == 4
    assert found.latencies["send_lag"].max == about(0.5)


def test_a_run_without_answers(record):
    found = summarize([record(1.0, ended=1.5), record(1.0, ended=2.0, unfinished=True)])
    assert (found.completed, found.failed, found.unfinished) == (0, 1, 1)
    assert found.duration == 1.0 and found.output_throughput == 0.0
    assert set(found.latencies) == {"send_lag"}
    assert summarize([]).duration == 0.0 and summarize([]).request_throughput == 0.0


def test_peak_throughput_counts_tokens_and_not_events(record):
    """Bins of a second from the first sending at 0.5: [0.5, 1.5) has 1 + 8, [1.5, 2.5) has 7."""
    one = record(0.5, 0.9, 1.4, 1.6, output_tokens=10, event_tokens=[1, 8, 1])
    two = record(0.7, 2.0, 2.4, output_tokens=6, event_tokens=[3, 3])
    assert peak_output_rate([one, two], run_duration([one, two])) == 9.0
    assert peak_output_rate([], 1.0) == 0.0
    short = record(0.0, 0.1, 0.25, output_tokens=5)
    assert peak_output_rate([short], 0.25) == about(20.0)  # as its mean
    even = record(0.0, 1.0, 2.0, output_tokens=2)  # the last token ends the second second
    assert peak_output_rate([even], 2.0) == 1.0


def test_distributions():
    found = Distribution.of([4.0, 1.0, 2.0, 3.0], (25, 99))
    assert (found.count, found.mean, found.median, found.min, found.max) == (4, 2.5, 2.5, 1.0, 4.0)
    assert found.std == about(math.sqrt(1.25))
    assert found.percentiles == about({25: 1.75, 99: 3.97})
    assert found.as_json()["p99"] == about(3970)
    assert [percent_name(percent) for percent in (99.0, 99.9, 50)] == ["p99", "p99.9", "p50"]


def test_bootstrap_intervals(record):
    same = [record(float(i), i + 0.5, i + 0.6, i + 0.7) for i in range(5)]
    found = bootstrap_intervals(same, (99,))
    assert found["mean_ttft_ms"] == found["p99_ttft_ms"] == about((500, 500))
    assert found["mean_itl_ms"] == about((100, 100))

    mixed = [record(0.0, 0.01 * (i + 1), 1.0 + i) for i in range(40)]
    found = bootstrap_intervals(mixed, (99,))
    low, high = found["mean_ttft_ms"]
    assert 150 < low < 205 < high < 260  # 205 is the mean; its standard error 18
    assert found == bootstrap_intervals(mixed, (99,))
    assert found != bootstrap_intervals(mixed, (99,), seed=1)
    assert bootstrap_intervals(mixed[:1], (99,)) == {}
