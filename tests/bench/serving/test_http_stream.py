from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import time
from contextlib import asynccontextmanager, suppress

import pytest

from octavo.bench.serving import load
from octavo.bench.serving.http_client import HttpClient, ProtocolError
from octavo.bench.serving.http_stream import (
    EventSplitter,
    StreamResult,
    error_message,
    read_stream,
    stream_request,
)

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "Hé"}}]},
    {"choices": [{"index": 0, "text": "llo"}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 5}},
]


@asynccontextmanager
async def serving(answer, host: str = "127.0.0.1", **options):
    """The URL of a server that has done with its clients when the block has."""
    ended = []

    async def answer_and_close(reader, writer):
        ended.append(done := asyncio.Event())
        with suppress(OSError, asyncio.IncompleteReadError):
            await answer(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        done.set()

    async with await asyncio.start_server(answer_and_close, host, 0, **options) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        for done in ended:
            await done.wait()


def serve_and_ask(pieces: list[bytes], delay: float = 0.0, host: str = "127.0.0.1"):
    """The result of one request to a server that answers with these bytes; and what it was sent."""
    received = bytearray()

    async def answer(reader, writer):
        received.extend(await reader.readuntil(b"}"))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if delay:
                await asyncio.sleep(delay)

    async def main():
        async with serving(answer, host) as url:
            headers = {"authorization": "Bearer k"}
            return await stream_request(url + "/v1/completions", {"prompt": "x"}, headers)

    return load.run(main()), bytes(received)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(document) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def body() -> bytes:
    return b": keep-alive\n\n" + b"".join(map(event, EVENTS)) + b"data: [DONE]\n\n"


def stream() -> bytes:
    whole = body()
    return HEAD + chunk(whole[:37]) + chunk(whole[37:90]) + chunk(whole[90:]) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_read_however_they_are_cut(size):
    whole = stream()
    result, received = serve_and_ask([whole[i : i + size] for i in range(0, len(whole), size)])
    assert result.error is None and result.status == 200
    assert result.text == "Héllo" and result.num_output_tokens == 5
    assert len(result.event_times) == 2 and result.first == result.event_times[0]
    assert result.sent <= result.connected <= result.first_byte <= result.first
    assert result.first <= result.last <= result.ended
    assert result.finish_reason == "stop"
    assert b"authorization: Bearer k" in received and b'{"prompt": "x"}' in received


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
        % len(body()),
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
    ],
)
def test_bodies_with_a_length_or_up_to_the_end_of_the_connection(head, size):
    whole = head + body()
    result, _ = serve_and_ask([whole[i : i + size] for i in range(0, len(whole), size)])
    assert (result.error, result.text, result.num_output_tokens) == (None, "Héllo", 5)


def test_times_are_those_of_the_events():
    pieces = [HEAD, *(chunk(b'data: {"choices": [{"text": "a"}]}\n\n') for _ in range(3))]
    begun = time.perf_counter()
    result, _ = serve_and_ask([*pieces, chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"], delay=0.05)
    passed = time.perf_counter() - begun
    gaps = [b - a for a, b in zip(result.event_times, result.event_times[1:], strict=False)]
    assert len(gaps) == 2 and min(gaps) > 0.04 and sum(gaps) < passed
    assert result.num_output_tokens == 3  # nobody said how many
    assert result.error is None and result.last == result.event_times[-1]


def test_ipv6():
    try:
        result, received = serve_and_ask([stream()], host="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    assert result.text == "Héllo" and b"Host: [::1]:" in received


def test_a_refusal_is_told_with_its_headers():
    refusal = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\ncontent-length: 4\r\n\r\nfull"
    result, _ = serve_and_ask([refusal])
    assert result.status == 503 and result.error == "full" and result.headers["retry-after"] == "2"
    assert result.first is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 2", "without an answer"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not answer in HTTP"),
        (HEAD + b"zz\r\n", "no size of a chunk"),
        (HEAD + chunk(event(EVENTS[1])), "in the middle"),
        (HEAD + chunk(event(EVENTS[1])) + b"0\r\n\r\n", "cut"),
        (HEAD + chunk(b"data: {nonsense\n\n") + b"0\r\n\r\n", "JSONDecodeError"),
        (HEAD + chunk(b"data: [1]\n\n") + b"0\r\n\r\n", "no JSON object"),
        (HEAD + chunk(b'data: {"choices": [7]}\n\n') + b"0\r\n\r\n", "no event of OpenAI's API"),
        (HEAD + chunk(b'data: {"error": {"message": "gone"}}\n\n') + b"0\r\n\r\n", "gone"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
            "no event stream, but application/json",
        ),
    ],
)
def test_what_is_wrong_with_an_answer_is_its_error(answer, message):
    result, _ = serve_and_ask([answer])
    assert result.error is not None and message in result.error
    assert result.ended is not None


def test_a_connection_that_breaks_after_the_end_hurts_nobody():
    result, _ = serve_and_ask([HEAD + chunk(body())])  # the last chunk is missing
    assert result.error is None and result.text == "Héllo"


def test_nobody_there_is_an_error():
    async def main():
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await stream_request(f"http://127.0.0.1:{port}/", {})

    result = asyncio.run(main())
    assert result.status == 0 and "ConnectionRefusedError" in result.error


def test_an_answer_that_does_not_end_is_an_error():
    async def main():
        async def answer(reader, writer):
            writer.write(HEAD + chunk(event(EVENTS[1])))
            await reader.read()

        async with serving(answer) as url:
            client = HttpClient(url)
            result = StreamResult(time.perf_counter())
            await read_stream(client, "/", b"{}", result, timeout_s=0.1)
            await client.close()
            return result

    result = asyncio.run(main())
    assert "no end after 0.1 s" in result.error and result.text == "Hé"
    assert result.ended - result.sent > 0.09


def test_connections_are_kept_and_one_that_has_gone_is_replaced():
    connections = []

    async def main():
        async def answer(reader, writer):
            connections.append(writer)
            for _ in range(2):  # and then it hangs up, as servers do with idle clients
                if b"}" in await reader.readuntil(b"}"):
                    writer.write(stream())

        async with serving(answer) as url:
            client = HttpClient(url + "/prefix/")
            results = []
            for _ in range(4):
                results.append(StreamResult(time.perf_counter()))
                await read_stream(client, "/v1/x", b"{}", results[-1])
            await client.close()
            return results

    results = load.run(main())
    assert [result.text for result in results] == ["Héllo"] * 4
    assert [result.error for result in results] == [None] * 4
    assert len(connections) == 2


def test_tokens_of_an_event_are_counted_where_it_says_them():
    events = [
        {"choices": [{"text": "a", "token_ids": [1, 2]}]},
        {"choices": [{"text": "", "token_ids": [3]}]},  # half a character: a token without text
        {"choices": [{"text": "b", "logprobs": {"tokens": ["b", "c", "d"]}}]},
        {"choices": [{"delta": {"reasoning_content": "hm"}, "logprobs": {"content": [{}]}}]},
        {"choices": [{"delta": {"tool_calls": [{}]}}]},
        {"choices": [{"text": ""}]},
    ]
    pieces = b"".join(map(event, events)) + b"data: [DONE]\n\n"
    result, _ = serve_and_ask([HEAD + chunk(pieces) + b"0\r\n\r\n"])
    assert result.event_tokens == [2, 1, 3, 1, None] and result.text == "abhm"

    usages = [
        {"choices": [{"text": "x"}], "usage": {"completion_tokens": count}} for count in (3, 4, 8)
    ]
    pieces = b"".join(map(event, usages)) + b"data: [DONE]\n\n"
    result, _ = serve_and_ask([HEAD + chunk(pieces) + b"0\r\n\r\n"])
    assert result.event_tokens == [3, 1, 4] and result.num_output_tokens == 8


def test_an_empty_answer_ends_with_its_first_token():
    events = event({"choices": [{"text": "", "finish_reason": "stop"}]}) + b"data: [DONE]\n\n"
    result, _ = serve_and_ask([HEAD + chunk(events) + b"0\r\n\r\n"])
    assert result.error is None and result.first == result.last is not None
    assert result.event_times == []


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata:b\r\n\r\n", [b"a", b"b"]),
        (b"data: 1\r\rdata:2\r\r", [b"1", b"2"]),
        (b": comment\n\nevent: x\nid: 1\ndata: a\ndata: b\n\n: c\n\n", [b"a\nb"]),
        (b"\n\n\ndata:  a\n\n", [b" a"]),
        (b"data: [DONE]", [b"[DONE]"]),
        (b'data: {"x": 1}\n', [b'{"x": 1}']),
        (b'data: {"x": ', []),
    ],
)
def test_events_are_split(text, expected, size):
    splitter = EventSplitter()
    found = []
    for start in range(0, len(text), size):
        found += splitter.feed(text[start : start + size])
    assert found + splitter.flush() == expected


def test_messages_of_errors():
    assert error_message(b'{"error": {"message": "no", "type": "x"}}') == "no"
    assert error_message(b'{"error": "no"}') == error_message(b'{"detail": "no"}') == "no"
    assert error_message(b"<h1>Bad\n gateway</h1>") == "<h1>Bad gateway</h1>"
    assert error_message(b"") == ""


@pytest.mark.parametrize("url", ["ftp://x", "localhost:8000", "http://", "x"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ValueError, match="no URL"):
        HttpClient(url)


def test_a_header_cannot_bring_further_lines():
    with pytest.raises(ValueError, match="header"):
        HttpClient("http://x", headers={"a": "b\r\nc: d"})


def test_https(tmp_path):
    """The certificate is made for this test: it is refused, unless that is not wanted."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", key, "-out", cert, "-subj", "/CN=localhost"]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def main():
        async def answer(reader, writer):
            while True:
                await reader.readuntil(b"}")
                writer.write(stream())

        async with serving(answer, ssl=context) as url:
            results = []
            for verify in (True, False, False):
                client = HttpClient(url.replace("http", "https"), verify=verify)
                results.append(StreamResult(time.perf_counter()))
                await read_stream(client, "/", b"{}", results[-1])
                await client.close()
            return results

    refused, *answered = load.run(main())
    assert "certificate" in refused.error.lower()
    assert all(result.text == "Héllo" and result.error is None for result in answered)


def test_an_answer_without_end_of_its_head():
    async def main():
        async def answer(reader, writer):
            pass

        async with serving(answer) as url:
            client = HttpClient(url)
            with pytest.raises((ProtocolError, OSError)):
                await client.fetch("GET", "/")
            await client.close()

    asyncio.run(main())
