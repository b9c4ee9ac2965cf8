"""The server put together: what holds for every route, also for those that are yet to come."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pace import python_seconds
from pydantic import BaseModel

from octavo.server.app import (
    create_app,
    create_routers,
    create_server_app,
    described_paths,
    post_routes,
)
from octavo.server.http.access_control import OPERATOR_PATHS, App
from octavo.server.http.body import JsonRoute
from octavo.server.http.context import RequestContext
from octavo.server.http.tenants import Tenant, Tenants
from octavo.server.watch.metrics import Metrics

LARGE = 1 << 18  # bytes
MOST_ROUNDS = 2e6  # of Python between two turns of the event loop; a fifth of it is usual


@pytest.fixture
def service(fake_engine, create_service):
    return create_service(fake_engine)


def body_models(service) -> dict[str, type[BaseModel]]:
    """Of all routes that take one, by path."""
    routes = post_routes(create_routers(service))
    assert all(isinstance(route, JsonRoute) for route in routes.values())  # strict, and bounded
    return {path: route.body_field.field_info.annotation for path, route in routes.items()}


# -- the description ---------------------------------------------------------------------------


def test_the_description_is_made_when_it_is_asked_for(service, monkeypatch):
    """It takes longer than all else of making the app, whose paths are known without it."""
    routers = create_routers(service)
    app = create_app(routers)
    with monkeypatch.context() as patch:
        patch.setattr(FastAPI, "openapi", None)
        create_server_app(
            dataclasses.replace(service, metrics=Metrics("tiny")), Tenants(service.settings)
        )

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/openapi.json")

    answer = asyncio.run(ask())
    assert answer.json() == app.openapi()
    assert set(app.openapi()["paths"]) == described_paths(routers)
    assert "/v1/chat/completions" in described_paths(routers)


# -- keys and operators --------------------------------------------------------------------------


def test_every_post_is_under_the_same_rules(fake_engine, create_service):
    """Rates, requests at once, and draining: the tokenizer is not for free either."""
    service = create_service(fake_engine, rate_limit_requests=1e-6)
    service = dataclasses.replace(service, metrics=Metrics("tiny"))
    paths = sorted(post_routes(create_routers(service)).keys() - OPERATOR_PATHS)
    assert {"/tokenize", "/detokenize", "/v1/chat/completions", "/generate", "/"} <= set(paths)
    app = create_server_app(service, Tenants(service.settings))

    async def statuses(path: str, address: str) -> list[int]:
        transport = httpx.ASGITransport(app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers = [await client.post(path, json={}) for _ in range(2)]
            service.drain_state.is_draining = True
            answers.append(await client.post(path, json={}))
            service.drain_state.is_draining = False
        return [answer.status_code for answer in answers]

    for number, path in enumerate(paths):
        assert asyncio.run(statuses(path, f"10.0.0.{number}")) == [400, 429, 503], path


def test_nothing_but_health_is_for_those_without_the_key(fake_engine, create_service):
    """Of every route that there is: what a page shows of the engine is the operator's too."""
    service = create_service(fake_engine, api_key=("secret",))
    service = dataclasses.replace(service, metrics=Metrics("tiny"))
    app = create_server_app(service, Tenants(service.settings))
    routes = [route for router in create_routers(service) for route in router.routes]
    asked = {(method, route.path) for route in routes for method in route.methods}
    posts = {("POST", f"/octavo/{name}") for name in ("simulate", "spec")}
    assert asked > posts | {("GET", "/steps"), ("GET", "/octavo/deployment"), ("GET", "/engine")}

    async def statuses() -> dict[tuple[str, str], int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers = {each: await client.request(*each, json={}) for each in asked}
            answers["POST", "with the key"] = await client.post(
                "/octavo/spec", json={}, headers={"authorization": "Bearer secret"}
            )
        return {each: answer.status_code for each, answer in answers.items()}

    found = asyncio.run(statuses())
    assert found.pop(("POST", "with the key")) == 400
    assert {each for each, status in found.items() if status != 401} == {
        ("GET", "/health"), ("HEAD", "/health"),
    }  # fmt: skip
    assert not fake_engine.is_enabled


# -- lists -----------------------------------------------------------------------------------------


def unbounded(schema: Any, where: str) -> Iterator[str]:
    """Places in a pydantic schema that validate more than somebody has thought of."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        if kind in ("list", "dict") and "max_length" not in schema:
            yield f"{where}: a {kind} without a bound"
        if kind == "list" and not schema.get("fail_fast"):
            yield f"{where}: a list that goes on after its first wrong item"
        if kind in ("set", "frozenset", "tuple", "generator"):
            yield f"{where}: a {kind}, which this test does not know"
        for key, value in schema.items():
            if key not in ("metadata", "serialization"):
                yield from unbounded(value, f"{where}.{key}" if isinstance(key, str) else where)
    elif isinstance(schema, list | tuple):
        for item in schema:
            yield from unbounded(item, where)


def test_lists_of_bodies_have_bounds_and_fail_fast(service):
    for path, model in body_models(service).items():
        found = list(unbounded(model.__pydantic_core_schema__, path))
        assert not found, "\n".join(found)


def test_the_search_for_lists_finds_them():
    class Body(BaseModel):
        names: list[str]
        sizes: dict[str, int]

    assert len(list(unbounded(Body.__pydantic_core_schema__, "body"))) == 3


# -- large bodies ----------------------------------------------------------------------------------


def many(item: str) -> str:
    return f"[{','.join([item] * (LARGE // (len(item) + 1)))}]"


# Of some, as much as a server takes was seconds in which no other client was served.
FIELDS = {"prompt", "messages", "tokens", "allowed_token_ids"}
KEYS = ",".join(f'"k{i}":1' for i in range(4000))
ODD = {
    "thousands of keys": f"{{{KEYS}}}",
    "objects that have a key twice": "[" + ",".join([f'{{{KEYS},"k3999":1}}'] * 16) + "]",
    "halves of characters": '"' + "\\ud800" * (LARGE // 6) + '"',
    "text like JSON": '"' + ',\\"[{:' * (LARGE // 6) + '"',
    "strings": many('""'),
}


def fields_of(model: type[BaseModel]) -> set[str]:
    schema = model.model_json_schema()
    forms = (schema, *schema.get("$defs", {}).values())
    return FIELDS & {name for form in forms for name in form.get("properties", ())}


def longest_stall(app: App, path: str, body: str) -> float:
    """CPU seconds that pass at most while the event loop waits for its next turn."""

    async def with_context(scope, receive, send):
        scope["octavo"] = RequestContext("req-1", Tenant("test"), time.monotonic())
        await app(scope, receive, send)

    async def ask() -> float:
        transport = httpx.ASGITransport(with_context)
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            content = body.encode()
            asking = asyncio.ensure_future(client.post(path, content=content, headers=headers))
            longest, last = 0.0, time.process_time()
            while not asking.done():
                await asyncio.sleep(0.001)
                now = time.process_time()
                longest, last = max(longest, now - last), now
            assert (await asking).status_code in (200, 400)
        return longest

    return asyncio.run(ask())


def test_a_large_wrong_body_stalls_nobody(service):
    app = create_app(create_routers(service))
    bodies = [
        (path, f'{{"{name}": {many(item)}}}', f"{path}: many {item} as {name}")
        for path, model in body_models(service).items()
        for name in sorted(fields_of(model))
        for item in ("-1", '"a"')
    ]
    bodies += [("/tokenize", f'{{"prompt": {odd}}}', name) for name, odd in ODD.items()]
    for path, body, case in bodies:
        # Of three: what else the process has to do, as collecting garbage, comes once.
        stalls = (longest_stall(app, path, body) for _ in range(3))
        assert any(stall < python_seconds(MOST_ROUNDS) for stall in stalls), case


# -- methods ---------------------------------------------------------------------------------------


def test_a_wrong_method_is_told_all_that_a_path_has(service):
    """Also where each has a route of its own."""
    app = create_server_app(
        dataclasses.replace(service, metrics=Metrics("tiny")), Tenants(service.settings)
    )

    async def ask(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.put(path)

    for path, methods in {
        "/v1/responses/resp_1": "DELETE, GET",
        "/v1/responses": "POST",
        "/v1/responses/input_tokens": "POST",
        "/v1/models": "GET",
    }.items():
        answer = asyncio.run(ask(path))
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)
