"""Opposites of JSON schemas: for each keyword, what a value is like that does not satisfy it.

All that satisfies an opposite does not satisfy the schema. A few values do neither: numbers that
are not whole where the schema is of integers, and those that are found beyond the first items of a
list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

from octavo.base.errors import ConstraintError
from octavo.grammars.json_patterns import pattern_of_others
from octavo.grammars.schema_document import Schema, SchemaDocument, pointed
from octavo.grammars.schema_overlaps import TYPES, type_of

# Where an item that decides may be: the first ones of a list.
NUM_FIRST_ITEMS = 8
_MAX_TEXTS, _MAX_CHARS = 1000, 100
_MAX_DEPTH = 50
NEVER = False


class Opposites:
    """Makes opposites of the parts of a document.

    Args:
        rewritten: returns a part as llguidance takes it.
        count: is told the place of each part, and raises where they are too many.
    """

    def __init__(
        self,
        document: SchemaDocument,
        rewritten: Callable[[Any, str], Any],
        count: Callable[[str], None],
    ):
        self._document, self._rewritten, self._count = document, rewritten, count
        self._underway: set[int] = set()

    def of(self, schema: Any, place: str) -> Any:
        """Return the opposite of a schema, as llguidance takes it.

        Raises:
            ConstraintError: of which keyword there is none.
        """
        if isinstance(schema, bool):
            return not schema
        self._count(place)
        if id(schema) in self._underway or len(self._underway) > _MAX_DEPTH:
            raise no_opposite("$ref", place)
        self._underway.add(id(schema))
        try:
            return any_of([self._of_keyword(schema, key, place) for key in schema])
        finally:
            self._underway.remove(id(schema))

    def _of_keyword(self, schema: Schema, key: str, place: str) -> Any:
        if self._document.has_lone_references and "$ref" in schema and key != "$ref":
            return NEVER
        make = _OPPOSITES.get(key)
        if make is None:  # a keyword that says nothing by itself, or none
            if key in _WITHOUT and schema[key] not in (True, {}, []):
                raise no_opposite(key, place)
            return NEVER
        return make(self, schema, place)

    # -- of all types ------------------------------------------------------------------------

    def _type(self, schema: Schema, place: str) -> Any:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        is_number = "number" in named or "integer" in named
        out = {*named, "integer", *(["number"] if is_number else [])}
        return of_types(kind for kind in TYPES if kind not in out)

    def _const(self, schema: Schema, place: str) -> Any:
        return self._none_of([schema["const"]], place)

    def _enum(self, schema: Schema, place: str) -> Any:
        return self._none_of(schema["enum"], place)

    def _none_of(self, values: list[Any], place: str) -> Any:
        options = []
        for kind in ("null", "boolean", "number", "string", "array", "object"):
            kinds = ("number", "integer") if kind == "number" else (kind,)
            out = [value for value in values if type_of(value) in kinds]
            options.append(self._without(kind, out, place))
        return any_of(options)

    def _without(self, kind: str, values: list[Any], place: str) -> Any:
        """Return a type without some of its values."""
        if not values:
            return {"type": kind}
        if kind == "null":
            return NEVER
        if kind == "boolean":
            return any_of([{"const": v} for v in (False, True) if v not in values])
        if kind == "number":
            return all_of(
                [{"type": "number"}]
                + [{"anyOf": [{"exclusiveMaximum": v}, {"exclusiveMinimum": v}]} for v in values]
            )
        if kind == "string":
            if len(values) > _MAX_TEXTS or any(len(each) > _MAX_CHARS for each in values):
                raise no_opposite("enum", place)
            return {"type": "string", "pattern": pattern_of_others(values)}
        return all_of([self._other_than(value, place) for value in values])

    def _other_than(self, value: list[Any] | Schema, place: str) -> Any:
        """Return a schema of lists, or of objects, without one of them."""
        size = len(value)
        if isinstance(value, list):
            items = [item_is(self._none_of([each], place), i) for i, each in enumerate(value)]
            more: Schema = {"type": "array", "minItems": size + 1}
            return any_of([_fewer("array", "maxItems", size), more, *items])
        more = {"type": "object", "required": list(value), "minProperties": size + 1}
        values = [has(name, self._none_of([each], place)) for name, each in value.items()]
        return any_of([more, *map(lacks, value), *values])

    def _allOf(self, schema: Schema, place: str) -> Any:
        parts = enumerate(schema["allOf"])
        return any_of([self.of(each, f"{place}/allOf/{i}") for i, each in parts])

    def _anyOf(self, schema: Schema, place: str) -> Any:
        parts = enumerate(schema["anyOf"])
        return all_of([self.of(each, f"{place}/anyOf/{i}") for i, each in parts])

    def _oneOf(self, schema: Schema, place: str) -> Any:
        """None of them, or two of them."""
        parts = [(each, f"{place}/oneOf/{i}") for i, each in enumerate(schema["oneOf"])]
        none = all_of([self.of(each, where) for each, where in parts])
        rewritten = [self._rewritten(each, where) for each, where in parts]
        return any_of([none, *(all_of(list(pair)) for pair in combinations(rewritten, 2))])

    def _not(self, schema: Schema, place: str) -> Any:
        return self._rewritten(schema["not"], f"{place}/not")

    def _if(self, schema: Schema, place: str) -> Any:
        condition, where = schema["if"], f"{place}/if"
        options = []
        if "then" in schema:
            opposite = self.of(schema["then"], f"{place}/then")
            options.append(all_of([self._rewritten(condition, where), opposite]))
        if "else" in schema:
            opposite = self.of(schema["else"], f"{place}/else")
            options.append(all_of([self.of(condition, where), opposite]))
        return any_of(options)

    def _ref(self, schema: Schema, place: str) -> Any:
        return self.of(*self._document.referred(schema, place))

    # -- of numbers and texts ----------------------------------------------------------------

    def _minimum(self, schema: Schema, place: str) -> Any:
        return {"type": "number", "exclusiveMaximum": schema["minimum"]}

    def _maximum(self, schema: Schema, place: str) -> Any:
        return {"type": "number", "exclusiveMinimum": schema["maximum"]}

    def _exclusiveMinimum(self, schema: Schema, place: str) -> Any:
        return {"type": "number", "maximum": schema["exclusiveMinimum"]}

    def _exclusiveMaximum(self, schema: Schema, place: str) -> Any:
        return {"type": "number", "minimum": schema["exclusiveMaximum"]}

    def _minLength(self, schema: Schema, place: str) -> Any:
        return _fewer("string", "maxLength", schema["minLength"])

    def _maxLength(self, schema: Schema, place: str) -> Any:
        return {"type": "string", "minLength": int(schema["maxLength"]) + 1}

    # -- of objects --------------------------------------------------------------------------

    def _required(self, schema: Schema, place: str) -> Any:
        return any_of([lacks(name) for name in schema["required"]])

    def _properties(self, schema: Schema, place: str) -> Any:
        options = []
        for name, each in schema["properties"].items():
            options.append(has(name, self.of(each, f"{place}/properties/{pointed(name)}")))
        return any_of(options)

    def _additionalProperties(self, schema: Schema, place: str) -> Any:
        if schema["additionalProperties"] in (True, {}):
            return NEVER
        raise no_opposite("additionalProperties", place)

    def _minProperties(self, schema: Schema, place: str) -> Any:
        return _fewer("object", "maxProperties", schema["minProperties"])

    def _maxProperties(self, schema: Schema, place: str) -> Any:
        return {"type": "object", "minProperties": int(schema["maxProperties"]) + 1}

    def _dependentRequired(self, schema: Schema, place: str) -> Any:
        needs = schema["dependentRequired"].items()
        return any_of([all_of([has(name), lacks(each)]) for name, names in needs for each in names])

    def _dependentSchemas(self, schema: Schema, place: str) -> Any:
        where = f"{place}/dependentSchemas"
        return any_of(
            [
                all_of([has(name), self.of(each, f"{where}/{pointed(name)}")])
                for name, each in schema["dependentSchemas"].items()
            ]
        )

    # -- of lists ----------------------------------------------------------------------------

    def _minItems(self, schema: Schema, place: str) -> Any:
        return _fewer("array", "maxItems", schema["minItems"])

    def _maxItems(self, schema: Schema, place: str) -> Any:
        return {"type": "array", "minItems": int(schema["maxItems"]) + 1}

    def _prefixItems(self, schema: Schema, place: str) -> Any:
        parts = enumerate(schema["prefixItems"])
        return any_of([item_is(self.of(e, f"{place}/prefixItems/{i}"), i) for i, e in parts])

    def _items(self, schema: Schema, place: str) -> Any:
        if isinstance(schema["items"], list):
            raise no_opposite("items", place)
        first = len(schema.get("prefixItems") or ())
        opposite = self.of(schema["items"], f"{place}/items")
        return any_of([item_is(opposite, first + i) for i in range(NUM_FIRST_ITEMS)])

    def _contains(self, schema: Schema, place: str) -> Any:
        if schema.get("minContains", 1) != 1 or "maxContains" in schema:
            raise no_opposite("contains", place)
        opposite = self.of(schema["contains"], f"{place}/contains")
        return {"type": "array", **({"maxItems": 0} if opposite is NEVER else {"items": opposite})}


_OPPOSITES: dict[str, Callable[[Opposites, Schema, str], Any]] = {
    key: getattr(Opposites, f"_{key.removeprefix('$')}")
    for key in (
        *("type", "const", "enum", "allOf", "anyOf", "oneOf", "not", "if", "$ref"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength"),
        *("required", "properties", "additionalProperties", "minProperties", "maxProperties"),
        *("dependentRequired", "dependentSchemas"),
        *("minItems", "maxItems", "prefixItems", "items", "contains"),
    )
}
# Keywords without an opposite. Any others are names that say nothing.
_WITHOUT = frozenset(
    ("pattern", "format", "multipleOf", "patternProperties", "propertyNames", "uniqueItems",
     "unevaluatedProperties", "unevaluatedItems", "dependencies", "additionalItems", "$dynamicRef",
     "$recursiveRef")
)  # fmt: skip


def no_opposite(key: str, place: str) -> ConstraintError:
    return ConstraintError(f"there is no opposite of {key!r} at {place}", None, "unsupported")


def any_of(options: list[Any]) -> Any:
    """Return a schema of what satisfies one of several."""
    options = [each for each in options if each is not NEVER]
    if any(each is True or each == {} for each in options):
        return True
    if len(options) == 1:
        return options[0]
    return {"anyOf": options} if options else NEVER


def all_of(parts: list[Any]) -> Any:
    """Return a schema of what satisfies all of several."""
    if any(each is NEVER for each in parts):
        return NEVER
    parts = [each for each in parts if each is not True and each != {}]
    if len(parts) == 1:
        return parts[0]
    return {"allOf": parts} if parts else True


def has(name: str, value: Any = True) -> Any:
    """Return a schema of objects with a property."""
    if value is NEVER:
        return NEVER
    made: Schema = {"type": "object", "required": [name]}
    return made if value is True else {**made, "properties": {name: value}}


def lacks(name: str) -> Schema:
    """Return a schema of objects without a property."""
    return {"type": "object", "properties": {name: False}}


def item_is(value: Any, index: int) -> Any:
    """Return a schema of lists whose item at an index is of a schema."""
    if value is NEVER:
        return NEVER
    return {"type": "array", "prefixItems": [*[True] * index, value], "minItems": index + 1}


def _fewer(kind: str, key: str, number: float) -> Any:
    return {"type": kind, key: int(number) - 1} if number >= 1 else NEVER


def of_types(kinds: Iterable[str]) -> Any:
    """Return a schema of all values of some types."""
    kinds = list(kinds)
    if not kinds:
        return NEVER
    return {"type": kinds[0] if len(kinds) == 1 else kinds}
