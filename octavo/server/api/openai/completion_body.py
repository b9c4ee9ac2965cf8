"""Bodies of requests to ``/v1/completions``, and the form of its answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from octavo.core.sampling_params import MAX_LOGPROBS, MAX_N
from octavo.server.api.answers import Answer, AnswerModel, PromptLogprobs
from octavo.server.api.fields import MAX_INT, MAX_TOKEN_ID, Unsupported, first_that_is_no_token_id
from octavo.server.api.requests import GenerationFields
from octavo.server.settings import MAX_PROMPTS

# -- requests ----------------------------------------------------------------------------------

Prompt: TypeAlias = str | list[int]


def _to_prompts(value: Any) -> list[Prompt]:
    """Return the prompts of a text, a list of token ids, or a list of such.

    It does not use pydantic, because there may be a million token ids, and pydantic would report
    for each how it fails to be any of the alternatives.
    """
    if isinstance(value, str) or _is_token_ids(value):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "must be text, token ids, or a list of such")
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", "at most {most} prompts", {"most": MAX_PROMPTS})
    for index, prompt in enumerate(value):
        if not isinstance(prompt, str) and not _is_token_ids(prompt):
            raise PydanticCustomError(
                "prompt", "item {index} is neither text nor token ids", {"index": index}
            )
    return value


def _is_token_ids(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and first_that_is_no_token_id(value) is None


_TOKEN_IDS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID},
}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _TOKEN_IDS_SCHEMA,
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
            "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS_SCHEMA]},
        },
    ],
    "description": "a text, token ids, or several of either",
}


class CompletionRequest(GenerationFields):
    """One prompt or several, each to be continued ``n`` times."""

    refused = frozenset({"messages", "tools", "max_completion_tokens", "top_logprobs", "inputs"})

    prompt: Annotated[list[Prompt], PlainValidator(_to_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_INT,
        description="16 if not given; -1 is as many as there is room for; 0, with echo, only "
        "scores the prompt",
    )
    best_of: int | None = Field(
        None, ge=1, le=MAX_N, description="generate so many, and answer with the n most likely"
    )
    echo: bool | None = Field(None, description="the prompt before the completion (no)")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    suffix: Unsupported = None
    prompt_embeds: Unsupported = None


# -- answers -----------------------------------------------------------------------------------


class CompletionLogprobs(AnswerModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(AnswerModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "error"]
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunkChoice(AnswerModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "error"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChunk(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
