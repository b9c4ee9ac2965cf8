"""Fields that answers of all APIs have in common.

These models describe answers in the OpenAPI document; answers themselves are made without them.
"""

from __future__ import annotations

from typing import TypeAlias

from pydantic import BaseModel, ConfigDict


class AnswerModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(AnswerModel):
    """Cached tokens of prompts; ``miss_reason``, of a single prompt, is why no longer prefix was
    found."""

    cached_tokens: int
    miss_reason: str | None = None


class CompletionTokensDetails(AnswerModel):
    """Accepted and rejected draft tokens, with speculative decoding; and those of thoughts, in
    chats with a model that reasons.

    Rejected ones are in no answer, and do not count in ``completion_tokens``.
    """

    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    reasoning_tokens: int | None = None


class Usage(AnswerModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class Timings(AnswerModel):
    """Times of a request with one prompt, in milliseconds, by the names of llama.cpp's server.

    ``prompt_*`` is of the ``prompt_n`` tokens that were computed, ``cache_n`` came from the prefix
    cache. ``predicted_ms`` is the time after the first token, and the rates are of the tokens after
    it. ``draft_n`` is there with speculative decoding. Unknown values are None.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float | None
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float | None
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    draft_n: int | None = None
    draft_n_accepted: int | None = None


class Logprob(AnswerModel):
    logprob: float
    rank: int
    decoded_token: str


# By position and token id; nothing comes before the first token.
PromptLogprobs: TypeAlias = list[dict[str, Logprob] | None]


class Answer(AnswerModel):
    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None


class InputTokens(AnswerModel):
    """Number of tokens of a prompt."""

    object: str | None = None
    input_tokens: int


class ErrorDetails(AnswerModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(AnswerModel):
    error: ErrorDetails


class LoadState(AnswerModel):
    """``value``: unloaded, loading or loaded, as llama-server's router has them, or restarting or
    unloading.
    ``failed``, ``error``: that the last attempt to load it has failed, and why."""

    value: str
    failed: bool
    error: str | None


class MemoryBytes(AnswerModel):
    weights: int
    kv: int
    activations: int
    total: int


class Model(AnswerModel):
    """A model under one of its names; the last fields are those of a server with several.

    ``memory_bytes``: what it takes, or would; null until that is known. ``pinned``: it is not
    unloaded but on request. ``num_requests``: that it has now. ``unload_after``: seconds until it
    is unloaded, without a further request; null is never, or not yet."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    sampling_defaults: dict[str, float] | None  # what the model's authors recommend
    permission: list[str]
    status: LoadState | None = None
    memory_bytes: MemoryBytes | None = None
    pinned: bool | None = None
    num_requests: int | None = None
    unload_after: float | None = None


class ModelList(AnswerModel):
    """``model_memory``: bytes that all loaded models may take, where there are several."""

    object: str
    data: list[Model]
    model_memory: int | None = None
