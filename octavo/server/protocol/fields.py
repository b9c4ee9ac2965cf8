"""What the fields of requests are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from octavo.core.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_STRINGS
from octavo.server.settings import MAX_ID_CHARS, MAX_STOP_CHARS

MAX_TOKEN_ID = 2**31 - 1
MAX_TOKEN_IDS = 1 << 18  # in a list of tokens that are allowed
MAX_STOP_TOKEN_IDS = 1024
MAX_TIMEOUT = 86_400.0  # seconds


class Body(BaseModel):
    """Nothing is converted, and nothing is ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, eq=False)  # `Annotated` takes what is equal for the same, as 1 and True
class Only:
    """Accepts these values and those that ask for nothing: null, false, [] and {}."""

    values: tuple[Any, ...] = ()

    def check(self, value: Any) -> Any:
        for accepted in (None, False, [], {}, *self.values):
            if type(value) is type(accepted) and value == accepted:
                return value
        if not self.values:
            raise PydanticCustomError("unsupported", "is not supported")
        names = " or ".join(map(repr, self.values))
        raise PydanticCustomError(
            "unsupported", "is not supported, but for {names}", {"names": names}
        )

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [None, False, [], {}, *self.values], "description": "Not supported."}


Unsupported = Annotated[Any, Only()]

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Label = Annotated[str, Field(max_length=512)]  # a name that only the client understands
RequestId = Annotated[str, Field(pattern=r"^[!-~]+$", max_length=MAX_ID_CHARS)]

Stop = Annotated[
    Annotated[Text, Tag("string")]
    | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS), Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "string"),
]
BadWords = Annotated[list[Text], Field(max_length=MAX_BAD_WORDS)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIAS),
]


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="a last chunk with the usage")
    continuous_usage_stats: bool | None = Field(None, description="the usage in every chunk")
    include_obfuscation: bool | None = Field(None, description="ignored: chunks are not padded")


class ResponseFormat(Body):
    type: Annotated[str, Only(("text",))] = Field(description="only text is supported")
