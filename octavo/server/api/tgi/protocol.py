"""Requests and answers of TGI's API, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from octavo.base.errors import InvalidRequestError
from octavo.core.sampling_params import MAX_LOGPROBS, MAX_N
from octavo.server.api.constraints import AskedConstraint, ConstrainedBody, Schema, named_schema
from octavo.server.api.fields import Body, Only, StopStrings, Unsupported
from octavo.server.api.requests import GenerationFields

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class TgiGrammar(Body):
    """TGI's constraint of an answer. ``json_schema`` has a ``{name, schema}``."""

    type: Literal["json", "regex", "json_schema"]
    value: Schema

    def constraint(self, field: str) -> AskedConstraint:
        """Return it under octavo's names.

        Raises:
            InvalidRequestError: the value is wrong.
        """
        field = f"{field}.value"
        if self.value is None:
            raise InvalidRequestError("is required", field)
        if self.type == "json_schema":
            return named_schema(field, self.value)
        return AskedConstraint.of(field, **{self.type: self.value})


class TgiParameters(ConstrainedBody):
    """Parameters of generation. It is greedy, unless a field asks for sampling."""

    place = "parameters."
    refused = GenerationFields.names_with_effect() | {"logprobs"}

    max_new_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1, description="100")
    do_sample: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=2**64 - 1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=1e6)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    stop: StopStrings | None = Field(default=None, description="ends the answer, and is part of it")
    best_of: int | None = Field(default=None, ge=1, le=MAX_N, description="only without streaming")
    truncate: int | None = Field(
        default=None, ge=1, description="keep so many of the last prompt tokens"
    )
    return_full_text: bool | None = Field(
        default=None, description="put the prompt before the answer"
    )
    details: bool | None = None
    decoder_input_details: bool | None = Field(
        default=None, description="also details of the prompt; only without streaming"
    )
    top_n_tokens: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    watermark: Unsupported = None
    grammar: TgiGrammar | None = None
    adapter_id: Annotated[Any, Only(("",))] = None

    def _constraints(self) -> Iterator[AskedConstraint]:
        if self.grammar is not None:
            yield self.grammar.constraint("grammar")

    @property
    def is_sampling(self) -> bool:
        shapes = (self.temperature, self.top_k, self.top_p, self.typical_p)
        return bool(self.do_sample) or any(shape is not None for shape in shapes)

    @property
    def wants_details(self) -> bool:
        return bool(self.details or self.decoder_input_details)


class TgiRequest(Body):
    """A prompt to be completed, with TGI's fields."""

    inputs: str = Field(min_length=1)
    parameters: TgiParameters | None = None
    stream: bool | None = None


class TgiStreamRequest(TgiRequest):
    """A prompt for the route that always streams."""

    stream: Literal[True] | None = None


class TgiPrefillToken(BaseModel):
    id: int
    text: str
    logprob: float | None = Field(description="null for the first token")


class TgiToken(BaseModel):
    id: int
    text: str
    logprob: float
    special: bool


class _Sequence(BaseModel):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None = Field(description="null if nothing was drawn")
    prefill: list[TgiPrefillToken]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]] | None = None


class TgiOtherSequence(_Sequence):
    """A sequence that was generated for ``best_of``, but is not the best."""

    generated_text: str


class TgiDetails(_Sequence):
    best_of_sequences: list[TgiOtherSequence] | None = None


class TgiResponse(BaseModel):
    generated_text: str
    details: TgiDetails | None = None


class TgiStreamDetails(BaseModel):
    finish_reason: FinishReason
    generated_tokens: int
    input_length: int
    seed: int | None


class TgiStreamEvent(BaseModel):
    index: int
    token: TgiToken
    top_tokens: list[TgiToken] | None = None
    generated_text: str | None
    details: TgiStreamDetails | None


class TgiError(BaseModel):
    error: str
    error_type: str
    type: str
    param: str | None
    code: str | None


class TgiInfo(BaseModel):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str
    model_dtype: str | None
    model_device_type: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
