"""Make OpenAI's answers from generations, whole or as a stream, for chats and completions.

The two differ in how a choice is written: each has a `ChoiceWriter`.

A sample that failed alone (its row had no valid probabilities) is a choice with the finish_reason
"error". If none succeeded, the request is answered with an error instead: a status, or in a stream
that has begun, an event.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.server.api.generation_job import MANY_ENTRIES, GenerationJob, num_entries, sample_error
from octavo.server.api.requests import GenerationFields
from octavo.server.api.server_context import ServerContext
from octavo.server.http.background import briefly_in_background, in_background
from octavo.server.http.context import request_context
from octavo.server.http.json_text import encode, encode_in_pieces
from octavo.server.http.sse import EventStream, run_until_disconnect
from octavo.serving.outputs import Delta


class ChoiceWriter(Protocol):
    """Writes the choices of one answer. It may remember what it has written of each."""

    object: str
    chunk_object: str
    counts_output: bool  # whether what was generated is part of the answer
    names_tokens: bool  # whether it needs the tokenizer for the names of tokens

    def first(self, job: GenerationJob, index: int) -> dict[str, Any] | None:
        """Return the first choice object of a stream, once its prompt has been computed."""
        ...

    def next(self, job: GenerationJob, index: int, delta: Delta) -> dict[str, Any] | None:
        """Return the choice object for new output, or None if it has nothing for the client."""
        ...

    def whole(self, job: GenerationJob, index: int, completion: Delta) -> dict[str, Any]:
        """Return the choice object of an answer that is not streamed."""
        ...

    def about_prompt(self, job: GenerationJob) -> dict[str, Any]:
        """Return fields of the answer beside its choices."""
        ...


@dataclass(frozen=True)
class AnswerHead:
    """The fields that an answer, and every chunk of it, begins with."""

    id: str
    model: str
    system_fingerprint: str
    created: int

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def create_head(
    server: ServerContext, request: Request, fields: GenerationFields, prefix: str
) -> AnswerHead:
    """Return the head of a new answer; its id contains the client's, if it brought one."""
    own_id = fields.request_id or request_context(request).external_id
    return AnswerHead(
        id=f"{prefix}-{own_id}",
        model=fields.model or server.model_names[0],
        system_fingerprint=_fingerprint(repr(sorted(server.engine.facts.info.items()))),
        created=int(time.time()),
    )


@lru_cache(maxsize=8)
def _fingerprint(info: str) -> str:
    """Return an id that changes whenever the engine could compute something else."""
    return f"octavo-{__version__}-{hashlib.sha256(info.encode()).hexdigest()[:12]}"


async def answer(
    server: ServerContext,
    request: Request,
    fields: GenerationFields,
    head: AnswerHead,
    job: GenerationJob,
    writer: ChoiceWriter,
) -> Response:
    """Return the response of a job, which is closed when the response is over."""
    headers = job.cache_headers
    if fields.stream:
        chunks = _chunks(fields, head, job, writer)
        return EventStream(chunks, [job], server.settings, headers=headers)
    try:
        completions = await run_until_disconnect(request, job.collect())
    finally:
        job.close()
    _check_success([completion for group in completions for completion in group])
    if num_entries(job, completions) > MANY_ENTRIES:
        body = await in_background(_whole, head, job, writer, completions, encode_in_pieces)
    elif writer.names_tokens:
        body = await briefly_in_background(_whole, head, job, writer, completions, encode)
    else:
        body = _whole(head, job, writer, completions, encode)
    return Response(body, media_type="application/json", headers=headers)


def _check_success(ends: list[Delta]) -> None:
    if all(end.finish_reason == "error" for end in ends):
        raise sample_error(ends[0].error)


# -- whole answers -----------------------------------------------------------------------------


def _whole(
    head: AnswerHead,
    job: GenerationJob,
    writer: ChoiceWriter,
    completions: list[list[Delta]],
    to_json: Callable[[Any], str],
) -> bytes:
    choices = [
        writer.whole(job, prompt * job.params.n + completion.index, completion)
        for prompt, group in enumerate(completions)
        for completion in group
    ]
    body = {
        **head.fields(writer.object),
        "choices": choices,
        **writer.about_prompt(job),
        "usage": job.usage(counts_output=writer.counts_output),
    }
    if (timings := job.timings()) is not None:
        body["timings"] = timings
    return to_json(body).encode()


# -- streams -----------------------------------------------------------------------------------


async def _chunks(
    fields: GenerationFields, head: AnswerHead, job: GenerationJob, writer: ChoiceWriter
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream but for its end. The first comes when the engine has output."""
    options = fields.stream_options
    has_usage_chunk = options is not None and bool(options.include_usage)
    has_usage = options is not None and bool(options.continuous_usage_stats)
    prefix = f"data: {encode(head.fields(writer.chunk_object))[:-1]}"
    unfinished = len(job.generations) * job.params.n
    ends: list[Delta] = []
    begun: set[int] = set()

    def event(
        choices: list[dict[str, Any]],
        extra: dict[str, Any] | None = None,
        to_json: Callable[[Any], str] = encode,
    ) -> str:
        more = {"choices": choices, **(extra or {})}
        if has_usage:
            more["usage"] = job.usage(counts_output=writer.counts_output)
        return f"{prefix},{to_json(more)[1:]}\n\n"

    def first_events(prompt: int, to_json: Callable[[Any], str]) -> list[str]:
        indices = range(prompt * job.params.n, (prompt + 1) * job.params.n)
        firsts = [writer.first(job, index) for index in indices]
        about_prompt = [{} if begun else writer.about_prompt(job)]  # in the first event of all
        return [
            event([first], about_prompt.pop() if about_prompt else {}, to_json)
            for first in filter(None, firsts)
        ]

    async for prompt, deltas in job.updates():
        events = []
        if prompt not in begun:
            _check_only_sample(job, deltas)
            if num_entries(job, ()) > MANY_ENTRIES:
                events = await in_background(first_events, prompt, encode_in_pieces)
            elif writer.names_tokens:
                events = await briefly_in_background(first_events, prompt, encode)
            else:
                events = first_events(prompt, encode)
            begun.add(prompt)
        for delta in deltas:
            choice = writer.next(job, prompt * job.params.n + delta.index, delta)
            extra = {}
            if delta.finish_reason is not None:
                unfinished -= 1
                ends.append(_end(delta))
                if not unfinished and not has_usage_chunk:
                    extra = _timings(job)
            if choice is not None:
                events.append(event([choice], extra))
        if events:
            yield "".join(events).encode()
    _check_success(ends)
    if has_usage_chunk:
        usage = {"usage": job.usage(counts_output=writer.counts_output)}
        yield event([], {**usage, **_timings(job)}).encode()


def _check_only_sample(job: GenerationJob, deltas: list[Delta]) -> None:
    """Raise the error of an only sample that fails at once: it gets a status, not a stream."""
    if len(job.generations) == 1 and job.params.n == 1 and deltas[-1].finish_reason == "error":
        raise sample_error(deltas[-1].error)


def _end(delta: Delta) -> Delta:
    return Delta(delta.index, finish_reason=delta.finish_reason, error=delta.error)


def _timings(job: GenerationJob) -> dict[str, Any]:
    timings = job.timings()
    return {} if timings is None else {"timings": timings}
