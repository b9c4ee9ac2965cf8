"""Bytes that are no decent request: one refusal, then the end of the connection."""

from __future__ import annotations

import re
import socket
import time

import pytest
from pace import python_seconds

pytestmark = pytest.mark.xdist_group("a live server")

BODY = b'{"prompt": "a", "max_tokens": 1}'
HOST = b"Host: 127.0.0.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST
SMUGGLED = b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
STATUS_LINE = re.compile(rb"HTTP/1\.1 \d{3} ")
NO_CHUNKS = b"0\r\n\r\n" + SMUGGLED

# What a proxy before the server might read as one request, or as two.
AMBIGUOUS = {
    "both lengths": POST + LENGTH + CHUNKED + b"\r\n" + NO_CHUNKS,
    "both, the other way round": POST + CHUNKED + LENGTH + b"\r\n" + NO_CHUNKS,
    "two lengths": POST + LENGTH + b"Content-Length: 0\r\n\r\n" + BODY + SMUGGLED,
    "the same length twice": POST + LENGTH + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "a list of lengths": POST + b"Content-Length: 32, 32\r\n\r\n" + BODY + SMUGGLED,
    "a length with a sign": POST + b"Content-Length: +32\r\n\r\n" + BODY + SMUGGLED,
    "a negative length": POST + b"Content-Length: -1\r\n\r\n" + BODY + SMUGGLED,
    "a hexadecimal length": POST + b"Content-Length: 0x20\r\n\r\n" + BODY + SMUGGLED,
    "a length with a space": POST + b"Content-Length: 3 2\r\n\r\n" + BODY + SMUGGLED,
    "a length beyond 64 bits": POST + b"Content-Length: 99999999999999999999\r\n\r\n" + BODY,
    "no length": POST + b"Content-Length: \r\n\r\n" + BODY + SMUGGLED,
    "space before the colon": POST + b"Content-Length : 32\r\n\r\n" + BODY + SMUGGLED,
    "chunked twice": POST + CHUNKED + CHUNKED + b"\r\n" + NO_CHUNKS,
    "chunked, identity": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + NO_CHUNKS,
    "xchunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + NO_CHUNKS,
    "a tab before chunked": POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n" + NO_CHUNKS,
    "chunked in quotes": POST + b'Transfer-Encoding: "chunked"\r\n\r\n' + NO_CHUNKS,
    "chunked in HTTP/1.0": POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + NO_CHUNKS,
    "a chunk with a sign": POST + CHUNKED + b"\r\n+5\r\nabcde\r\n" + NO_CHUNKS,
    "a chunk of 0x5": POST + CHUNKED + b"\r\n0x5\r\nabcde\r\n" + NO_CHUNKS,
    "a chunk beyond 64 bits": POST + CHUNKED + b"\r\n10000000000000005\r\nabcde\r\n" + NO_CHUNKS,
    "a chunk extension": POST + CHUNKED + b"\r\n5;a=b\r\nabcde\r\n" + NO_CHUNKS,
    "a chunk with a bare LF": POST + CHUNKED + b"\r\n5\nabcde\r\n" + NO_CHUNKS,
    "a chunk that is too short": POST + CHUNKED + b"\r\n3\r\nabcde\r\n" + NO_CHUNKS,
    "a trailer": POST + CHUNKED + b"\r\n0\r\nContent-Length: 5\r\n\r\n" + SMUGGLED,
    "a folded header": POST + b"X: a\r\n " + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "a bare LF": POST + b"X: a\n" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "a bare CR": POST + b"X: a\r" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "NUL in a header": POST + b"X: a\x00b\r\n" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "a header without a name": POST + b": a\r\n" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "a header without a colon": POST + b"Xa\r\n" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "two hosts": POST + b"Host: evil\r\n" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "no host": b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"\r\n" + BODY + SMUGGLED,
    "HTTP/0.9": b"GET /health\r\n" + SMUGGLED,
    "HTTP/2.0": b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n" + SMUGGLED,
    "HTTP/2's greeting": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a whole URL": b"GET http://127.0.0.1/health HTTP/1.1\r\n" + HOST + b"\r\n" + SMUGGLED,
    "a tunnel": b"CONNECT example.org:443 HTTP/1.1\r\n" + HOST + b"\r\n" + SMUGGLED,
    "two spaces": b"GET  /health HTTP/1.1\r\n" + HOST + b"\r\n" + SMUGGLED,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
    "noise": bytes(range(256)) * 4,
}

OVERSIZE = {
    "a header of 33 KiB": (431, b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 33_000),
    "endless headers": (431, b"GET /health HTTP/1.1\r\n" + HOST + b"X: a\r\n" * 20_000),
    "101 headers": (431, b"GET /health HTTP/1.1\r\n" + HOST + b"X: a\r\n" * 100 + b"\r\n"),
    "a URL of 9 KiB": (414, b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n"),
    "an endless URL": (414, b"GET /" + b"a" * 100_000),
    "a body of 1 GiB": (413, POST + b"Content-Length: 1073741824\r\n\r\n" + BODY),
    "a chunked body of 10 MiB": (
        413,
        POST + CHUNKED + b"\r\n" + (b"10000\r\n" + b" " * 65_536 + b"\r\n") * 160,
    ),
}


@pytest.fixture(scope="module")
def server(shared_server, tiny_model):
    return shared_server(tiny_model)


def exchange(server, request: bytes) -> bytes:
    """All that comes back until the server closes the connection, which it must do."""
    received = b""
    with server.connect() as connection:
        connection.settimeout(10)
        try:
            connection.sendall(request)
            while data := connection.recv(1 << 16):
                received += data
        except (ConnectionResetError, BrokenPipeError):
            pass  # it did not want to read all of it
    return received


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_is_ambiguous_is_refused_and_ends_the_connection(server, name):
    answer = exchange(server, AMBIGUOUS[name])
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert len(STATUS_LINE.findall(answer)) == 1 and b"octavo:" not in answer
    assert b"connection: close" in answer.lower()
    assert server.fetch("/health").status == 200


@pytest.mark.parametrize("name", OVERSIZE)
def test_what_is_too_large_is_refused_before_it_is_read(server, name):
    status, request = OVERSIZE[name]
    memory = server.resident_bytes()
    answer = exchange(server, request)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert len(STATUS_LINE.findall(answer)) == 1
    assert server.resident_bytes() - memory < 32 << 20


def test_requests_in_a_row_are_answered_in_a_row(server):
    get = b"GET /health HTTP/1.1\r\n" + HOST
    answer = exchange(server, (get + b"\r\n") * 20 + get + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 21


@pytest.mark.timing
def test_connections_that_never_finish_deny_nobody(server):
    usual = _seconds_of_a_request(server)
    idle = [server.connect() for _ in range(400)]
    try:
        for number, connection in enumerate(idle):
            connection.sendall((POST + LENGTH + b"\r\n" + BODY)[: 1 + number % 100])
        beside = _seconds_of_a_request(server)
    finally:
        for connection in idle:
            connection.close()
    print(f"{usual * 1e3:.1f} ms alone, {beside * 1e3:.1f} ms beside 400 idle connections")
    assert beside < 2 * usual + python_seconds(1e6, time.perf_counter)


def _seconds_of_a_request(server) -> float:
    body = {"prompt": "a", "max_tokens": 8, "ignore_eos": True}
    answers = [server.fetch("/v1/completions", body) for _ in range(9)]
    assert all(answer.status == 200 for answer in answers)
    return sorted(answer.seconds for answer in answers)[4]


def test_too_many_connections_are_told_so(live_server, tiny_model):
    with live_server(tiny_model, "--max-connections", "20") as server:
        idle = [server.connect() for _ in range(20)]
        try:
            time.sleep(0.3)
            answer = exchange(server, b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n")
            assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: " in answer.lower()
            # Health checks are answered.
            answer = exchange(server, b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
        finally:
            for connection in idle:
                connection.shutdown(socket.SHUT_RDWR)
                connection.close()
        time.sleep(0.3)
        assert server.fetch("/health").status == 200
