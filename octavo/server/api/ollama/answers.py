"""Descriptions of what Ollama's routes answer, for the OpenAPI document, and their errors."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.responses import JSONResponse

from octavo.server.api.answers import AnswerModel
from octavo.server.http.errors import HttpError, error_body


class Measured(AnswerModel):
    """An answer, or a line of one. Counts and durations, in nanoseconds, are in the last line."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[dict[str, Any]] | None = None
    warnings: list[str] | None = None


class ChatResponse(Measured):
    message: dict[str, Any]


class GenerateResponse(Measured):
    response: str
    thinking: str | None = None
    context: list[int] | None = None


class Models(AnswerModel):
    models: list[dict[str, Any]]


class ModelDescription(AnswerModel):
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    template: str
    parameters: str
    modelfile: str
    license: str
    modified_at: str


class Version(AnswerModel):
    version: str
    octavo: str


class Status(AnswerModel):
    status: str


class OllamaError(AnswerModel):
    error: str


def ollama_error_body(error: HttpError) -> dict[str, Any]:
    """Return Ollama's object of an error, which begins with the field that is wrong."""
    described = error_body(error)["error"]
    message, field = described["message"], described["param"]
    return {"error": message if not field or message.startswith(field) else f"{field}: {message}"}


def ollama_error_response(error: HttpError, request_id: str = "") -> JSONResponse:
    """Return the answer to a request that has failed."""
    return JSONResponse(ollama_error_body(error), error.status, error.headers)


def timestamp(seconds: float) -> str:
    """Return a Unix time as Ollama writes it."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
