from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace

import pytest

from octavo.core.stats import StepStats
from octavo.server.api.octavo.steps import create_router
from octavo.server.engine.generation import EngineState
from octavo.server.watch import step_viewer
from octavo.server.watch.observer_group import ObserverGroup
from octavo.server.watch.step_stream import StepStream


def step(number: int) -> StepStats:
    return replace(StepStats.idle(100), step_id=number, roofline_share=0.5)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(step_viewer, "_INTERVAL", 0.0)


async def take(viewer, count):
    events = viewer.events()
    return [await asyncio.wait_for(anext(events), 5) for _ in range(count)]


def test_a_viewer_sees_all_steps_from_when_it_came():
    async def watch():
        stream = StepStream()
        stream.on_step(step(0))  # there are no viewers
        viewer = stream.add_viewer()
        ObserverGroup(stream).on_step(step(1))
        stream.on_step(step(2))
        stream.on_engine_state(EngineState.RESTARTING, "it was killed")
        return await take(viewer, 2)

    steps, state = asyncio.run(watch())
    assert state == {"engine": "restarting", "detail": "it was killed"}, "after what came before"
    assert steps == {"missed": 0, "steps": [asdict(step(1)), asdict(step(2))]}


def test_who_does_not_read_misses_the_oldest(monkeypatch):
    monkeypatch.setattr(step_viewer, "_MOST_STEPS", 3)

    async def watch():
        stream = StepStream()
        viewer, other = stream.add_viewer(), stream.add_viewer()
        for number in range(5):
            stream.on_step(step(number))
        (late,) = await take(viewer, 1)
        viewer.close()
        stream.on_step(step(5))
        (last,) = await take(other, 1)
        return late, last, viewer

    late, last, viewer = asyncio.run(watch())
    assert late["missed"] == 2 and [each["step_id"] for each in late["steps"]] == [2, 3, 4]
    assert last["missed"] == 3 and [each["step_id"] for each in last["steps"]] == [3, 4, 5]
    assert not any(viewer._steps.values()), "a closed viewer is given nothing more"


def test_the_end_comes_after_what_is_there():
    async def watch():
        stream = StepStream()
        viewer = stream.add_viewer()
        stream.on_step(step(1))
        stream.end()
        return [each async for each in viewer.events()], stream.num_viewers

    events, num_viewers = asyncio.run(watch())
    assert [each["step_id"] for each in events[0]["steps"]] == [1]
    assert (len(events), num_viewers) == (1, 1)


@pytest.mark.parametrize("query", ["", "snapshots=true", "closely=true"])
def test_route(create_service, fake_engine, create_test_app, query):
    service = create_service(fake_engine)

    async def watch() -> list[dict]:
        got: list[dict] = []

        async def receive():
            while len(got) < 2:
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.start":
                assert message["status"] == 200
            for line in message.get("body", b"").splitlines():
                if line.startswith(b"data: "):
                    got.append(json.loads(line[6:]))
                    assert fake_engine.is_enabled == bool(query)
                    if len(got) == 1:
                        service.steps.on_step(step(1))

        scope = scope_of("/steps", query)
        app = create_test_app(create_router(service))
        await asyncio.wait_for(app(scope, receive, send), 5)
        return got

    state, steps = asyncio.run(watch())
    assert state.items() >= {"engine": "ready", "detail": ""}.items()
    assert ("about" in state) == bool(query)
    last = steps["last"] if query else steps["steps"][0]
    assert (last["step_id"], last["roofline_share"]) == (1, 0.5)
    assert service.steps.num_viewers == 0, "the viewer is gone with its client"
    assert not fake_engine.is_enabled


def scope_of(path: str, query: str) -> dict:
    return {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [],
        "scheme": "http",
        "server": ("test", 80),
        "client": ("127.0.0.1", 1),
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "root_path": "",
    }
