"""`StructuredOutputs`, the constraint that a request puts on its answer. Names of fields are
vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from octavo.base.errors import InvalidRequestError

# Each bounds the work of one request. Schemas of large agents, all tools together, have 100 kB.
MAX_CHARS = 1 << 18
MAX_CHOICES = 4096
MAX_DEPTH = 64  # of objects and lists in a schema: vLLM's bound

_FIELD = "structured_outputs"
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class Constraint(NamedTuple):
    """The one thing that an answer must be: the name of the field that says it, and its text."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, repr=False)
class StructuredOutputs:
    """A constraint on the text of an answer; just one of the first six fields is given.

    Args:
        json: a JSON schema, as an object or as text; or a class of pydantic's.
        regex: a regular expression that the whole answer matches.
        choice: texts, of which the answer is one.
        grammar: a grammar in GBNF (llama.cpp's notation) or in Lark's.
        json_object: True for any JSON object.
        structural_tag: tags, within which a schema holds, while the text around them is free
            (vLLM's object, or its text).
        disable_any_whitespace: JSON without blanks and newlines.
        disable_additional_properties: objects have no properties but those that the schema names,
            where it does not say.
        whitespace_pattern: a regular expression of the white space between the parts of JSON.
        is_bounded: whether runs of white space, and of digits in numbers, have a bound, which keeps
            models from going on with them for ever.
        begins_after: text after which the constraint begins, such as the end of a thought; what
            comes before it, and whether it comes, is free.
        begins_with: text with which the answer must begin for ``begins_after`` to count, such as
            the beginning of a thought; else the constraint holds from the start.
        preamble: a grammar in Lark's notation of all that comes before the constraint, instead of
            free text: the thoughts and headers of a chat format, which sets it. ``begins_after`` is
            the text that it ends with.

    Raises:
        InvalidRequestError: none or several are given, or one is of the wrong type, or too large.
    """

    json: Any = None
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    is_bounded: bool = True
    begins_after: str | None = None
    begins_with: str | None = None
    preamble: str | None = None

    def __post_init__(self) -> None:
        def store(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if self.json_object is False:
            store("json_object", None)
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"give one of {', '.join(_KINDS)}, not {' and '.join(given) or 'none'}", _FIELD
            )
        (kind,) = given
        if kind in ("json", "structural_tag"):
            store(kind, _json_text(getattr(self, kind), f"{_FIELD}.{kind}"))
        elif kind == "choice":
            store(kind, _choices(self.choice))
        elif kind == "json_object":
            _flag(kind, self.json_object)
        else:
            _text(kind, getattr(self, kind))
        for name in ("disable_any_whitespace", "disable_additional_properties", "is_bounded"):
            _flag(name, getattr(self, name))
        for name in ("whitespace_pattern", "begins_after", "begins_with", "preamble"):
            if getattr(self, name) is not None:
                _text(name, getattr(self, name))
        if self.begins_with is not None and self.begins_after is None:
            raise InvalidRequestError("needs begins_after", f"{_FIELD}.begins_with")

    @classmethod
    def of(cls, values: Any) -> StructuredOutputs:
        """Return the object of a mapping with the same fields; an object is returned as it is."""
        if isinstance(values, cls):
            return values
        if not isinstance(values, Mapping):  # vLLM's StructuredOutputsParams, field by field
            names = [each.name for each in fields(cls)]
            values = {name: getattr(values, name) for name in names if hasattr(values, name)}
            if not values:
                raise InvalidRequestError("must be an object with a constraint", _FIELD)
        known = {each.name for each in fields(cls)}
        if unknown := set(values) - known:
            raise InvalidRequestError(
                f"has no field {min(map(str, unknown))!r}; it has {', '.join(sorted(known))}",
                _FIELD,
            )
        return cls(**values)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    def __repr__(self) -> str:
        given = (f"{name}={value!r}" for name, value in self.to_dict().items())
        return f"{type(self).__name__}({', '.join(given)})"

    @property
    def constraint(self) -> Constraint:
        """The field that is given, as text: choices are a JSON list, and any object is a schema."""
        kind = self.kind
        if kind == "json_object":
            return Constraint("json", '{"type": "object"}')
        value = getattr(self, kind)
        return Constraint(kind, json.dumps(value) if kind == "choice" else value)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, of which ``of`` makes an equal
        object."""
        defaults = {each.name: each.default for each in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


# vLLM's name of it.
StructuredOutputsParams = StructuredOutputs


def _json_text(value: Any, field: str) -> str:
    """Return a schema as text, with its properties in their order."""
    if isinstance(value, str):
        return _text(field.rpartition(".")[2], value)
    for method in ("model_json_schema", "json_schema"):  # pydantic's BaseModel, and TypeAdapter
        if callable(make := getattr(value, method, None)):
            value = make()
            break
    if not isinstance(value, Mapping | bool):
        raise InvalidRequestError(
            f"must be a JSON schema or a class of pydantic's, not {type(value).__name__}", field
        )
    _check_depth(value, field)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"is no JSON: {error}", field) from None
    return _text(field.rpartition(".")[2], text)


def _check_depth(value: Any, field: str) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"is nested more than {MAX_DEPTH} deep", field)
        below: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                below += each.values()
            elif isinstance(each, list | tuple):
                below += each
        level = [each for each in below if isinstance(each, Mapping | list | tuple)]


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidRequestError("must be a list of texts", f"{_FIELD}.choice")
    choices = tuple(value)
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(
            f"must have from 1 to {MAX_CHOICES} texts, not {len(choices)}", f"{_FIELD}.choice"
        )
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise InvalidRequestError(
                f"must hold texts that are not empty, not {choice!r:.80}", f"{_FIELD}.choice"
            )
    if (total := sum(map(len, choices))) > MAX_CHARS:
        raise InvalidRequestError(
            f"at most {MAX_CHARS} characters in all, not {total}", f"{_FIELD}.choice"
        )
    return choices


def _text(name: str, value: Any) -> str:
    field = f"{_FIELD}.{name}"
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"must be a text that is not empty, not {value!r:.80}", field)
    if len(value) > MAX_CHARS:
        raise InvalidRequestError(f"at most {MAX_CHARS} characters, not {len(value)}", field)
    return value


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"must be true or false, not {value!r:.80}", f"{_FIELD}.{name}")
