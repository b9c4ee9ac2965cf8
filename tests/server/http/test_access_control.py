from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import re
import socket
import threading
import time
from dataclasses import dataclass
from urllib.parse import unquote

import pytest
import uvicorn
from fastapi import FastAPI, Request
from pace import python_seconds
from starlette.requests import ClientDisconnect

from octavo.base.errors import ConfigError, EngineUnavailableError, QueueFullError
from octavo.server.engine.generation import EngineObserver
from octavo.server.http import shared_limits
from octavo.server.http.access_control import AccessControl, DrainState
from octavo.server.http.connection import uvicorn_config
from octavo.server.http.context import request_context
from octavo.server.http.errors import HttpError
from octavo.server.http.listener import listen
from octavo.server.http.tenants import Tenants
from octavo.server.settings import ServerSettings
from octavo.system.child_process import KEY_VARIABLE

COSTLY = "/v1/completions"
KEY = "right-key"
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


class RoomyEngine:
    """The part of an engine that access control uses."""

    def __init__(self):
        self.error: Exception | None = None

    def check_capacity(self, tenant: str = "") -> None:
        if self.error is not None:
            raise self.error


class RecordingObserver(EngineObserver):
    def __init__(self):
        self.rejected: list[str] = []
        self.ignored: list[tuple[str, ...]] = []

    def on_ignored_fields(self, names) -> None:
        self.ignored.append(names)

    def on_rejected(self, reason: str) -> None:
        self.rejected.append(reason)


class EchoApp:
    """Answers with the body, after ``wait``; remembers the scopes and the bodies."""

    def __init__(self):
        self.scopes = []
        self.bodies = []
        self.headers = []
        self.wait = None
        self.error_before: Exception | None = None
        self.error_within: Exception | None = None

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": (await receive())["type"] + ".complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        if self.wait is not None:
            await self.wait.wait()
        if self.error_before is not None:
            raise self.error_before
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        if self.error_within is not None:
            raise self.error_within
        await send({"type": "http.response.body", "body": body})


@dataclass
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    num_read: int  # parts of the body that were taken
    is_complete: bool

    def __getitem__(self, name: str) -> str | None:
        """All values of a header."""
        return ", ".join(value for key, value in self.headers if key == name) or None

    @property
    def error(self) -> dict:
        return json.loads(self.body)["error"]


OPERATORS = ["/steps", "/metrics", "/load", "/slots", "/octavo/tensors", "/octavo/tensors/a.b"]


class GuardedApp:
    """An `AccessControl` with an app behind it."""

    def __init__(self, app=None, costly=frozenset((COSTLY,)), **settings):
        self.app = EchoApp() if app is None else app
        self.engine = RoomyEngine()
        self.drain_state = DrainState()
        self.observer = RecordingObserver()
        self.settings = ServerSettings(**settings)
        self.tenants = Tenants(self.settings)
        self.layer = AccessControl(
            self.app,
            self.settings,
            self.tenants,
            self.engine,
            self.drain_state,
            self.observer,
            costly,
        )

    async def ask_async(self, method="GET", path="/x", headers=(), body=(b"",), client="127.0.0.1"):
        fields = {"host": "127.0.0.1:8000", **dict(headers)}
        raw_path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(raw_path),
            "raw_path": raw_path.encode(),
            "query_string": query.encode(),
            "headers": [(k.encode(), v.encode()) for k, v in fields.items() if v is not None],
            "client": (client, 1234),
            "server": ("127.0.0.1", 8000),
        }
        parts, sent = list(body), []

        async def receive():
            if not parts:
                return {"type": "http.disconnect"}
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        async def send(message):
            sent.append(message)

        await self.layer(scope, receive, send)
        assert sent[0]["type"] == "http.response.start", sent
        decoded = [(k.decode(), v.decode()) for k, v in sent[0]["headers"]]
        content = b"".join(message["body"] for message in sent[1:] if "body" in message)
        is_complete = len(sent) > 1 and not sent[-1].get("more_body", False)
        return Reply(sent[0]["status"], decoded, content, len(body) - len(parts), is_complete)

    def ask(self, *args, **kwargs) -> Reply:
        return asyncio.run(self.ask_async(*args, **kwargs))


# -- requests that are let in ----------------------------------------------------------------------


def real_app() -> FastAPI:
    """As the server's: the routes that would answer if `AccessControl` let a request through."""
    app = FastAPI(openapi_url="/openapi.json", redirect_slashes=False)

    async def answer(request: Request) -> dict[str, str]:
        return {"tenant": request_context(request).tenant.name}

    for path in (
        "/",
        "/health",
        "/ready",
        "/version",
        "/metrics",
        "/load",
        "/v1/models",
        "/v1/models/{name:path}",
    ):
        app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"):
        app.add_api_route(path, answer, methods=["POST"])
    return app


ROUTES = [
    "/",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/load",
    "/docs",
    "/openapi.json",
    "/v1/models",
    "/v1/models/tiny",
    "/v1/completions",
    "/v1/chat/completions",
    "/generate",
    "/tokenize",
    "/no/such/route",
]
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY"]
KEYS = {
    "none": None,
    "wrong": "Bearer wrong-key",
    "empty": "Bearer ",
    "prefix": f"Bearer {KEY[:-1]}",
    "longer": f"Bearer {KEY}x",
    "other scheme": f"Token {KEY}",
    "bare": KEY,
}


def test_deny_by_default():
    """Every route and method without the right key: only /health is open."""
    access = GuardedApp(real_app(), api_key=(KEY,))

    async def walk():
        for route in ROUTES:
            for method in METHODS:
                for name, key in KEYS.items():
                    reply = await access.ask_async(method, route, {"authorization": key})
                    is_open = route == "/health" and method in ("GET", "HEAD")
                    expected = 200 if is_open else 401
                    assert reply.status == expected, (method, route, name, reply)
                    if not is_open:
                        assert 'Bearer realm="octavo"' in reply["www-authenticate"]
                        assert reply.error["code"] == "invalid_api_key"

    asyncio.run(walk())


def test_the_right_key_opens_what_there_is():
    access = GuardedApp(real_app(), api_key=("other", KEY))

    async def walk():
        for route in ROUTES:
            for method in METHODS:
                reply = await access.ask_async(method, route, BEARER)
                expected = (403,) if route in OPERATORS else (200, 404, 405)
                assert reply.status in expected, (method, route, reply)
        assert (await access.ask_async("GET", "/v1/models", BEARER)).body == b'{"tenant":"key-2"}'

    asyncio.run(walk())


SPELLINGS = [
    "/health/",
    "//health",
    "/health//",
    "/./health",
    "/health/.",
    "/x/../health",
    "/%2e/health",
    "/x/%2e%2e/health",
    "/HEALTH",
    "/Health",
    "/health;x",
    "/health;/../v1/models",
    "/health%00",
    "/health%20",
    "/health%0a",
    "/health\\",
    "/health%5c..%5cready",
    "/%68ealth",
    "/health%2f",
    "/healthz",
    "/health/../v1/models",
    "//v1/models",
    "/v1//models",
    "/v1/./models",
    "/v1/%2e/models",
    "/V1/models",
    "/v1/models/",
    "/v1/models;x",
    "/v1/models;/health",
    "/v1/models/..",
    "/v1/models?x=/health",
    "/v1/models%3f/health",
    "/\u00e9",
    "/\ufffd",
]


@pytest.mark.parametrize("path", SPELLINGS)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
def test_other_spellings_open_nothing(path, method):
    access = GuardedApp(api_key=(KEY,))
    for key in (None, "Bearer wrong"):
        assert access.ask(method, path, {"authorization": key}).status in (400, 401)
    assert not access.app.scopes


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/v1/./models", "/v1/../x", "/v1/%2e%2e/x", "/..", "/a\\b", "/a\nb", "/\ufffd"],
)
def test_paths_that_others_may_read_differently_reach_no_route(path):
    access = GuardedApp()
    assert access.ask("GET", path).status == 400
    assert not access.app.scopes


@pytest.mark.parametrize("path", ["/v1/models/org/na.me", "/.well-known/x", "/v1/models/..x"])
def test_usual_paths_pass(path):
    assert GuardedApp().ask("GET", path).status == 200


def test_a_browser_is_asked_for_the_key_of_the_page_only():
    access = GuardedApp(api_key=(KEY,))
    for path in ("/", "/engine", "/docs"):
        assert 'Basic realm="octavo"' in access.ask("GET", path)["www-authenticate"]
    assert "Basic" not in access.ask("GET", "/v1/models")["www-authenticate"]
    password = base64.b64encode(f"me:{KEY}".encode()).decode()
    assert access.ask("GET", "/", {"authorization": f"Basic {password}"}).status == 200


def test_websockets_are_closed():
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    access = GuardedApp()
    asyncio.run(
        access.layer({"type": "websocket", "path": "/health", "headers": []}, receive, send)
    )
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert not access.app.scopes


def test_an_open_server_knows_clients_by_address():
    access = GuardedApp(real_app())
    assert access.ask("GET", "/v1/models", client="10.1.2.3").body == b'{"tenant":"10.1.2.3"}'


# -- browsers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host, is_ours",
    [
        ("127.0.0.1:8000", True),
        ("127.0.0.1", True),
        ("localhost:8000", True),
        ("LocalHost", True),
        ("[::1]:8000", True),
        ("my.lan:8000", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example:127.0.0.1", False),
        ("localhost:8000:80", False),
        ("0.0.0.0", False),
        ("", False),
        (None, False),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_on_loopback_only_local_names_lead_here(host, is_ours, path):
    reply = GuardedApp(allowed_host=("My.lan",)).ask("GET", path, {"host": host})
    assert reply.status == (200 if is_ours else 403)


def test_on_a_network_a_name_of_a_page_leads_nowhere():
    """DNS rebinding: origin and host are the same, and both are the page's."""
    lured = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    reply = GuardedApp(host="0.0.0.0").ask("POST", COSTLY, lured)
    assert reply.status == 403 and "--allowed-host" in reply.error["message"]
    assert GuardedApp(host="0.0.0.0").ask("GET", "/x", {"host": "192.168.1.7:8000"}).status == 200
    named = GuardedApp(host="0.0.0.0", allowed_host=("gpu.lab",))
    assert named.ask("GET", "/x", {"host": "gpu.lab:8000"}).status == 200


def test_behind_keys_a_network_may_use_any_name():
    access = GuardedApp(host="0.0.0.0", api_key=(KEY,))
    assert access.ask("GET", "/x", {"host": "gpu.lab:8000", **BEARER}).status == 200


@pytest.mark.parametrize(
    "origin, is_welcome",
    [
        (None, True),
        ("http://127.0.0.1:8000", True),
        ("https://app.example", True),
        ("HTTPS://App.Example", True),
        ("null", False),
        ("", False),
        ("http://evil.example", False),
        ("http://app.example", False),
        ("https://app.example.evil.example", False),
        ("https://app.example:444", False),
        ("http://127.0.0.1:9000", False),
        ("http://127.0.0.1", False),
        ("http://localhost:8000", False),
        ("file://", False),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
def test_pages_of_foreign_origins_are_turned_away(origin, is_welcome, method):
    access = GuardedApp(allowed_origin=("https://app.example",), api_key=(KEY,))
    reply = access.ask(method, COSTLY, {"origin": origin, **BEARER})
    assert reply.status == (200 if is_welcome else 403)
    is_named = origin is not None and origin.lower() == "https://app.example"
    assert reply["access-control-allow-origin"] == (origin if is_named else None)
    assert reply["vary"] == "origin"


def test_cors_is_off_by_default():
    access = GuardedApp()
    preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
    for origin in ("https://app.example", "http://127.0.0.1:8000"):
        reply = access.ask("OPTIONS", COSTLY, {**preflight, "origin": origin})
        assert not [name for name, _ in reply.headers if name.startswith("access-control")]
    assert access.ask("GET")["vary"] is None


def test_preflights_of_allowed_pages_need_no_key():
    access = GuardedApp(allowed_origin=("https://app.example",), api_key=(KEY,))
    asked = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    reply = access.ask("OPTIONS", COSTLY, asked)
    assert reply.status == 204 and reply.body == b""
    assert reply["access-control-allow-headers"] == asked["access-control-request-headers"]
    assert "POST" in reply["access-control-allow-methods"]
    assert reply["access-control-allow-credentials"] is None
    assert not access.app.scopes
    assert access.ask("OPTIONS", COSTLY, {"origin": "https://app.example"}).status == 401
    assert access.ask("OPTIONS", COSTLY, {**asked, "origin": "https://x.example"}).status == 403
    assert access.ask("POST", COSTLY, {**asked, "authorization": "Bearer no"}).status == 401


def test_an_allowed_page_can_read_why_it_was_refused():
    access = GuardedApp(allowed_origin=("https://app.example",), api_key=(KEY,))
    reply = access.ask("POST", COSTLY, {"origin": "https://app.example"})
    assert reply.status == 401
    assert reply["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize("origin", ["*", "null", "example.org", "https://a/b", "https://a b"])
def test_what_is_no_origin_cannot_be_allowed(origin):
    with pytest.raises(ConfigError, match="allowed_origin"):
        GuardedApp(allowed_origin=(origin,))


# -- ids, headers and bodies ---------------------------------------------------------------------


@pytest.mark.parametrize("given", ["abc", "a" * 128, "x-1:2/3=~!"])
def test_a_sane_request_id_comes_back(given):
    access = GuardedApp()
    assert access.ask("GET", headers={"x-request-id": given})["x-request-id"] == given
    assert access.app.scopes[0]["octavo"].external_id == given


@pytest.mark.parametrize("given", [None, "", "a" * 129, "a b", "a\r\nX: y", "\x1b[31m", "\u00e9"])
def test_another_is_replaced(given):
    access = GuardedApp(api_key=(KEY,))
    ids = {access.ask("GET", headers={"x-request-id": given})["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(re.fullmatch(r"req-[0-9a-f]{24}", one) for one in ids)


@pytest.mark.parametrize("name", ["authorization", "origin", "host", "x-request-id"])
def test_a_header_that_decides_cannot_come_twice(name):
    access = GuardedApp()

    async def ask():
        sent = []
        headers = [(name.encode(), b"a"), (b"accept", b"b"), (b"accept", b"c")]
        scope = {"type": "http", "method": "GET", "path": "/x", "client": None}
        scope["headers"] = headers + headers[:1]

        async def send(message):
            sent.append(message)

        await access.layer(scope, None, send)
        return sent[0]["status"]

    assert asyncio.run(ask()) == 400


def test_every_answer_is_marked():
    access = GuardedApp(api_key=(KEY,))
    for reply in (access.ask("GET"), access.ask("GET", headers=BEARER)):
        assert reply["x-content-type-options"] == "nosniff"
        assert reply["cache-control"] == "no-store"
        assert reply["x-request-id"]
    access.app.headers = [(b"cache-control", b"max-age=60")]
    assert access.ask("GET", headers=BEARER)["cache-control"] == "max-age=60"


@pytest.mark.parametrize("strict", [False, True])
def test_fields_without_effect_are_told_to_client_and_operator(strict):
    async def app(scope, receive, send):
        ignored = scope["octavo"].ignored
        assert ignored.strict is strict
        for name in ("store", "user", "store"):
            ignored.add(name)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    access = GuardedApp(app, strict_fields=strict)
    assert access.ask("POST", COSTLY)["x-octavo-ignored"] == "store, user"
    assert access.observer.ignored == [("store", "user")]
    assert GuardedApp().ask("POST", COSTLY)["x-octavo-ignored"] is None


@pytest.mark.parametrize("path", OPERATORS)
def test_what_concerns_all_clients_is_the_operators(path):
    def status(access, key=None):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return access.ask("GET", path, headers).status

    assert status(GuardedApp()) == 200, "no client is asked for a key"
    keys = GuardedApp(api_key=("k1", "k2"))
    assert [status(keys), status(keys, "k1"), status(keys, "x")] == [401, 403, 401]
    both = GuardedApp(api_key=("k1",), admin_key=("a1", "a2"))
    assert [status(both, key) for key in (None, "k1", "a1", "a2")] == [401, 403, 200, 200]
    admin = GuardedApp(admin_key=("a1",))
    assert [status(admin, key) for key in (None, "x", "a1")] == [403, 403, 200]
    for access in (both, admin):
        assert access.ask("GET", "/x", {"authorization": "Bearer a1"}).status == 200


def test_the_operators_requests_are_counted_too():
    access = GuardedApp(api_key=("k1",), admin_key=("a1",), max_concurrent_per_key=1)
    headers = {"authorization": "Bearer a1"}
    assert [access.ask("POST", COSTLY, headers).status for _ in range(3)] == [200] * 3
    assert access.tenants.num_running == 0


def test_no_other_path_is_the_operators():
    access = GuardedApp(api_key=("k1",))
    headers = {"authorization": "Bearer k1"}
    for path in ("/", "/v1/models", "/health", "/octavo/simulate", "/octavo/deployment", "/stepsx"):
        assert access.ask("GET", path, headers).status == 200, path


def test_a_long_body_is_refused_unread():
    access = GuardedApp(max_body_bytes=1000)
    reply = access.ask("POST", COSTLY, {"content-length": "1001"}, [b"x"])
    assert (reply.status, reply.num_read, reply["connection"]) == (413, 0, "close")
    assert not access.app.scopes
    assert access.ask("POST", COSTLY, {"content-length": "1000"}, [b"x" * 1000]).status == 200
    for length in ("9" * 5000, "-1", "1e3"):
        assert access.ask("POST", COSTLY, {"content-length": length}).status == 413


def test_a_body_that_grows_too_long_is_refused_where_it_does():
    access = GuardedApp(max_body_bytes=1000)
    reply = access.ask("POST", "/x", {"transfer-encoding": "chunked"}, [b"x" * 400] * 9)
    assert (reply.status, reply.num_read, reply["connection"]) == (413, 3, "close")
    assert reply.error["type"] == "invalid_request_error"
    assert (
        access.ask("POST", "/x", {"transfer-encoding": "chunked"}, [b"x" * 500] * 2).status == 200
    )
    assert access.app.bodies == [b"x" * 1000]


def test_bodies_share_the_memory_that_is_set_aside_for_them():
    access = GuardedApp(max_body_bytes=100_000, max_body_memory=200_000)
    held = access.layer._body_memory.open("203.0.113.9")
    held.add(shared_limits.FREE_BYTES + 100_000)
    reply = access.ask("POST", COSTLY, {}, [b"x" * 60_000] * 2)
    assert reply.status == 413, "too long is too long"
    parts = [b"x" * 40_000] * 2
    assert access.ask("POST", COSTLY, {}, parts).status == 200
    other = access.layer._body_memory.open("203.0.113.8")
    other.add(shared_limits.FREE_BYTES + 99_000)
    reply = access.ask("POST", COSTLY, {}, parts)
    assert reply.status == 503 and reply["retry-after"] and reply["connection"] == "close"
    assert access.ask("POST", COSTLY, {}, [b"x" * 60_000]).status == 200, "small ones always pass"
    held.close()
    assert access.ask("POST", COSTLY, {}, parts).status == 200


def test_so_it_is_in_front_of_a_real_app():
    app = FastAPI()

    @app.post("/x")
    async def read(request: Request) -> int:
        return len(await request.body())

    access = GuardedApp(app, max_body_bytes=1000)
    assert access.ask("POST", "/x", {}, [b"x" * 400] * 9).status == 413
    assert access.ask("POST", "/x", {}, [b"x" * 400] * 2).body == b"800"


# -- overload ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, reason",
    [
        (QueueFullError("full", 2.5), "queue_requests"),
        (EngineUnavailableError("restarting"), "unavailable"),
    ],
)
def test_without_room_the_door_stays_shut(error, reason):
    access = GuardedApp()
    access.engine.error = error
    reply = access.ask("POST", COSTLY, {"content-length": "1"}, [b"x"])
    assert (reply.status, reply.num_read, reply["connection"]) == (503, 0, None)
    assert int(reply["retry-after"]) >= 1 and reply["x-should-retry"] == "true"
    assert access.observer.rejected == [reason]
    # What costs the engine nothing is answered.
    for method, path in (("GET", COSTLY), ("GET", "/health"), ("POST", "/tokenize")):
        assert access.ask(method, path).status == 200


def test_while_it_drains_new_work_is_refused():
    access = GuardedApp()
    access.drain_state.is_draining = True
    reply = access.ask("POST", COSTLY)
    assert (reply.status, reply.error["type"]) == (503, "overloaded_error")
    assert reply["retry-after"] and access.observer.rejected == ["draining"]
    assert access.ask("GET", "/health").status == 200


def test_a_tenant_over_its_rate_is_told_when_to_return():
    access = GuardedApp(api_key=(KEY, "other"), rate_limit_requests=2)
    assert [access.ask("POST", COSTLY, BEARER).status for _ in range(3)] == [200, 200, 429]
    reply = access.ask("POST", COSTLY, BEARER)
    assert reply.error["code"] == "rate_limit_exceeded" and 28 < int(reply["retry-after"]) <= 30
    assert access.observer.rejected == ["rate_requests"] * 2
    assert access.ask("POST", COSTLY, {"authorization": "Bearer other"}).status == 200
    assert access.ask("GET", "/v1/models", BEARER).status == 200


def test_requests_at_once_count_until_their_answer_is_over():
    access = GuardedApp(max_concurrent_per_key=2)

    async def run():
        access.app.wait = asyncio.Event()
        running = [asyncio.create_task(access.ask_async("POST", COSTLY)) for _ in range(2)]
        await asyncio.sleep(0.01)
        refused = await access.ask_async("POST", COSTLY)
        other = asyncio.create_task(access.ask_async("POST", COSTLY, client="10.0.0.9"))
        access.app.wait.set()
        answered = [*await asyncio.gather(*running), await other]
        return refused, answered, await access.ask_async("POST", COSTLY)

    refused, answered, later = asyncio.run(run())
    assert refused.status == 429 and access.observer.rejected == ["concurrency"]
    assert [reply.status for reply in [*answered, later]] == [200] * 4


def test_nothing_is_held_after_errors_and_cancellation():
    access = GuardedApp(max_concurrent_per_key=1)
    tenant = access.tenants.from_address("127.0.0.1")

    async def run():
        access.app.error_before = RuntimeError("asked for")
        assert (await access.ask_async("POST", COSTLY)).status == 500
        assert tenant.num_running == 0
        access.app.error_before = None
        access.app.wait = asyncio.Event()
        task = asyncio.create_task(access.ask_async("POST", COSTLY))
        await asyncio.sleep(0.01)
        assert tenant.num_running == 1
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert tenant.num_running == 0
        access.engine.error = QueueFullError("full")
        await access.ask_async("POST", COSTLY)
        assert tenant.num_running == 0

    asyncio.run(run())


def test_a_rejection_is_cheap():
    access = GuardedApp(api_key=(KEY,))
    access.engine.error = QueueFullError("full", 1.0)

    async def run() -> float:
        best = 1.0
        for _ in range(5):
            started = time.thread_time()
            for _ in range(100):
                await access.ask_async("POST", COSTLY, BEARER)
            best = min(best, (time.thread_time() - started) / 100)
        return best

    assert asyncio.run(run()) < python_seconds(6000, time.thread_time)


# -- errors of the app ---------------------------------------------------------------------------


def test_an_exception_is_an_answer_without_details(caplog):
    access = GuardedApp()
    access.app.error_before = KeyError("/secret/path")
    with caplog.at_level(logging.ERROR):
        reply = access.ask("GET")
    assert (reply.status, reply.error["message"]) == (500, "internal error")
    assert "/secret/path" in caplog.text and b"secret" not in reply.body
    assert reply["x-request-id"]


def test_so_is_one_behind_a_real_app(caplog):
    app = FastAPI()

    @app.get("/x")
    async def fail() -> None:
        raise KeyError("/secret/path")

    with caplog.at_level(logging.ERROR):
        reply = GuardedApp(app).ask("GET")
    assert (reply.status, reply.error["message"]) == (500, "internal error")
    assert len(caplog.records) == 1 and "/secret/path" in caplog.text


def test_an_http_error_of_the_app_is_its_answer():
    access = GuardedApp()
    access.app.error_before = HttpError(418, "no coffee")
    assert (access.ask("GET").status, access.ask("GET").error["message"]) == (418, "no coffee")


def test_an_answer_that_breaks_off_stays_incomplete(caplog):
    access = GuardedApp()
    access.app.error_within = RuntimeError("asked for")
    with caplog.at_level(logging.ERROR):
        assert not access.ask("GET").is_complete
    assert "asked for" in caplog.text


def test_a_client_that_is_gone_is_no_error(caplog):
    access = GuardedApp()
    access.app.error_within = ClientDisconnect()
    access.ask("GET")
    assert not caplog.records


# -- over a connection ---------------------------------------------------------------------------


@contextlib.contextmanager
def on_a_port(access: GuardedApp):
    listener = listen(ServerSettings(port=0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn_config(access.layer, access.settings))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield lambda: socket.create_connection(("127.0.0.1", port), timeout=5)
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def request_bytes(method: bytes, headers: bytes = b"", body: bytes = b"") -> bytes:
    line = method + b" " + COSTLY.encode() + b" HTTP/1.1\r\nHost: localhost\r\n"
    return line + headers + b"\r\n" + body


def read_statuses(connection: socket.socket, count: int) -> list[int]:
    received = b""
    while len(found := re.findall(rb"HTTP/1\.1 (\d+)", received)) < count:
        part = connection.recv(1 << 16)
        assert part, received
        received += part
    return [int(status) for status in found]


def test_a_rejected_body_leaves_the_connection_usable():
    access = GuardedApp(api_key=(KEY,))
    body = b"x" * 300_000
    with on_a_port(access) as connect, connect() as connection:
        wrong = request_bytes(b"POST", b"Content-Length: 300000\r\n", body)
        right = request_bytes(b"POST", f"Authorization: Bearer {KEY}\r\n".encode())
        connection.sendall(wrong + wrong + right)
        assert read_statuses(connection, 3) == [401, 401, 200]
    assert access.app.bodies == [b""]


@pytest.mark.parametrize(
    "headers",
    [b"Content-Length: 2\r\nExpect: 100-continue\r\n", b"Transfer-Encoding: chunked\r\n"],
)
def test_a_rejected_body_that_may_never_come_ends_it(headers):
    access = GuardedApp(api_key=(KEY,))
    with on_a_port(access) as connect, connect() as connection:
        connection.sendall(request_bytes(b"POST", headers))
        received = b""
        while part := connection.recv(1 << 16):
            received += part
        assert received.startswith(b"HTTP/1.1 401") and b"connection: close" in received


@pytest.mark.timing
@pytest.mark.parametrize("is_sized", [True, False])
def test_64_mib_are_refused_at_once(is_sized):
    access = GuardedApp()
    sized, chunked = b"Content-Length: 67108864\r\n", b"Transfer-Encoding: chunked\r\n"
    part = b"x" * (1 << 20)
    with on_a_port(access) as connect, connect() as connection:
        started = time.monotonic()
        connection.sendall(request_bytes(b"POST", sized if is_sized else chunked))
        if is_sized:
            assert read_statuses(connection, 1) == [413]
            assert time.monotonic() - started < python_seconds(2e6, time.perf_counter)
        for _ in range(64):  # a client that sends on regardless can do so, and then read
            connection.sendall(part if is_sized else b"100000\r\n" + part + b"\r\n")
        if not is_sized:
            assert read_statuses(connection, 1) == [413]
    assert not access.app.bodies


def test_the_inner_exception_closes_a_begun_answer():
    access = GuardedApp()
    access.app.error_within = RuntimeError("asked for")
    with on_a_port(access) as connect, connect() as connection:
        connection.sendall(request_bytes(b"GET"))
        received = b""
        while part := connection.recv(1 << 16):
            received += part
        assert received.startswith(b"HTTP/1.1 200") and not received.endswith(b"0\r\n\r\n")
