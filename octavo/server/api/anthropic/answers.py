"""Descriptions of what ``/v1/messages`` answers, for the OpenAPI document, and its errors."""

from __future__ import annotations

from typing import Any, Literal

from starlette.responses import JSONResponse

from octavo.server.api.answers import AnswerModel
from octavo.server.http.errors import HttpError, error_body

# Anthropic's types of errors that are not by the same names in all of octavo.
_TYPES = {413: "request_too_large", 500: "api_error", 529: "overloaded_error"}


class MessagesUsage(AnswerModel):
    """Tokens of a request. Those of the prompt are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


class AnswerMessage(AnswerModel):
    """An answer. Blocks of ``content`` are of the types ``thinking``, ``text`` and ``tool_use``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesEvent(AnswerModel):
    """An event of a stream: ``message_start``, ``ping``, ``content_block_start``, ``_delta`` and
    ``_stop``, ``message_delta``, ``message_stop`` or ``error``."""

    type: str


class ErrorType(AnswerModel):
    type: str
    message: str


class MessagesError(AnswerModel):
    type: Literal["error"]
    error: ErrorType
    request_id: str


def messages_error_body(error: HttpError, request_id: str) -> dict[str, Any]:
    """Return Anthropic's object of an error, as a body or as the event of a stream. Its message
    begins with the field that is wrong."""
    described = error_body(error)["error"]
    message = described["message"]
    if described["param"] and not message.startswith(described["param"]):
        message = f"{described['param']}: {message}"
    kind = _TYPES.get(error.status, error.type)
    kind = "api_error" if kind == "server_error" else kind
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def messages_error_response(error: HttpError, request_id: str) -> JSONResponse:
    """Return the answer to a request that has failed."""
    headers = {**error.headers, "request-id": request_id}
    return JSONResponse(messages_error_body(error, request_id), error.status, headers)
