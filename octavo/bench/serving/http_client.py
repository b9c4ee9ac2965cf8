"""An HTTP/1.1 client with little overhead.

A load generator shares the machine with the server that it measures. General HTTP libraries take
more time for a token than a small model's server does; this one takes the bytes off the socket as
the event loop hands them over, records when that was, and keeps connections for the next request,
as clients of a real server do.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

# Called with a part of the body and the time (``time.perf_counter()``) at which it was received.
BodySink = Callable[[bytes, float], None]


class ProtocolError(ValueError):
    """The response of the server is not HTTP/1.1, or ended too early."""


class Response:
    """Parses the bytes of one response: its head, and its body in any of the three framings.

    ``is_complete``: nothing more belongs to it. ``is_reusable``: the connection can be kept.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.first_byte: float | None = None
        self.is_complete = False
        self.is_reusable = False
        self._pending = b""
        self._is_chunked = False
        self._remaining: int | None = None  # bytes of the body, where its length was said

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body that ``data`` completes. Raises ProtocolError."""
        if self.status == 0:
            data = self._take_head(self._pending + data)
            if self.status == 0:
                return b""
        if self._is_chunked:
            return self._take_chunks(data)
        if self._remaining is None:  # the body ends with the connection
            return data
        body, surplus = data[: self._remaining], data[self._remaining :]
        if surplus:
            raise ProtocolError("the server sent more than the Content-Length it had said")
        self._remaining -= len(body)
        self.is_complete = self._remaining == 0
        return body

    def end(self) -> None:
        """Handle the end of the connection. Raises ProtocolError where that came too early."""
        self.is_reusable = False
        if self.status == 0:
            raise ProtocolError("the server closed the connection without an answer")
        if not self.is_complete and (self._is_chunked or self._remaining is not None):
            raise ProtocolError("the server closed the connection in the middle of an answer")
        self.is_complete = True

    def _take_head(self, data: bytes) -> bytes:
        """Return the bytes after the head; interim answers (1xx) are passed over."""
        while (end := data.find(b"\r\n\r\n")) >= 0:
            first, *lines = data[:end].decode("latin-1").split("\r\n")
            data = data[end + 4 :]
            version, _, rest = first.partition(" ")
            if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
                raise ProtocolError(f"the server does not answer in HTTP/1.1: {first[:80]!r}")
            if rest[0] == "1":
                continue
            self.status = int(rest[:3])
            fields = (line.partition(":") for line in lines)
            self.headers = {name.strip().lower(): value.strip() for name, _, value in fields}
            self._choose_framing(version)
            return data
        self._pending = data
        return b""

    def _choose_framing(self, version: str) -> None:
        self._pending = b""
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if not self._is_chunked and length is not None:
            if not length.isdecimal():
                raise ProtocolError(f"Content-Length is no number: {length!r}")
            self._remaining = int(length)
            self.is_complete = self._remaining == 0
        connection = self.headers.get("connection", "").lower()
        has_end = self._is_chunked or self._remaining is not None
        self.is_reusable = has_end and version == "HTTP/1.1" and "close" not in connection

    def _take_chunks(self, data: bytes) -> bytes:
        """Return the content of the chunks that are whole by now; the last one is empty."""
        pending, at = self._pending + data, 0
        pieces = []
        while (line_end := pending.find(b"\r\n", at)) >= 0:
            size = _chunk_size(pending[at:line_end])
            if size == 0:  # trailers may follow, up to an empty line
                self.is_complete = pending.find(b"\r\n\r\n", line_end) >= 0
                break
            end = line_end + 2 + size
            if len(pending) < end + 2:
                break
            pieces.append(pending[line_end + 2 : end])
            at = end + 2
        self._pending = pending[at:]
        return b"".join(pieces)


def _chunk_size(line: bytes) -> int:
    try:
        size = int(line.split(b";", 1)[0], 16)
        if size >= 0:
            return size
    except ValueError:
        pass
    raise ProtocolError(f"no size of a chunk: {line[:40]!r}")


class HttpClient:
    """Sends requests to one server, ``scheme://host[:port][/prefix]``, over connections that are
    kept.

    Used from one event loop. There is no limit to the connections; proxies of the environment are
    not used.

    Args:
        headers: sent with every request.
        keep_alive: keep connections for later requests.
        verify: check the certificate of an https server.

    Raises:
        ValueError: the URL is none that this client can ask.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        keep_alive: bool = True,
        verify: bool = True,
    ):
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is no URL such as http://127.0.0.1:8000")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self.address = f"{parts.scheme}://{self._host}:{self._port}"
        self._prefix = parts.path.rstrip("/")
        self._ssl = _ssl_context(verify) if parts.scheme == "https" else None
        self._keep_alive = keep_alive
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        fixed = {
            "Host": parts.netloc.rpartition("@")[2],
            "Connection": "keep-alive" if keep_alive else "close",
            **(headers or {}),
        }
        for name, value in fixed.items():
            if not (name + value).isprintable():
                raise ValueError(f"the header {name!r} has a character that no header may have")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())

    async def request(
        self, method: str, path: str, body: bytes, response: Response, sink: BodySink
    ) -> float:
        """Send a request, and pass the body of the response to ``sink`` as it comes.

        Returns:
            when the connection was there, a ``time.perf_counter()``.

        Raises:
            OSError: no connection, or it broke.
            ProtocolError: no whole response came.
        """
        content = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{content if body else ''}"
        message = head.encode("latin-1") + b"\r\n" + body
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            connected = time.perf_counter()
            try:
                await self._exchange(connection, message, response, sink)
                return connected
            except (OSError, ProtocolError):
                if response.first_byte is not None:
                    raise
                # It was closed as we wrote to it: the server had dropped an idle connection.
        connection = await self._connect()
        connected = time.perf_counter()
        await self._exchange(connection, message, response, sink)
        return connected

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and whole body of a response. Raises as ``request``."""
        pieces: list[bytes] = []
        response = Response()
        await self.request(method, path, body, response, lambda data, _: pieces.append(data))
        return response.status, b"".join(pieces)

    async def close(self) -> None:
        """Close all connections, and wait until they are."""
        self._idle.clear()
        for connection in self._open:
            connection.abort()
        if self._open:
            await asyncio.wait([connection.closed for connection in self._open], timeout=1)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._ssl
        )
        self._open.add(connection)
        connection.closed.add_done_callback(lambda _: self._open.discard(connection))
        return connection

    async def _exchange(
        self, connection: _Connection, message: bytes, response: Response, sink: BodySink
    ) -> None:
        try:
            await connection.exchange(message, response, sink)
        except BaseException:  # cancellation, too: what is left of the answer is of no use
            connection.abort()
            raise
        if self._keep_alive and response.is_reusable and connection.is_open:
            self._idle.append(connection)
        else:
            connection.abort()


def _ssl_context(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _Connection(asyncio.Protocol):
    """One connection, with at most one exchange at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done: asyncio.Future[None] | None = None

    async def exchange(self, message: bytes, response: Response, sink: BodySink) -> None:
        self._response, self._sink = response, sink
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            await self._done
        finally:
            self._done = None

    def abort(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._done is None or self._done.done():  # no request is open
            self.abort()
            return
        response = self._response
        if response.first_byte is None:
            response.first_byte = now
        try:
            body = response.feed(data)
            if body:
                self._sink(body, now)
        except ValueError as error:
            self._done.set_exception(error)
            return
        if response.is_complete:
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if not self.closed.done():
            self.closed.set_result(None)
        if self._done is None or self._done.done():
            return
        if error is not None:
            self._done.set_exception(error)
            return
        try:
            self._response.end()
            self._done.set_result(None)
        except ProtocolError as cut:
            self._done.set_exception(cut)
