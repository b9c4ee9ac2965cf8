from __future__ import annotations

import csv
import io
import json

import pytest
from simulating import at_times, different_asks, fleet_spec

from octavo.measure.load_report import create_report
from octavo.measure.slo import RequestSlo
from octavo.sim.report import report_on
from octavo.sim.timeline import Timeline, series_csv
from octavo.workload.settings import LoadSettings


@pytest.fixture(scope="module")
def run():
    timeline = Timeline()
    prompts = different_asks(40, 60, 20)
    times = [0.01 * index for index in range(40)]
    spec = fleet_spec(num_replicas=2, max_num_seqs=6)
    return timeline, at_times(prompts, times, spec, watch=timeline.note)


def test_a_series_adds_up(run):
    timeline, result = run
    points = timeline.series(result.makespan_s, span_s=0.25)
    assert [point.time_s for point in points] == [0.25 * index for index in range(len(points))]
    assert len(points) == int(result.makespan_s / 0.25) + 1
    tokens = sum(point.output_tps * 0.25 for point in points)
    assert tokens == pytest.approx(40 * 20)
    computed = sum(each.tokens_computed for each in result.replicas)
    assert sum(point.computed_tps * 0.25 for point in points) == pytest.approx(computed)
    assert all(0 <= point.kv_use <= 1 and point.running <= 12 for point in points)
    assert max(point.waiting for point in points) > 0


def test_a_series_chooses_its_own_span(run):
    timeline, result = run
    assert 100 < len(timeline.series(result.makespan_s)) <= 600
    rows = list(csv.DictReader(io.StringIO(series_csv(timeline.series(result.makespan_s)))))
    assert list(rows[0]) == [
        *("time_s", "running", "waiting", "kv_use"),
        *("steps_per_s", "computed_tps", "output_tps"),
    ]
    assert Timeline().series(0.0) == []


def test_the_trace_has_a_track_for_each_replica_and_each_request(run):
    timeline, result = run
    events = timeline.trace(result.requests)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[1, 0] == "replica 0" and names[1, 1] == "replica 1"
    spans = [event for event in events if event["ph"] == "X"]
    steps = [span for span in spans if span["pid"] == 1]
    assert len(steps) == sum(each.num_steps for each in result.replicas)
    for track in (0, 1):  # a track has one thing at a time
        own = [span for span in steps if span["tid"] == track]
        ends = [span["ts"] + span["dur"] for span in own]
        assert all(b["ts"] >= end - 1e-3 for end, b in zip(ends, own[1:], strict=False))
    record = result.records[7]
    mine = [span for span in spans if (span["pid"], span["tid"]) == (2, 7)]
    assert [span["name"] for span in mine] == ["queue", "prefill", "decode"]
    assert sum(span["dur"] for span in mine) == pytest.approx(record.e2el * 1e6)
    assert mine[2]["ts"] == pytest.approx(record.first_token * 1e6)


def test_the_report_is_that_of_the_load_benchmark(run, tmp_path):
    timeline, result = run
    load = LoadSettings(request_rate=33.0)
    slo = RequestSlo(ttft=0.5)
    report = report_on(result, "none", load, is_open_loop=True, setting={"slots": 6}, slo=slo)
    document = report.as_json()
    live = create_report(result.records, is_open_loop=True, slo=slo)
    assert document["mean_ttft_ms"] == live.metrics.latencies["ttft"].mean * 1e3
    assert document["goodput_attainment"] == live.goodput.attainment.share
    assert document["request_rate"] == 33.0 and document["completed"] == 40
    assert document["simulated"] is True and document["simulation"]["slots"] == 6
    for each in document["simulation"]["replicas"]:
        assert each["busy_s"] + each["idle_s"] == pytest.approx(result.makespan_s)
    assert "Serving Benchmark Result" in report.as_text()
    paths = report.write(tmp_path / "out", timeline)
    before = [path.read_bytes() for path in paths]
    assert json.loads(before[0])["ttfts"] == [record.ttft for record in result.records]
    assert json.loads(before[2])["traceEvents"]
    report.write(tmp_path / "out", timeline)
    assert [path.read_bytes() for path in paths] == before
