"""``POST /generate``, the simplest route from a prompt to a text.

It takes octavo's fields or TGI's, and answers with the same API's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Discriminator, Field, RootModel, Tag

from octavo.server.api.answers import Error, Timings
from octavo.server.api.fields import MAX_INT, TokenIds
from octavo.server.api.generation_job import GenerationJob, check_sample
from octavo.server.api.requests import GenerationFields, SamplingFields
from octavo.server.api.responses import describe
from octavo.server.api.sampling import (
    context_of,
    may_exceed_context,
    resolve_max_tokens,
    to_sampling_params,
)
from octavo.server.api.server_context import ServerContext
from octavo.server.api.tgi.protocol import TgiError, TgiRequest, TgiResponse
from octavo.server.api.tgi.routes import (
    TgiRoute,
    generate_tgi,
    stream_tgi,
    tgi_error_response,
)
from octavo.server.http.context import request_context
from octavo.server.http.errors import HttpError, error_response
from octavo.server.http.json_text import encode
from octavo.server.http.sse import EventStream, event, run_until_disconnect

DEFAULT_MAX_TOKENS = 16
MAX_PROMPT_TOKENS = 1 << 20


class GenerateRequest(SamplingFields):
    """A prompt to be completed. A missing or null field is as the model's authors recommend."""

    refused = GenerationFields.names_with_effect() | {"parameters", "messages", "logprobs"}

    prompt: Annotated[
        Annotated[str, Field(min_length=1), Tag("text")]
        | Annotated[list[int], TokenIds(MAX_PROMPT_TOKENS, least=1), Tag("ids")],
        Discriminator(lambda value: "ids" if isinstance(value, list) else "text"),
    ] = Field(description="text, or token ids")
    max_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=MAX_INT,
        description=f"{DEFAULT_MAX_TOKENS} if not given; -1 is as many as there is room for",
    )


def _api_of(value: Any) -> str | None:
    """Return the API of a body's fields; None for a mix or neither, which is an error."""
    if isinstance(value, BaseModel):
        return "tgi" if isinstance(value, TgiRequest) else "octavo"
    apis = [api for key, api in (("prompt", "octavo"), ("inputs", "tgi")) if key in value]
    return apis[0] if len(apis) == 1 else None


class GenerateBody(
    RootModel[
        Annotated[
            Annotated[GenerateRequest, Tag("octavo")] | Annotated[TgiRequest, Tag("tgi")],
            Discriminator(
                _api_of,
                custom_error_type="one_of",
                custom_error_message="give either prompt, or TGI's inputs and parameters",
            ),
        ]
    ]
):
    """A prompt, with octavo's fields or TGI's."""


class GenerateResponse(BaseModel):
    request_id: str
    text: str
    tokens_generated: int
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    timings: Timings | None
    cached: bool = Field(default=False, description="the answer came from the response cache")


class GenerateEvent(BaseModel):
    """An event of a stream. Only the last one has the optional fields.

    ``text`` is new text; ``tokens_generated`` counts from the start.
    """

    text: str
    tokens_generated: int
    finish_reason: Literal["stop", "length"] | None
    request_id: str | None = None
    prompt_tokens: int | None = None
    timings: Timings | None = None
    cached: bool = False


class GenerateRoute(TgiRoute):
    """A route whose errors have TGI's body if the request's body seems to be TGI's."""

    async def _answer_error(self, request: Request, error: HttpError) -> Response:
        # The body may be what is wrong, so it is not parsed for this.
        is_tgi = error.status != 499 and b'"inputs"' in await request.body()
        return tgi_error_response(error) if is_tgi else error_response(error)


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=GenerateRoute, tags=["octavo"])
    responses = describe(GenerateResponse, GenerateEvent)
    responses[200]["model"] = GenerateResponse | TgiResponse
    for status in responses.keys() - {200}:
        responses[status]["model"] = Error | TgiError

    @router.post("/generate", response_model=None, responses=responses)
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Continue a text, with octavo's fields or TGI's."""
        asked = body.root
        if isinstance(asked, TgiRequest):
            answer_tgi = stream_tgi if asked.stream else generate_tgi
            return await answer_tgi(server, asked, request)
        job = await _begin(server, asked, request)
        if not asked.stream:
            return await _answer(job, request)
        return EventStream(_events(job, request), [job], server.settings, headers=job.cache_headers)

    return router


async def _begin(server: ServerContext, body: GenerateRequest, request: Request) -> GenerationJob:
    server.check_model(body.model)
    facts = server.engine.facts
    prompt = body.prompt
    asked = None if body.max_tokens == -1 else body.max_tokens
    if isinstance(prompt, str):
        limit = None if may_exceed_context(body, asked, facts) else context_of(facts)
        rendering = server.prompts.text(prompt, limit=limit)
        prompt = await run_until_disconnect(request, rendering)
    max_tokens = resolve_max_tokens(len(prompt), asked, facts, body)
    if body.max_tokens is None:
        max_tokens = min(max_tokens, DEFAULT_MAX_TOKENS)
    fields = GenerationFields.of(body, max_tokens=None)
    params = to_sampling_params(fields, facts, max_tokens=max_tokens)
    return await GenerationJob(server, request, fields, [prompt], params).begin()


async def _answer(job: GenerationJob, request: Request) -> Response:
    ((completion,),) = await job.collect(request)
    check_sample(completion)
    answer = {
        "request_id": request_context(request).external_id,
        "text": completion.text,
        "tokens_generated": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        **_closing(job),
    }
    return Response(encode(answer), media_type="application/json", headers=job.cache_headers)


async def _events(job: GenerationJob, request: Request) -> AsyncGenerator[bytes, None]:
    """Yield an event for everything that a step brought."""
    (generation,) = job.generations
    num_tokens = 0
    async for deltas in generation:
        for delta in deltas:
            check_sample(delta)
            num_tokens += len(delta.token_ids)
            answer: dict[str, Any] = {
                "text": delta.text,
                "tokens_generated": num_tokens,
                "finish_reason": delta.finish_reason,
            }
            if delta.finish_reason is not None:
                answer["request_id"] = request_context(request).external_id
                answer |= _closing(job)
            yield event(answer)


def _closing(job: GenerationJob) -> dict[str, Any]:
    """Return the fields of a finished answer."""
    (generation,) = job.generations
    closing = {"prompt_tokens": generation.stats.num_prompt_tokens, "timings": job.timings()}
    return {**closing, "cached": True} if job.is_from_cache else closing
