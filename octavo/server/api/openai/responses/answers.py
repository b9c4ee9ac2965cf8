"""Descriptions of what ``/v1/responses`` answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from octavo.server.api.answers import AnswerModel, Timings


class IncompleteDetails(AnswerModel):
    reason: Literal["max_output_tokens"]


class FailureDetails(AnswerModel):
    code: str
    message: str


class InputTokensDetails(AnswerModel):
    """Cached tokens of the prompt, and those that are in the prefix cache since this request."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(AnswerModel):
    reasoning_tokens: int


class ResponseUsage(AnswerModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(AnswerModel):
    """An answer. Items of ``output`` are of the types ``reasoning``, ``message``,
    ``function_call`` and ``custom_tool_call``."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: FailureDetails | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    truncation: Literal["auto", "disabled"]
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    usage: ResponseUsage | None
    timings: Timings | None = None
    warnings: list[str] | None = None


class InputItemList(AnswerModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(AnswerModel):
    id: str
    object: Literal["response"]
    deleted: bool
