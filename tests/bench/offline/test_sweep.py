from __future__ import annotations

import csv
import io

import pytest

from octavo.base.errors import BenchmarkError
from octavo.bench.offline.load_sources import (
    EngineUnderLoad,
    ServerUnderLoad,
    sample_of_records,
)
from octavo.bench.offline.session import OfflineSession
from octavo.bench.offline.sweep import (
    LatencyBounds,
    LoadSample,
    SweepPlan,
    SweepPoint,
    choose_point,
    sweep,
    to_csv,
)
from octavo.bench.serving.http_client import HttpClient
from octavo.measure.concurrency import powers_of_two
from octavo.measure.request_record import RequestRecord
from octavo.measure.statistics import MedianRange
from octavo.settings.engine import EngineArgs


def sample(concurrency, tps=100.0, ttft=0.1, tpot=0.01, e2e=1.0, **changes):
    latencies = {"ttft": [ttft], "tpot": [tpot], "itl": [tpot], "e2e": [e2e]}
    return LoadSample(concurrency, 2.0, 1, 50, int(2 * tps), latencies, **changes)


class ScriptedSource:
    """Throughput and TPOT by a law; keeps the order in which it was asked."""

    def __init__(self):
        self.asked = []

    def measure(self, plan, concurrency, repetition):
        self.asked.append((repetition, concurrency))
        tps = 100 * min(concurrency, 4) + repetition
        return sample(concurrency, tps, tpot=concurrency / 1000)


def test_points_take_turns():
    source, steps = ScriptedSource(), []
    result = sweep(source, SweepPlan((4, 1, 2), repeat=2), advance=lambda: steps.append(1))
    assert source.asked == [(0, 1), (0, 2), (0, 4), (1, 1), (1, 2), (1, 4)]
    assert len(steps) == 6
    assert [point.concurrency for point in result.points] == [1, 2, 4]
    assert result.points[2].output_tps == MedianRange(400.5, 400, 401)
    assert result.points[0].total_tps.min == 100 + 50 / 2


def test_result_names_the_knee():
    result = sweep(ScriptedSource(), SweepPlan((1, 2, 4, 8, 16)))
    assert result.as_json()["knee"]["concurrency"] == 4
    assert result.best is None


def test_latencies_are_percentiles_over_all_requests():
    point = SweepPoint(2, [sample(2, ttft=0.1), sample(2, ttft=0.3)])
    assert point.latency_ms("ttft", 50) == pytest.approx(200)
    assert point.latency_ms("ttft", 99) == pytest.approx(298)
    one_token = SweepPoint(1, [LoadSample(1, 1.0, 1, 1, 1, {"ttft": [0.1], "tpot": []})])
    assert one_token.latency_ms("tpot", 99) is None


def points(*rows):
    """(concurrency, tps, ttft ms, tpot ms)"""
    return [
        SweepPoint(n, [sample(n, tps, ttft=ttft / 1e3, tpot=tpot / 1e3)])
        for n, tps, ttft, tpot in rows
    ]


CURVE = points((1, 100, 50, 10), (2, 180, 60, 12), (4, 300, 90, 20), (8, 290, 200, 40))


def test_the_best_point_has_most_throughput_of_those_within_all_bounds():
    assert choose_point(CURVE, LatencyBounds(tpot_ms=20)).point.concurrency == 4
    assert choose_point(CURVE, LatencyBounds(tpot_ms=20, ttft_ms=70)).point.concurrency == 2
    best = choose_point(CURVE, LatencyBounds(ttft_ms=1000))
    assert best.point.concurrency == 4 and best.is_met  # not the last, which is slower
    assert choose_point(CURVE, LatencyBounds()) is None


def test_where_no_point_is_within_bounds_the_nearest_is_told():
    choice = choose_point(CURVE, LatencyBounds(tpot_ms=5, ttft_ms=10))
    assert not choice.is_met
    assert choice.point.concurrency == 1
    assert choice.excesses == pytest.approx({"ttft": 5, "tpot": 2})


def test_bounds_are_on_the_percentile_that_is_asked_for():
    point = SweepPoint(1, [sample(1, tpot=0.01)] * 9 + [sample(1, tpot=0.1)])
    assert choose_point([point], LatencyBounds(tpot_ms=20, percent=50)).is_met
    assert not choose_point([point], LatencyBounds(tpot_ms=20, percent=99)).is_met


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, (1,)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))]
)
def test_default_concurrencies(limit, expected):
    assert powers_of_two(limit) == expected


def test_no_prompt_comes_twice():
    plan = SweepPlan((1, 2), input_len=8, output_len=4, repeat=2)
    prompts = [
        request.prompt_token_ids
        for repetition in range(2)
        for concurrency in (1, 2)
        for request in plan.requests(concurrency, repetition, 1000)
    ]
    assert len(set(prompts)) == len(prompts)
    assert plan.requests(2, 1, 1000) == plan.requests(2, 1, 1000)


def test_csv_has_a_line_a_point():
    rows = list(csv.DictReader(io.StringIO(to_csv(CURVE))))
    assert [row["concurrency"] for row in rows] == ["1", "2", "4", "8"]
    assert float(rows[1]["output_tps"]) == 180
    assert float(rows[1]["ttft_p99_ms"]) == 60
    assert rows[1]["mean_batch"] == ""


def test_an_engine_under_load(tiny_model):
    with OfflineSession(
        EngineArgs(model=str(tiny_model), device="cpu", kernels="reference")
    ) as session:
        plan = SweepPlan((1, 3), input_len=10, output_len=5, repeat=2)
        source = EngineUnderLoad(session)
        source.warm_up(plan)
        result = sweep(source, plan)
    document = result.as_json()
    assert [point["concurrency"] for point in document["points"]] == [1, 3]
    for point in document["points"]:
        assert point["num_requests"] >= 2 * 4
        assert 0 < point["output_tps"]["min"] <= point["output_tps"]["median"]
        assert point["output_tps"]["median"] < point["total_tps"]["median"]
        assert 0 < point["ttft_ms"]["p50"] <= point["ttft_ms"]["p99"] <= point["e2e_ms"]["p99"]
        assert point["num_preemptions"] == 0
    assert document["points"][0]["mean_batch"] <= 1
    assert 2 < document["points"][1]["mean_batch"] <= 3


def record(sent, first, last, **changes):
    fields = {
        "request_id": f"{sent}",
        "scheduled": sent,
        "sent": sent,
        "ended": last,
        "first_token": first,
        "last_token": last,
        "event_times": [first, last],
        "event_tokens": [1, 1],
        "prompt_tokens": 10,
        "output_tokens": 2,
        **changes,
    }
    return RequestRecord(**fields)


def test_a_server_is_measured_while_the_loop_is_full():
    # Two in flight. The window is from 2.0, when both of the ramp have a token, to 7.0, when the
    # last is sent.
    records = [
        record(0, 1, 3),
        record(0, 2, 4),
        record(3, 4, 5),
        record(4, 5, 6.5),
        record(5, 6, 7),
        record(6.5, 7.5, 8),
        record(7, 8, 9),
    ]
    found = sample_of_records(records, 2)
    assert found.elapsed_s == 5
    assert found.num_requests == 3
    # Tokens at 3, 4 of the ramp; at 4, 5, 5, 6.5, 6, 7 of the others.
    assert found.num_output_tokens == 8
    assert found.num_prompt_tokens == 30
    assert found.latencies["ttft"] == [1, 1, 1]
    assert found.latencies["e2e"] == [2, 2.5, 2]


def test_a_failed_request_ends_a_sweep():
    with pytest.raises(BenchmarkError, match="no room"):
        sample_of_records([record(0, 1, 2), record(0, None, None, ended=1, error="no room")], 1)


def test_a_server_under_load(fake_server):
    source = ServerUnderLoad(lambda: HttpClient(fake_server.url), None, vocab_size=1000)
    plan = SweepPlan((1, 3), input_len=7, output_len=3, repeat=2)
    source.warm_up(plan)
    result = sweep(source, plan)
    bodies = [entry["body"] for entry in fake_server.log()]
    assert {body["model"] for body in bodies} == {"fake/model"}
    assert {len(body["prompt"]) for body in bodies} == {7}
    assert {body["max_tokens"] for body in bodies} == {1, 2, 3}  # the ramp is shorter
    assert all(body["ignore_eos"] for body in bodies)
    assert all(point.output_tps.min > 0 for point in result.points)
    assert result.as_json()["points"][0]["mean_batch"] is None
