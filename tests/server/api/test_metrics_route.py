"""``GET /metrics``."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx

from octavo.server.api.octavo.metrics import create_router
from octavo.server.watch.metrics import Metrics


def test_route(create_test_app):
    app = create_test_app(create_router(SimpleNamespace(metrics=Metrics("m"))))

    async def scrape() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            paths = ("/metrics", "/metrics?names=plain", "/metrics?names=octavo:")
            return [await client.get(path) for path in paths]

    default, plain, wrong = asyncio.run(scrape())
    assert default.status_code == plain.status_code == 200
    assert default.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "vllm:num_requests_running{" in default.text
    assert "octavo_num_requests_running{" in plain.text
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "names"
    parameters = app.openapi()["paths"]["/metrics"]["get"]["parameters"]
    assert [one["name"] for one in parameters] == ["names"]
