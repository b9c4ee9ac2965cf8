"""One streamed answer of an OpenAI-compatible server, with the time of each of its events.

The events are those of the HTML standard, §9.2 ("server-sent events"), in which such servers send
``chat.completion.chunk`` and ``text_completion`` objects, and ``[DONE]`` at the end.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from octavo.bench.serving.http_client import HttpClient, Response

INTERRUPTED = "interrupted"  # the error of a request that its caller cancelled
_MAX_MESSAGE_CHARS = 500


@dataclass(slots=True)
class StreamResult:
    """The result of one request. Times are ``time.perf_counter()``; ``error`` is None if it
    succeeded."""

    sent: float  # before the connection was made, if one had to be
    status: int = 0
    connected: float | None = None
    first_byte: float | None = None  # of the answer, its head included
    first: float | None = None  # the first event with content: the first token
    last: float | None = None  # the last event of the answer, with content or the end of it
    ended: float | None = None
    event_times: list[float] = field(default_factory=list)  # of events with content
    event_tokens: list[int | None] = field(default_factory=list)  # tokens in each, where known
    text: str = ""
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens that the server tells; else the number of events with content."""
        if self.usage is not None and self.usage.get("completion_tokens") is not None:
            return int(self.usage["completion_tokens"])
        return len(self.event_times)


async def stream_request(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> StreamResult:
    """POST a JSON body and read the events of the answer, on a connection of its own."""
    parts = urlsplit(url)
    client = HttpClient(f"{parts.scheme}://{parts.netloc}", headers=headers, keep_alive=False)
    result = StreamResult(time.perf_counter())
    await read_stream(client, parts.path or "/", json.dumps(body).encode(), result)
    await client.close()
    return result


async def read_stream(
    client: HttpClient,
    path: str,
    body: bytes,
    result: StreamResult,
    timeout_s: float | None = None,
) -> None:
    """POST ``body`` and fill ``result``, whose ``sent`` is now.

    Raises nothing but CancelledError: other errors are in ``result.error``.
    """
    response, answer = Response(), _AnswerReader(result)

    def take(data: bytes, now: float) -> None:
        if response.status == 200 and answer.is_stream(response.headers):
            answer.feed(data, now)
        else:
            answer.other_body += data

    try:
        async with asyncio.timeout(timeout_s):
            result.connected = await client.request("POST", path, body, response, take)
        answer.end(response)
    except (OSError, ValueError) as error:
        if isinstance(error, TimeoutError) and error.errno is None:  # ours, not the system's
            error = TimeoutError(f"no end after {timeout_s:g} s")
        if not answer.is_done:  # what breaks after the last event has not hurt the answer
            result.error = result.error or f"{type(error).__name__}: {error}"
    except asyncio.CancelledError:
        result.error = INTERRUPTED
        raise
    finally:
        result.ended = time.perf_counter()
        result.status, result.headers = response.status, response.headers
        result.first_byte = response.first_byte


class _AnswerReader:
    """Builds a StreamResult from the body, event by event."""

    def __init__(self, result: StreamResult):
        self.result = result
        self.is_done = False
        self.other_body = b""  # of an answer that is no stream
        self._events = EventSplitter()
        self._tokens_said = 0  # by a server that tells the usage in every event

    def is_stream(self, headers: Mapping[str, str]) -> bool:
        return headers.get("content-type", "text/event-stream").startswith("text/event-stream")

    def feed(self, data: bytes, now: float) -> None:
        for event in self._events.feed(data):
            try:
                self._take(event, now)
            except (TypeError, AttributeError) as error:
                raise ValueError(f"no event of OpenAI's API: {event[:80]!r}") from error

    def end(self, response: Response) -> None:
        """Check that the answer is whole, at its end."""
        result = self.result
        if response.status != 200:
            result.error = error_message(self.other_body) or f"HTTP {response.status}"
        elif not self.is_stream(response.headers):
            kind = response.headers["content-type"]
            result.error = f"the answer is no event stream, but {kind}"
        else:
            for event in self._events.flush():
                self._take(event, result.last or time.perf_counter())
            if result.error is None and not self.is_done and result.finish_reason is None:
                result.error = "cut: the stream ended before the answer did"
            if result.error is None and result.first is None:
                result.first = result.last  # of an empty answer only the end has come

    def _take(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self.is_done = True
            return
        document = json.loads(event)
        if not isinstance(document, dict):
            raise ValueError(f"an event is no JSON object: {event[:80]!r}")
        result = self.result
        if document.get("error"):
            result.error = _short(document["error"])
        if document.get("usage"):
            result.usage = document["usage"]
        choices = document.get("choices")
        if not choices:
            return
        result.last = now
        has_content, num_tokens = False, 0
        for choice in choices:
            text, tokens = content_of(choice)
            if text is not None:
                has_content = True
                result.text += text
                num_tokens += tokens
            if choice.get("finish_reason"):
                result.finish_reason = choice["finish_reason"]
        if has_content:
            if result.first is None:
                result.first = now
            result.event_times.append(now)
            result.event_tokens.append(self._count(document, num_tokens))

    def _count(self, document: Mapping[str, Any], num_tokens: int) -> int | None:
        """Return the tokens of an event: counted in it, or by the usage that came with it."""
        said = (document.get("usage") or {}).get("completion_tokens")
        if said is None:
            return num_tokens or None
        self._tokens_said, before = said, self._tokens_said
        return max(0, said - before)


def content_of(choice: Mapping[str, Any]) -> tuple[str | None, int]:
    """Return the text of a choice, None if it has no content; and its tokens, 0 where they are not
    told.

    Reasoning and tool calls are content, too: they are tokens that the model wrote.
    """
    delta = choice.get("delta") or choice
    text = delta.get("content") or choice.get("text") or ""
    text += delta.get("reasoning_content") or delta.get("reasoning") or ""
    tokens = len(choice.get("token_ids") or ())
    if not tokens and (logprobs := choice.get("logprobs")):
        tokens = len(logprobs.get("tokens") or logprobs.get("content") or ())
    is_empty = not (text or tokens or delta.get("tool_calls"))
    return (None if is_empty else text), tokens


def error_message(body: bytes) -> str:
    """Return the message in the body of an error."""
    try:
        document = json.loads(body)
    except ValueError:
        return " ".join(body.decode(errors="replace").split())[:_MAX_MESSAGE_CHARS]
    if isinstance(document, dict):
        document = document.get("error") or document.get("detail") or document
    return _short(document)


def _short(error: Any) -> str:
    if isinstance(error, dict):
        error = error.get("message") or error
    return (error if isinstance(error, str) else json.dumps(error))[:_MAX_MESSAGE_CHARS]


class EventSplitter:
    """Splits server-sent events, however their bytes are cut; returns their data."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that end within ``data``."""
        pending = self._pending + data
        held = b""
        if b"\r" in pending:
            if pending.endswith(b"\r"):  # its \n may follow
                pending, held = pending[:-1], b"\r"
            pending = pending.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = pending.split(b"\n\n")
        self._pending = rest + held
        return [data for event in events if (data := _event_data(event))]

    def flush(self) -> list[bytes]:
        """Return the data of a last event whose empty line is missing, if it is whole."""
        data = _event_data(self._pending.replace(b"\r", b"\n"))
        self._pending = b""
        if data == b"[DONE]":
            return [data]
        try:
            json.loads(data)
        except ValueError:
            return []
        return [data]


def _event_data(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly all
        return event[6:]
    lines = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            line = line[5:]
            lines.append(line[1:] if line.startswith(b" ") else line)
    return b"\n".join(lines)
