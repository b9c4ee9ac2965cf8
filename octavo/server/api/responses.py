"""Descriptions of answers for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from octavo.server.api.answers import Error

_ERRORS = {
    400: "A field is wrong, or the prompt too long.",
    401: "The API key is missing or wrong.",
    404: "The model does not exist.",
    413: "The body is too large.",
    429: "A limit of this client is reached.",
    500: "The engine failed.",
    503: "The server is overloaded or not ready. Try again after Retry-After.",
    504: "The request took longer than its timeout.",
}


def describe(
    model: type[BaseModel] | None, chunk: type[BaseModel] | None = None
) -> dict[int | str, Any]:
    """Return the ``responses`` of a route that answers with ``model``, or streams ``chunk``
    objects. None is a text."""
    responses: dict[int | str, Any] = {
        status: {"model": Error, "description": text} for status, text in _ERRORS.items()
    }
    responses["default"] = {"model": Error, "description": "Another error."}
    responses[200] = {"model": model, "description": "The answer."}
    if model is None:
        text = {"schema": {"type": "string"}}
        responses[200] = {"description": "The answer.", "content": {"text/plain": text}}
    if chunk is not None:
        data = {"type": "string", "description": f"a {chunk.__name__} object as JSON, or [DONE]"}
        stream = {"schema": {"type": "object", "properties": {"data": data}}}  # each event
        responses[200]["content"] = {"text/event-stream": stream}
    return responses
