"""Raw sockets against the live protocol, with a small app behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import select
import socket
import subprocess
import sys
import threading
import time

import pytest
import uvicorn
from pace import python_seconds

from octavo.base.errors import ConfigError
from octavo.server.http import connection as http
from octavo.server.http.connection import connection_limit, uvicorn_config
from octavo.server.http.listener import SEND_BUFFER_BYTES, listen
from octavo.server.settings import ServerSettings

GET = b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n"
EVIL = b"GET /evil HTTP/1.1\r\nHost: a\r\n\r\n"


class EchoApp:
    """Remembers what it was asked. ``/echo`` answers with the body, ``/ignore`` without reading it,
    ``/wait`` when the client is gone, ``/flood`` without an end."""

    def __init__(self):
        self.requests: list[tuple[str, str, bytes]] = []
        self.num_gone = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": (await receive())["type"] + ".complete"})
            return
        body, path = b"", scope["path"]
        if path != "/ignore":
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.num_gone += 1
                    return
                body += message["body"]
                if not message["more_body"]:
                    break
        self.requests.append((scope["method"], path, body))
        if path == "/wait":
            assert (await receive())["type"] == "http.disconnect"
            self.num_gone += 1
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while path == "/flood" and (await _poll(receive)) != "http.disconnect":
            await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
        self.num_gone += path == "/flood"
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def _poll(receive) -> str:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            return (await receive())["type"]
    return ""


class LiveServer:
    def __init__(self, **settings):
        self.app = EchoApp()
        self.settings = ServerSettings(port=0, **settings)
        listener = listen(self.settings)
        self.port = listener.getsockname()[1]
        self._server = uvicorn.Server(uvicorn_config(self.app, self.settings))
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        address = ("127.0.0.1", self.port)
        return socket.create_connection(address, timeout=5, source_address=(source, 0))

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join()

    def exchange(self, *parts: bytes) -> tuple[list[int], bytes]:
        """Send, and read until the server closes: the statuses that came, and everything."""
        with self.connect() as connection:
            for part in parts:
                connection.sendall(part)
            received = read_all(connection)
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", received)], received


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    return received


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """One answer with a chunked or sized body: its status and its body as it came."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    while len(body) < int(length[1]) if length else not body.endswith(b"0\r\n\r\n"):
        body += connection.recv(1 << 16)
    return int(head.split()[1]), body


@contextlib.contextmanager
def serving(**settings):
    server = LiveServer(**settings)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def shared_server():
    with serving(max_body_bytes=1 << 20) as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.app.requests.clear()
    return shared_server


def post(headers: bytes, body: bytes = b"", line: bytes = b"POST /echo HTTP/1.1") -> bytes:
    return line + b"\r\nHost: a\r\n" + headers + b"\r\n" + body


def chunked(body: bytes) -> bytes:
    return post(b"Transfer-Encoding: chunked\r\n", body)


# Each is sent with a second request behind it, which must not be seen.
FRAMING_ATTACKS = {
    # Two lengths
    "CL.TE": post(b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\nG"),
    "TE.CL": post(b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n", b"5c\r\nG\r\n0\r\n\r\n"),
    "TE.TE": post(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: cow\r\n", b"0\r\n\r\n"),
    "TE twice": post(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
    "TE list": post(b"Transfer-Encoding: chunked, chunked\r\n", b"0\r\n\r\n"),
    "TE gzip": post(b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"),
    "TE identity": post(b"Transfer-Encoding: identity\r\n", b"0\r\n\r\n"),
    "TE xchunked": post(b"Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n"),
    "TE quoted": post(b'Transfer-Encoding: "chunked"\r\n', b"0\r\n\r\n"),
    "TE empty": post(b"Transfer-Encoding:\r\n", b"0\r\n\r\n"),
    "TE parameter": post(b"Transfer-Encoding: chunked;q=1\r\n", b"0\r\n\r\n"),
    "TE vertical tab": post(b"Transfer-Encoding: \x0bchunked\r\n", b"0\r\n\r\n"),
    "TE space before colon": post(b"Transfer-Encoding : chunked\r\n", b"0\r\n\r\n"),
    "TE folded": post(b"Transfer-Encoding:\r\n chunked\r\n", b"0\r\n\r\n"),
    "TE in HTTP/1.0": post(b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b"POST /echo HTTP/1.0"),
    "CL twice": post(b"Content-Length: 1\r\nContent-Length: 1\r\n", b"a"),
    "CL differs": post(b"Content-Length: 0\r\nContent-Length: 2\r\n", b"ab"),
    "CL list": post(b"Content-Length: 1, 1\r\n", b"a"),
    "CL +5": post(b"Content-Length: +5\r\n", b"aaaaa"),
    "CL 0x5": post(b"Content-Length: 0x5\r\n", b"aaaaa"),
    "CL -1": post(b"Content-Length: -1\r\n", b"a"),
    "CL 5 5": post(b"Content-Length: 5 5\r\n", b"aaaaa"),
    "CL trailing space": post(b"Content-Length: 5 \r\n", b"aaaaa"),
    "CL underscore": post(b"Content-Length: 1_0\r\n", b"a" * 10),
    "CL float": post(b"Content-Length: 1.0\r\n", b"a"),
    "CL exponent": post(b"Content-Length: 1e0\r\n", b"a"),
    "CL Arabic digit": post("Content-Length: \u0665\r\n".encode(), b"aaaaa"),
    "CL empty": post(b"Content-Length:\r\n"),
    "CL overflow": post(b"Content-Length: 18446744073709551617\r\n", b"a"),
    "CL space before colon": post(b"Content-Length : 5\r\n", b"aaaaa"),
    "CL folded": post(b"Content-Length:\r\n 5\r\n", b"aaaaa"),
    # Lines
    "obs-fold": post(b"X: a\r\n b\r\n"),
    "first header folded": b"GET /echo HTTP/1.1\r\n Host: a\r\n\r\n",
    "bare LF everywhere": GET.replace(b"\r\n", b"\n"),
    "bare LF after the request line": b"GET /echo HTTP/1.1\nHost: a\r\n\r\n",
    "bare LF after a header": b"GET /echo HTTP/1.1\r\nHost: a\nX: y\r\n\r\n",
    "bare LF at the end": b"GET /echo HTTP/1.1\r\nHost: a\r\n\n",
    "bare CR in a value": b"GET /echo HTTP/1.1\r\nHost: a\rX: y\r\n\r\n",
    "bare CR everywhere": GET.replace(b"\r\n", b"\r"),
    "CR CR LF": b"GET /echo HTTP/1.1\r\r\nHost: a\r\n\r\n",
    "NUL in a value": post(b"X: a\x00b\r\n"),
    "NUL in a name": post(b"X\x00: a\r\n"),
    "NUL in the URL": b"GET /a\x00b HTTP/1.1\r\nHost: a\r\n\r\n",
    "control character": post(b"X: \x01\r\n"),
    "DEL": post(b"X: \x7f\r\n"),
    "space in a name": post(b"X y: a\r\n"),
    "no name": post(b": a\r\n"),
    "no colon": post(b"Xabc\r\n"),
    "parentheses in a name": post(b"X(): a\r\n"),
    "byte above ASCII in a name": post(b"X\xe9: a\r\n"),
    # The first line
    "HTTP/0.9": b"GET /echo\r\n\r\n",
    "HTTP/0.9 with a version": b"GET /echo HTTP/0.9\r\nHost: a\r\n\r\n",
    "HTTP/1.2": b"GET /echo HTTP/1.2\r\nHost: a\r\n\r\n",
    "HTTP/2.0": b"GET /echo HTTP/2.0\r\nHost: a\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/01.1": b"GET /echo HTTP/01.1\r\nHost: a\r\n\r\n",
    "HTTP/1.10": b"GET /echo HTTP/1.10\r\nHost: a\r\n\r\n",
    "http/1.1": b"GET /echo http/1.1\r\nHost: a\r\n\r\n",
    "RTSP": b"GET /echo RTSP/1.0\r\nHost: a\r\n\r\n",
    "ICE": b"SOURCE /echo ICE/1.0\r\nHost: a\r\n\r\n",
    "two spaces": b"GET  /echo HTTP/1.1\r\nHost: a\r\n\r\n",
    "two spaces before the version": b"GET /echo  HTTP/1.1\r\nHost: a\r\n\r\n",
    "space after the version": b"GET /echo HTTP/1.1 \r\nHost: a\r\n\r\n",
    "tabs": b"GET\t/echo\tHTTP/1.1\r\nHost: a\r\n\r\n",
    "leading space": b" GET /echo HTTP/1.1\r\nHost: a\r\n\r\n",
    "two empty lines first": b"\r\n\r\n" + GET,
    "space in the URL": b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    "byte above ASCII in the URL": b"GET /\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n",
    "fragment": b"GET /echo#x HTTP/1.1\r\nHost: a\r\n\r\n",
    "whole URL": b"GET http://b/echo HTTP/1.1\r\nHost: a\r\n\r\n",
    "no path": b"GET echo HTTP/1.1\r\nHost: a\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    "CONNECT": b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    "lower-case method": b"get /echo HTTP/1.1\r\nHost: a\r\n\r\n",
    "unknown method": b"FETCH /echo HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    # Host
    "no Host": b"GET /echo HTTP/1.1\r\n\r\n",
    "two Hosts": post(b"Host: b\r\n"),
    "the same Host twice": post(b"Host: a\r\n"),
    "empty Host": b"GET /echo HTTP/1.1\r\nHost:\r\n\r\n",
    "list of Hosts": b"GET /echo HTTP/1.1\r\nHost: a, b\r\n\r\n",
    "Host with a user": b"GET /echo HTTP/1.1\r\nHost: b@a\r\n\r\n",
    "Host with a path": b"GET /echo HTTP/1.1\r\nHost: a/b\r\n\r\n",
    # Chunks
    "chunk extension": chunked(b"1;a=b\r\nx\r\n0\r\n\r\n"),
    "chunk extension without a name": chunked(b"1;\r\nx\r\n0\r\n\r\n"),
    "LF in a chunk extension": chunked(b"1;a\nb\r\nx\r\n0\r\n\r\n"),
    "endless chunk extension": chunked(b"1;" + b"a" * 40),
    "extension of the last chunk": chunked(b"1\r\nx\r\n0;a\r\n\r\n"),
    "space after a chunk size": chunked(b"1 \r\nx\r\n0\r\n\r\n"),
    "space before a chunk size": chunked(b" 1\r\nx\r\n0\r\n\r\n"),
    "chunk +1": chunked(b"+1\r\nx\r\n0\r\n\r\n"),
    "chunk -1": chunked(b"-1\r\nx\r\n0\r\n\r\n"),
    "chunk 0x1": chunked(b"0x1\r\nx\r\n0\r\n\r\n"),
    "chunk size overflow": chunked(b"10000000000000001\r\nx\r\n0\r\n\r\n"),
    "chunk size with leading zeros": chunked(b"0" * 30 + b"1\r\nx\r\n0\r\n\r\n"),
    "no chunk size": chunked(b"\r\nx\r\n0\r\n\r\n"),
    "bare LF in chunks": chunked(b"1\nx\n0\n\n"),
    "chunk longer than its size": chunked(b"1\r\nxy\r\n0\r\n\r\n"),
    "chunk data without CRLF": chunked(b"1\r\nx0\r\n\r\n"),
    "trailer": chunked(b"1\r\nx\r\n0\r\nX: y\r\n\r\n"),
    "trailer with a length": chunked(b"0\r\nContent-Length: 5\r\n\r\n"),
    "bare LF at the end of chunks": chunked(b"1\r\nx\r\n0\r\n\n"),
    "many tiny chunks": chunked(b"1\r\nx\r\n" * 3000),
}


@pytest.mark.parametrize("name", FRAMING_ATTACKS)
def test_ambiguous_framing_is_refused_and_the_connection_ends(server, name):
    statuses, received = server.exchange(FRAMING_ATTACKS[name] + EVIL)
    assert len(statuses) == 1 and 400 <= statuses[0] < 500, received
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower() and b"x-request-id: " in head
    assert json.loads(body)["error"]["message"]
    assert not server.app.requests


def test_the_corpus_is_large_enough():
    assert len(FRAMING_ATTACKS) >= 60


@pytest.mark.parametrize("name", ["CL.TE", "obs-fold", "chunk extension", "HTTP/0.9"])
def test_an_attack_in_single_bytes_is_the_same_attack(server, name):
    parts = [bytes([byte]) for byte in FRAMING_ATTACKS[name]]
    with server.connect() as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                connection.sendall(part)
                time.sleep(0.0005)
        assert read_answer(connection)[0] == 400
    assert not server.app.requests


def test_an_attack_behind_a_good_request_is_refused_after_its_answer(server):
    statuses, _ = server.exchange(GET + FRAMING_ATTACKS["CL.TE"] + EVIL)
    assert statuses == [200, 400]
    assert [path for _, path, _ in server.app.requests] == ["/echo"]


@pytest.mark.parametrize(
    "request_bytes, body",
    [
        (GET, b""),
        (b"\r\n" + GET, b""),
        (b"GET /echo HTTP/1.0\r\n\r\n", b""),
        (post(b"Content-Length: 5\r\n", b"hello"), b"hello"),
        (post(b"content-length:\t005\r\n", b"hello"), b"hello"),
        (chunked(b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"), b"hello world"),
        (chunked(b"00a\r\n0123456789\r\n0\r\n\r\n"), b"0123456789"),
        (post(b"Transfer-Encoding: CHUNKED\r\n", b"1\r\nx\r\n0\r\n\r\n"), b"x"),
        (post(b"X: \xe9\tb\r\nContent-Length: 1\r\n", b"x"), b"x"),
        (b"GET /echo HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n", b""),
        # What Java's client offers with each request; llhttp alone would lose the body.
        (
            post(
                b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 2\r\n",
                b"hi",
            ),
            b"hi",
        ),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_good_requests_are_read_however_they_are_cut(server, request_bytes, body, step):
    with server.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(request_bytes), step):
            connection.sendall(request_bytes[start : start + step])
        assert read_answer(connection)[0] == 200
    assert [seen for _, _, seen in server.app.requests] == [body]


def test_pipelined_requests_are_answered_in_their_order(server):
    first, second = post(b"Content-Length: 3\r\n", b"one"), chunked(b"3\r\ntwo\r\n0\r\n\r\n")
    last = b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    statuses, received = server.exchange(first + second + last + EVIL)
    assert statuses == [200, 200, 200]
    assert received.index(b"one") < received.index(b"two")
    assert [path for _, path, _ in server.app.requests] == ["/echo"] * 3


def test_pipelining_without_an_end_is_cut(server):
    num_gone = server.app.num_gone
    with server.connect() as connection:
        connection.sendall(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                connection.sendall(EVIL * 100)
            read_all(connection)
    wait_until(lambda: server.app.num_gone == num_gone + 1)
    assert "/evil" not in [path for _, path, _ in server.app.requests]


def test_a_client_that_leaves_is_noticed(server):
    num_gone = server.app.num_gone
    with server.connect() as connection:
        connection.sendall(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n" + EVIL)
        wait_until(lambda: server.app.requests)
    wait_until(lambda: server.app.num_gone == num_gone + 1)


# -- bounds --------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.parametrize(
    "request_bytes, status",
    [
        (b"GET /" + b"a" * 8191 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 200),
        (b"GET /" + b"a" * 8192 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (b"GET /?" + b"a" * 100_000, 414),
        (post(b"X: y\r\n" * 99), 200),
        (post(b"X: y\r\n" * 100), 431),
        (post(b"X: " + b"a" * 32_700 + b"\r\n"), 200),
        (post(b"X: " + b"a" * 32_768 + b"\r\n"), 431),
        (post(b"X: " + b"a" * 1_000_000), 431),
    ],
)
def test_headers_and_urls_are_bounded(server, request_bytes, status):
    with server.connect() as connection:
        started = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(request_bytes)
        assert read_answer(connection)[0] == status
        assert time.monotonic() - started < python_seconds(2e6, time.perf_counter)


def test_a_body_that_the_app_left_unread_does_not_end_the_connection(server):
    body = b"Content-Length: 500000\r\n\r\n" + b"x" * 500_000
    with server.connect() as connection:
        connection.sendall(b"POST /ignore HTTP/1.1\r\nHost: a\r\n" + body)
        assert read_answer(connection)[0] == 200
        connection.sendall(GET)
        assert read_answer(connection)[0] == 200
    assert [path for _, path, _ in server.app.requests] == ["/ignore", "/echo"]


def test_but_not_without_an_end(server):
    head = b"POST /ignore HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    num_sent = 0
    with server.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(head)
        while num_sent < 100 << 20:
            connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            num_sent += 65536
    assert num_sent < 20 << 20


def test_an_answer_survives_a_body_that_is_still_being_sent(server):
    # Without lingering, the reset for the unread input would destroy the answer.
    head = b"POST /ignore HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 20000000\r\n"
    statuses, _ = server.exchange(head + b"\r\n", *[b"x" * 1_000_000] * 20)
    assert statuses == [200]


def test_expect_continue(server):
    with server.connect() as connection:
        connection.sendall(post(b"Expect: 100-continue\r\nContent-Length: 2\r\n"))
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"hi")
        assert read_answer(connection) == (200, b"2\r\nhi\r\n0\r\n\r\n")


def test_connections_over_the_limit_are_told_so():
    with serving(max_connections=2) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(server.connect())
            connection.sendall(GET)
            assert read_answer(connection)[0] == 200
        statuses, received = server.exchange(GET)
        assert statuses == [503] and b"retry-after: " in received
        for path in (b"/health", b"/metrics", b"/health?a=b"):
            statuses, received = server.exchange(GET.replace(b"/echo", path))
            assert statuses == [200], "health checks are let in"
        assert server.exchange(post(b"Content-Length: 1\r\n", b"x"))[0] == [503]
        stack.close()
        wait_until(lambda: not server.num_connections)
        with server.connect() as connection:
            connection.sendall(GET)
            assert read_answer(connection)[0] == 200


def test_one_address_cannot_have_all_connections():
    with serving(max_connections=8, max_connections_per_address=2) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                connection = stack.enter_context(server.connect())
                connection.sendall(GET)
                assert read_answer(connection)[0] == 200
            assert server.exchange(GET)[0] == [503]
            assert server.exchange(GET.replace(b"/echo", b"/health"))[0] == [200]
            with server.connect("127.0.0.2") as other:
                other.sendall(GET)
                assert read_answer(other)[0] == 200, "another one has its own"
        wait_until(lambda: not server.num_connections)
        with server.connect() as connection:
            connection.sendall(GET)
            assert read_answer(connection)[0] == 200
    unbounded = serving(max_connections=8, max_connections_per_address=0)
    with unbounded as server, contextlib.ExitStack() as stack:
        for _ in range(8):
            connection = stack.enter_context(server.connect())
            connection.sendall(GET)
            assert read_answer(connection)[0] == 200


# -- time ----------------------------------------------------------------------------------------


@pytest.fixture
def hasty_server(monkeypatch):
    monkeypatch.setattr(http, "HEADER_TIMEOUT", 0.3)
    monkeypatch.setattr(http, "BODY_TIMEOUT", 0.3)
    monkeypatch.setattr(http, "KEEP_ALIVE_TIMEOUT", 1)
    with serving(slow_reader_timeout=0.3) as server:
        yield server


@pytest.mark.timing
def test_slow_headers_end_with_408(hasty_server):
    server = hasty_server
    with server.connect() as connection:
        started = time.monotonic()
        connection.sendall(b"GET /echo HTTP/1.1\r\nHost: a\r\n")
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < started + 0.6:
                connection.sendall(b"X: y\r\n")
                time.sleep(0.02)
        assert read_answer(connection)[0] == 408


def test_a_second_request_has_its_own_time(hasty_server):
    with hasty_server.connect() as connection:
        connection.sendall(GET)
        assert read_answer(connection)[0] == 200
        time.sleep(0.5)  # idle is no slow header
        connection.sendall(GET[:10])
        time.sleep(0.1)
        connection.sendall(GET[10:])
        assert read_answer(connection)[0] == 200
        connection.sendall(GET[:10])
        assert read_answer(connection)[0] == 408


def test_silent_connections_are_closed_silently(hasty_server):
    with hasty_server.connect() as connection:
        assert read_all(connection) == b""
    with hasty_server.connect() as connection:
        connection.sendall(GET)
        read_answer(connection)
        started = time.monotonic()
        assert read_all(connection) == b""
        assert time.monotonic() - started > http.KEEP_ALIVE_TIMEOUT / 2


@pytest.mark.timing
@pytest.mark.parametrize("interval", [None, 0.05])
def test_slow_bodies_end_with_408(hasty_server, interval):
    server = hasty_server
    with server.connect() as connection:
        connection.sendall(post(b"Content-Length: 1000\r\n"))
        num_bytes = 0
        with contextlib.suppress(ConnectionError):
            while interval and num_bytes < 200 and not is_readable(connection):
                connection.sendall(b"x")
                num_bytes += 1
                time.sleep(interval)
        assert read_answer(connection)[0] == 408
        assert num_bytes < 200, "each byte bought it time"
    wait_until(lambda: server.app.num_gone == 1)
    assert not server.app.requests


def test_a_client_that_does_not_read_is_cut(hasty_server):
    server = hasty_server
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_until(lambda: server.app.num_gone, seconds=5)
    wait_until(lambda: not server.num_connections)


@pytest.mark.timing
def test_a_client_that_reads_slowly_is_not():
    """So slowly that the timeout passes before there is room for more."""
    with serving(slow_reader_timeout=1.0) as server:
        with server.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")
            started = time.monotonic()
            while time.monotonic() < started + 3.5:
                assert connection.recv(768)
                time.sleep(0.025)
            assert server.num_connections == 1
        wait_until(lambda: server.app.num_gone, seconds=5)


@pytest.mark.timing
def test_slow_attackers_do_not_keep_others_out():
    with serving() as server, contextlib.ExitStack() as stack:
        alone = seconds_of_requests(server)
        for _ in range(200):
            connection = stack.enter_context(server.connect())
            connection.sendall(b"GET /echo HTTP/1.1\r\n")
        assert seconds_of_requests(server) < 3 * alone + python_seconds(2e6, time.perf_counter)


def seconds_of_requests(server, count=20):
    started = time.monotonic()
    with server.connect() as connection:
        for _ in range(count):
            connection.sendall(GET)
            assert read_answer(connection)[0] == 200
    return time.monotonic() - started


# -- the socket ----------------------------------------------------------------------------------


def test_listen_takes_a_free_port_and_bounds_what_the_kernel_keeps():
    with listen(ServerSettings(port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1" and listener.getsockname()[1] > 0
        kept = listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert kept <= 2 * SEND_BUFFER_BYTES


def test_localhost_is_one_socket():
    with listen(ServerSettings(host="localhost", port=0)) as listener:
        assert listener.family == socket.AF_INET


def test_a_port_in_use_says_what_to_do():
    with listen(ServerSettings(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: another program does; stop it"):
            listen(ServerSettings(port=port))


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "256.1.1.1"])
def test_a_foreign_address_says_what_to_do(host):
    with pytest.raises(ConfigError, match="no address of this machine"):
        listen(ServerSettings(host=host, port=0))


def test_few_open_files_mean_few_connections():
    program = """if True:
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        from octavo.server.http.connection import connection_limit
        from octavo.server.settings import ServerSettings
        for settings in (ServerSettings(), ServerSettings(max_connections=4)):
            print(connection_limit(settings))
    """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["16", "4"]


def test_the_soft_limit_of_open_files_is_raised():
    program = """if True:
        import resource
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        from octavo.server.http.connection import connection_limit
        from octavo.server.settings import ServerSettings
        assert connection_limit(ServerSettings(max_connections=100)) == 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (148, hard)
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_no_torch_is_loaded():
    modules = "octavo.server.http.connection, octavo.server.http.access_control"
    program = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_limit_is_the_setting_where_files_suffice():
    assert connection_limit(ServerSettings(max_connections=10)) == 10


def is_readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def wait_until(condition, seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
