"""Ollama's routes: chats, prompts, and what there is to know of models.

Models are not fetched, made or removed by clients here: the routes for that say so.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo import __version__
from octavo.base.errors import InvalidRequestError
from octavo.core.limits import checked_token_ids
from octavo.server.api.chat_answer import ChatAnswer
from octavo.server.api.chats import Begun, begin_chat, begin_text
from octavo.server.api.fill_in import fill_in_prompt
from octavo.server.api.ollama.answers import (
    ChatResponse,
    GenerateResponse,
    ModelDescription,
    Models,
    OllamaError,
    Status,
    Version,
    ollama_error_body,
    ollama_error_response,
    timestamp,
)
from octavo.server.api.ollama.body import (
    NAMES,
    ChatRequest,
    CopyRequest,
    GenerateRequest,
    GenerationBody,
    ModelRequest,
    ShowRequest,
)
from octavo.server.api.ollama.models import ServedModels
from octavo.server.api.ollama.writer import ChatWriter, GenerateWriter, Line, OllamaWriter
from octavo.server.api.openai.logprobs import TokenNames
from octavo.server.api.responses import describe
from octavo.server.api.sampling import context_of
from octavo.server.api.server_context import ServerContext
from octavo.server.http.body import DialectRoute, work_on_body
from octavo.server.http.context import request_context
from octavo.server.http.errors import HttpError, to_http_error
from octavo.server.http.json_text import encode
from octavo.server.http.sse import EventStream

PREFIX = "/api"
# The version of Ollama whose API this is: clients ask for it to know what they may send.
API_VERSION = "0.12.6"
_LINES = "application/x-ndjson"


class OllamaRoute(DialectRoute):
    """A route whose errors have Ollama's form."""

    async def _answer_error(self, request: Request, error: HttpError) -> Response:
        return ollama_error_response(error)


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=OllamaRoute, tags=["Ollama"], prefix=PREFIX)
    models = ServedModels(server)

    @router.post("/chat", response_model=None, responses=describe_ollama(ChatResponse))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation."""
        models.find(body.model)
        _check(server, body, request)
        if not body.messages:
            return _loaded(server, body, {"message": {"role": "assistant", "content": ""}})
        context = request_context(request)
        fields = body.generation_fields(server.engine.facts, context.ignored)
        begun = await begin_chat(
            server,
            request,
            fields,
            await work_on_body(request, body.to_chat),
            body.length,
            names=NAMES,
            logprobs=body.num_logprobs,
        )
        answer = ChatAnswer(server, begun)
        names = TokenNames(server.prompts.tokenizer)
        writer = ChatWriter(body, answer, names, context.arrival_time)
        return await _respond(server, request, body, answer, writer)

    @router.post("/generate", response_model=None, responses=describe_ollama(GenerateResponse))
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Answer a prompt, complete a text, or fill in what belongs between two."""
        models.find(body.model)
        _check(server, body, request)
        if not body.prompt and not body.suffix:
            return _loaded(server, body, {"response": ""})
        begun = await _begin_generate(server, body, request)
        answer = ChatAnswer(server, begun)
        names = TokenNames(server.prompts.tokenizer)
        arrival_time = request_context(request).arrival_time
        gives_context = not (body.raw or body.suffix)
        writer = GenerateWriter(body, answer, names, arrival_time, gives_context=gives_context)
        return await _respond(server, request, body, answer, writer)

    @router.get("/tags", response_model=None, responses=describe_ollama(Models))
    async def list_models() -> Response:
        """List the models."""
        return _json({"models": await models.tags()})

    @router.get("/ps", response_model=None, responses=describe_ollama(Models))
    async def list_running_models() -> Response:
        """List the models in memory."""
        return _json({"models": await models.running()})

    @router.post("/show", response_model=None, responses=describe_ollama(ModelDescription))
    async def show(body: ShowRequest) -> Response:
        """Describe a model."""
        return _json(await models.show(body.model))

    @router.get("/version", response_model=None, responses=describe_ollama(Version))
    async def version() -> Response:
        """Return the version of Ollama whose API this is, and that of octavo."""
        return _json({"version": API_VERSION, "octavo": __version__})

    @router.post("/pull", response_model=None, responses=describe_ollama(Status))
    async def pull(body: ModelRequest) -> Response:
        """Confirm that a model is there; others are fetched by the operator."""
        models.find(body.model)
        return (
            _lines([{"status": "success"}])
            if body.stream is not False
            else _json({"status": "success"})
        )

    for path in ("/push", "/create"):

        @router.post(path, response_model=None, responses=describe_ollama(Status))
        async def change(body: ModelRequest) -> Response:
            """Refuse: clients do not change models here."""
            raise _operators()

    @router.post("/copy", response_model=None, responses=describe_ollama(Status))
    async def copy(body: CopyRequest) -> Response:
        """Refuse: clients do not change models here."""
        raise _operators()

    @router.delete("/delete", response_model=None, responses=describe_ollama(Status))
    async def delete(body: ModelRequest) -> Response:
        """Refuse: clients do not change models here."""
        raise _operators()

    return router


def describe_ollama(model: Any) -> dict[int | str, Any]:
    """Return the ``responses`` of a route whose errors have Ollama's form."""
    responses = describe(model)
    for status, response in responses.items():
        if status != 200:
            response["model"] = OllamaError
    return responses


def _operators() -> HttpError:
    return HttpError(
        403,
        "models are the operator's here: clients may not make, copy, send or remove them; "
        "octavo serve MODEL serves another one, under the names of --served-model-name",
    )


def _check(server: ServerContext, body: GenerationBody, request: Request) -> None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("needs logprobs to be true", "top_logprobs")
    seconds = body.keep_seconds
    if seconds is None:
        return
    if server.models is not None:
        server.models.keep(body.model, seconds)
    elif seconds >= 0:
        ignored = request_context(request).ignored
        if ignored.strict:
            raise InvalidRequestError("has no effect: the model stays in memory", "keep_alive")
        ignored.add("keep_alive")


def _loaded(server: ServerContext, body: GenerationBody, parts: dict[str, Any]) -> Response:
    """Return the answer to a request that only wants the model to be there, or to be gone.

    Raises:
        InvalidRequestError: it wants the only model to be gone.
    """
    is_unloaded = body.keep_seconds == 0
    if is_unloaded and server.models is None:
        raise InvalidRequestError("0 would unload the model, which this server keeps", "keep_alive")
    line = {
        "model": body.model,
        "created_at": timestamp(time.time()),
        **parts,
        "done": True,
        "done_reason": "unload" if is_unloaded else "load",
    }
    return _lines([line]) if body.streams else _json(line)


async def _begin_generate(server: ServerContext, body: GenerateRequest, request: Request) -> Begun:
    facts, ignored = server.engine.facts, request_context(request).ignored
    fields, length = body.generation_fields(facts, ignored), body.length
    if not body.raw and body.suffix is None:
        before = checked_token_ids(body.context or [], facts.vocab_size, "context")
        return await begin_chat(
            server,
            request,
            fields,
            body.to_chat(),
            length,
            names=NAMES,
            logprobs=body.num_logprobs,
            before=before,
        )
    for name in ("system", "context", "think"):
        if getattr(body, name):
            raise InvalidRequestError("has no place in a text that no template makes", name)
    if body.suffix is not None:
        token_ids = await fill_in_prompt(server.prompts, body.prompt or "", body.suffix)
    else:
        token_ids = await server.prompts.text(
            body.prompt or "", parse_special=True, limit=context_of(facts)
        )
    return await begin_text(
        server, request, fields, token_ids, length, names=NAMES, logprobs=body.num_logprobs
    )


async def _respond(
    server: ServerContext,
    request: Request,
    body: GenerationBody,
    answer: ChatAnswer,
    writer: OllamaWriter,
) -> Response:
    headers = answer.job.cache_headers
    if body.streams:
        return EventStream(
            _stream(answer, writer),
            [answer.job],
            server.settings,
            done=b"",
            headers=headers,
            error_event=lambda error: _line(ollama_error_body(to_http_error(error))),
            error_response=ollama_error_response,
            keep_alive=b"",
            media_type=_LINES,
        )
    piece = await answer.whole(request)
    text = await answer.to_json(writer.whole(piece))
    return Response(text, media_type="application/json", headers=headers)


async def _stream(answer: ChatAnswer, writer: OllamaWriter) -> AsyncGenerator[bytes, None]:
    async for piece in answer.pieces():
        for line in writer.lines(piece):
            yield _line(line)
    yield f"{await answer.to_json(writer.last())}\n".encode()


def _line(value: Line) -> bytes:
    return f"{encode(value)}\n".encode()


def _lines(values: list[Line]) -> Response:
    return Response(b"".join(map(_line, values)), media_type=_LINES)


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
