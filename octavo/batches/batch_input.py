"""The lines of a batch: OpenAI's JSONL, a request each.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}

`read_requests` reads a file once and keeps a little of each line; a body is read again when its
turn comes, so that a file may be larger than memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from octavo.base.errors import OctavoError

MAX_LINE_BYTES = 16 << 20
MAX_ID_CHARS = 512
# Endpoints whose answers are one JSON object.
URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score", "/rerank", "/score", "/pooling", "/classify"),
)
_FIELDS = {"custom_id", "method", "url", "body"}
# Prompts are compared by so many first characters, then by a hash of twice as many, and so on: to
# keep all of them would take as much memory as the file.
_FIRST_CHARS, _NUM_HASHES, _HASH_BYTES = 2048, 6, 8


class BatchFileError(OctavoError):
    """A file of requests or of answers is not one; tells the line."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of the input. ``order``: lines whose prompts begin alike are neighbours when sorted by
    it. ``model``: the name in its body, if it has one."""

    custom_id: str
    url: str
    offset: int
    order: bytes
    model: str | None


def read_requests(path: Path) -> list[BatchRequest]:
    """Return the requests of a file. BatchFileError names the line that is none."""
    found: list[BatchRequest] = []
    seen: set[str] = set()
    with open(path, "rb") as file:
        for number, (offset, line) in enumerate(_lines(file, path), 1):
            if not line.strip():
                continue
            try:
                request = _request(line, offset)
                if request.custom_id in seen:
                    raise ValueError(f"custom_id {request.custom_id!r} was there before")
            except (ValueError, RecursionError) as error:
                raise BatchFileError(f"{path}, line {number}: {error}") from error
            seen.add(request.custom_id)
            found.append(request)
    if not found:
        raise BatchFileError(f"{path} has no requests")
    return found


def read_body(file: BinaryIO, request: BatchRequest) -> bytes:
    """Return the body of a request, from the file that it was found in."""
    file.seek(request.offset)
    return json.dumps(json.loads(file.readline())["body"]).encode()


def in_order(requests: list[BatchRequest]) -> list[BatchRequest]:
    """Return requests so that those with a common beginning of their prompts follow each other,
    which then is computed once and found in the prefix cache."""
    return sorted(requests, key=lambda request: (request.url, request.model or "", request.order))


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their offsets."""
    offset = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise BatchFileError(f"{path}: a line has more than {MAX_LINE_BYTES:,} bytes")
        yield offset, line
        offset += len(line)


def _request(line: bytes, offset: int) -> BatchRequest:
    """Raises ValueError: the line is no request."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("is no object with custom_id, method, url and body")
    if unknown := fields.keys() - _FIELDS:
        raise ValueError(f"has {sorted(unknown)[0]!r}, which is not of a request of a batch")
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
        raise ValueError(f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters")
    if fields.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, not {fields['method']!r}")
    if url not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}, not {url!r}")
    if not isinstance(body, dict):
        raise ValueError("body must be an object")
    if body.get("stream"):
        raise ValueError("body has stream: answers of a batch come whole, so leave it out")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise ValueError(f"model must be a text, not {model!r}")
    return BatchRequest(custom_id, url, offset, _order(body), model)


def _order(body: dict[str, Any]) -> bytes:
    """Return the beginning of a body's prompt, and hashes of longer and longer ones."""
    prompt = json.dumps(
        [body.get(name) for name in ("system", "instructions", "tools", "messages", "input")]
        + [body.get(name) for name in ("prompt", "query", "documents")]
    )
    order = prompt[:_FIRST_CHARS].encode()
    size = _FIRST_CHARS
    while size < len(prompt) and size < _FIRST_CHARS << _NUM_HASHES:
        size *= 2
        order += hashlib.blake2b(prompt[:size].encode(), digest_size=_HASH_BYTES).digest()
    return order
