"""HTTP/1.1 connections by uvicorn's protocol, with bounds on all that clients send or leave out.

    bytes ── header_length ──► llhttp ──► uvicorn's cycle ──► the ASGI app
             body.consume      (strict)

One request at a time is given to the parser, and the next one only when the answer is out. So an
error in the framing always belongs to the request that is being read, and ends the connection.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import logging
import struct
import sys
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo.base.errors import EngineUnavailableError
from octavo.server.http.context import ABORT, SLOW_READER, TAKEN, create_request_id
from octavo.server.http.errors import HttpError, error_body, to_http_error
from octavo.server.http.framing import (
    ChunkedBody,
    SizedBody,
    create_body,
    header_length,
    without_upgrade,
)
from octavo.server.http.listener import BACKLOG
from octavo.server.http.shared_limits import ConnectionCounts
from octavo.server.http.tenants import network_of
from octavo.server.settings import BODY_TIMEOUT, HEADER_TIMEOUT, ServerSettings
from octavo.system import machine

logger = logging.getLogger("octavo.server")

KEEP_ALIVE_TIMEOUT = 75  # seconds
MIN_BODY_RATE = 1024  # bytes a second that a body must bring, once it is older than BODY_TIMEOUT
LINGER_TIMEOUT = 2.0  # seconds for a client to read an answer that it did not wait for

# A client that does not read is noticed when this buffer is full, and the kernel's.
WRITE_BUFFER_BYTES = 32 << 10
MAX_PIPELINED_BYTES = 64 << 10

# Connections over the limit: for an error answer, and for health checks.
SPARE_CONNECTIONS = 16
SPARE_TIMEOUT = 2.0  # seconds for one of them to ask
SPARE_PATHS = ("/health", "/metrics")
SPARE_FILES = 32  # open files of everything but connections


class ConnectionPhase(Enum):
    """State of a connection: what its next bytes are."""

    HEADER = auto()
    BODY = auto()
    ANSWER = auto()  # the request has been read; further bytes are the next request's
    CLOSING = auto()  # further bytes are dropped


class HttpProtocol(HttpToolsProtocol):
    """One HTTP/1.1 connection, with limits on sizes and times.

    Args:
        settings: for the sizes and times that are settings.
        max_connections: connections beyond so many may only request ``SPARE_PATHS``.
        counts: the connections of each address.
        args, kwargs: uvicorn's.
    """

    def __init__(
        self,
        settings: ServerSettings,
        max_connections: int,
        counts: ConnectionCounts,
        *args: Any,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._max_connections = max_connections
        self._counts = counts
        self._address = ""
        self._is_spare = False  # over a limit
        self._phase = ConnectionPhase.HEADER
        self._held = b""  # bytes that cannot be parsed yet
        self._num_checked = 0  # of the header in them
        self._body: SizedBody | ChunkedBody = SizedBody(0)
        self._body_time = 0.0  # when it began
        self._num_body_bytes = 0
        self._num_unwanted_bytes = 0  # of a body, after the answer
        self._read_time = 0.0  # of the latest bytes
        self._timer: asyncio.TimerHandle | None = None  # for the client to send
        self._reader_timer: asyncio.TimerHandle | None = None  # for the client to read
        self._num_taken = 0  # bytes, when it was last seen to read
        self._taken_time = 0.0

    # -- the connection ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._out = _Transport(transport, self)
        super().connection_made(cast(asyncio.Transport, self._out))
        excess = self._excess()
        self._is_spare = excess > 0
        if excess > SPARE_CONNECTIONS:
            self._abort()
            return
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._arm(self._header_timeout, self._on_header_timeout)

    def _excess(self) -> int:
        """Count this connection; return by how many connections it is over a limit."""
        self._address = network_of(self.client[0] if self.client else None)
        of_address = self._counts.add(self._address)
        most = self._settings.max_connections_per_address
        of_all = len(self.connections) - self._max_connections
        return max(of_all, of_address - most if most else 0)

    @property
    def _header_timeout(self) -> float:
        return SPARE_TIMEOUT if self._is_spare else HEADER_TIMEOUT

    def connection_lost(self, error: Exception | None) -> None:
        self._counts.remove(self._address)
        self._phase = ConnectionPhase.CLOSING
        self._disarm()
        self._disarm_reader()
        self._unset_keepalive_if_required()
        super().connection_lost(error)

    def close(self, transport: asyncio.Transport) -> None:
        """Close, and let the client read what was sent to it.

        A socket that is closed with input unread is reset, and the client may lose an answer that
        it has not read. So the input is read and thrown away for a while.
        """
        has_input = self._phase is ConnectionPhase.BODY or self._held
        if self._phase is ConnectionPhase.CLOSING or not has_input:
            transport.close()
        else:
            self._linger(transport)

    def _linger(self, transport: asyncio.Transport) -> None:
        self._phase = ConnectionPhase.CLOSING
        self._held = b""
        self._arm(LINGER_TIMEOUT, transport.abort)
        transport.write_eof()
        self.flow.resume_reading()

    def _abort(self) -> None:
        self._phase = ConnectionPhase.CLOSING
        self.transport.abort()

    @property
    def is_closing(self) -> bool:
        return self._phase is ConnectionPhase.CLOSING

    # -- reading -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._phase is ConnectionPhase.CLOSING:
            return
        self._unset_keepalive_if_required()
        self._read_time = self.loop.time()
        self._read(self._held + data if self._held else data)

    def _read(self, data: bytes) -> None:
        self._held = b""
        try:
            while data:
                match self._phase:
                    case ConnectionPhase.HEADER:
                        num_read = self._read_header(data)
                    case ConnectionPhase.BODY:
                        num_read = self._read_body(data)
                    case _:
                        num_read = 0
                if num_read == 0:
                    self._hold(data)
                    return
                data = data[num_read:]
        except HttpError as error:
            self._refuse(error)

    def _hold(self, data: bytes) -> None:
        if self._phase is ConnectionPhase.ANSWER and len(data) > MAX_PIPELINED_BYTES:
            # Without reading it would go unnoticed when the client goes away.
            self._abort()
        elif self._phase is not ConnectionPhase.CLOSING:
            self._held = data

    def _read_header(self, data: bytes) -> int:
        """Parse the header at the beginning of ``data``: return its length, or 0 if it is
        incomplete."""
        length = header_length(data, self._num_checked)
        if not length:
            if not self._num_checked:
                self._arm(self._header_timeout, self._on_header_timeout)
            self._num_checked = len(data)
            return 0
        self._num_checked = 0
        self._disarm()
        self._parse(without_upgrade(data[:length]))
        if self._phase is ConnectionPhase.BODY:
            self._body_time, self._num_body_bytes = self.loop.time(), 0
            self._num_unwanted_bytes = 0
            self._arm(BODY_TIMEOUT, self._check_body_progress)
        return length

    def _read_body(self, data: bytes) -> int:
        length = self._body.consume(data)
        self._num_body_bytes += length
        if self.cycle.response_complete:
            self._num_unwanted_bytes += length
            if self._num_unwanted_bytes > self._settings.max_body_bytes:
                self._abort()
                return 0
        self._parse(data[:length])
        return length

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise HttpError(400, "Other protocols are not supported.") from None
        except httptools.HttpParserError as error:
            cause = error.__context__  # raised by a method here that the parser called
            if isinstance(cause, HttpError):
                raise cause from None
            raise HttpError(400, "The HTTP request is malformed.") from None
        if self._body.is_complete != (self._phase is not ConnectionPhase.BODY):
            raise HttpError(400, "The length of the body is ambiguous.")

    def on_headers_complete(self) -> None:
        self._body = create_body(self.headers, self.parser.get_http_version())
        scope = cast(dict[str, Any], self.scope)
        scope[ABORT], scope[TAKEN] = self._abort, self._out.num_taken
        if self._is_spare and not self._is_about_health():
            raise to_http_error(EngineUnavailableError("too many connections"))
        super().on_headers_complete()
        if self._is_spare:
            self.cycle.keep_alive = False  # the next one may ask, too
        self._phase = ConnectionPhase.BODY

    def _is_about_health(self) -> bool:
        path = self.url.partition(b"?")[0].decode("latin-1")
        return self.parser.get_method() in (b"GET", b"HEAD") and path in SPARE_PATHS

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._disarm()
        self._phase = (
            ConnectionPhase.HEADER if self.cycle.response_complete else ConnectionPhase.ANSWER
        )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase is ConnectionPhase.ANSWER:
            self._phase = ConnectionPhase.HEADER
            if self._held:
                self.loop.call_soon(self._read_held)

    def _read_held(self) -> None:
        if self._phase is ConnectionPhase.HEADER:
            self._unset_keepalive_if_required()
            self._read(self._held)

    # -- clients that are slow or wrong ------------------------------------------------------

    def _on_header_timeout(self) -> None:
        if self._held:
            seconds = self._header_timeout
            self._refuse(HttpError(408, f"The header took more than {seconds:g} s."))
        else:  # no request has begun
            self.transport.close()

    def _check_body_progress(self) -> None:
        now = self.loop.time()
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:
            self._read_time = self._body_time = now  # the client waits for the server
        idle_time = now - self._read_time
        overdue_time = now - self._body_time - BODY_TIMEOUT
        if idle_time >= BODY_TIMEOUT or self._num_body_bytes < overdue_time * MIN_BODY_RATE:
            self._refuse(HttpError(408, "The body did not come in time."))
        else:
            self._arm(BODY_TIMEOUT - idle_time, self._check_body_progress)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_taken, self._taken_time = self._out.num_taken(), self.loop.time()
        self._arm_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm_reader()

    def _check_reader(self) -> None:
        """Cut the client if it has taken nothing for too long. One that takes anything may go
        on."""
        num_taken, now = self._out.num_taken(), self.loop.time()
        if num_taken > self._num_taken:
            self._num_taken, self._taken_time = num_taken, now
        if now - self._taken_time >= self._settings.slow_reader_timeout:
            self._on_slow_reader()
        else:
            self._arm_reader()

    def _on_slow_reader(self) -> None:
        logger.info("%s does not read its answer: connection cut", self.client)
        if self.cycle is not None:
            cast(dict[str, Any], self.cycle.scope)[SLOW_READER] = True
        self._abort()

    def _refuse(self, error: HttpError) -> None:
        """Answer with an error and end the connection: its further bytes mean nothing."""
        logger.debug("refused %s: %d %s", self.client, error.status, error.message)
        if self._phase is ConnectionPhase.BODY:
            has_begun = self.cycle.response_started
            self.cycle.disconnected = True  # to the app, the client is gone
            self.cycle.message_event.set()
            if has_begun:
                self._abort()
                return
        body = json.dumps(error_body(error)).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", create_request_id().encode()),
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
            (b"connection", b"close"),
        ]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self._linger(cast(_Transport, self.transport).inner)

    # -- timers ------------------------------------------------------------------------------

    def _arm(self, seconds: float, callback: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, callback)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm_reader(self) -> None:
        self._disarm_reader()
        seconds = self._settings.slow_reader_timeout / 4
        self._reader_timer = self.loop.call_later(seconds, self._check_reader)

    def _disarm_reader(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None


class _Transport:
    """The transport that uvicorn writes to; `HttpProtocol.close` decides when it really closes.

    It counts what the client has taken: what was written, less what is still in a buffer here or in
    the kernel.
    """

    def __init__(self, inner: asyncio.Transport, protocol: HttpProtocol):
        self.inner = inner
        self._protocol = protocol
        self._num_written = 0
        self.abort = inner.abort
        self.pause_reading = inner.pause_reading
        self.resume_reading = inner.resume_reading
        self.get_extra_info = inner.get_extra_info

    def write(self, data: bytes) -> None:
        self._num_written += len(data)
        self.inner.write(data)

    def num_taken(self) -> int:
        """Return how many bytes the client's machine has confirmed."""
        return self._num_written - self.inner.get_write_buffer_size() - self._num_unconfirmed()

    def _num_unconfirmed(self) -> int:
        """Return how many bytes are in the kernel; 0 where it does not say, so progress shows in
        large steps."""
        sock = self.inner.get_extra_info("socket")
        if sys.platform != "linux" or sock is None or sock.fileno() < 0:
            return 0
        import fcntl  # not on Windows
        import termios

        (number,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
        return int(number)

    def close(self) -> None:
        self._protocol.close(self.inner)

    def is_closing(self) -> bool:
        return self._protocol.is_closing or self.inner.is_closing()


# -- the server --------------------------------------------------------------------------------


def uvicorn_config(app: Any, settings: ServerSettings) -> uvicorn.Config:
    """Return uvicorn's configuration for an app on the socket of `listen`. Logging is left
    alone."""
    limit, counts = connection_limit(settings), ConnectionCounts()
    protocol = functools.partial(HttpProtocol, settings, limit, counts)
    return uvicorn.Config(
        app,
        loop="uvloop" if importlib.util.find_spec("uvloop") else "asyncio",
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # any client can write them
        timeout_keep_alive=KEEP_ALIVE_TIMEOUT,
        backlog=BACKLOG,
    )


def connection_limit(settings: ServerSettings) -> int:
    """Return how many of ``max_connections`` connections can be served.

    Raises the process's soft limit of open files if needed and possible: a connection for which
    there is no file cannot even be refused.
    """
    reserve = SPARE_FILES + SPARE_CONNECTIONS
    allowed = machine.allow_open_files(settings.max_connections + reserve)
    limit = max(1, allowed - reserve)
    if limit < settings.max_connections:
        logger.warning("the limit of %d open files leaves %d connections", allowed, limit)
    return limit
