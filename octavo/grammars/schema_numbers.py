"""Numbers and listed values of JSON schemas as llguidance computes with them: as doubles, and as
64-bit integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

from octavo.grammars.schema_document import Schema
from octavo.grammars.schema_overlaps import key_of, type_of

_MAX_INTEGER = (1 << 63) - 1
_TOO_LARGE = 1 << 1000  # for a double, nearly


def numbers_in(value: Any) -> Iterator[int | float]:
    """Yield the numbers in a JSON value."""
    if isinstance(value, list | dict):
        for each in value if isinstance(value, list) else value.values():
            yield from numbers_in(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def is_double(number: float) -> bool:
    return isinstance(number, float) or (abs(number) < _TOO_LARGE and int(float(number)) == number)


def has_64_bits(number: float) -> bool:
    return abs(number) <= _MAX_INTEGER


def settled(schema: Schema) -> list[Any] | None:
    """Return the values that a schema lists, by ``enum`` and ``const``, without those that other
    keywords of it exclude; None if it lists none.

    Args:
        schema: has no keywords but those on a value as it is.
    """
    if "enum" not in schema and "const" not in schema:
        return None
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
    if "const" in schema:
        values = [value for value in values if key_of(value) == key_of(schema["const"])]
    checks = [(_CHECKS[key], limit) for key, limit in schema.items() if key in _CHECKS]
    return [value for value in values if all(check(value, limit) for check, limit in checks)]


def _of_type(value: Any, named: Any) -> bool:
    kind = type_of(value)
    names = named if isinstance(named, list) else [named]
    return kind in names or (kind == "integer" and "number" in names)


def _number(holds: Callable[[Fraction, Fraction], bool]) -> Callable[[Any, Any], bool]:
    def check(value: Any, limit: Any) -> bool:
        if type_of(value) not in ("integer", "number"):
            return True
        return holds(_exact(value), _exact(limit))

    return check


def _exact(number: Any) -> Fraction:
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def _size(
    kind: type[str] | type[list[Any]] | type[dict[str, Any]], holds: Callable[[int, Any], bool]
) -> Callable[[Any, Any], bool]:
    return lambda value, limit: not isinstance(value, kind) or holds(len(value), limit)


_CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "type": _of_type,
    "minimum": _number(lambda value, limit: value >= limit),
    "maximum": _number(lambda value, limit: value <= limit),
    "exclusiveMinimum": _number(lambda value, limit: value > limit),
    "exclusiveMaximum": _number(lambda value, limit: value < limit),
    "multipleOf": _number(lambda value, limit: value % limit == 0),
    "minLength": _size(str, lambda size, limit: size >= limit),
    "maxLength": _size(str, lambda size, limit: size <= limit),
    "minItems": _size(list, lambda size, limit: size >= limit),
    "maxItems": _size(list, lambda size, limit: size <= limit),
    "minProperties": _size(dict, lambda size, limit: size >= limit),
    "maxProperties": _size(dict, lambda size, limit: size <= limit),
    "required": lambda value, names: not isinstance(value, dict) or {*names} <= value.keys(),
}


def round_limits(schema: Schema) -> None:
    """Make limits narrower that are no doubles: llguidance would round them to the nearest one."""
    for key, towards in (
        *((key, math.inf) for key in ("minimum", "exclusiveMinimum")),
        *((key, -math.inf) for key in ("maximum", "exclusiveMaximum")),
    ):
        limit = schema.get(key)
        if isinstance(limit, bool) or not isinstance(limit, int):
            continue
        nearest = float(max(min(limit, _TOO_LARGE), -_TOO_LARGE))
        if (nearest < limit) if towards > 0 else (nearest > limit):
            nearest = math.nextafter(nearest, towards)
        if int(nearest) != limit:
            schema[key] = int(nearest)


def has_large_integers(schema: Schema, kinds: Iterable[str]) -> bool:
    """Return whether there are none but integers of more than 64 bits."""
    if "number" in kinds or "integer" not in kinds:
        return False
    low = max(schema.get("minimum", 0), schema.get("exclusiveMinimum", 0))
    high = min(schema.get("maximum", 0), schema.get("exclusiveMaximum", 0))
    return bool(low >= _MAX_INTEGER or high <= -_MAX_INTEGER)
