"""Bodies of ``/completion``, field by field, as the README of llama.cpp's server describes them."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, Field, PlainValidator, RootModel, WithJsonSchema
from pydantic_core import PydanticCustomError

from octavo.core.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS
from octavo.server.api.answers import Timings
from octavo.server.api.fields import MAX_INT, Body, Unsupported, first_that_is_no_token_id
from octavo.server.api.fill_in import OtherFile
from octavo.server.api.requests import CommonFields, GenerationFields
from octavo.server.settings import MAX_PROMPTS, MAX_STOP_CHARS

# A mix of texts and runs of token ids. A text at its beginning gets the model's BOS.
Prompt: TypeAlias = list[list[int] | str]

MAX_TEXTS = 256  # among the token ids of one prompt
MAX_BIAS_CHARS = 16 << 10  # of all texts whose tokens are to have a bias
_FALSE_BIAS = -100.0


class Prompts(list[Prompt]):
    """The prompts of a body. ``is_list`` says whether the answer is a list."""

    is_list = False


def _to_prompts(value: Any) -> Prompts:
    """Validate prompts, without pydantic because there may be a million token ids."""
    is_list = isinstance(value, list) and not any(type(item) is int for item in value)
    items = value if is_list else [value]
    if not items or len(items) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", "must be 1 to {most} prompts", {"most": MAX_PROMPTS})
    prompts = Prompts(_to_prompt(item) for item in items)
    prompts.is_list = is_list
    return prompts


def _to_prompt(value: Any) -> Prompt:
    if isinstance(value, dict) and isinstance(value.get("prompt_string"), str):
        if value.get("multimodal_data"):
            raise PydanticCustomError("prompt", "multimodal_data: this model reads text only")
        value = value["prompt_string"]
    pieces = [value] if isinstance(value, str) else value
    is_list = isinstance(pieces, list)
    ids = [piece for piece in pieces if type(piece) is int] if is_list else []
    if not is_list or sum(isinstance(piece, str) for piece in pieces) + len(ids) < len(pieces):
        raise PydanticCustomError(
            "prompt", "must be text, token ids, both in turns, or a list of such"
        )
    if first_that_is_no_token_id(ids) is not None:
        raise PydanticCustomError("prompt", "has a token id that is none")
    if len(pieces) - len(ids) > MAX_TEXTS:
        raise PydanticCustomError("prompt", "has more than {most} texts", {"most": MAX_TEXTS})
    runs = groupby(pieces, key=type)
    return [run for kind, each in runs for run in ([list(each)] if kind is int else each)]


def _to_bias(value: Any) -> list[tuple[int | str, float]]:
    """Return pairs of a token, or a text that stands for all of its tokens, and its bias; false is
    never."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or len(pairs) > MAX_LOGIT_BIAS:
        raise PydanticCustomError(
            "logit_bias", "must be at most {most} pairs [token, bias]", {"most": MAX_LOGIT_BIAS}
        )
    found = [_to_pair(pair) for pair in pairs]
    if sum(len(token) for token, _ in found if isinstance(token, str)) > MAX_BIAS_CHARS:
        raise PydanticCustomError(
            "logit_bias", "has texts of more than {most} characters", {"most": MAX_BIAS_CHARS}
        )
    return found


def _to_pair(pair: Any) -> tuple[int | str, float]:
    token: Any
    bias: Any
    token, bias = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
    if isinstance(token, str) and token.isdecimal() and len(token) <= 10:
        token = int(token)  # JSON objects have no other keys than texts
    bias = _FALSE_BIAS if bias is False else bias
    is_token = type(token) is int or (isinstance(token, str) and len(token) <= MAX_STOP_CHARS)
    is_bias = type(bias) in (int, float) and -100 <= bias <= 100
    if not (is_token and is_bias):
        raise PydanticCustomError(
            "logit_bias", "must be pairs [token, bias] with a bias in [-100, 100], or false"
        )
    return token, float(bias)


class LlamaCompletionRequest(CommonFields):
    """A prompt to be completed, with the fields of llama.cpp's server."""

    synonyms = {
        "max_tokens": "n_predict",
        "repetition_penalty": "repeat_penalty",
        "typ_p": "typical_p",
    }
    refused = GenerationFields.names_with_effect() | {"logprobs", "messages", "best_of"}

    prompt: Annotated[Prompts, PlainValidator(_to_prompts), WithJsonSchema({})] = Field(
        description="text, token ids, both in turns, {prompt_string}, or a list of these"
    )
    n_predict: int | None = Field(
        None, ge=-2, le=MAX_INT, description="tokens at most; -1 is as many as there is room for"
    )
    temperature: float | None = Field(None, ge=-100, le=100, description="0 and below are greedy")
    top_k: int | None = Field(None, ge=-MAX_INT, le=MAX_INT, description="0 and below are off")
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0, le=1000)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    ignore_eos: bool | None = None
    logit_bias: Annotated[
        list[tuple[int | str, float]] | None, PlainValidator(_to_bias), WithJsonSchema({})
    ] = Field(None, description="[[token, bias], …] or {token: bias}; a text is all of its tokens")
    n_probs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="most likely tokens")
    n_keep: int | None = Field(
        None,
        ge=-1,
        le=MAX_INT,
        description="tokens that a context shift keeps, if one is made; -1 is the prompt",
    )
    cache_prompt: bool | None = Field(
        None, description="find the prompt in the prefix cache, and leave it there (yes)"
    )
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = Field(
        None, description="only these of the answer; a/b is b in a"
    )

    post_sampling_probs: Unsupported = None

    @property
    def max_tokens(self) -> int | None:
        """Most tokens to generate; None is as many as the context allows."""
        return None if self.n_predict is None or self.n_predict < 0 else max(self.n_predict, 1)


class ExtraFile(Body):
    """A further file that the model is shown."""

    filename: Annotated[str, Field(max_length=MAX_STOP_CHARS)] | None = None
    text: str


class InfillRequest(LlamaCompletionRequest):
    """A text with a gap to be filled in."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_TEXTS, fail_fast=True)] | None = (
        Field(None, description="further files")
    )
    prompt: Annotated[Prompts, PlainValidator(_to_prompts), WithJsonSchema({})] = Field(
        default_factory=lambda: Prompts([[""]]), description="what the text in the gap begins with"
    )

    @property
    def files(self) -> list[OtherFile]:
        """The further files."""
        return [OtherFile(file.filename or "file", file.text) for file in self.input_extra or ()]


class Slot(BaseModel):
    id: int
    n_ctx: int
    is_processing: bool


class Slots(RootModel[list[Slot]]):
    """The places of requests that run at once."""


class LlamaCompletion(BaseModel):
    """An answer, and the last event of a stream.

    Other events have ``content``, ``tokens``, ``stop`` (false) and the counts.
    """

    index: int
    content: str
    tokens: list[int]
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: str
    stopping_word: str
    tokens_cached: int
    timings: Timings | None
    completion_probabilities: list[dict[str, Any]] | None = None


class Props(BaseModel):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool
