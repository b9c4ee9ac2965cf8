"""Messages between the server and its engine process: JSON, each after its length in four bytes.

They cross a socket pair that nobody else can open. JSON because it cannot carry code, and because
what crosses is small: a prompt's ids once, and some forty bytes for each token.

To the engine:

    start   args: the fields of EngineArgs                                      (the first message)
    add     id, ids, params, priority, salt, arrival
    abort   id
    ping    number                                   answered between two steps, by the engine
    stop

From the engine:

    ready    facts
    failed   kind, message              it could not start; the process ends
    refused  id, kind, message, field
    step     time, tokens, seqs, load, begun: [id], deltas: [...], ended: {id: stats}
    pong     number
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from octavo.core.batch import TokenLogprobs
from octavo.server.generation import Delta

Message = dict[str, Any]

# More than any message needs: a larger one is a bug, and must not become an allocation.
MAX_BYTES = 256 << 20
_LENGTH = struct.Struct(">I")


def encode(message: Message) -> bytes:
    """One message as bytes."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a stream of bytes, which arrive in any pieces, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that ``data`` completes."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer)
            if size > MAX_BYTES:
                raise ValueError(f"a message of {size} bytes")
            end = _LENGTH.size + size
            if len(buffer) < end:
                return
            body = bytes(buffer[_LENGTH.size : end])
            del buffer[:end]
            yield json.loads(body)


def delta_to_list(request_id: str, delta: Delta) -> list[Any]:
    """A delta as the ``step`` message holds it, as short as it can be."""
    items: list[Any] = [request_id, delta.index, delta.text, delta.token_ids]
    if delta.logprobs or delta.finish_reason is not None:
        items.append(delta.logprobs)
    if delta.finish_reason is not None:
        items += [delta.finish_reason, delta.stop_reason, delta.cumulative_logprob, delta.error]
    return items


def delta_from_list(items: list[Any]) -> tuple[str, Delta]:
    """The inverse of ``delta_to_list``."""
    request_id, index, text, token_ids, *rest = items
    if not rest:
        return request_id, Delta(index, text, token_ids)
    logprobs, *end = rest
    return request_id, Delta(index, text, token_ids, logprobs_from_list(logprobs), *end)


def logprobs_from_list(entries: list[list[Any]]) -> list[TokenLogprobs]:
    """Log-probabilities as JSON brought them (a named tuple goes out as a list)."""
    return [
        TokenLogprobs(token_id, logprob, rank, tuple((i, value) for i, value in top))
        for token_id, logprob, rank, top in entries
    ]
