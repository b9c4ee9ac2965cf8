"""Viewers of snapshots get more; the engine makes snapshots as long as there is one."""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict, replace

import pytest
from rank_models import llama_8b

from octavo.base.errors import ConfigError
from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import StepStats
from octavo.server.engine.generation import EngineState, Generation, GenerationRequest
from octavo.server.watch import snapshot_viewer, step_viewer
from octavo.server.watch.observer_group import ObserverGroup
from octavo.server.watch.snapshot_viewer import about_engine, bucket_of
from octavo.server.watch.step_stream import StepStream


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(step_viewer, "_INTERVAL", 0.0)


def generation() -> Generation:
    request = GenerationRequest("r1", [1, 2, 3], SamplingParams(), 0.0)
    return Generation(request, lambda one: None)


def test_the_engine_is_watched_as_long_as_somebody_looks(fake_engine):
    async def watch():
        stream = StepStream()
        plain = stream.add_viewer()
        seen = [fake_engine.is_enabled]
        first, second = (stream.add_snapshot_viewer(fake_engine, "tiny") for _ in range(2))
        seen.append(fake_engine.is_enabled)
        first.close()
        seen.append(fake_engine.is_enabled)
        second.close()
        plain.close()
        return [*seen, fake_engine.is_enabled], stream.num_viewers

    assert asyncio.run(watch()) == ([False, True, True, False], 0)


def test_steps_come_as_columns_and_the_last_one_whole(fake_engine):
    records = [
        replace(StepStats.idle(64), step_id=number, seconds=number / 8) for number in range(3)
    ]

    async def watch():
        stream = StepStream()
        viewers = stream.add_viewer(), stream.add_snapshot_viewer(fake_engine, "tiny")
        for record in records:
            stream.on_step(record)
        return [await asyncio.wait_for(anext(viewer.events()), 5) for viewer in viewers]

    plain, close = asyncio.run(watch())
    assert close["last"] == plain["steps"][-1] and close["missed"] == 0
    assert close["steps"]["seconds"] == (0.0, 0.125, 0.25)
    for name, column in close["steps"].items():
        assert list(column) == [step[name] for step in plain["steps"]]


def test_several_see_the_same_and_go_on_without_each_other(fake_engine):
    async def watch():
        stream = StepStream()
        viewers = [stream.add_snapshot_viewer(fake_engine, "tiny") for _ in range(2)]
        streams = [viewer.events() for viewer in viewers]
        stream.on_step(StepStats.idle(64))
        stream.on_snapshot(0, {"pool": {"runs": [-1, 64]}, "prefixes": []})
        both = [await asyncio.wait_for(anext(each), 5) for each in streams]
        viewers[0].close()
        stream.on_step(replace(StepStats.idle(64), step_id=1))
        return both, await asyncio.wait_for(anext(streams[1]), 5)

    (first, second), then = asyncio.run(watch())
    assert first == second and first["pool"] == {"runs": [-1, 64]}
    assert then["steps"]["step_id"] == (1,) and "pool" not in then
    assert fake_engine.is_enabled, "somebody still is"


def test_what_one_is_told(fake_engine):
    async def watch():
        stream = StepStream()
        observer, viewer = ObserverGroup(stream), stream.add_snapshot_viewer(fake_engine, "tiny")
        viewer.put_state(EngineState.READY, "")
        ended = generation()
        ended.stats.ttft = 0.25
        observer.on_tokens(ended, 1, None)  # of another sample, in the same step
        for gap in (None, 0.010, 0.010, 0.020):
            observer.on_tokens(ended, 1, gap)
        observer.on_snapshot(7, {"rows": [["r1#0", 0, 3, 1, 0, 0]], "preempted": []})
        for runs in ([-1, 8], [-1, 7, 0, 1]):
            observer.on_snapshot(8, {"pool": {"runs": runs}, "prefixes": []})
        observer.on_finished(ended, "stop")
        observer.on_rejected("queue_requests")
        events = viewer.events()
        return [await asyncio.wait_for(anext(events), 5) for _ in range(2)]

    state, news = asyncio.run(watch())
    assert state["engine"] == "ready"
    assert state["about"]["num_blocks"] == 1024 and state["about"]["model"] == "tiny"
    assert news["looks"] == [{"step_id": 7, "rows": [["r1#0", 0, 3, 1, 0, 0]], "preempted": []}]
    assert news["pool"] == {"runs": [-1, 7, 0, 1]}, "the last picture is enough"
    assert [(each["id"], each["reason"]) for each in news["ended"]] == [("r1", "stop")]
    assert news["ttfts"] == [0.25], "of a request, however many samples begin with it"
    assert news["gaps"] == [(bucket_of(0.010), 2), (bucket_of(0.020), 1)]
    assert news["rejected"] == {"queue_requests": 1}


def test_memory_is_told_of_a_device_that_was_not_measured(fake_engine, monkeypatch):
    def unknown(kind):
        raise ConfigError("not measured yet")

    monkeypatch.setattr(snapshot_viewer, "device_of_engine", unknown)
    fake_engine.facts = replace(
        fake_engine.facts, info={"weights_bytes": 1000}, rank_model=asdict(llama_8b())
    )
    about = about_engine(fake_engine, "tiny")
    blocks = fake_engine.facts.num_blocks * fake_engine.facts.block_size
    assert about["memory"] == {
        "total_bytes": None,
        "kv_bytes": llama_8b().kv_bytes_per_token * blocks,
        "lines": [{"name": "weights", "bytes": 1000, "known": "counted"}],
    }
    assert about["usd_per_hour"] is None


def test_a_bucket_is_nine_percent_wide():
    for seconds in (1.7e-6, 0.0123, 3.0):
        low = 1e-6 * 2 ** (bucket_of(seconds) / 8)
        assert low <= seconds * (1 + 1e-9) < low * 2 ** (1 / 8) * (1 + 1e-8)
    assert bucket_of(0.0) == 0 and math.isclose(2 ** (1 / 8), 1.09, rel_tol=0.01)
