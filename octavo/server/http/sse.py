"""Server-sent events, to clients that may read slowly, stop reading, or be gone.

A stream is supervised beside the task that sends it: its source is closed when the client is gone
or stops reading with too much unread (`connection.py` cuts those who read nothing for longer), and
comments are sent while there is no data, so that no proxy takes the connection for dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.http.context import ABORT, SLOW_READER, TAKEN
from octavo.server.http.errors import HttpError, error_body, error_response, to_http_error
from octavo.server.http.json_text import encode
from octavo.server.settings import ServerSettings

logger = logging.getLogger("octavo.server")

T = TypeVar("T")

MAX_PENDING_CHARS = 64 << 10  # of text, for a blocked client that takes nothing
PATIENCE = 5.0  # seconds for it to take something
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
EVENTS = "text/event-stream; charset=utf-8"
_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def event(data: Any) -> bytes:
    """Return one event with a JSON value."""
    return f"data: {encode(data)}\n\n".encode()


def named_event(name: str, data: str) -> bytes:
    """Return one event of a type, with JSON that is written already."""
    return f"event: {name}\ndata: {data}\n\n".encode()


async def until_disconnect(receive: Receive) -> None:
    """Return when the client is gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, which is cancelled as soon as the client is gone.

    Raises:
        HttpError: 499, the client is gone. It shows in logs and metrics only.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnect(request.receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise HttpError(499, "The client closed its connection.")
    finally:
        await _cancel(working, gone)


class EventSource(Protocol):
    """The source of a stream's events: a `Generation`, or several."""

    @property
    def num_pending_chars(self) -> int: ...

    def close(self) -> None: ...


class EventStream(Response):
    """A response that sends ``events``: each item is one event or more, as bytes.

    The response begins with the first item: an exception before it gets an answer with its own
    status, a later one an event. In any case ``sources`` and ``events`` are closed.

    Args:
        done: sent last, also after an error.
        headers: of the response, beside those of all streams.
        error_event: makes the event of an error.
        error_response: makes the answer to an error before the first item.
        keep_alive: sent while there is no data; empty where a client could not read it.
        media_type: of the response.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        sources: Sequence[EventSource],
        settings: ServerSettings,
        *,
        done: bytes = DONE,
        headers: Mapping[str, str] | None = None,
        error_event: Callable[[BaseException], bytes] | None = None,
        error_response: Callable[[HttpError], Response] = error_response,
        keep_alive: bytes = COMMENT,
        media_type: str = EVENTS,
    ):
        super().__init__()
        self._events = events
        self._sources = sources
        self._keep_alive_seconds = settings.sse_keep_alive if keep_alive else 0.0
        self._keep_alive = keep_alive
        self._done = done
        self._error_event = error_event or _to_event
        own = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self._stream_headers = [(b"content-type", media_type.encode()), *_HEADERS, *own]
        self._error_response = error_response
        self._has_begun = False
        self._has_failed = False  # and was answered with a status
        self._is_blocked = False
        self._last_sent = 0.0
        self._num_taken = 0  # bytes, when the client was last seen to read
        self._taken_time = 0.0
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._last_sent = _now()
        sending = asyncio.ensure_future(self._send_events(scope, receive, send))
        gone = asyncio.ensure_future(until_disconnect(receive))
        try:
            await self._supervise(sending, gone, scope, send)
        finally:
            for source in self._sources:
                source.close()
            await _cancel(sending, gone)
            await self._events.aclose()

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for chunk in self._events:
                await self._send(send, chunk)
        except Exception as error:
            if not self._has_begun:
                self._has_failed = True
                await self._error_response(to_http_error(error))(scope, receive, send)
                return
            await self._send(send, self._error_event(error))
        await self._send(send, self._done, is_last=True)

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        async with self._sending:  # comments come from another task
            if self._has_failed:
                return
            self._is_blocked = True
            if not self._has_begun:
                self._has_begun = True
                headers = self._stream_headers
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            self._is_blocked = False
            self._last_sent = _now()

    # -- supervision -------------------------------------------------------------------------

    async def _supervise(
        self, sending: asyncio.Future[None], gone: asyncio.Future[None], scope: Scope, send: Send
    ) -> None:
        """Return when the stream is over, or its client has been cut or is gone."""
        comment: asyncio.Future[None] | None = None
        tick = max(min(self._keep_alive_seconds / 4 or 1.0, 1.0), 0.01)
        try:
            while not (sending.done() or gone.done()):
                if self._has_too_much_pending() and not self._is_reading(scope):
                    await _abort_connection(scope, gone)
                    return
                if self._is_silent():
                    comment = asyncio.ensure_future(self._send(send, self._keep_alive))
                first = asyncio.FIRST_COMPLETED
                await asyncio.wait((sending, gone), timeout=tick, return_when=first)
        finally:
            if comment is not None:
                await _cancel(comment)
        if sending.done():
            sending.result()

    def _has_too_much_pending(self) -> bool:
        if not self._is_blocked:
            return False
        return sum(source.num_pending_chars for source in self._sources) > MAX_PENDING_CHARS

    def _is_reading(self, scope: Scope) -> bool:
        """True if the client has taken anything lately, though it is blocked."""
        num_taken = scope[TAKEN]() if TAKEN in scope else 0
        if num_taken > self._num_taken:
            self._num_taken, self._taken_time = num_taken, _now()
        return _now() - max(self._taken_time, self._last_sent) < PATIENCE

    def _is_silent(self) -> bool:
        """True if a comment is due."""
        if self._is_blocked or not self._keep_alive_seconds:
            return False
        return _now() - self._last_sent >= self._keep_alive_seconds


async def _abort_connection(scope: Scope, gone: asyncio.Future[None]) -> None:
    """Drop the connection, with all that was written to it and not read."""
    logger.info("a client has left too much of its stream unread: connection cut")
    scope[SLOW_READER] = True
    if (abort := scope.get(ABORT)) is not None:
        abort()
        await gone


def _now() -> float:
    return asyncio.get_running_loop().time()


def _to_event(error: BaseException) -> bytes:
    return event(error_body(to_http_error(error)))


async def _cancel(*futures: asyncio.Future[Any]) -> None:
    """Cancel futures that are still running, and wait for their end."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
