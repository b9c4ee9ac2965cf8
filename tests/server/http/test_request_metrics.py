"""HTTP requests are counted by route, with their ends."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest
from fastapi import FastAPI

from octavo.server.http.context import SLOW_READER
from octavo.server.http.request_metrics import MeasuredApp


class Count:
    """What was told, and how often."""

    def __init__(self):
        self.responses, self.leaving = Counter(), Counter()

    def on_disconnect(self):
        self.leaving["disconnect"] += 1

    def on_slow_reader(self):
        self.leaving["slow reader"] += 1

    def on_http_response(self, route, method, status, seconds):
        assert seconds >= 0
        self.responses[method, route, status] += 1


def scrape(app, *paths: str, method: str = "GET") -> list[httpx.Response]:
    async def requests() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.request(method, path) for path in paths]

    return asyncio.run(requests())


def new_app() -> FastAPI:
    app = FastAPI()

    @app.get("/items/{item}")
    async def item(item: str):
        if item == "broken":
            raise RuntimeError("asked for")

    return app


def test_http_requests_are_counted_by_route_not_by_path():
    count = Count()
    app = MeasuredApp(new_app(), count, paths={"/known"})
    scrape(app, "/items/1", "/items/2", "/items/broken", "/made/up", "/known")
    scrape(app, "/items/1", method="BREW")
    assert count.responses == {
        ("GET", "/items/{item}", 200): 2,
        ("GET", "/items/{item}", 500): 1,
        ("GET", "other", 404): 1,
        ("GET", "/known", 404): 1,
        ("other", "/items/{item}", 405): 1,
    }


def test_a_client_that_leaves_unanswered_is_counted_too():
    async def waits(scope, receive, send):
        await asyncio.sleep(60)

    async def leave(app):
        scope = {"type": "http", "path": "/x", "method": "GET"}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(app(scope, None, None), 0.01)

    count = Count()
    asyncio.run(leave(MeasuredApp(waits, count)))
    assert count.responses == {("GET", "other", 499): 1}


@pytest.mark.parametrize(
    "mark, counted", [({}, "disconnect"), ({SLOW_READER: True}, "slow reader")]
)
def test_clients_that_leave_early_are_counted(mark, counted):
    """And those that leave once they have everything are not."""
    messages = [
        {"type": "http.response.start", "status": 200, "headers": []},
        {"type": "http.response.body", "body": b"a", "more_body": True},
        {"type": "http.response.body", "body": b"b"},
    ]

    async def disconnected():
        return {"type": "http.disconnect"}

    async def ignored(message):
        pass

    async def answer(num_sent):
        async def app(scope, receive, send):
            for message in messages[:num_sent]:
                await send(message)
            await receive()
            scope.update(mark if num_sent < len(messages) else {})

        scope = {"type": "http", "path": "/x", "method": "GET"}
        await MeasuredApp(app, count)(scope, disconnected, ignored)

    count = Count()
    for num_sent in range(len(messages) + 1):
        asyncio.run(answer(num_sent))
    assert count.leaving == {counted: 3}


def test_what_is_not_http_passes_through():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)

    asyncio.run(MeasuredApp(app, Count())({"type": "lifespan"}, None, None))
    assert seen == [{"type": "lifespan"}]
