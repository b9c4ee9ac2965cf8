"""A client for one streamed answer that costs next to nothing.

A load generator shares the machine with what it measures. General HTTP libraries take more time
for a token than the server does; this one reads events off a socket and notes when they came.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class StreamResult:
    """What one request got. Times are ``time.perf_counter()``; ``error`` is None if all is well."""

    sent: float
    status: int = 0
    first: float | None = None  # the first event with a choice that has text
    ended: float | None = None
    event_times: list[float] = field(default_factory=list)  # of events with text
    text: str = ""
    usage: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """As the server says; where it does not, the events with text."""
        if self.usage is not None:
            return int(self.usage["completion_tokens"])
        return len(self.event_times)


async def stream_request(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> StreamResult:
    """POST a JSON body and read the events of the answer, on a connection of its own."""
    result = StreamResult(time.perf_counter())
    try:
        await _exchange(url, body, headers or {}, result)
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.ended = time.perf_counter()
    return result


async def _exchange(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str], result: StreamResult
) -> None:
    parts = urlsplit(url)
    assert parts.scheme == "http" and parts.hostname
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        content = json.dumps(body).encode()
        lines = [
            f"POST {parts.path or '/'} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        result.status = int(head[0].split()[1])
        result.headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        if result.status != 200:
            result.error = (await reader.read()).decode(errors="replace")
            return
        await _read_events(reader, result)
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, result: StreamResult) -> None:
    """Events end with an empty line; the chunks that carry them are taken off first."""
    pending, wire = b"", b""
    while data := await reader.read(1 << 16):
        now = time.perf_counter()
        pieces, wire = _unchunk(wire + data)
        *events, pending = (pending + pieces).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                _take(json.loads(event[6:]), now, result)


def _unchunk(data: bytes) -> tuple[bytes, bytes]:
    """The content of the whole chunks in ``data``, and the bytes that are left."""
    pieces = []
    while True:
        line_end = data.find(b"\r\n")
        if line_end < 0:
            break
        size = int(data[:line_end], 16)
        end = line_end + 2 + size
        if len(data) < end + 2:
            break
        pieces.append(data[line_end + 2 : end])
        data = data[end + 2 :]
    return b"".join(pieces), data


def _take(event: dict[str, Any], now: float, result: StreamResult) -> None:
    if "error" in event:
        result.error = str(event["error"])
    if event.get("usage") is not None:
        result.usage = event["usage"]
    for choice in event.get("choices", ()):
        text = choice.get("text")
        if text is None:
            text = choice.get("delta", {}).get("content")
        if text:
            result.text += text
            result.event_times.append(now)
            if result.first is None:
                result.first = now
