"""Types of request fields, and `Body`, the base class of all request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from octavo.core.sampling_params import (
    MAX_BAD_WORDS,
    MAX_BREAKERS,
    MAX_DRAFT_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
)
from octavo.server.http.context import IgnoredFields
from octavo.server.http.json_text import MAX_KEYS
from octavo.server.settings import MAX_ID_CHARS, MAX_STOP_CHARS

MAX_INT = 2**31 - 1
MAX_TOKEN_ID = MAX_INT
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_STOP_TOKEN_IDS = 1024
MAX_TIMEOUT = 86_400.0  # seconds

_SLICE = 1 << 13  # ids that are looked at in one go, far below a millisecond


class NoEffect:
    """A mark of a field that has no effect here: its values are neither checked nor kept."""


class Body(BaseModel):
    """A JSON object whose values are not converted.

    A field that would change the meaning of the answer, and that is not supported here, is declared
    as `Unsupported` and refused by name. A field without effect, because it is unknown or marked
    with `NoEffect`, is dropped, and its name is noted in the `IgnoredFields` that validation has
    for its context. Where these are strict, it is refused like any wrong field.
    """

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    # Other servers' names of fields, and octavo's, which counts where both are given.
    synonyms: ClassVar[Mapping[str, str]] = {}
    # Names that would change the answer on other routes, and here too if they were known.
    refused: ClassVar[frozenset[str]] = frozenset()
    _names: ClassVar[frozenset[str]] = frozenset()  # of the fields, as clients write them
    _without_effect: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        cls._names = frozenset(fields)
        cls._without_effect = frozenset(
            name for name, field in fields.items() if NoEffect in field.metadata
        )

    @model_validator(mode="before")
    @classmethod
    def _drop_fields_without_effect(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        dropped = (value.keys() - cls._names) | (value.keys() & cls._without_effect)
        if not dropped:
            return value
        ignored = info.context if isinstance(info.context, IgnoredFields) else IgnoredFields()
        cls._refuse_unknown_fields(value, ignored.strict)
        if ignored.strict:
            return value
        for name in value:  # in the body's order
            if name in dropped and name not in cls.synonyms and not asks_for_nothing(value[name]):
                ignored.add(name)
        kept = {name: field for name, field in value.items() if name not in dropped}
        cls._resolve_synonyms(value, kept)
        return kept

    @classmethod
    def _refuse_unknown_fields(cls, value: Mapping[str, Any], strict: bool) -> None:
        unknown = value.keys() - cls._names
        if not strict:
            unknown = {
                name
                for name in (unknown & cls.refused) - cls.synonyms.keys()
                if not asks_for_nothing(value[name])
            }
        if unknown:
            raise ValidationError.from_exception_data(
                cls.__name__,
                [
                    {"type": "extra_forbidden", "loc": (name,), "input": value[name]}
                    for name in value
                    if name in unknown
                ],
            )

    @classmethod
    def _resolve_synonyms(cls, value: dict[str, Any], kept: dict[str, Any]) -> None:
        """Add other servers' fields under octavo's names to ``kept``.

        They are added to ``value``, the body as it came, too: error messages look names up there.
        """
        resolved: dict[str, Any] = {}
        for name in value:  # in the body's order: the first of two counts
            own_name = cls.synonyms.get(name)
            if own_name is not None:
                resolved[own_name] = kept.setdefault(own_name, value[name])
        value |= resolved


def asks_for_nothing(value: Any) -> bool:
    """True if a value is one that clients send for a field that they do not use."""
    return value is None or value is False or value == [] or value == {}


class _Check:
    """A validator that takes the place of pydantic's own."""

    def check(self, value: Any) -> Any:
        """Return a valid value, or raise PydanticCustomError."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)


@dataclass(frozen=True, eq=False)  # else `Annotated` would take Only((1,)) and Only((True,)) as one
class Only(_Check):
    """A validator that accepts these values and those that ask for nothing: null, false, [] and
    {}."""

    values: tuple[Any, ...] = ()

    def check(self, value: Any) -> Any:
        if asks_for_nothing(value):
            return value
        for accepted in self.values:
            if type(value) is type(accepted) and value == accepted:
                return value
        if not self.values:
            raise PydanticCustomError("unsupported", "is not supported")
        names = " or ".join(map(repr, self.values))
        raise PydanticCustomError(
            "unsupported", "is not supported, but for {names}", {"names": names}
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [None, False, [], {}, *self.values], "description": "Not supported."}


Unsupported = Annotated[Any, Only()]


def first_that_is_no_token_id(values: list[Any]) -> int | None:
    """Return the index of the first value that is no token id, None if all are.

    It goes in slices, between which other threads can run: there may be a million.
    """
    for start in range(0, len(values), _SLICE):
        part = values[start : start + _SLICE]
        if set(map(type, part)) == {int} and min(part) >= 0 and max(part) <= MAX_TOKEN_ID:
            continue
        return start + next(
            index
            for index, value in enumerate(part)
            if type(value) is not int or not 0 <= value <= MAX_TOKEN_ID
        )
    return None


@dataclass(frozen=True)
class TokenIds(_Check):
    """A validator of a list of so many token ids; pydantic's lets no other thread run meanwhile."""

    most: int
    least: int = 0

    def check(self, value: Any) -> Any:
        if not isinstance(value, list):
            raise PydanticCustomError("token_ids", "should be a list of token ids")
        for is_wrong, words, bound in (
            (len(value) < self.least, "at least", self.least),
            (len(value) > self.most, "at most", self.most),
        ):
            if is_wrong:
                raise PydanticCustomError(
                    "token_ids",
                    "should have {words} {bound} token ids, not {length}",
                    {"words": words, "bound": bound, "length": len(value)},
                )
        if (index := first_that_is_no_token_id(value)) is not None:
            raise PydanticCustomError(
                "token_ids",
                "item {index} should be a token id, an integer in [0, {most}]",
                {"index": index, "most": MAX_TOKEN_ID},
            )
        return value

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        token_id = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
        lengths = {"minItems": self.least, "maxItems": self.most}
        return {"type": "array", "items": token_id, **lengths}


Text = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Label = Annotated[str, Field(max_length=512)]  # a name that only the client understands
RequestId = Annotated[str, Field(pattern=r"^[!-~]+$", max_length=MAX_ID_CHARS)]

# Every list of a body has a bound, and stops at its first wrong item: reporting each of many takes
# seconds, in which no other request is served. A test checks all bodies.
Object = Annotated[dict[str, Any], Field(max_length=MAX_KEYS)]  # its members are checked elsewhere
StopStrings = Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
Stop = Annotated[
    Annotated[Text, Tag("string")] | Annotated[StopStrings, Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "string"),
]
Breakers = Annotated[list[Text], Field(max_length=MAX_BREAKERS, fail_fast=True)]
ToolChoice = Annotated[
    Annotated[str, Tag("mode")] | Annotated[Object, Tag("object")],
    Discriminator(lambda value: "object" if isinstance(value, dict) else "mode"),
]
BadWords = Annotated[list[Text], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIAS),
]


# Most tokens to generate; -1, as llama.cpp's clients send it, is as many as the context allows.
MaxTokens = Annotated[
    Annotated[int, Field(ge=1, le=MAX_INT)] | None,
    BeforeValidator(lambda value: None if type(value) is int and value == -1 else value),
]


class Speculative(Body):
    enabled: bool | None = Field(
        None, description="draft tokens, if the server has a drafter (yes)"
    )
    num_speculative_tokens: int | None = Field(
        None, ge=0, le=MAX_DRAFT_TOKENS, description="draft tokens a step; the answer is the same"
    )


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="a last chunk with the usage")
    continuous_usage_stats: bool | None = Field(None, description="the usage in every chunk")
    include_obfuscation: bool | None = Field(None, description="ignored: chunks are not padded")
