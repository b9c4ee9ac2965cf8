"""``/tokenize`` and ``/detokenize``, in vLLM's shapes.

They answer without the engine: the tokenizer is in this process.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Discriminator, Field, RootModel, Tag

from octavo.errors import InvalidRequestError
from octavo.server.background import in_background
from octavo.server.body import JsonRoute
from octavo.server.http_errors import HttpError
from octavo.server.json_text import encode
from octavo.server.protocol.fields import Body
from octavo.server.protocol.responses import describe
from octavo.server.service import Service
from octavo.server.sse import run_until_disconnect
from octavo.text.tokenizer import Tokenizer

MAX_CHARS = 1 << 20  # of a text
MAX_TOKENS = 1 << 18  # of a list
_MANY_TOKENS = 8 << 10  # beyond which an answer is written off the event loop
_PIECE = 4 << 10  # values that take well below a millisecond to write


class TokenizeTextRequest(Body):
    """The tokens of a text."""

    model: str | None = None
    prompt: str = Field(max_length=MAX_CHARS)
    add_special_tokens: bool | None = Field(
        None, description="put BOS and EOS where the model wants them (yes)"
    )
    return_token_strs: bool | None = Field(None, description="also the text of each token")


class TokenizeChatRequest(Body):
    """The tokens of a conversation, as the chat template writes it."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(
        None, description="in addition to those that the template writes (no)"
    )
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(None, description="also the text of each token")


def _form_of(value: Any) -> str | None:
    """Which of the two a body is; neither is an error that names both fields."""
    if isinstance(value, TokenizeTextRequest | TokenizeChatRequest):
        return "text" if isinstance(value, TokenizeTextRequest) else "chat"
    forms = [form for key, form in (("prompt", "text"), ("messages", "chat")) if key in value]
    return forms[0] if len(forms) == 1 else None


class TokenizeRequest(
    RootModel[
        Annotated[
            Annotated[TokenizeTextRequest, Tag("text")]
            | Annotated[TokenizeChatRequest, Tag("chat")],
            Discriminator(
                _form_of,
                custom_error_type="one_of",
                custom_error_message="give either prompt or messages",
            ),
        ]
    ]
):
    """A text or a conversation."""


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(
        None, description="bytes of a token that are no whole character appear as U+FFFD"
    )


class DetokenizeRequest(Body):
    """The text of tokens, special ones included."""

    model: str | None = None
    tokens: list[int] = Field(max_length=MAX_TOKENS)


class DetokenizeResponse(BaseModel):
    prompt: str


def create_router(service: Service) -> APIRouter:
    """The routes of the tokenizer."""
    router = APIRouter(route_class=JsonRoute, tags=["tokenizer"])
    tokenizer = service.prompts.tokenizer

    @router.post("/tokenize", response_model=None, responses=describe(TokenizeResponse))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        asked = body.root
        service.check_model(asked.model)
        max_model_len = service.engine.facts.max_model_len
        tokens = await run_until_disconnect(request, _token_ids(service, asked))
        answer = {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}
        return await _to_response(answer, tokenizer if asked.return_token_strs else None)

    @router.post("/detokenize", response_model=None, responses=describe(DetokenizeResponse))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of tokens, special ones included."""
        service.check_model(body.model)
        _check_ids(body.tokens, tokenizer.vocab_size)
        text = await run_until_disconnect(request, service.prompts.detokenize(body.tokens))
        return Response(encode({"prompt": text}), media_type="application/json")

    return router


async def _token_ids(
    service: Service, asked: TokenizeTextRequest | TokenizeChatRequest
) -> list[int]:
    if isinstance(asked, TokenizeTextRequest):
        return await service.prompts.text(
            asked.prompt, add_special_tokens=asked.add_special_tokens is not False
        )
    for name in ("media_io_kwargs", "mm_processor_kwargs"):
        if getattr(asked, name):
            raise HttpError(400, f"{name}: this model reads text only", param=name)
    prompt = await service.prompts.chat(
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


async def _to_response(answer: dict[str, Any], tokenizer: Tokenizer | None) -> Response:
    """The JSON of an answer, with the text of its tokens if a ``tokenizer`` is given for that."""

    def write() -> str:
        if tokenizer is None:
            return _encode_lists(answer)
        texts = [tokenizer.token_text(token) for token in answer["tokens"]]
        return _encode_lists({**answer, "token_strs": texts})

    text = await in_background(write) if answer["count"] > _MANY_TOKENS else write()
    return Response(text, media_type="application/json")


def _encode_lists(answer: dict[str, Any]) -> str:
    """JSON of an object with long lists, so many values at a time that other threads get turns."""
    members = []
    for name, value in answer.items():
        if isinstance(value, list):
            parts = (value[at : at + _PIECE] for at in range(0, len(value), _PIECE))
            members.append(f'"{name}":[{",".join(encode(part)[1:-1] for part in parts)}]')
        else:
            members.append(f'"{name}":{encode(value)}')
    return f"{{{','.join(members)}}}"


def _check_ids(token_ids: list[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise InvalidRequestError(f"token ids are in [0, {vocab_size - 1}]", "tokens")
