"""Facts of JSON schemas that can be told without trying values: types, the values where there are
few, and whether two of them exclude each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from octavo.grammars.schema_document import Schema

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_DEPTH = 12
_MAX_VALUES = 4096
_MAX_LOOKS = 100_000  # at schemas, all in all; more is not known


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


class Overlaps:
    """Tells what it can of the schemas of one document, within bounds.

    Args:
        resolve: returns what a schema with a reference refers to.
    """

    def __init__(self, resolve: Callable[[Schema], Any]):
        self._resolve = resolve
        self._num_looks = 0

    def _is_too_deep(self, depth: int) -> bool:
        self._num_looks += 1
        return depth > _MAX_DEPTH or self._num_looks > _MAX_LOOKS

    def types_of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Return the types that values of a schema have; maybe too many. Of these, ``number`` is
        that of numbers that are not whole."""
        if schema is False:
            return frozenset()
        found = frozenset(TYPES)
        if not isinstance(schema, dict) or self._is_too_deep(depth):
            return found
        if "type" in schema:
            named = schema["type"]
            named = set(named) if isinstance(named, list) else {named}
            found &= named | ({"integer"} if "number" in named else set())
        if "const" in schema:
            found &= {type_of(schema["const"])}
        if isinstance(schema.get("enum"), list):
            found &= {type_of(value) for value in schema["enum"]}
        for each in self._conjuncts_of(schema, depth):
            found &= self.types_of(each, depth + 1)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                parts = (self.types_of(each, depth + 1) for each in schema[key])
                found &= frozenset().union(*parts)
        return found

    def values_of(self, schema: Any, depth: int = 0) -> list[Any] | None:
        """Return all values that a schema may have, and maybe more; None if they are too many."""
        if schema is False:
            return []
        if not isinstance(schema, dict) or self._is_too_deep(depth):
            return None
        if "const" in schema:
            return [schema["const"]]
        kinds = self.types_of(schema, depth)
        if isinstance(schema.get("enum"), list):
            return [value for value in schema["enum"] if type_of(value) in kinds][:_MAX_VALUES]
        if kinds <= {"boolean", "null"}:
            return [v for v in (False, True, None) if type_of(v) in kinds]
        for each in self._conjuncts_of(schema, depth):
            if (values := self.values_of(each, depth + 1)) is not None:
                return values
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                parts = [self.values_of(each, depth + 1) for each in schema[key]]
                if all(part is not None for part in parts):
                    return [value for part in parts for value in part or ()][:_MAX_VALUES]
        return None

    def _conjuncts_of(self, schema: Schema, depth: int = 0) -> Iterator[Any]:
        """Yield the schemas within one that hold for all of its values."""
        if isinstance(schema.get("allOf"), list):
            yield from schema["allOf"]
        if depth <= _MAX_DEPTH and "$ref" in schema:
            yield self._resolve(schema)

    def exclude_each_other(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Return whether no value can satisfy both of two schemas; maybe false where none does."""
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or self._is_too_deep(depth):
            return False
        both = self.types_of(one) & self.types_of(other)
        if not both:
            return True
        values, others = self.values_of(one), self.values_of(other)
        if values is not None and others is not None:
            return not set(map(key_of, values)) & set(map(key_of, others))
        for first, second in ((one, other), (other, one)):
            for each in self._conjuncts_of(first, depth):
                if self.exclude_each_other(each, second, depth + 1):
                    return True
            for key in ("anyOf", "oneOf"):
                options = first.get(key)
                if isinstance(options, list) and all(
                    self.exclude_each_other(each, second, depth + 1) for each in options
                ):
                    return True
        excluded = {
            "object": lambda: self._exclude_as_objects(one, other, depth),
            "integer": lambda: _exclude_as_numbers(one, other),
            "number": lambda: _exclude_as_numbers(one, other),
        }
        return all(kind in excluded and excluded[kind]() for kind in both)

    def overlapping(self, parts: list[Any]) -> set[tuple[int, int]]:
        """Return which of several schemas may have values in common, by their indices, the smaller
        one first; maybe too many."""
        return {
            (i, j)
            for (i, one), (j, other) in combinations(enumerate(parts), 2)
            if not self.exclude_each_other(one, other)
        }

    def discriminator(self, parts: list[Any]) -> str | None:
        """Return the name of a property whose values tell schemas of objects apart, where it is
        there; None if none is found. One that they require goes first."""
        if not all(self.types_of(part) <= {"object"} and isinstance(part, dict) for part in parts):
            return None
        first = self._with_properties(parts[0]) if parts else {}
        names = [*(first.get("required") or ()), *(first.get("properties") or ())]
        return next((name for name in names if self._are_told_apart_by(name, parts)), None)

    def _with_properties(self, part: Schema) -> Schema:
        found = self._resolve(part) if "$ref" in part and "properties" not in part else part
        return found if isinstance(found, dict) else {}

    def _are_told_apart_by(self, name: str, parts: list[Schema]) -> bool:
        seen: set[str] = set()
        for part in parts:
            values = self.values_of(_property(self._with_properties(part), name))
            keys = set(map(key_of, values or ()))
            if not keys or keys & seen:
                return False
            seen |= keys
        return True

    def _exclude_as_objects(self, one: Schema, other: Schema, depth: int) -> bool:
        for first, second in ((one, other), (other, one)):
            for name in first.get("required") or ():
                there = _property(second, name)
                if self.exclude_each_other(_property(first, name), there, depth + 1):
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
