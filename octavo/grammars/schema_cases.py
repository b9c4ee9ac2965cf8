"""Conditions of JSON schemas on one property that has few values.

What they leave for each of these is shorter than all combinations of what they say and of their
opposites.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from octavo.grammars.schema_document import ANNOTATIONS, Schema
from octavo.grammars.schema_overlaps import key_of

_MAX_VALUES = 64
_CONDITION = frozenset(("if", "then", "else"))


class Condition(NamedTuple):
    """An ``if`` on a property.

    Args:
        schema: it has the keyword, and ``then`` or ``else``.
        place_in_all: its index in ``allOf``; None if it is in the whole.
        keys: those of the values of the property for which it holds.
        is_required: whether it fails without the property.
    """

    schema: Schema
    place_in_all: int | None
    name: str
    keys: frozenset[str]
    is_required: bool

    def holds(self, key: str | None) -> bool:
        """Return whether it holds for a value; None is for an object without the property."""
        return key in self.keys if key is not None else not self.is_required


class Case(NamedTuple):
    """Some values of a property, and for each condition whether it holds. Without values, the
    property is not there."""

    values: tuple[Any, ...]
    holds: tuple[bool, ...]


def conditions_in(schema: Schema) -> dict[str, list[Condition]]:
    """Return the conditions of a schema that are on one property each, by its name."""
    found: dict[str, list[Condition]] = {}
    parts: list[tuple[int | None, Schema]] = [(None, schema)]
    parts += [
        (i, part)
        for i, part in enumerate(schema.get("allOf") or ())
        if isinstance(part, dict) and part.keys() - ANNOTATIONS <= _CONDITION
    ]
    for index, part in parts:
        condition = _condition(part, index)
        if condition is not None:
            found.setdefault(condition.name, []).append(condition)
    return found


def _condition(schema: Schema, place_in_all: int | None) -> Condition | None:
    test = schema.get("if")
    if not isinstance(test, dict) or not schema.keys() & {"then", "else"}:
        return None
    keys = test.keys() - ANNOTATIONS
    properties = test.get("properties")
    if not keys <= {"properties", "required"} or not isinstance(properties, dict):
        return None
    if len(properties) != 1:
        return None
    ((name, value),) = properties.items()
    required = test.get("required", [])
    if not isinstance(value, dict) or not set(required) <= {name}:
        return None
    asserted = value.keys() - ANNOTATIONS
    if asserted == {"const"}:
        values = [value["const"]]
    elif asserted == {"enum"}:
        values = value["enum"]
    else:
        return None
    return Condition(schema, place_in_all, name, frozenset(map(key_of, values)), bool(required))


def cases_of(
    conditions: list[Condition], values: list[Any] | None, *, is_required: bool
) -> list[Case] | None:
    """Return the cases that differ in which conditions hold; None if there are too many values.

    Args:
        values: of the property.
        is_required: whether it is always there.
    """
    if values is None or len(values) > _MAX_VALUES:
        return None
    groups: dict[tuple[bool, ...], list[Any]] = {}
    for value in values:
        holds = tuple(condition.holds(key_of(value)) for condition in conditions)
        groups.setdefault(holds, []).append(value)
    cases = [Case(tuple(group), holds) for holds, group in groups.items()]
    if not is_required:
        cases.append(Case((), tuple(condition.holds(None) for condition in conditions)))
    return cases
