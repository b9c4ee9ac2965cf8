"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.server.api.answers import InputTokens
from octavo.server.api.anthropic.answers import (
    AnswerMessage,
    MessagesError,
    MessagesEvent,
    messages_error_body,
    messages_error_response,
)
from octavo.server.api.anthropic.body import (
    NAMES,
    CountTokensRequest,
    MessagesFields,
    MessagesRequest,
)
from octavo.server.api.anthropic.writer import Event, MessageWriter
from octavo.server.api.chat_answer import ChatAnswer
from octavo.server.api.chats import Chat, Length, begin_chat, count_tokens
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.http.body import DialectRoute, work_on_body
from octavo.server.http.context import request_context
from octavo.server.http.errors import HttpError, to_http_error
from octavo.server.http.json_text import encode
from octavo.server.http.sse import EventStream, named_event

PATH = "/v1/messages"
# Of the API. Later ones have taken fields away, which are accepted here all the same.
_VERSION = re.compile(r"20\d\d-\d\d-\d\d")
_PING = named_event("ping", encode({"type": "ping"}))


class MessagesRoute(DialectRoute):
    """A route whose errors have Anthropic's form."""

    async def _answer_error(self, request: Request, error: HttpError) -> Response:
        return messages_error_response(error, request_context(request).external_id)


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=MessagesRoute, tags=["Anthropic"])

    @router.post(PATH, response_model=None, responses=_describe(AnswerMessage, MessagesEvent))
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Continue a conversation."""
        chat = await _chat_of(server, body, request)
        fields = body.generation_fields()
        length = Length(max_tokens=body.max_tokens, is_bound=True)
        begun = await begin_chat(server, request, fields, chat, length, names=NAMES)
        answer = ChatAnswer(server, begun)
        writer = MessageWriter(body.model or server.model_names[0], body, answer)
        request_id = request_context(request).external_id
        headers = {**begun.job.cache_headers, "request-id": request_id}
        if body.stream:
            return EventStream(
                _stream(answer, writer),
                [begun.job],
                server.settings,
                done=b"",
                headers=headers,
                error_event=lambda error: _error_event(error, request_id),
                error_response=lambda error: messages_error_response(error, request_id),
                keep_alive=_PING,
            )
        piece = await answer.whole(request)
        for _ in (*writer.add(piece), *writer.end()):
            pass
        text = await answer.to_json(writer.message)
        return Response(text, media_type="application/json", headers=headers)

    @router.post(f"{PATH}/count_tokens", response_model=None, responses=_describe(InputTokens))
    async def count_message_tokens(body: CountTokensRequest, request: Request) -> Response:
        """Count the tokens of a conversation."""
        chat = await _chat_of(server, body, request)
        num_tokens = await count_tokens(server, request, chat, names=NAMES)
        headers = {"request-id": request_context(request).external_id}
        text = encode({"input_tokens": num_tokens})
        return Response(text, media_type="application/json", headers=headers)

    return router


def _describe(model: Any, event: Any = None) -> dict[int | str, Any]:
    responses = describe(model, event)
    for status, response in responses.items():
        if status != 200:
            response["model"] = MessagesError
    return responses


async def _chat_of(server: ServerContext, body: MessagesFields, request: Request) -> Chat:
    """Return the conversation of a body, after the checks that all requests have in common."""
    version = request.headers.get("anthropic-version")
    if version is not None and not _VERSION.fullmatch(version):
        raise HttpError(400, f"anthropic-version: must be a date, not {version[:40]!r}")
    server.check_model(body.model)
    return await work_on_body(request, body.to_chat, request_context(request).ignored)


async def _stream(answer: ChatAnswer, writer: MessageWriter) -> AsyncGenerator[bytes, None]:
    has_begun = False
    async for piece in answer.pieces():
        events = [] if has_begun else list(writer.begin())
        has_begun = True
        events += writer.add(piece)
        if events:
            yield _written(events)
    yield _written(writer.end())


def _written(events: Iterable[Event]) -> bytes:
    return b"".join(named_event(event["type"], encode(event)) for event in events)


def _error_event(error: BaseException, request_id: str) -> bytes:
    return named_event("error", encode(messages_error_body(to_http_error(error), request_id)))
