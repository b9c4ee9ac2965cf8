"""Fields of requests that constrain the answer, under the names of several servers.

All of them come to one `AskedConstraint`, which is made when a body is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from octavo.base.errors import InvalidRequestError
from octavo.core.structured_outputs import MAX_CHOICES, StructuredOutputs
from octavo.server.api.fields import Body, Label, NoEffect, Object, asks_for_nothing
from octavo.server.http.body import CONSTRAINT


def _object_or_text(value: Any) -> Any:
    if value is not None and not isinstance(value, dict | str | bool):
        raise PydanticCustomError("schema", "should be an object or a text")
    return value


# What is in it is checked where it is compiled.
Schema = Annotated[
    Any,
    PlainValidator(_object_or_text),
    WithJsonSchema({"type": ["object", "string", "boolean", "null"]}),
]
Choices = Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)]


@dataclass(frozen=True, slots=True)
class AskedConstraint:
    """A constraint, and the dotted path of the field by which the client has asked for it."""

    value: StructuredOutputs
    field: str

    @classmethod
    def of(cls, field: str, **values: Any) -> AskedConstraint:
        """Return the constraint with these fields of `StructuredOutputs`.

        Raises:
            InvalidRequestError: they are wrong; the error names ``field``.
        """
        try:
            return cls(StructuredOutputs(**values), field)
        except InvalidRequestError as error:
            raise error.with_field(field) from None


class ConstrainedBody(Body):
    """A body with fields that constrain the answer."""

    place: ClassVar[str] = ""  # of this object in the whole body, with a dot behind it

    _constraint: AskedConstraint | None = PrivateAttr(None)
    _is_read: bool = PrivateAttr(False)  # FastAPI validates a body again

    @property
    def constraint(self) -> AskedConstraint | None:
        """The constraint of the answer; None if it is free."""
        return self._constraint

    def _constraints(self) -> Iterator[AskedConstraint]:
        """Yield the constraint of each field that has one; raise InvalidRequestError for a field
        that is wrong."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _read_constraint(self) -> Self:
        if self._is_read:
            return self
        self._is_read = True
        try:
            for asked in self._constraints():
                if self._constraint is not None:
                    first, second = (each.field.split(".")[0] for each in (self._constraint, asked))
                    raise InvalidRequestError(f"give {first} or {second}, not both", second)
                self._constraint = AskedConstraint(asked.value, self.place + asked.field)
        except InvalidRequestError as error:
            raise _as_validation_error(type(self).__name__, error) from None
        return self


def _as_validation_error(model: str, error: InvalidRequestError) -> ValidationError:
    """Return the error as one of pydantic's, with its place."""
    place = tuple((error.field or "").split("."))
    message = PydanticCustomError(CONSTRAINT, "{message}", {"message": error.message})
    return ValidationError.from_exception_data(
        model, [{"type": message, "loc": place, "input": None}]
    )


# -- response_format -----------------------------------------------------------------------------


class JsonSchemaFormat(Body):
    """OpenAI's ``json_schema`` of a response format."""

    name: Label | None = Field(None, description="for people")
    description: str | None = Field(None, description="for people")
    schema_: Schema = Field(None, alias="schema", description="a JSON schema")
    strict: bool | None = Field(
        None, description="objects have no properties but those of the schema, if it does not say"
    )


class ResponseFormat(Body):
    """The form that an answer must have.

    Types ``text``, ``json_object`` and ``json_schema`` are OpenAI's, ``structural_tag`` is vLLM's
    and SGLang's. ``schema`` beside the type is llama.cpp's, ``json`` and ``regex`` with their
    ``value`` are TGI's.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag", "json", "regex"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Schema = Field(None, alias="schema", description="a JSON schema")
    value: Schema = Field(None, description="a JSON schema, or a regular expression")
    format: Object | None = Field(None, description="of a structural_tag")
    structures: Annotated[list[Object], Field(max_length=256, fail_fast=True)] | None = Field(
        None, description="of a structural_tag in the older form"
    )
    triggers: Annotated[list[Label], Field(max_length=256, fail_fast=True)] | None = None

    def constraint(self, field: str) -> AskedConstraint | None:
        """Return what it asks for; None if that is any text.

        Args:
            field: the client's name of it.

        Raises:
            InvalidRequestError: it lacks a part, or has one that is not of its type.
        """
        of_type = _PARTS[self.type]
        parts = {}
        for name, info in type(self).model_fields.items():
            part, value = info.alias or name, getattr(self, name)
            if part == "type" or value is None:
                continue
            if part in of_type:
                parts[part] = value
            elif not asks_for_nothing(value):
                raise InvalidRequestError(f"is no part of type {self.type!r}", f"{field}.{part}")
        if self.type == "text":
            return None
        if self.type == "json_object" and not any(parts.values()):
            return AskedConstraint.of(field, json_object=True)
        if not parts:
            raise InvalidRequestError(f"{of_type[0]} is required for type {self.type!r}", field)
        if self.type == "structural_tag":
            return AskedConstraint.of(field, structural_tag={"type": self.type, **parts})
        if len(parts) > 1:
            raise InvalidRequestError(f"give {' or '.join(parts)}, not both", field)
        ((part, value),) = parts.items()
        field = f"{field}.{part}"
        if self.type == "regex":
            return AskedConstraint.of(field, regex=value)
        if part == "json_schema":
            return named_schema(field, {"schema": value.schema_, "strict": value.strict})
        if self.type == "json_schema" and part == "value":
            return named_schema(field, value)
        return AskedConstraint.of(field, json=value)


# By type, the parts of which it has one; those of a structural_tag are checked with its grammar.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema", "value"),
    "json_schema": ("json_schema", "schema", "value"),
    "json": ("value",),
    "regex": ("value",),
    "structural_tag": ("format", "structures", "triggers"),
}


def named_schema(field: str, named: Any) -> AskedConstraint:
    """Return the constraint of a ``{"name", "schema", "strict"}``, as OpenAI and TGI have it."""
    if not isinstance(named, Mapping) or named.get("schema") is None:
        raise InvalidRequestError("schema is required", field)
    return AskedConstraint.of(
        f"{field}.schema",
        json=named["schema"],
        disable_additional_properties=named.get("strict") is True,
    )


# -- fields of octavo's, OpenAI's and llama.cpp's routes -----------------------------------------


class ConstraintFields(ConstrainedBody):
    """Fields of which one may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: Object | None = Field(
        None,
        description="json, regex, choice, grammar, json_object or structural_tag, and how, as in "
        "vLLM",
    )
    guided_json: Schema = Field(None, description="a JSON schema, or its text")
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = Field(None, description="needs guided_json")
    guided_decoding_backend: Annotated[Label | None, NoEffect] = None
    json_schema: Schema = Field(None, description="a JSON schema, or its text")
    grammar: str | None = Field(None, description="in GBNF or Lark")
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Schema = Field(None, description="an object, or its text")

    def _constraints(self) -> Iterator[AskedConstraint]:
        if self.response_format is not None:
            asked = self.response_format.constraint("response_format")
            if asked is not None:
                yield asked
        if self.structured_outputs:
            if "preamble" in self.structured_outputs:
                raise InvalidRequestError("is no field of requests", "structured_outputs.preamble")
            value = StructuredOutputs.of(self.structured_outputs)
            yield AskedConstraint(value, f"structured_outputs.{value.constraint.kind}")
        for name, kind in _KINDS.items():
            given = getattr(self, name)
            if given is None or given is False or given in ("", []):
                continue
            pattern = (self.guided_whitespace_pattern or None) if name == "guided_json" else None
            yield AskedConstraint.of(name, **{kind: given}, whitespace_pattern=pattern)
        if self.guided_whitespace_pattern and self.guided_json is None:
            raise InvalidRequestError("needs guided_json", "guided_whitespace_pattern")


# Fields, and what they are in `StructuredOutputs`. The first four are of older vLLM, others are
# SGLang's and llama.cpp's.
_KINDS: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
