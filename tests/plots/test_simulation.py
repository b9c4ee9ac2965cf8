from __future__ import annotations

import pytest
from simulating import at_times, different_asks, fleet_spec

from octavo.measure.metrics import latency_values
from octavo.plots.simulation import run_over_time
from octavo.sim.timeline import Timeline

pytest.importorskip("matplotlib")


@pytest.fixture
def run():
    timeline = Timeline()
    prompts = different_asks(12, 100, 10)
    spec = fleet_spec(num_blocks=16)
    return at_times(prompts, [0.05 * i for i in range(12)], spec, watch=timeline.note), timeline


def test_a_run_is_drawn_over_its_time(run):
    result, timeline = run
    points = timeline.series(result.makespan_s, max_points=20)
    assert 10 <= len(points) <= 20
    values = latency_values(result.records)
    samples = {name: [each * 1e3 for each in values[name]] for name in ("ttft", "tpot")}
    figure = run_over_time(points, samples, title="a run", bounds_ms={"ttft": 5.0})
    requests, pool, computed, output, ttft, tpot = figure.axes
    times = [point.time_s for point in points]
    running, waiting = (line.get_ydata().tolist() for line in requests.lines)
    assert running == [point.running for point in points] and max(waiting) > 0
    assert pool.lines[0].get_ydata().tolist() == [100 * point.kv_use for point in points]
    assert computed.lines[0].get_ydata().tolist() == [point.computed_tps for point in points]
    assert output.lines[0].get_xydata().tolist() == [
        [time, point.output_tps] for time, point in zip(times, points, strict=True)
    ]
    assert (output.get_xlabel(), ttft.get_xlabel(), tpot.get_xlabel()) == (
        "time, s", "ttft, ms", "tpot, ms",
    )  # fmt: skip
    assert "bound 5 ms" in [text.get_text() for text in ttft.texts]


def test_answers_of_one_token_have_no_time_between_them(run):
    result, timeline = run
    points = timeline.series(result.makespan_s)
    figure = run_over_time(points, {"TTFT": [1.0], "TPOT": []}, title="")
    assert [axes.get_xlabel() for axes in figure.axes][-2:] == ["time, s", "TTFT, ms"]
    assert len(run_over_time(points, {"TTFT": []}, title="").axes) == 4
