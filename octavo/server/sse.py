"""Server-sent events to clients who may read slowly, stop reading, or be gone.

A stream is supervised beside the task that sends it: it ends its generations when the client is
gone or leaves its data unread for too long, and sends comments while there is no data, so that
nobody between takes the connection for dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.context import SLOW_READER
from octavo.server.generation import Generation
from octavo.server.http_errors import HttpError, error_body, error_response, to_http_error
from octavo.server.json_text import encode
from octavo.server.settings import ServerSettings

logger = logging.getLogger("octavo.server")

T = TypeVar("T")

MAX_PENDING_CHARS = 64 << 10  # of text that a blocked client has not read
DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def event(data: Any) -> bytes:
    """One event with a JSON value."""
    return f"data: {encode(data)}\n\n".encode()


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client is gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled as soon as the client is gone.

    Raises:
        HttpError: 499, it is. Nobody will see that, but logs and metrics.
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


class EventStream(Response):
    """Answers with ``events``, each of them whole events as bytes.

    The response begins with the first of them: an exception before is answered with a status of
    its own, a later one with an event. ``events`` is closed in any case, and so are
    ``generations``.

    Args:
        done: the last event, also after an error.
        headers: of the response, beside those of any stream.
        error_event: makes the event of an error.
        error_response: makes the answer that an error gets instead of a stream.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        generations: Sequence[Generation],
        settings: ServerSettings,
        *,
        done: bytes = DONE,
        headers: Mapping[str, str] | None = None,
        error_event: Callable[[BaseException], bytes] | None = None,
        error_response: Callable[[HttpError], Response] = error_response,
    ):
        super().__init__()
        self._events = events
        self._generations = generations
        self._settings = settings
        self._done = done
        own = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self._stream_headers = _HEADERS + own
        self._error_event = error_event or _error_event
        self._error_response = error_response
        self._has_begun = False
        self._has_failed = False  # and was answered with a status
        self._blocked_since: float | None = None
        self._last_sent = 0.0
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._last_sent = _now()
        sending = asyncio.ensure_future(self._send_events(scope, receive, send))
        gone = asyncio.ensure_future(until_disconnect(receive))
        comment: asyncio.Future[None] | None = None
        try:
            while not sending.done():
                await asyncio.wait(
                    (sending, gone), timeout=self._tick(), return_when=asyncio.FIRST_COMPLETED
                )
                if sending.done() or gone.done():
                    break
                if self._is_stuck():
                    logger.info("a client that does not read was cut off")
                    scope[SLOW_READER] = True
                    abort_connection(scope)
                    await asyncio.wait((gone,), timeout=1.0)
                    break
                if self._is_silent() and (comment is None or comment.done()):
                    comment = asyncio.ensure_future(self._send(send, _COMMENT))
            if sending.done():
                sending.result()
        finally:
            for generation in self._generations:
                generation.close()
            await _cancel(sending, gone, *([] if comment is None else [comment]))
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
        async with self._sending:
            if self._has_failed:
                return
            self._blocked_since = _now()
            if not self._has_begun:
                self._has_begun = True
                headers = self._stream_headers
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            self._blocked_since, self._last_sent = None, _now()

    # -- supervision -------------------------------------------------------------------------

    def _tick(self) -> float:
        """Seconds until the stream is to be looked at again."""
        limits = (self._settings.sse_keep_alive or 4.0, self._settings.slow_reader_timeout, 4.0)
        return max(min(limits) / 4, 0.01)

    def _is_silent(self) -> bool:
        """Whether a comment is due."""
        if self._blocked_since is not None or not self._settings.sse_keep_alive:
            return False
        return _now() - self._last_sent >= self._settings.sse_keep_alive

    def _is_stuck(self) -> bool:
        """Whether the client has left its data unread for too long, or too much of it."""
        if self._blocked_since is None:
            return False
        pending = sum(generation.num_pending_chars for generation in self._generations)
        blocked = _now() - self._blocked_since
        return blocked > self._settings.slow_reader_timeout or pending > MAX_PENDING_CHARS


def abort_connection(scope: Scope) -> None:
    """Drop the connection with all that waits to be sent. The server puts the means there."""
    abort = scope.get("extensions", {}).get("octavo.abort")
    if abort is not None:
        abort()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _error_event(error: BaseException) -> bytes:
    return event(error_body(to_http_error(error)))


async def _cancel(*futures: asyncio.Future[Any]) -> None:
    """Cancel what is still running, and wait for its end."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
