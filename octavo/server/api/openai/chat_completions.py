"""``POST /v1/chat/completions``, OpenAI's route for conversations."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from octavo.base.errors import InvalidRequestError
from octavo.server.api.answers import InputTokens
from octavo.server.api.chats import Length, begin_chat, count_tokens
from octavo.server.api.openai.chat_body import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
)
from octavo.server.api.openai.chat_choices import ChatChoiceWriter
from octavo.server.api.openai.choices import answer
from octavo.server.api.responses import describe
from octavo.server.api.sampling import check_stream_fields
from octavo.server.api.server_context import ServerContext
from octavo.server.http.body import JsonRoute, work_on_body
from octavo.server.http.json_text import encode


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses=describe(ChatCompletion, ChatCompletionChunk),
    )
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Continue a conversation."""
        server.check_model(body.model)
        check_stream_fields(body)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequestError("needs logprobs to be true", "top_logprobs")
        chat = await begin_chat(
            server,
            request,
            body,
            await work_on_body(request, body.to_chat),
            Length(max_tokens=body.max_completion_tokens or body.max_tokens),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        writer = ChatChoiceWriter(server, body, chat)
        return await answer(server, request, body, chat.job, writer)

    @router.post(
        "/v1/chat/completions/input_tokens", response_model=None, responses=describe(InputTokens)
    )
    async def count_input_tokens(body: ChatCompletionRequest, request: Request) -> Response:
        """Count the tokens of a conversation."""
        server.check_model(body.model)
        chat = await work_on_body(request, body.to_chat)
        counted = {"input_tokens": await count_tokens(server, request, chat)}
        return Response(encode(counted), media_type="application/json")

    return router
