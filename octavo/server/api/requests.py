"""Fields that the requests of several routes have in common.

`GenerationFields` are those of chats and of completions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.core.sampling_params import MAX_LOGPROBS, MAX_N, MAX_SEED
from octavo.server.api.constraints import ConstrainedBody, ConstraintFields
from octavo.server.api.fields import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_INT,
    MAX_STOP_TOKEN_IDS,
    MAX_TIMEOUT,
    BadWords,
    Breakers,
    Label,
    LogitBias,
    MaxTokens,
    NoEffect,
    Object,
    Only,
    RequestId,
    Speculative,
    Stop,
    StreamOptions,
    TokenIds,
    Unsupported,
)


class CommonFields(ConstraintFields):
    """Fields that octavo's, OpenAI's and llama.cpp's routes have in common."""

    model: str | None = Field(None, description="any of /v1/models; it may be left out")
    stream: bool | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-MAX_SEED, lt=MAX_SEED, description="below 0 is none")
    stop: Stop | None = None
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT, description="seconds")
    top_n_sigma: float | None = Field(
        None, ge=-1, description="standard deviations below the greatest logit; 0 and -1 are off"
    )
    xtc_probability: float | None = Field(None, ge=0, le=1, description="to cut top choices (0)")
    xtc_threshold: float | None = Field(None, ge=0, le=1, description="of a top choice (0.1)")
    dry_multiplier: float | None = Field(None, ge=0, le=100, description="0 is off")
    dry_base: float | None = Field(None, ge=1, le=100)
    dry_allowed_length: int | None = Field(None, ge=1, le=MAX_INT)
    dry_penalty_last_n: int | None = Field(None, ge=-1, le=MAX_INT)
    dry_sequence_breakers: Breakers | None = None

    @property
    def own_seed(self) -> int | None:
        """The client's seed, if it has one."""
        return None if self.seed is None or self.seed < 0 else self.seed

    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class SamplingFields(CommonFields):
    """Fields that octavo's and OpenAI's routes have in common."""

    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy")
    top_k: int | None = Field(None, ge=-1, le=MAX_INT, description="0 and -1 are off")
    attention_sinks: int | None = Field(None, ge=0, le=MAX_INT, description="seen with a window")
    window: int | None = Field(
        None, ge=0, le=MAX_INT, description="see the last tokens alone, and generate any number"
    )
    n_keep: int | None = Field(None, ge=0, le=MAX_INT, description="kept by a context shift")


class GenerationFields(SamplingFields):
    """Fields that say how to generate. A missing or null one is as the model's authors
    recommend."""

    synonyms = {  # llama.cpp's
        "n_predict": "max_tokens",
        "repeat_penalty": "repetition_penalty",
        "typ_p": "typical_p",
    }

    stream_options: StreamOptions | None = None

    n: int | None = Field(None, ge=1, le=MAX_N, description="answers to the same prompt (1)")
    max_tokens: MaxTokens = None
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=1000)
    stop_token_ids: Annotated[list[int], TokenIds(MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="leave them out of the text (yes)")
    logit_bias: LogitBias | None = Field(None, description="by token id")
    bad_words: BadWords | None = None
    allowed_token_ids: Annotated[list[int], TokenIds(MAX_ALLOWED_TOKEN_IDS)] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    thinking_token_budget: int | None = Field(
        None, ge=-1, le=MAX_INT, description="tokens of a thought, which then is closed (no limit)"
    )
    speculative: Speculative | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_INT, description="keep so many; -1 is as many as there is room for"
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="to cut off (left)")
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(
        None, description="write tokens of logprobs as token_id:NUMBER"
    )
    priority: int | None = Field(
        None, ge=-MAX_INT, le=MAX_INT, description="lower is sooner (0); as far as the server lets"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="share cached prefixes only with requests of the same salt"
    )
    request_id: RequestId | None = Field(None, description="becomes part of the answer's id")

    # These have an effect on other servers, but none on the meaning of the answer.
    user: Annotated[Label | None, NoEffect] = None
    metadata: Annotated[dict[Label, Label] | None, Field(max_length=16), NoEffect] = None
    store: Annotated[Unsupported, NoEffect] = None
    service_tier: Annotated[Any, Only(("auto", "default")), NoEffect] = None
    safety_identifier: Annotated[Label | None, NoEffect] = None
    prompt_cache_key: Annotated[Label | None, NoEffect] = None
    prompt_cache_retention: Annotated[Label | None, NoEffect] = None
    prompt_cache_options: Annotated[Object | None, NoEffect] = None
    session_id: Annotated[Label | None, NoEffect] = None
    spaces_between_special_tokens: Annotated[bool | None, NoEffect] = None
    stream_interval: Annotated[Any, Only((1,)), NoEffect] = None
    vllm_xargs: Annotated[Unsupported, NoEffect] = None

    # These change the meaning of the answer on other servers.
    use_beam_search: Unsupported = None
    length_penalty: Annotated[Any, Only((1, 1.0))] = None
    logprob_token_ids: Unsupported = None
    repetition_detection: Unsupported = None
    watermarking: Unsupported = None
    return_token_offsets: Unsupported = None
    kv_transfer_params: Unsupported = None
    ec_transfer_params: Unsupported = None
    grammar_lazy: Unsupported = None
    grammar_triggers: Unsupported = None
    stop_regex: Annotated[Any, Only(("",))] = None
    lora: Unsupported = None
    lora_path: Unsupported = None
    mirostat: Annotated[Any, Only((0,))] = None
    dynatemp_range: Annotated[Any, Only((0, 0.0))] = None

    @classmethod
    def of(cls, body: ConstrainedBody, **own: Any) -> GenerationFields:
        """Return the fields of another route's body, which have been checked, with ``own`` in place
        of some."""
        names = cls.model_fields.keys() & type(body).model_fields.keys()
        fields = cls.model_construct(**{**{name: getattr(body, name) for name in names}, **own})
        fields._constraint = body.constraint
        return fields

    @classmethod
    def names_with_effect(cls) -> frozenset[str]:
        return frozenset(cls.model_fields) - cls._without_effect
