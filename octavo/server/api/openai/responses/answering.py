"""Requests for answers, from their bodies to what is kept of them."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from fastapi import Request, Response

from octavo.base.errors import InvalidRequestError
from octavo.server.api.chat_answer import ChatAnswer
from octavo.server.api.chats import Length, Message, begin_chat
from octavo.server.api.openai.logprobs import TokenNames
from octavo.server.api.openai.responses.background import BackgroundAnswers
from octavo.server.api.openai.responses.body import (
    ENCRYPTED_REASONING,
    LOGPROBS,
    NAMES,
    ChatFields,
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
from octavo.server.api.server_context import ServerContext
from octavo.server.http.background import in_background
from octavo.server.http.body import work_on_body
from octavo.server.http.context import request_context
from octavo.server.http.json_text import encode, encode_in_pieces
from octavo.server.http.sse import EventStream, named_event


class ResponseRequest:
    """One request for an answer, from its body to the answer's being kept."""

    def __init__(
        self,
        server: ServerContext,
        store: ResponseStore,
        background: BackgroundAnswers,
        body: ResponsesRequest,
        request: Request,
    ):
        self._server, self._store, self._background = server, store, background
        self._body, self._request = body, request
        self._keeps = store.keeps_any and body.store is not False
        self._id = f"resp_{secrets.token_hex(24)}"

    async def answer(self) -> Response:
        """Return the response, which is kept when it is over."""
        server, body, request = self._server, self._body, self._request
        if body.top_logprobs and not body.wants_logprobs:
            raise InvalidRequestError(f"needs {LOGPROBS} to be included", "top_logprobs")
        if body.background and (body.stream or not self._keeps):
            raise InvalidRequestError(
                "needs store, and no stream: the answer is asked for later", "background"
            )
        self._note_includes()
        self._messages, self._items = await conversation_of(self._store, body, request)
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
        if body.background:
            return json_answer(await self._begin_in_background(writer, answer), headers)
        piece = await answer.whole(request)
        for _ in (*writer.add(piece), *writer.end()):
            pass
        return json_answer(await self._keep(writer, answer), headers)

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
        await self._keep(writer, answer)
        yield end

    async def _begin_in_background(self, writer: ResponseWriter, answer: ChatAnswer) -> str:
        """Begin to make the answer, and return it as it stands."""
        try:
            text = await self._keep(writer, answer)
        except BaseException:
            answer.job.close()
            raise
        self._background.begin(self._id, self._make(answer, writer))
        return text

    async def _make(self, answer: ChatAnswer, writer: ResponseWriter) -> None:
        """Make the answer without its client, and keep it however it ends."""
        try:
            async for piece in answer.pieces():
                for _ in writer.add(piece):
                    pass
            for _ in writer.end():
                pass
        except asyncio.CancelledError:
            writer.cancel()
        except Exception as error:
            writer.fail(error)
        finally:
            answer.job.close()
        await self._keep(writer, answer)

    def _note_includes(self) -> None:
        ignored = request_context(self._request).ignored
        for name in self._body.include or ():
            if name not in (ENCRYPTED_REASONING, LOGPROBS):
                if ignored.strict:
                    raise InvalidRequestError(f"{name[:80]!r} is not known here", "include")
                ignored.add(f"include.{name}")

    async def _keep(self, writer: ResponseWriter, answer: ChatAnswer) -> str:
        """Keep the answer as it stands, if it is to be kept; return it as JSON."""
        text = await answer.to_json(writer.response)
        if self._keeps:
            response = writer.response
            is_over = response["status"] != "in_progress"
            kept = await in_background(self._kept, response["output"], text, is_over)
            self._store.keep(kept)
        return text

    def _kept(self, output: list[dict[str, Any]], text: str, is_over: bool) -> KeptResponse:
        conversation = Conversation(self._messages)
        for item in output:
            conversation.add(output_item(item))
        return KeptResponse(
            self._id,
            owner_of(self._request),
            text.encode(),
            encode_in_pieces(self._items).encode(),
            encode_in_pieces(conversation.messages).encode(),
            [item["id"] for item in output],
            is_over,
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
            is_short = "delta" in fields  # others have all of a text
            text = encode(value) if is_short else await self._answer.to_json(value)
            written.append(named_event(kind, text))
        return b"".join(written)

    def written(self, event: Event) -> bytes:
        """Return one event as bytes."""
        return named_event(event[0], encode(self._numbered(*event)))

    def _numbered(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def owner_of(request: Request) -> str:
    """Return the name of the tenant to which what a request keeps belongs."""
    return request_context(request).tenant.name


def json_answer(body: str | bytes, headers: dict[str, str] | None = None) -> Response:
    """Return a response of JSON that is written already."""
    return Response(body, media_type="application/json", headers=headers)


async def conversation_of(
    store: ResponseStore, body: ChatFields, request: Request
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return the messages of a body, and the items of its input as they are listed later.

    Raises:
        HttpError: 404, an answer that it refers to is not kept.
    """
    owner, before = owner_of(request), []
    if body.previous_response_id is not None:
        kept = store.find(body.previous_response_id, owner)
        if not kept.is_over:
            raise InvalidRequestError("is still being made", "previous_response_id")
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
