"""Facts of JSON schemas that can be told without trying values: types, the values where there are
few, and whether two of them exclude each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from octavo.grammars.schema_document import Schema

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_DEPTH = 12
_MAX_VALUES = 4096

# Returns what a schema with a reference refers to.
Resolve = Callable[[Schema], Any]


def type_of(value: Any) -> str:
    """Return the type of a JSON value; that of a whole number is integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def key_of(value: Any) -> str:
    """Return a text that is the same for equal values of JSON, such as 1 and 1.0."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(key_of, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(k)}:{key_of(value[k])}' for k in sorted(value))}}}"
    return json.dumps(value)


def types_of(schema: Any, resolve: Resolve, depth: int = 0) -> frozenset[str]:
    """Return the types that values of a schema have; maybe too many. Of these, ``number`` is that
    of numbers that are not whole."""
    if schema is False:
        return frozenset()
    found = frozenset(TYPES)
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return found
    if "type" in schema:
        named = schema["type"]
        named = set(named) if isinstance(named, list) else {named}
        found &= named | ({"integer"} if "number" in named else set())
    if "const" in schema:
        found &= {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= {type_of(value) for value in schema["enum"]}
    for each in conjuncts_of(schema, resolve, depth):
        found &= types_of(each, resolve, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = (types_of(each, resolve, depth + 1) for each in schema[key])
            found &= frozenset().union(*parts)
    return found


def values_of(schema: Any, resolve: Resolve, depth: int = 0) -> list[Any] | None:
    """Return all values that a schema may have, and maybe more; None if they are too many."""
    if schema is False:
        return []
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    if "const" in schema:
        return [schema["const"]]
    kinds = types_of(schema, resolve, depth)
    if isinstance(schema.get("enum"), list):
        return [value for value in schema["enum"] if type_of(value) in kinds][:_MAX_VALUES]
    if kinds <= {"boolean", "null"}:
        return [v for v in (False, True, None) if type_of(v) in kinds]
    for each in conjuncts_of(schema, resolve, depth):
        if (values := values_of(each, resolve, depth + 1)) is not None:
            return values
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [values_of(each, resolve, depth + 1) for each in schema[key]]
            if all(part is not None for part in parts):
                return [value for part in parts for value in part or ()][:_MAX_VALUES]
    return None


def conjuncts_of(schema: Schema, resolve: Resolve, depth: int = 0) -> Iterator[Any]:
    """Yield the schemas within one that hold for all of its values."""
    if isinstance(schema.get("allOf"), list):
        yield from schema["allOf"]
    if depth <= _MAX_DEPTH and "$ref" in schema:
        yield resolve(schema)


def exclude_each_other(one: Any, other: Any, resolve: Resolve, depth: int = 0) -> bool:
    """Return whether no value can satisfy both of two schemas; maybe false where none does."""
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > _MAX_DEPTH:
        return False
    both = types_of(one, resolve) & types_of(other, resolve)
    if not both:
        return True
    values, others = values_of(one, resolve), values_of(other, resolve)
    if values is not None and others is not None:
        return not set(map(key_of, values)) & set(map(key_of, others))
    for first, second in ((one, other), (other, one)):
        for each in conjuncts_of(first, resolve, depth):
            if exclude_each_other(each, second, resolve, depth + 1):
                return True
        for key in ("anyOf", "oneOf"):
            options = first.get(key)
            if isinstance(options, list) and all(
                exclude_each_other(each, second, resolve, depth + 1) for each in options
            ):
                return True
    excluded = {
        "object": lambda: _exclude_as_objects(one, other, resolve, depth),
        "integer": lambda: _exclude_as_numbers(one, other),
        "number": lambda: _exclude_as_numbers(one, other),
    }
    return all(kind in excluded and excluded[kind]() for kind in both)


def _exclude_as_objects(one: Schema, other: Schema, resolve: Resolve, depth: int) -> bool:
    for first, second in ((one, other), (other, one)):
        for name in first.get("required") or ():
            there = _property(second, name)
            if exclude_each_other(_property(first, name), there, resolve, depth + 1):
                return True
    return False


def _property(schema: Schema, name: Any) -> Any:
    """Return the schema of a property; maybe a wider one."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))


def _exclude_as_numbers(one: Schema, other: Schema) -> bool:
    for first, second in ((one, other), (other, one)):
        for least in ("minimum", "exclusiveMinimum"):
            for most in ("maximum", "exclusiveMaximum"):
                low, high = _limit(first, least), _limit(second, most)
                if low is None or high is None:
                    continue
                are_both_in = least == "minimum" and most == "maximum"
                if low > high or (low == high and not are_both_in):
                    return True
    return False


def _limit(schema: Schema, key: str) -> float | None:
    """Return a limit; None if there is none. In draft 4, true may be there."""
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
