"""The checks that every request must pass before a route sees it, as plain ASGI.

    id, path ─► Host, Origin ─► key ─► size ─► queue, rate ─► the app

All of them look at the header alone, so refusing costs little, whatever the client has yet to send.
Everything that is not allowed is refused; only ``/health`` needs no key.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from octavo.base.errors import ConfigError, EngineUnavailableError, QueueFullError
from octavo.page.site import is_page
from octavo.server.engine.generation import EngineObserver
from octavo.server.http.context import (
    REFUSED_CONSTRAINT,
    IgnoredFields,
    RequestContext,
    create_request_id,
)
from octavo.server.http.error_dialects import ErrorDialects
from octavo.server.http.errors import HttpError, to_http_error
from octavo.server.http.hosts import AllowedHosts
from octavo.server.http.shared_limits import BodyAllocation, BodyMemory
from octavo.server.http.tenants import RateLimitError, Tenant, Tenants, address_of
from octavo.server.settings import MAX_ID_CHARS, ServerSettings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

_REQUEST_ID = re.compile(f"[!-~]{{1,{MAX_ID_CHARS}}}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#]+")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,2048}")
# Spellings that other programs may read as another path, and bytes that are no UTF-8.
_ODD_PATH = re.compile(r"[\x00-\x1f\x7f\\\ufffd]|//|/\.{1,2}(?:/|$)")

# Paths for operators only, where there are keys: traffic of all clients, the model's weights, and
# what is loaded.
OPERATOR_PATHS = frozenset(
    (
        *("/steps", "/metrics", "/load", "/slots", "/octavo/tensors", "/octavo/replicas"),
        *("/v1/models/load", "/v1/models/unload"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    )
)
OPERATOR_PREFIX = "/octavo/tensors/"

# Headers that decide something here, so that none of them may come twice.
_DECISIVE = (
    b"authorization",
    b"content-length",
    b"host",
    b"origin",
    b"x-api-key",
    b"x-request-id",
)
_IGNORED = b"x-octavo-ignored"
_EXPOSED = b"x-request-id, retry-after, retry-after-ms, x-should-retry, " + _IGNORED
_PREFLIGHT_SECONDS = b"600"
_PLAIN_TEXT = (b"content-type", b"text/plain; charset=utf-8")


class Capacity(Protocol):
    """Knows whether one more request can be queued."""

    def check_capacity(self, tenant: str = "") -> None:
        """Raise QueueFullError if not, whatever its size; EngineUnavailableError if none can be.

        Cheap: called before the body of a request is read.
        """
        ...


@dataclass(slots=True)
class DrainState:
    """State of the server's shutdown. ``is_draining`` is set once, on SIGTERM."""

    is_draining: bool = False


class AccessControl:
    """An ASGI layer that authenticates requests and enforces limits.

    Args:
        app: its routes find a `RequestContext` in their scope.
        capacity: asked whether another request can be queued.
        drain_state: whether new requests are still taken.
        observer: gets what is refused for overload.
        costly_paths: paths where a POST is work for the engine or the tokenizer.
        errors: the form of errors, by path.

    Raises:
        ConfigError: an ``allowed_origin`` is not an origin.
    """

    def __init__(
        self,
        app: App,
        settings: ServerSettings,
        tenants: Tenants,
        capacity: Capacity,
        drain_state: DrainState,
        observer: EngineObserver,
        costly_paths: frozenset[str],
        errors: ErrorDialects | None = None,
    ):
        self._app = app
        self._tenants = tenants
        self._capacity = capacity
        self._drain_state = drain_state
        self._observer = observer
        self._costly_paths = costly_paths
        self._errors = errors or ErrorDialects()
        self._max_body_bytes = settings.max_body_bytes
        self._body_memory = BodyMemory(settings.body_memory)
        self._strict_fields = settings.strict_fields
        self._hosts = AllowedHosts(settings, is_open=tenants.is_open)
        self._origins = frozenset(origin.lower() for origin in settings.allowed_origin)
        for origin in self._origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origin {origin} is no origin: write it like https://example.org"
                )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._serve(scope, receive, send)
            case "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008})
            case "lifespan":
                await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_time = time.monotonic()
        headers = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
        }
        response = _ResponseWriter(send, _request_id(headers))
        try:
            self._check_source(scope, headers, response)
            if _is_preflight(scope, headers, response):
                await response.send_preflight(headers)
                return
            tenant = self._authenticate(scope, headers, response)
            self._check_operator(scope, tenant)
            self._check_length(headers)
            is_costly = scope["method"] == "POST" and scope["path"] in self._costly_paths
            if is_costly:
                self._check_capacity(tenant)
        except Exception as error:
            await self._reject(to_http_error(error), scope, headers, response)
            return
        ignored = response.ignored = IgnoredFields(strict=self._strict_fields)
        scope["octavo"] = RequestContext(response.external_id, tenant, arrival_time, ignored)
        allocation = self._body_memory.open(address_of(scope))
        body = _BoundedBody(
            receive,
            response,
            self._max_body_bytes,
            allocation,
            lambda error: self._errors.response(error, scope, response.external_id),
        )
        try:
            await self._app(scope, body.receive, response.send)
        except Exception as error:
            await self._fail(error, scope, response)
        finally:
            allocation.close()
            if is_costly:
                tenant.end_request()
            if ignored.names:
                self._observer.on_ignored_fields(ignored.names)
            if REFUSED_CONSTRAINT in scope:
                self._observer.on_constraint_refused(scope[REFUSED_CONSTRAINT])

    # -- origin and key ----------------------------------------------------------------------

    def _check_source(
        self, scope: Scope, headers: dict[str, str], response: _ResponseWriter
    ) -> None:
        """Refuse requests that a foreign page makes a browser send (DNS rebinding, CSRF).

        Allows pages of the allowed origins to read the answer (CORS).

        Raises:
            HttpError: 400 or 403.
        """
        decisive = [name for name, _ in scope["headers"] if name in _DECISIVE]
        if len(decisive) > len(set(decisive)):
            raise HttpError(400, "A header that must be unique came twice.")
        if _ODD_PATH.search(scope["path"]):
            raise HttpError(400, "The path is malformed.")
        host = headers.get("host", "").lower()
        if not self._hosts.accepts(host):
            raise HttpError(
                403, f"The Host header names {host[:200]!r}; --allowed-host lets it through."
            )
        if self._origins:
            response.add_headers([(b"vary", b"origin")])
        origin = headers.get("origin", "").lower()
        if origin in self._origins:
            response.allow_origin(headers["origin"].encode("latin-1"))
        elif "origin" in headers and origin not in (f"http://{host}", f"https://{host}"):
            raise HttpError(403, "The page's origin is not allowed; see --allowed-origin.")
        elif "origin" not in headers and _is_from_elsewhere(scope, headers):
            raise HttpError(403, "A page of another site may not ask; see --allowed-origin.")

    def _authenticate(
        self, scope: Scope, headers: dict[str, str], response: _ResponseWriter
    ) -> Tenant:
        host = scope["client"][0] if scope.get("client") else None
        given = headers.get("authorization")
        if given is None and "x-api-key" in headers:  # Anthropic's and llama.cpp's clients
            given = f"Bearer {headers['x-api-key']}"
        tenant = self._tenants.authenticate(given, host)
        if tenant is not None:
            return tenant
        path = scope.get("raw_path") or scope["path"].encode()
        if path == b"/health" and scope["method"] in ("GET", "HEAD"):
            return self._tenants.from_address(host)
        if is_page(path.decode("latin-1")):  # have the browser ask for the key
            response.add_headers([(b"www-authenticate", b'Basic realm="octavo", charset="UTF-8"')])
        raise HttpError(
            401,
            "An API key is needed." if given is None else "The API key is wrong.",
            code="invalid_api_key",
            headers={"www-authenticate": 'Bearer realm="octavo"'},
        )

    def _check_operator(self, scope: Scope, tenant: Tenant) -> None:
        """Raise HttpError, 403, if a tenant asks for what concerns all clients and is not an
        operator."""
        path: str = scope["path"]
        is_operators = path in OPERATOR_PATHS or path.startswith(OPERATOR_PREFIX)
        if is_operators and not self._tenants.is_operator(tenant):
            raise HttpError(
                403,
                "This concerns all keys: it needs the operator's admin key "
                "(octavo serve --admin-key).",
                code="admin_key_needed",
            )

    # -- limits ------------------------------------------------------------------------------

    def _check_length(self, headers: dict[str, str]) -> None:
        if _content_length(headers) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)

    def _check_capacity(self, tenant: Tenant) -> None:
        """Charge the tenant for a request, which must be ended if this returns."""
        try:
            if self._drain_state.is_draining:
                raise EngineUnavailableError("the server is stopping")
            self._capacity.check_capacity(tenant.name)
            tenant.begin_request()
        except RateLimitError as error:
            self._observer.on_rejected(error.reason)
            raise
        except QueueFullError:
            self._observer.on_rejected("queue_requests")
            raise
        except EngineUnavailableError:
            self._observer.on_rejected(
                "draining" if self._drain_state.is_draining else "unavailable"
            )
            raise

    # -- errors ------------------------------------------------------------------------------

    async def _reject(
        self, error: HttpError, scope: Scope, headers: dict[str, str], response: _ResponseWriter
    ) -> None:
        """Answer with an error without having read the body.

        The protocol then reads the body and drops it, and the connection stays usable, unless the
        body is long, of unknown length, or may not come at all.
        """
        is_long = _content_length(headers) > self._max_body_bytes
        if is_long or "transfer-encoding" in headers or "expect" in headers:
            response.add_headers([(b"connection", b"close")])
        answer = self._errors.response(error, scope, response.external_id)
        await answer(scope, _receive_nothing, response.send)

    async def _fail(self, error: Exception, scope: Scope, response: _ResponseWriter) -> None:
        """Answer with an error for an exception of the app, unless the answer has begun."""
        if response.is_complete or isinstance(error, ClientDisconnect):
            return  # it is logged already, or there is no client any more
        http_error = to_http_error(error)
        if not response.has_begun:
            answer = self._errors.response(http_error, scope, response.external_id)
            await answer(scope, _receive_nothing, response.send)
        # Else uvicorn closes the connection, by which a client sees that its answer is cut.


class _ResponseWriter:
    """Sends a response with the headers of all responses, and knows how far it has got."""

    def __init__(self, send: Send, external_id: str):
        self.external_id = external_id
        self.has_begun = False
        self.is_complete = False
        self._send = send
        self._headers: list[Header] = [
            (b"x-request-id", external_id.encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        self.allowed_origin: bytes | None = None
        self.ignored = IgnoredFields()

    def add_headers(self, headers: list[Header]) -> None:
        self._headers += headers

    def allow_origin(self, origin: bytes) -> None:
        self.allowed_origin = origin
        self._headers += [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED),
        ]

    async def send(self, message: Message) -> None:
        """Send a message of the app; none after a complete answer."""
        if self.is_complete:
            return
        if message["type"] == "http.response.start":
            # Starlette's answer to an exception, before it raises it: `_fail` has a better one.
            if message["status"] == 500 and _PLAIN_TEXT in message.get("headers", ()):
                return
            self.has_begun = True
            headers = [*message.get("headers", ()), *self._headers]
            if all(name.lower() != b"cache-control" for name, _ in headers):
                headers.append((b"cache-control", b"no-store"))
            if names := self.ignored.names:
                headers.append((_IGNORED, ", ".join(names).encode()))
            message = {**message, "headers": headers}
        elif not self.has_begun:
            return
        else:
            self.is_complete = not message.get("more_body", False)
        await self._send(message)

    async def send_preflight(self, headers: dict[str, str]) -> None:
        """Answer a preflight: the page may send what it asks for."""
        wanted = headers.get("access-control-request-headers", "")
        if _HEADER_NAMES.fullmatch(wanted):
            self.add_headers([(b"access-control-allow-headers", wanted.encode())])
        if "access-control-request-private-network" in headers:
            self.add_headers([(b"access-control-allow-private-network", b"true")])
        self.add_headers(
            [
                (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
                (b"access-control-max-age", _PREFLIGHT_SECONDS),
            ]
        )
        await self.send({"type": "http.response.start", "status": 204, "headers": []})
        await self.send({"type": "http.response.body"})


class _BoundedBody:
    """Receives a request's body, and ends the request if it is too long or there is no memory for
    it."""

    def __init__(
        self,
        receive: Receive,
        response: _ResponseWriter,
        max_bytes: int,
        allocation: BodyAllocation,
        to_response: Callable[[HttpError], Response],
    ):
        self._receive = receive
        self._to_response = to_response
        self._response = response
        self._max_bytes, self._allocation = max_bytes, allocation
        self._num_bytes = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        num_bytes = len(message.get("body", b""))
        self._num_bytes += num_bytes
        error = None
        try:
            self._allocation.add(num_bytes)
        except QueueFullError as full:
            error = to_http_error(full)
        if self._num_bytes > self._max_bytes:
            error = _too_large(self._max_bytes)
        if error is None:
            return message
        if not self._response.has_begun:
            self._response.add_headers([(b"connection", b"close")])
            answer = self._to_response(error)
            await answer({"type": "http"}, _receive_nothing, self._response.send)
        return {"type": "http.disconnect"}


def _request_id(headers: dict[str, str]) -> str:
    """Return the client's request id, if it is fit for logs and headers, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else create_request_id()


def _content_length(headers: dict[str, str]) -> float:
    """Return the content length: 0 if there is none, infinity if it is no number."""
    length = headers.get("content-length", "0")
    return int(length) if len(length) < 19 and length.isdecimal() else math.inf


def _is_from_elsewhere(scope: Scope, headers: dict[str, str]) -> bool:
    """True if a browser says that a page of another site has made a request that may change
    something."""
    is_harmless = scope["method"] in ("GET", "HEAD", "OPTIONS")
    return not is_harmless and headers.get("sec-fetch-site") in ("cross-site", "same-site")


def _is_preflight(scope: Scope, headers: dict[str, str], response: _ResponseWriter) -> bool:
    is_asked = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
    return is_asked and response.allowed_origin is not None


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"The body has more than {max_bytes} bytes.")


async def _receive_nothing() -> Message:
    return {"type": "http.disconnect"}
