"""Make OpenAI's answers from generations, whole or as a stream, for chats and completions.

The two differ in how a choice is written: each has a `ChoiceWriter` of its own.

A sample that failed alone (its row had no valid probabilities) is a choice with the finish_reason
"error". If none succeeded, the request is answered with an error instead: a status, or in a stream
that has begun, an event.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Callable
from functools import lru_cache
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.server.api.generation_job import MANY_CHARS, GenerationJob, sample_error
from octavo.server.api.openai.logprobs import TokenNames
from octavo.server.api.requests import GenerationFields
from octavo.server.api.server_context import ServerContext
from octavo.server.http.background import in_background
from octavo.server.http.context import request_context
from octavo.server.http.json_text import encode
from octavo.server.http.sse import EventStream
from octavo.serving.outputs import Delta


class ChoiceWriter:
    """Writes the choices of one job's answer. It may remember what it has written of each.

    A subclass writes what only its route has, which may be another finish_reason too.
    """

    object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, server: ServerContext, fields: GenerationFields, job: GenerationJob):
        self._fields, self._job = fields, job
        self._names = TokenNames(
            server.prompts.tokenizer, as_ids=bool(fields.return_tokens_as_token_ids)
        )
        self.counts_output = True  # whether what was generated is part of the answer
        # Whether it needs the tokenizer for the names of tokens.
        self.names_tokens = job.params.logprobs is not None or fields.prompt_logprobs is not None

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the first choice object of a stream, once its prompt has been computed."""
        raise NotImplementedError

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the members of a choice that new output has in a stream."""
        raise NotImplementedError

    def message(self, index: int, completion: Delta) -> dict[str, Any]:
        """Return the members of a choice that a whole completion has."""
        raise NotImplementedError

    def about_prompt(self) -> dict[str, Any]:
        """Return fields of the answer beside its choices."""
        return {}

    def usage(self) -> dict[str, Any]:
        """Return the ``usage`` object of what has been written so far."""
        return self._job.usage(counts_output=self.counts_output)

    def shows(self, index: int, delta: Delta) -> bool:
        """Tell whether new output has something for the client, before its `piece` is made."""
        return bool(delta.text)

    def finish(self) -> None:
        """Note what was written, when all of it has been: called on the event loop."""

    def next(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """Return the choice object for new output, or None if it has nothing for the client."""
        is_last = delta.finish_reason is not None
        is_shown = self.shows(index, delta)
        if not (is_shown or is_last or delta.logprobs or self._fields.return_token_ids):
            return None
        piece = self.piece(index, delta)
        choice = {"index": index, "finish_reason": delta.finish_reason, **piece}
        if is_last:
            choice["stop_reason"] = delta.stop_reason
        if self._fields.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def whole(self, index: int, completion: Delta) -> dict[str, Any]:
        """Return the choice object of an answer that is not streamed."""
        choice = {
            "index": index,
            "finish_reason": completion.finish_reason,
            **self.message(index, completion),
            "stop_reason": completion.stop_reason,
        }
        if self._fields.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice


@lru_cache(maxsize=8)
def _fingerprint(info: str) -> str:
    """Return an id that changes whenever the engine could compute something else."""
    return f"octavo-{__version__}-{hashlib.sha256(info.encode()).hexdigest()[:12]}"


async def answer(
    server: ServerContext,
    request: Request,
    fields: GenerationFields,
    job: GenerationJob,
    writer: ChoiceWriter,
) -> Response:
    """Return the response of a job, which is closed when the response is over."""
    own_id = fields.request_id or request_context(request).external_id
    # The fields that an answer, and every chunk of it, begins with.
    head = {
        "id": f"{writer.id_prefix}-{own_id}",
        "object": writer.chunk_object if fields.stream else writer.object,
        "created": int(time.time()),
        "model": fields.model or server.model_names[0],
        "system_fingerprint": _fingerprint(repr(sorted(server.engine.facts.info.items()))),
    }
    if fields.stream:
        chunks = _chunks(fields, head, job, writer)
        return EventStream(chunks, [job], server.settings, headers=job.cache_headers)
    completions = await job.collect(request)
    _check_success([completion for group in completions for completion in group])
    body = await job.write(completions, writer.names_tokens, _whole, head, job, writer, completions)
    writer.finish()
    return Response(body, media_type="application/json", headers=job.cache_headers)


def _check_success(ends: list[Delta]) -> None:
    if all(end.finish_reason == "error" for end in ends):
        raise sample_error(ends[0].error)


# -- whole answers -----------------------------------------------------------------------------


def _whole(
    head: dict[str, Any],
    job: GenerationJob,
    writer: ChoiceWriter,
    completions: list[list[Delta]],
    to_json: Callable[[Any], str],
) -> bytes:
    choices = [
        writer.whole(prompt * job.params.n + completion.index, completion)
        for prompt, group in enumerate(completions)
        for completion in group
    ]
    body = {
        **head,
        "choices": choices,
        **writer.about_prompt(),
        "usage": writer.usage(),
    }
    return to_json(body | _timings(job)).encode()


# -- streams -----------------------------------------------------------------------------------


async def _chunks(
    fields: GenerationFields, head: dict[str, Any], job: GenerationJob, writer: ChoiceWriter
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream but for its end. The first comes when the engine has output."""
    options = fields.stream_options
    has_usage_chunk = options is not None and bool(options.include_usage)
    has_usage = options is not None and bool(options.continuous_usage_stats)
    prefix = f"data: {encode(head)[:-1]}"
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
            more["usage"] = writer.usage()
        return f"{prefix},{to_json(more)[1:]}\n\n"

    def first_events(prompt: int, to_json: Callable[[Any], str]) -> list[str]:
        indices = range(prompt * job.params.n, (prompt + 1) * job.params.n)
        firsts = [writer.first(index) for index in indices]
        about_prompt = [{} if begun else writer.about_prompt()]  # in the first event of all
        return [
            event([first], about_prompt.pop() if about_prompt else {}, to_json)
            for first in filter(None, firsts)
        ]

    async for prompt, deltas in job.updates():
        events = []
        if prompt not in begun:
            _check_only_sample(job, deltas)
            events = await job.write((), writer.names_tokens, first_events, prompt)
            begun.add(prompt)
        for delta in deltas:
            index = prompt * job.params.n + delta.index
            if len(delta.text) > MANY_CHARS:
                choice = await in_background(writer.next, index, delta)
            else:
                choice = writer.next(index, delta)
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
    writer.finish()
    _check_success(ends)
    if has_usage_chunk:
        yield event([], {"usage": writer.usage(), **_timings(job)}).encode()


def _check_only_sample(job: GenerationJob, deltas: list[Delta]) -> None:
    """Raise the error of an only sample that fails at once: it gets a status, not a stream."""
    if len(job.generations) == 1 and job.params.n == 1 and deltas[-1].finish_reason == "error":
        raise sample_error(deltas[-1].error)


def _end(delta: Delta) -> Delta:
    return Delta(delta.index, finish_reason=delta.finish_reason, error=delta.error)


def _timings(job: GenerationJob) -> dict[str, Any]:
    timings = job.timings()
    return {} if timings is None else {"timings": timings}
