"""``/tokenize`` and ``/detokenize``, in the forms of vLLM and of llama.cpp's server.

They answer without the engine: the tokenizer is in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Discriminator, Field, RootModel, Tag

from octavo.core.limits import checked_token_ids
from octavo.server.api.fields import Body, Object, TokenIds
from octavo.server.api.prompts import MAX_MESSAGES, MAX_TOOLS
from octavo.server.api.responses import describe
from octavo.server.api.server_context import ServerContext
from octavo.server.http.background import briefly_in_background, in_background
from octavo.server.http.body import JsonRoute
from octavo.server.http.errors import HttpError
from octavo.server.http.json_text import encode
from octavo.server.http.sse import run_until_disconnect
from octavo.text.tokenizer import Tokenizer

MAX_CHARS = 1 << 20  # of a text
MAX_TOKENS = 1 << 18  # of a list
_MANY_TOKENS = 8 << 10  # beyond which an answer's JSON is written off the event loop
_PIECE = 4 << 10  # values that take well below a millisecond to write


class TokenizeTextRequest(Body):
    """A text to tokenize."""

    model: str | None = None
    prompt: str = Field(max_length=MAX_CHARS)
    add_special_tokens: bool | None = Field(
        None, description="put BOS and EOS where the model wants them (yes)"
    )
    return_token_strs: bool | None = Field(None, description="also the text of each token")


class TokenizeContentRequest(Body):
    """A text to tokenize, with the fields of llama.cpp's server."""

    model: str | None = None
    content: str = Field(max_length=MAX_CHARS)
    add_special: bool | None = Field(None, description="put BOS where the model wants it (no)")
    parse_special: bool | None = Field(None, description="special tokens in it are such (yes)")
    with_pieces: bool | None = Field(None, description="tokens as {id, piece}")


class TokenizeChatRequest(Body):
    """A conversation to tokenize, as the chat template writes it."""

    model: str | None = None
    messages: Annotated[list[Object], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[Object], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(
        None, description="in addition to those that the template writes (no)"
    )
    chat_template: str | None = None
    chat_template_kwargs: Object | None = None
    media_io_kwargs: Object | None = None
    mm_processor_kwargs: Object | None = None
    return_token_strs: bool | None = Field(None, description="also the text of each token")


_FORMS = {"prompt": "text", "messages": "chat", "content": "llama.cpp"}


def _form_of(value: Any) -> str | None:
    """Return the form of a body; None for several or none, which is an error."""
    keys = value.model_fields_set if isinstance(value, BaseModel) else value
    forms = [form for key, form in _FORMS.items() if key in keys]
    return forms[0] if len(forms) == 1 else None


class TokenizeRequest(
    RootModel[
        Annotated[
            Annotated[TokenizeTextRequest, Tag("text")]
            | Annotated[TokenizeChatRequest, Tag("chat")]
            | Annotated[TokenizeContentRequest, Tag("llama.cpp")],
            Discriminator(
                _form_of,
                custom_error_type="one_of",
                custom_error_message="give either prompt or messages, or content",
            ),
        ]
    ]
):
    """A text or a conversation to tokenize."""


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(
        None, description="bytes of a token that are no whole character appear as U+FFFD"
    )


class DetokenizeRequest(Body):
    """Tokens to turn into text, special ones included."""

    model: str | None = None
    tokens: Annotated[list[int], TokenIds(MAX_TOKENS)]


class DetokenizeResponse(BaseModel):
    prompt: str
    content: str = Field(description="the same, as llama.cpp's server calls it")


def create_router(server: ServerContext) -> APIRouter:
    """Return the routes of the tokenizer."""
    router = APIRouter(route_class=JsonRoute, tags=["tokenizer"])

    @router.post("/tokenize", response_model=None, responses=describe(TokenizeResponse))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the tokens of a text or of a conversation."""
        asked = body.root
        server.check_model(asked.model)
        max_model_len, tokenizer = server.engine.facts.max_model_len, server.prompts.tokenizer
        tokens = await run_until_disconnect(request, _token_ids(server, asked))
        answer = {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}
        if isinstance(asked, TokenizeContentRequest):
            more = partial(_with_pieces, tokenizer) if asked.with_pieces else None
        else:
            more = partial(_with_texts, tokenizer) if asked.return_token_strs else None
        return await _to_response(answer, more)

    @router.post("/detokenize", response_model=None, responses=describe(DetokenizeResponse))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of tokens, special ones included."""
        server.check_model(body.model)
        vocab_size = server.prompts.tokenizer.vocab_size
        tokens = checked_token_ids(body.tokens, vocab_size, "tokens")
        text = await run_until_disconnect(request, server.prompts.detokenize(tokens))
        return Response(encode({"prompt": text, "content": text}), media_type="application/json")

    return router


async def _token_ids(
    server: ServerContext,
    asked: TokenizeTextRequest | TokenizeChatRequest | TokenizeContentRequest,
) -> list[int]:
    if isinstance(asked, TokenizeContentRequest):
        return await server.prompts.text(
            asked.content,
            add_special_tokens=asked.add_special is True,
            parse_special=asked.parse_special is not False,
        )
    if isinstance(asked, TokenizeTextRequest):
        return await server.prompts.text(
            asked.prompt, add_special_tokens=asked.add_special_tokens is not False
        )
    for name in ("media_io_kwargs", "mm_processor_kwargs"):
        if getattr(asked, name):
            raise HttpError(400, f"{name}: this model reads text only", param=name)
    prompt = await server.prompts.chat(
        asked.messages,
        tools=asked.tools,
        chat_template=asked.chat_template or None,
        chat_template_kwargs=asked.chat_template_kwargs,
        # Where a message is continued, none begins, unless both are asked for: that is refused.
        add_generation_prompt=(
            not asked.continue_final_message
            if asked.add_generation_prompt is None
            else asked.add_generation_prompt
        ),
        continue_final_message=asked.continue_final_message is True,
        add_special_tokens=asked.add_special_tokens is True,
    )
    return prompt.token_ids


def _with_texts(tokenizer: Tokenizer, answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "token_strs": [tokenizer.token_text(token) for token in answer["tokens"]]}


def _with_pieces(tokenizer: Tokenizer, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer with the text of each token, or its bytes where these are no whole
    character."""
    pieces = []
    for token in answer["tokens"]:
        raw = tokenizer.token_bytes(token)
        try:
            pieces.append({"id": token, "piece": raw.decode()})
        except UnicodeDecodeError:
            pieces.append({"id": token, "piece": list(raw)})
    return {**answer, "tokens": pieces}


async def _to_response(
    answer: dict[str, Any], more: Callable[[dict[str, Any]], dict[str, Any]] | None
) -> Response:
    """Return the JSON of an answer, after ``more`` has added details of its tokens."""

    def write() -> str:
        return _encode_lists(answer if more is None else more(answer))

    is_small = answer["count"] <= _MANY_TOKENS
    text = await (briefly_in_background(write) if is_small else in_background(write))
    return Response(text, media_type="application/json")


def _encode_lists(answer: dict[str, Any]) -> str:
    """Return JSON of an object with long lists, written in parts between which other threads can
    run."""
    members = []
    for name, value in answer.items():
        if isinstance(value, list):
            parts = (value[at : at + _PIECE] for at in range(0, len(value), _PIECE))
            members.append(f'"{name}":[{",".join(encode(part)[1:-1] for part in parts)}]')
        else:
            members.append(f'"{name}":{encode(value)}')
    return f"{{{','.join(members)}}}"
