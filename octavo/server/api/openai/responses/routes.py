"""The routes below ``/v1/responses``."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Iterable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from octavo.base.errors import InvalidRequestError
from octavo.server.api.answers import InputTokens
from octavo.server.api.chat_answer import ChatAnswer
from octavo.server.api.chats import Length, Message, begin_chat, count_tokens
from octavo.server.api.openai.logprobs import TokenNames
from octavo.server.api.openai.responses.answers import (
    DeletedResponse,
    InputItemList,
    ResponseObject,
)
from octavo.server.api.openai.responses.body import (
    ENCRYPTED_REASONING,
    LOGPROBS,
    NAMES,
    ChatFields,
    InputTokensRequest,
    ResponsesRequest,
)
from octavo.server.api.openai.responses.items import (
    Conversation,
    output_item,
    references,
    resolved,
)
from octavo.server.api.openai.responses.output import Event
from octavo.server.api.openai.responses.store import KeptResponse, ResponseStore
from octavo.server.api.openai.responses.writer import ResponseWriter
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.http.background import in_background
from octavo.server.http.body import JsonRoute, work_on_body
from octavo.server.http.context import request_context
from octavo.server.http.errors import HttpError
from octavo.server.http.json_text import encode, encode_in_pieces
from octavo.server.http.sse import EventStream, named_event
from octavo.settings.engine import parse_bytes

MAX_LISTED = 100  # items of a page


def create_router(server: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
    store = ResponseStore(parse_bytes(server.settings.response_store))

    @router.post("/v1/responses", response_model=None, responses=describe(ResponseObject))
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Continue a conversation by items."""
        server.check_model(body.model)
        return await _ResponseRequest(server, store, body, request).answer()

    @router.post("/v1/responses/input_tokens", response_model=None, responses=describe(InputTokens))
    async def count_input_tokens(body: InputTokensRequest, request: Request) -> Response:
        """Count the tokens of a conversation."""
        server.check_model(body.model)
        messages, _ = await _conversation_of(store, body, request)
        chat = body.to_chat(messages)
        num_tokens = await count_tokens(server, request, chat, names=NAMES)
        return _json(encode({"object": "response.input_tokens", "input_tokens": num_tokens}))

    @router.get(
        "/v1/responses/{response_id}", response_model=None, responses=describe(ResponseObject)
    )
    async def retrieve_response(
        response_id: str, request: Request, stream: bool = False
    ) -> Response:
        """Return an answer that is kept."""
        if stream:
            raise HttpError(400, "An answer that is over is not streamed.", param="stream")
        return _json(store.find(response_id, _owner(request)).body)

    @router.delete(
        "/v1/responses/{response_id}", response_model=None, responses=describe(DeletedResponse)
    )
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forget an answer that is kept."""
        store.forget(response_id, _owner(request))
        return _json(encode({"id": response_id, "object": "response", "deleted": True}))

    @router.post(
        "/v1/responses/{response_id}/cancel",
        response_model=None,
        responses=describe(ResponseObject),
    )
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Refuse: answers are not made in the background, and end when their client goes."""
        store.find(response_id, _owner(request))
        raise HttpError(400, "Only an answer that is made in the background can be cancelled.")

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
        kept = store.find(response_id, _owner(request))
        return _json(await in_background(_page, kept.input_items, after, limit, order))

    return router


def _owner(request: Request) -> str:
    return request_context(request).tenant.name


def _json(body: str | bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, media_type="application/json", headers=headers)


# -- one request -----------------------------------------------------------------------------------


class _ResponseRequest:
    """One request for an answer, from its body to the answer's being kept."""

    def __init__(
        self, server: ServerContext, store: ResponseStore, body: ResponsesRequest, request: Request
    ):
        self._server, self._store, self._body, self._request = server, store, body, request
        self._keeps = store.keeps_any and body.store is not False
        self._id = f"resp_{secrets.token_hex(24)}"

    async def answer(self) -> Response:
        """Return the response, which is kept when it is over."""
        server, body, request = self._server, self._body, self._request
        if body.top_logprobs and not body.wants_logprobs:
            raise InvalidRequestError(f"needs {LOGPROBS} to be included", "top_logprobs")
        self._note_includes()
        self._messages, self._items = await _conversation_of(self._store, body, request)
        begun = await begin_chat(
            server,
            request,
            body,
            body.to_chat(self._messages),
            Length(
                max_tokens=body.max_output_tokens,
                drops_oldest=body.truncation == "auto",
            ),
            names=NAMES,
            logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
        )
        answer = ChatAnswer(server, begun)
        writer = ResponseWriter(
            self._id,
            body.model or server.model_names[0],
            body,
            answer,
            TokenNames(server.prompts.tokenizer),
            is_kept=self._keeps,
        )
        headers = begun.job.cache_headers
        if body.stream:
            events = _Events(answer)
            return EventStream(
                self._stream(answer, writer, events),
                [begun.job],
                server.settings,
                done=b"",
                headers=headers,
                error_event=lambda error: events.written(writer.fail(error)),
            )
        piece = await answer.whole(request)
        for _ in (*writer.add(piece), *writer.end()):
            pass
        text = await answer.to_json(writer.response)
        await self._keep(writer, text)
        return _json(text, headers)

    async def _stream(
        self, answer: ChatAnswer, writer: ResponseWriter, events: _Events
    ) -> AsyncGenerator[bytes, None]:
        has_begun = False
        async for piece in answer.pieces():
            found = [] if has_begun else list(writer.begin())
            found += writer.add(piece)
            has_begun = True
            if found:
                yield await events.write(found)
        end = await events.write(writer.end())
        await self._keep(writer, await answer.to_json(writer.response))
        yield end

    def _note_includes(self) -> None:
        ignored = request_context(self._request).ignored
        for name in self._body.include or ():
            if name not in (ENCRYPTED_REASONING, LOGPROBS):
                if ignored.strict:
                    raise InvalidRequestError(f"{name[:80]!r} is not known here", "include")
                ignored.add(f"include.{name}")

    async def _keep(self, writer: ResponseWriter, text: str) -> None:
        if self._keeps:
            kept = await in_background(self._kept, writer.response["output"], text)
            self._store.keep(kept)

    def _kept(self, output: list[dict[str, Any]], text: str) -> KeptResponse:
        conversation = Conversation(self._messages)
        for item in output:
            conversation.add(output_item(item))
        return KeptResponse(
            self._id,
            _owner(self._request),
            text.encode(),
            encode_in_pieces(self._items).encode(),
            encode_in_pieces(conversation.messages).encode(),
            [item["id"] for item in output],
        )


class _Events:
    """Numbers events, and writes them."""

    def __init__(self, answer: ChatAnswer):
        self._answer = answer
        self._number = 0

    async def write(self, events: Iterable[Event]) -> bytes:
        """Return some events as bytes."""
        written = []
        for kind, fields in events:
            value = self._numbered(kind, fields)
            written.append(named_event(kind, await self._answer.to_json(value)))
        return b"".join(written)

    def written(self, event: Event) -> bytes:
        """Return one event as bytes."""
        return named_event(event[0], encode(self._numbered(*event)))

    def _numbered(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


# -- what is kept ----------------------------------------------------------------------------------


async def _conversation_of(
    store: ResponseStore, body: ChatFields, request: Request
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return the messages of a body, and the items of its input as they are listed later.

    Raises:
        HttpError: 404, an answer that it refers to is not kept.
    """
    owner, before = _owner(request), []
    if body.previous_response_id is not None:
        kept = store.find(body.previous_response_id, owner)
        before = await in_background(json.loads, kept.messages)
    known: dict[str, Any] = {}
    for item_id in references(body.items):
        kept_of_item = store.of_item(item_id, owner)
        if kept_of_item is not None and item_id not in known:
            output = (await in_background(json.loads, kept_of_item.body))["output"]
            known |= {item["id"]: item for item in output}
    ignored = request_context(request).ignored

    def make() -> tuple[list[Message], list[dict[str, Any]]]:
        items = resolved(body.items, known)
        listed = [
            {"id": f"item_{secrets.token_hex(24)}"} | item.model_dump(exclude_none=True)
            for item in items
        ]
        return body.messages_after(before, items, ignored), listed

    return await work_on_body(request, make)


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
