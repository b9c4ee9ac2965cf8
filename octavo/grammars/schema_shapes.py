"""Values that keywords of JSON schemas may have: others are refused with their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.base.errors import ConstraintError


def check_keywords(part: dict[str, Any], place: str) -> None:
    """Check the keywords of one schema, but not the schemas in it.

    Raises:
        ConstraintError: a keyword has a value that it cannot have; says which and where.
    """
    for key in part.keys() & _SHAPES.keys():
        is_right, name = _SHAPES[key]
        if not is_right(part[key]):
            raise ConstraintError(f"has at {place}/{key} {part[key]!r:.60}, which is no {name}")
    kinds = part.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            known = ", ".join(sorted(_TYPES))
            raise ConstraintError(
                f"has at {place}/type {kind!r:.60}, which is no type; {known} are"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and int(value) == value


def _is_limit(value: Any) -> bool:
    return isinstance(value, bool) or _is_number(value)  # true in draft 4


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_Check = Callable[[Any], bool]
_SHAPES: dict[str, tuple[_Check, str]] = {
    **dict.fromkeys(
        ("allOf", "anyOf", "oneOf", "prefixItems", "enum"),
        (lambda value: isinstance(value, list), "list"),
    ),
    **dict.fromkeys(
        ("properties", "patternProperties", "dependentSchemas", "dependencies"),
        (lambda value: isinstance(value, dict), "object"),
    ),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_are_texts, value.values())),
        "object of lists of names",
    ),
    "required": (_are_texts, "list of names"),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
         "minContains", "maxContains"),
        (_is_count, "whole number from 0 on"),
    ),
    **dict.fromkeys(("minimum", "maximum"), (_is_number, "number")),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (_is_limit, "number")),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "number above 0"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    **dict.fromkeys(
        ("pattern", "$ref", "$dynamicRef", "$recursiveRef"),
        (lambda value: isinstance(value, str), "text"),
    ),
}  # fmt: skip
_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
