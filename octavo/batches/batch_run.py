"""`run_batch` has a server answer the requests of a file, many at a time.

Those whose prompts begin alike follow each other. A server that is full says when to come again: it
is asked again then, and nothing is written about it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from octavo.batches.batch_input import BatchRequest, in_order, read_body, read_requests
from octavo.batches.batch_output import BatchOutput

_BUSY = {429, 503}
_MOST_WAIT = 30.0  # seconds until a full server is asked again


class Answer(NamedTuple):
    """The answer of a server; headers have names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


# Sends a body to a path; OSError or ValueError if no answer comes.
Send = Callable[[str, bytes], Awaitable[Answer]]


@dataclass(frozen=True)
class BatchSummary:
    """The numbers of requests: all, those that were answered before, and those that failed."""

    num_requests: int
    num_before: int
    num_failed: int


async def run_batch(
    source: Path,
    target: Path,
    send: Send,
    *,
    concurrency: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> BatchSummary:
    """Answer what is not answered yet; return the numbers.

    Args:
        concurrency: requests that are sent at a time.
        progress: called with (requests that are answered, requests in all).

    Raises:
        BatchFileError: a file is not what it should be. OSError: one cannot be read or written.
    """
    requests = read_requests(source)
    with open(source, "rb") as file, BatchOutput(target, _ids(requests)) as output:
        num_before = len(output.done)
        waiting = iter([each for each in in_order(requests) if each.custom_id not in output.done])
        progress(num_before, len(requests))

        async def work() -> None:
            for request in waiting:  # shared by all workers
                await _answer(request, read_body(file, request), send, output)
                progress(len(output.done), len(requests))

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(requests))):
                workers.create_task(work())
        return BatchSummary(len(requests), num_before, output.num_failed)


def _ids(requests: list[BatchRequest]) -> set[str]:
    return {request.custom_id for request in requests}


async def _answer(request: BatchRequest, body: bytes, send: Send, output: BatchOutput) -> None:
    while True:
        try:
            answer = await send(request.url, body)
        except (OSError, ValueError) as error:
            output.write_failure(request.custom_id, "no_answer", str(error) or repr(error))
            return
        if answer.status not in _BUSY:
            break
        await asyncio.sleep(_seconds_to_wait(answer.headers.get("retry-after", "")))
    request_id = answer.headers.get("x-request-id", "")
    output.write_answer(request.custom_id, answer.status, _document(answer.body), request_id)


def _seconds_to_wait(retry_after: str) -> float:
    return min(float(retry_after), _MOST_WAIT) if retry_after.isdecimal() else 1.0


def _document(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
