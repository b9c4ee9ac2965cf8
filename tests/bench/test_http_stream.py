from __future__ import annotations

import asyncio
import json

import pytest

from octavo.bench.http_stream import stream_request

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "Hé"}}]},
    {"choices": [{"index": 0, "text": "llo"}]},
    {"choices": [], "usage": {"completion_tokens": 5}},
]


def serve_and_ask(pieces: list[bytes], delay: float = 0.0):
    """The result of one request to a server that answers with these bytes; and what it was sent."""
    received = bytearray()

    async def answer(reader, writer):
        received.extend(await reader.readuntil(b"}"))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if delay:
                await asyncio.sleep(delay)
        writer.close()

    async def main():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}/v1/completions"
            return await stream_request(url, {"prompt": "x"}, {"authorization": "Bearer k"})

    return asyncio.run(main()), bytes(received)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream() -> bytes:
    events = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in EVENTS]
    body = b": keep-alive\n\n" + b"".join(events) + b"data: [DONE]\n\n"
    return HEAD + chunk(body[:37]) + chunk(body[37:90]) + chunk(body[90:]) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_read_however_they_are_cut(size):
    whole = stream()
    result, received = serve_and_ask([whole[i : i + size] for i in range(0, len(whole), size)])
    assert result.error is None and result.status == 200
    assert result.text == "Héllo" and result.num_output_tokens == 5
    assert len(result.event_times) == 2 and result.first == result.event_times[0]
    assert result.sent <= result.first <= result.ended
    assert b"authorization: Bearer k" in received and b'{"prompt": "x"}' in received


def test_times_are_those_of_the_events():
    pieces = [HEAD, *(chunk(b'data: {"choices": [{"text": "a"}]}\n\n') for _ in range(3))]
    result, _ = serve_and_ask([*pieces, b"0\r\n\r\n"], delay=0.05)
    gaps = [b - a for a, b in zip(result.event_times, result.event_times[1:], strict=False)]
    assert len(gaps) == 2 and all(0.04 < gap < 0.5 for gap in gaps)
    assert result.num_output_tokens == 3  # nobody said how many


def test_a_refusal_is_told_with_its_headers():
    refusal = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\ncontent-length: 4\r\n\r\nfull"
    result, _ = serve_and_ask([refusal])
    assert result.status == 503 and result.error == "full" and result.headers["retry-after"] == "2"
    assert result.first is None


def test_a_connection_that_breaks_is_an_error():
    result, _ = serve_and_ask([b"HTTP/1.1 2"])
    assert result.error is not None and "IncompleteReadError" in result.error


def test_an_error_event_is_an_error():
    event = b'data: {"error": {"message": "gone"}}\n\n'
    result, _ = serve_and_ask([HEAD + chunk(event) + b"0\r\n\r\n"])
    assert result.error is not None and "gone" in result.error
