"""JSON schemas as llguidance can follow them: `parse_schema` checks and rewrites what was sent.

llguidance refuses keywords that it does not have, but does not say where; and a few things it would
let through. What is refused here is named with its place, a JSON pointer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from octavo.base.errors import ConstraintError
from octavo.grammars.schema_document import Schema, SchemaDocument, parts_of, schema_at
from octavo.grammars.schema_rewriter import SchemaRewriter, required_of

# A newline and an indentation: more white space between two parts means nothing.
MAX_WHITESPACE = 40

# They hold for the same value as the schema that they are in.
_IN_PLACE = ("allOf", "anyOf", "oneOf")
# Without those of code points: a name that is spelled so would pass for another one.
_ESCAPES = 'nrbtf\\"'


class ParsedSchema(NamedTuple):
    """A schema as llguidance takes it, and where its parts come from: places by their id."""

    schema: Schema
    places: Mapping[int, str]


def parse_schema(text: str, *, closes_objects: bool = False) -> ParsedSchema:
    """Return a schema as llguidance takes it.

    Args:
        closes_objects: objects have no properties but those that the schema names, where it does
            not say.

    Raises:
        ConstraintError: it is none, or has a keyword that is not supported; says which and where.
    """
    found, end = schema_at(text.strip())
    if end < len(text.strip()):
        raise ConstraintError(f"is no JSON: more follows it at character {end}")
    return rewritten_schema(found, closes_objects=closes_objects)


def rewritten_schema(
    found: Any, *, closes_objects: bool = False, is_lenient: bool = False
) -> ParsedSchema:
    """Return a schema, given as a value of JSON, as llguidance takes it.

    Args:
        closes_objects: see `parse_schema`.
        is_lenient: keywords that are not supported are left out, and not refused.

    Raises:
        ConstraintError: as `parse_schema`.
    """
    rewriter = SchemaRewriter(SchemaDocument(found), is_lenient=is_lenient)
    try:
        schema = rewriter.whole()
    except RecursionError:
        raise ConstraintError("is nested too deep", None, "too_complex") from None
    _check_that_it_ends(schema)
    if closes_objects:
        _close_objects(schema)
    return ParsedSchema(schema, rewriter.places)


def json_options(*, is_bounded: bool = True, whitespace: str | None = None) -> dict[str, Any]:
    """Return llguidance's options of JSON.

    Args:
        is_bounded: whether runs of white space between its parts have a bound.
        whitespace: a regular expression of that white space.
    """
    if whitespace is None and is_bounded:
        whitespace = rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}"
    options = {"json_allowed_escapes": _ESCAPES}
    return options if whitespace is None else {**options, "whitespace_pattern": whitespace}


def reachable(parsed: ParsedSchema) -> Iterator[tuple[str, Schema]]:
    """Yield the schema and those in it that it uses, each with its place, and before those in
    it."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("#", parsed.schema)]
    while waiting:
        place, part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        place = parsed.places.get(id(part), place)
        yield place, part
        waiting += reversed([*parts_of(part, place)])
        if "$ref" in part:
            waiting.append((part["$ref"], _referred(parsed.schema, part)))


def _referred(schema: Schema, part: Schema) -> Any:
    """Return what a part of a rewritten schema refers to: the whole, or a definition."""
    reference = part["$ref"]
    if reference == "#":
        return schema
    return schema["$defs"][reference.removeprefix("#/$defs/")]


# -- recursion -----------------------------------------------------------------------------------


def _check_that_it_ends(schema: Schema) -> None:
    """Raise ConstraintError if each value has another one of its own kind in it, without end."""
    endless = {id(part): part for _, part in reachable(ParsedSchema(schema, {}))}
    num_before = 0
    while len(endless) != num_before:
        num_before = len(endless)
        for key, part in reversed([*endless.items()]):  # inner ones first
            if _ends(schema, part, endless):
                del endless[key]
    if id(schema) in endless:
        references = [part["$ref"] for part in endless.values() if "$ref" in part]
        raise ConstraintError(
            f"no text can satisfy it: {references[0]!r:.80} refers to itself without end",
            None,
            "unsatisfiable",
        )


def _ends(schema: Schema, part: Schema, endless: Mapping[int, Schema]) -> bool:
    """Return whether there is a value of a schema in which none is of an ``endless`` one."""

    def is_endless(each: Any) -> bool:
        return id(each) in endless

    if "$ref" in part and is_endless(_referred(schema, part)):
        return False
    if any(map(is_endless, part.get("allOf", ()))):
        return False
    for key in ("anyOf", "oneOf"):
        if part.get(key) and all(map(is_endless, part[key])):
            return False
    if part.get("type") in ("object", ["object"]):
        properties = part.get("properties", {})
        return not any(is_endless(properties.get(name)) for name in required_of(part))
    if part.get("type") in ("array", ["array"]):
        least = part.get("minItems", 0)
        first = part.get("prefixItems", [])
        if any(map(is_endless, first[:least])):
            return False
        return least <= len(first) or not is_endless(part.get("items"))
    return True


# -- objects without further properties ----------------------------------------------------------


def _close_objects(schema: Schema) -> None:
    """Say of objects that they have no further properties, where they do not say.

    What holds for the same value as the schema that it is in is left open there, or it would forbid
    the properties of the others; the whole knows the names of all.
    """
    parts = [part for _, part in reachable(ParsedSchema(schema, {}))]
    inner: set[int] = set()
    for part in parts:
        if "properties" in part or len(part.get("allOf", ())) > 1:
            inner.update(id(each) for each in _held_in_place(schema, part))
    for part in parts:
        if id(part) in inner or "additionalProperties" in part or "patternProperties" in part:
            continue
        names = dict.fromkeys(part.get("properties", {}))
        others = [each for each in _held_in_place(schema, part) if id(each) in inner]
        if any("additionalProperties" in each or "patternProperties" in each for each in others):
            continue
        for each in others:
            names |= dict.fromkeys(each.get("properties", {}))
        if names or part.get("type") == "object":
            part["additionalProperties"] = False
            missing: Schema = {name: {} for name in names if name not in part.get("properties", {})}
            if missing:
                part["properties"] = part.get("properties", {}) | missing


def _held_in_place(schema: Schema, part: Schema) -> list[Schema]:
    """Return the schemas below ``part`` that hold for the same value."""
    found: dict[int, Schema] = {}
    waiting: list[Any] = [part]
    while waiting:
        each = waiting.pop()
        below = [one for key in _IN_PLACE for one in each.get(key, ())]
        if "$ref" in each:
            below.append(_referred(schema, each))
        for one in below:
            if isinstance(one, dict) and id(one) not in found:
                found[id(one)] = one
                waiting.append(one)
    return list(found.values())
