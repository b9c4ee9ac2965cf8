"""Timelines of stages show when each computes which step, and how long it waits."""

from __future__ import annotations

import json

import pytest

from octavo.sim import FleetSettings, LoadSettings, Timeline, Workload, prepare
from octavo.sim.stage_timeline import MOST_STEPS

WORKLOAD = Workload(num_prompts=24, input_len=300, output_len=12)


def simulated(timeline: Timeline | None = None, **layout: int):
    fleet = FleetSettings(hardware="h100-sxm:4", tp=1, **layout)
    watch = None if timeline is None else timeline.note
    return prepare("llama-3.1-8b", fleet, WORKLOAD, LoadSettings()).run(watch)


def test_no_pipeline_has_no_timeline():
    report = simulated(replicas=4)
    assert report.as_json()["simulation"]["pipeline"] is None
    assert "stage" not in report.as_text()


@pytest.mark.parametrize(("pp", "replicas"), [(2, 2), (4, 1)])
def test_a_stage_computes_steps_in_their_order_one_at_a_time(pp, replicas):
    report = simulated(pp=pp, replicas=replicas)
    found = json.loads(json.dumps(report.as_json()))["simulation"]["pipeline"]
    assert found["replica"] == "replica 0" and len(found["busy"]) == replicas
    steps = found["steps"]
    assert 1 < len(steps) <= MOST_STEPS
    for step in steps:
        assert len(step["stages"]) == pp and step["num_seqs"] > 0 and step["num_tokens"] > 0
        for (_, ended), (begun, _) in zip(step["stages"], step["stages"][1:], strict=False):
            assert ended <= begun  # hidden states are sent meanwhile
    for one, two in zip(steps, steps[1:], strict=False):
        for (_, ended), (begun, _) in zip(one["stages"], two["stages"], strict=True):
            assert ended <= begun
    shares = [share for each in found["busy"].values() for share in each]
    assert all(0 < share <= 1 for share in shares)
    assert found["bubbles"] == pytest.approx(1 - sum(shares) / len(shares))


def test_the_text_has_a_row_for_each_stage():
    lines = simulated(pp=4).as_text().splitlines()
    rows = [line.split() for line in lines if line.startswith("  stage ")]
    assert [row[1] for row in rows] == ["0", "1", "2", "3"]
    cells = [row[2] for row in rows]
    assert len({len(each) for each in cells}) == 1
    assert cells[0].startswith("A") and cells[1].startswith(".")  # it waits for the first one
    firsts = [each.index("A") for each in cells]
    assert firsts == sorted(firsts)


def test_the_trace_has_a_track_for_each_stage():
    timeline = Timeline()
    report = simulated(timeline, pp=2, replicas=2)
    events = timeline.trace(report.result.requests)["traceEvents"]
    names = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    stages = {f"replica {replica} stage {stage}" for replica in (0, 1) for stage in (0, 1)}
    assert stages <= names and "replica 0" not in names
    ends: dict[int, float] = {}
    for each in events:
        if each["ph"] == "X" and each["pid"] == 1:
            assert each["ts"] >= ends.get(each["tid"], 0.0) - 1e-6
            ends[each["tid"]] = each["ts"] + each["dur"]
    assert len(ends) == 4
