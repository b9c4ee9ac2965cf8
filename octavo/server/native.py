"""octavo's own routes: ``/generate`` for those who want no more than text, and operational ones.

``/generate`` takes octavo's words, or TGI's, and answers in the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Discriminator, Field, RootModel, Tag
from starlette.responses import JSONResponse

from octavo import __version__
from octavo.core.sampling_params import MAX_SEED
from octavo.server.context import request_context
from octavo.server.generation import EngineState
from octavo.server.http_errors import HttpError, error_response
from octavo.server.job import Job
from octavo.server.json_text import encode
from octavo.server.openai_sampling import check_length, context_of, to_sampling_params
from octavo.server.protocol.answers import Error, Timings
from octavo.server.protocol.fields import MAX_TIMEOUT, Body, Stop, TokenId
from octavo.server.protocol.requests import MAX_INT, GenerationFields
from octavo.server.protocol.responses import describe
from octavo.server.response_cache import cache_headers
from octavo.server.service import Service
from octavo.server.sse import EventStream, event, run_until_disconnect
from octavo.server.tgi import TgiRoute, check_sample, generate_tgi, stream_tgi, tgi_error_response
from octavo.server.tgi_protocol import TgiError, TgiRequest, TgiResponse

DEFAULT_MAX_TOKENS = 16
MAX_PROMPT_TOKENS = 1 << 20
_METHODS = ["GET", "HEAD"]  # of operational routes


class GenerateRequest(Body):
    """A prompt. What is null, or not given, is as the model's authors recommend."""

    model: str | None = None
    prompt: Annotated[
        Annotated[str, Field(min_length=1), Tag("text")]
        | Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS), Tag("ids")],
        Discriminator(lambda value: "ids" if isinstance(value, list) else "text"),
    ] = Field(description="text, or token ids")
    max_tokens: int | None = Field(
        default=None, ge=1, le=MAX_INT, description=f"{DEFAULT_MAX_TOKENS} if not given"
    )
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT, description="0 and -1 are off")
    seed: int | None = Field(default=None, ge=-1, lt=MAX_SEED, description="-1 is none")
    stop: Stop | None = None
    stream: bool | None = None
    timeout: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT, description="seconds")


def _words_of(value: Any) -> str | None:
    """Whose words a body uses; mixed ones, or neither's, are an error that names both fields."""
    if isinstance(value, BaseModel):
        return "tgi" if isinstance(value, TgiRequest) else "octavo"
    words = [words for key, words in (("prompt", "octavo"), ("inputs", "tgi")) if key in value]
    return words[0] if len(words) == 1 else None


class GenerateBody(
    RootModel[
        Annotated[
            Annotated[GenerateRequest, Tag("octavo")] | Annotated[TgiRequest, Tag("tgi")],
            Discriminator(
                _words_of,
                custom_error_type="one_of",
                custom_error_message="give either prompt, or TGI's inputs and parameters",
            ),
        ]
    ]
):
    """A prompt, in octavo's words or TGI's."""


class GenerateResponse(BaseModel):
    request_id: str
    text: str
    tokens_generated: int
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    timings: Timings | None
    cached: bool = Field(default=False, description="the answer came from the response cache")


class GenerateEvent(BaseModel):
    """``text`` is what is new; ``tokens_generated`` counts from the start. The last one has all."""

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


def create_router(service: Service) -> APIRouter:
    router = APIRouter()
    router.include_router(_create_generate_router(service))
    router.include_router(_create_operational_router(service))
    return router


def _create_generate_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=GenerateRoute, tags=["octavo"])
    responses = describe(GenerateResponse, GenerateEvent)
    responses[200]["model"] = GenerateResponse | TgiResponse
    for status in responses.keys() - {200}:
        responses[status]["model"] = Error | TgiError

    @router.post("/generate", response_model=None, responses=responses)
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Continue a text, in octavo's words or TGI's."""
        asked = body.root
        if isinstance(asked, TgiRequest):
            answer_tgi = stream_tgi if asked.stream else generate_tgi
            return await answer_tgi(service, asked, request)
        job = await _begin(service, asked, request)
        if not asked.stream:
            return await _answer(job, request)
        return EventStream(
            _events(job, request), [job], service.settings, headers=cache_headers(job)
        )

    return router


async def _begin(service: Service, body: GenerateRequest, request: Request) -> Job:
    service.check_model(body.model)
    facts = service.engine.facts
    prompt = body.prompt
    if isinstance(prompt, str):
        rendering = service.prompts.text(prompt, limit=context_of(facts))
        prompt = await run_until_disconnect(request, rendering)
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = min(check_length(len(prompt), None, facts), DEFAULT_MAX_TOKENS)
    check_length(len(prompt), max_tokens, facts)
    fields = GenerationFields.model_validate(body.model_dump(exclude={"prompt"}))
    params = to_sampling_params(fields, facts, max_tokens=max_tokens)
    return Job(service, request_context(request), "/generate", fields, [prompt], params)


async def _answer(job: Job, request: Request) -> Response:
    try:
        ((completion,),) = await run_until_disconnect(request, job.collect())
    finally:
        job.close()
    check_sample(completion)
    answer = {
        "request_id": request_context(request).external_id,
        "text": completion.text,
        "tokens_generated": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        **_closing(job),
    }
    return Response(encode(answer), media_type="application/json", headers=cache_headers(job))


async def _events(job: Job, request: Request) -> AsyncGenerator[bytes, None]:
    """An event for everything that a step brought."""
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


def _closing(job: Job) -> dict[str, Any]:
    """What is said of an answer when it is over."""
    (generation,) = job.generations
    closing = {"prompt_tokens": generation.stats.num_prompt_tokens, "timings": job.timings()}
    return {**closing, "cached": True} if job.is_from_cache else closing


# -- operation ----------------------------------------------------------------------------------


class Status(BaseModel):
    status: str


class Version(BaseModel):
    version: str


class Load(BaseModel):
    """``server_load`` is vLLM's: requests, counted by sample, that wait or run."""

    server_load: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    kv_usage: float
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    prefix_tokens_queried: int
    prefix_tokens_hit: int
    num_preemptions: int
    num_restarts: int


def _create_operational_router(service: Service) -> APIRouter:
    """Routes for those who watch the server. They answer whatever the engine is doing."""
    router = APIRouter(tags=["operation"])
    unavailable: Any = {503: {"model": Status}}
    engine = service.engine

    async def health() -> JSONResponse:
        """Whether the engine lives."""
        if engine.state is EngineState.READY:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": engine.state.value}, 503)

    async def ready() -> JSONResponse:
        """Whether new requests are welcome."""
        if service.lifecycle.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        return await health()

    async def version() -> JSONResponse:
        """The version of octavo."""
        return JSONResponse({"version": __version__})

    async def load() -> JSONResponse:
        """What the engine has to do at this moment."""
        numbers = dataclasses.asdict(engine.load)
        return JSONResponse(
            {"server_load": engine.load.num_running + engine.load.num_waiting, **numbers}
        )

    def add(path: str, answer: Callable[[], Awaitable[JSONResponse]], **documented: Any) -> None:
        # The first answers, and names all its methods to those who use another one; OpenAPI, in
        # which a route has one method, knows the second.
        router.add_api_route(path, answer, methods=_METHODS, include_in_schema=False)
        router.add_api_route(path, answer, methods=["GET"], **documented)

    add("/health", health, response_model=Status, responses=unavailable)
    add("/ready", ready, response_model=Status, responses=unavailable)
    add("/ping", health, response_model=Status, responses=unavailable)
    add("/version", version, response_model=Version)
    add("/load", load, response_model=Load)
    return router
