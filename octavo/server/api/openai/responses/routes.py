"""The routes below ``/v1/responses``."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from octavo.server.api.answers import InputTokens
from octavo.server.api.chats import count_tokens
from octavo.server.api.openai.responses.answering import (
    ResponseRequest,
    conversation_of,
    json_answer,
    owner_of,
)
from octavo.server.api.openai.responses.answers import (
    DeletedResponse,
    InputItemList,
    ResponseObject,
)
from octavo.server.api.openai.responses.background import BackgroundAnswers
from octavo.server.api.openai.responses.body import NAMES, InputTokensRequest, ResponsesRequest
from octavo.server.api.openai.responses.store import ResponseStore
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.http.background import in_background
from octavo.server.http.body import JsonRoute
from octavo.server.http.errors import HttpError
from octavo.server.http.json_text import encode, encode_in_pieces
from octavo.settings.engine import parse_bytes

MAX_LISTED = 100  # items of a page


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
    store = ResponseStore(parse_bytes(server.settings.response_store))
    background = BackgroundAnswers()

    @router.post("/v1/responses", response_model=None, responses=describe(ResponseObject))
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Continue a conversation by items."""
        server.check_model(body.model)
        return await ResponseRequest(server, store, background, body, request).answer()

    @router.post("/v1/responses/input_tokens", response_model=None, responses=describe(InputTokens))
    async def count_input_tokens(body: InputTokensRequest, request: Request) -> Response:
        """Count the tokens of a conversation."""
        server.check_model(body.model)
        messages, _ = await conversation_of(store, body, request)
        chat = body.to_chat(messages)
        num_tokens = await count_tokens(server, request, chat, names=NAMES)
        return json_answer(encode({"object": "response.input_tokens", "input_tokens": num_tokens}))

    @router.get(
        "/v1/responses/{response_id}", response_model=None, responses=describe(ResponseObject)
    )
    async def retrieve_response(
        response_id: str, request: Request, stream: bool = False
    ) -> Response:
        """Return an answer that is kept."""
        if stream:
            raise HttpError(
                400, "A kept answer is not streamed: ask for it until it is over.", param="stream"
            )
        return json_answer(store.find(response_id, owner_of(request)).body)

    @router.delete(
        "/v1/responses/{response_id}", response_model=None, responses=describe(DeletedResponse)
    )
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forget an answer that is kept, which ends if it is still being made."""
        store.find(response_id, owner_of(request))
        await background.cancel(response_id)
        store.forget(response_id, owner_of(request))
        return json_answer(encode({"id": response_id, "object": "response", "deleted": True}))

    @router.post(
        "/v1/responses/{response_id}/cancel",
        response_model=None,
        responses=describe(ResponseObject),
    )
    async def cancel_response(response_id: str, request: Request) -> Response:
        """End an answer that is being made in the background."""
        store.find(response_id, owner_of(request))
        if not await background.cancel(response_id):
            raise HttpError(400, "Only an answer that is being made can be cancelled.")
        return json_answer(store.find(response_id, owner_of(request)).body)

    @router.get(
        "/v1/responses/{response_id}/input_items",
        response_model=None,
        responses=describe(InputItemList),
    )
    async def list_input_items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """List the items of a request whose answer is kept."""
        kept = store.find(response_id, owner_of(request))
        return json_answer(await in_background(_page, kept.input_items, after, limit, order))

    return router


# -- what is kept ----------------------------------------------------------------------------------


def _page(items: bytes, after: str | None, limit: int, order: str) -> str:
    listed = json.loads(items)
    for item in listed:
        if item["type"] == "message" and isinstance(item["content"], str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
    if order == "desc":
        listed.reverse()
    if after is not None:
        places = [index for index, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise HttpError(400, "No item has this id.", param="after")
        listed = listed[places[0] + 1 :]
    page = listed[:limit]
    return encode_in_pieces(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(listed) > limit,
        }
    )
