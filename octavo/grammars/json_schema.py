"""JSON schemas as llguidance can follow them: checked, and rewritten where that says the same.

llguidance refuses keywords that it does not have, but does not say where; and a few things it would
let through. What is refused here is named with its place, a JSON pointer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from octavo.base.errors import ConstraintError
from octavo.core.structured_outputs import MAX_DEPTH
from octavo.grammars.json_patterns import without_nul

# A newline and an indentation: more white space between two parts means nothing.
MAX_WHITESPACE = 40

Schema = dict[str, Any]

_SINGLE = ("additionalProperties", "items", "additionalItems", "unevaluatedProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties")
# They hold for the same value as the schema that they are in.
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
_UNSUPPORTED = (
    "not", "then", "else", "if", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "uniqueItems",
    "propertyNames", "$dynamicRef", "$recursiveRef", "x-guidance",
)  # fmt: skip

# Formats of llguidance; others by a format whose texts they all have, or by an expression.
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_NARROWER = {
    "iri": "uri",
    "uri-reference": "uri",
    "iri-reference": "uri",
    "url": "uri",
    "idn-email": "email",
    "idn-hostname": "hostname",
}
_PATTERNS = {
    "json-pointer": "^(/([^/~]|~[01])*)*$",
    "relative-json-pointer": "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
    "byte": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
# Few that read dates know the year 0.
_YEAR = "^(000[1-9]|00[1-9][0-9]|0[1-9][0-9][0-9]|[1-9][0-9][0-9][0-9])-"
_ANY_TEXT = frozenset(("password", "binary", "path", "file-path", "directory-path", "textarea"))
_INTEGERS = {
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
    "uint32": (0, (1 << 32) - 1),
    "uint64": (0, (1 << 64) - 1),
}
_FLOATS = frozenset(("float", "double", "decimal", "number"))


def parse_schema(text: str, *, closes_objects: bool = False) -> Schema:
    """Return a schema as llguidance takes it.

    Args:
        closes_objects: objects have no properties but those that the schema names, where it does
            not say.

    Raises:
        ConstraintError: it is none, or has a keyword that is not supported; says which and where.
    """
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ConstraintError(f"is no JSON: {error}") from None
    _check_depth(schema)
    if schema is True:
        schema = {}
    if schema is False:
        raise ConstraintError("the schema is false, which nothing satisfies", None, "unsatisfiable")
    if not isinstance(schema, dict):
        raise ConstraintError(f"must be a JSON schema, an object, not {schema!r:.60}")
    for place, part in reachable(schema):
        _rewrite(part, place)
    _check_that_it_ends(schema)
    if closes_objects:
        _close_objects(schema)
    return schema


def reachable(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the schema and those in it that it uses, each with its JSON pointer, and before those
    in it. They may be changed meanwhile."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("#", schema)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise ConstraintError(f"has at {place} no schema: {part!r:.60}")
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield place, part
        waiting += reversed(list(_parts(part, place)))
        if (reference := _local_reference(part)) is not None:
            waiting.append((reference, _referred(schema, reference, place)))
        elif "$ref" in part:  # by a name, which may be that of any definition
            for key in ("$defs", "definitions"):
                named = schema.get(key)
                if isinstance(named, dict):
                    waiting += ((f"#/{key}/{_pointed(k)}", each) for k, each in named.items())


def _parts(part: Schema, place: str) -> Iterator[tuple[str, Any]]:
    for key in _SINGLE:
        if isinstance(part.get(key), dict):
            yield f"{place}/{key}", part[key]
    for key in _LISTS:
        if isinstance(part.get(key), list):
            yield from ((f"{place}/{key}/{i}", each) for i, each in enumerate(part[key]))
    for key in _MAPS:
        if isinstance(part.get(key), dict):
            yield from ((f"{place}/{key}/{_pointed(k)}", each) for k, each in part[key].items())


def _local_reference(part: Schema) -> str | None:
    """Return the JSON pointer that a schema refers to; None if it does not, or in another way."""
    reference = part.get("$ref")
    is_local = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
    return reference if is_local else None


def _referred(schema: Schema, reference: str, place: str) -> Any:
    found: Any = schema
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if "%" in step:
            from urllib.parse import unquote

            step = unquote(step)
        if isinstance(found, dict) and step in found:
            found = found[step]
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            raise ConstraintError(f"{place}/$ref: there is no {reference!r:.100} in the schema")
    return found


def _pointed(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _check_depth(value: Any) -> None:
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        below: list[Any] = []
        for each in level:
            below += each.values() if isinstance(each, dict) else each
        level = [each for each in below if isinstance(each, dict | list)]


def _too_deep() -> ConstraintError:
    return ConstraintError(f"is nested more than {MAX_DEPTH} deep", None, "too_complex")


# -- recursion -----------------------------------------------------------------------------------


def _check_that_it_ends(schema: Schema) -> None:
    """Raise ConstraintError if each value has another one of its own kind in it, without end."""
    endless = {id(part): part for _, part in reachable(schema)}
    while True:
        known = [key for key, part in endless.items() if _ends(schema, part, endless)]
        if not known:
            break
        for key in known:
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

    reference = _local_reference(part)
    if reference is not None and is_endless(_referred(schema, reference, "#")):
        return False
    if any(map(is_endless, part.get("allOf", ()))):
        return False
    for key in ("anyOf", "oneOf"):
        if part.get(key) and all(map(is_endless, part[key])):
            return False
    if part.get("type") in ("object", ["object"]):
        properties = part.get("properties", {})
        return not any(is_endless(properties.get(name)) for name in _required(part))
    if part.get("type") in ("array", ["array"]):
        least = part.get("minItems", 0)
        first = part.get("prefixItems", [])
        if any(map(is_endless, first[:least])):
            return False
        return least <= len(first) or not is_endless(part.get("items"))
    return True


# -- keywords ------------------------------------------------------------------------------------


def _rewrite(part: Schema, place: str) -> None:
    """Replace what llguidance does not have by the same in other words, or refuse it."""
    _drop_what_says_nothing(part)
    _rewrite_names(part)
    if part.get("unevaluatedProperties") is False and not _has_in_place(part):
        del part["unevaluatedProperties"]
        part.setdefault("additionalProperties", False)
    for key in _UNSUPPORTED:
        if key in part:
            raise _unsupported(key, place)
    _check_type(part, place)
    _rewrite_format(part, place)
    if isinstance(part.get("pattern"), str):
        part["pattern"] = without_nul(part["pattern"])
    if isinstance(part.get("patternProperties"), dict):
        patterns = part["patternProperties"].items()
        part["patternProperties"] = {without_nul(key): value for key, value in patterns}
    least = part.get("minProperties")
    if isinstance(least, int | float) and part.get("additionalProperties") is not False:
        # A name that may be any could come twice, and then there are fewer.
        most = len(_required(part)) + 1
        if least > most:
            raise ConstraintError(
                f"minProperties above {most} at {place} is not supported where properties may have "
                "any name",
                None,
                "unsupported",
            )


def _drop_what_says_nothing(part: Schema) -> None:
    if part.get("uniqueItems") is False or part.get("maxItems") in (0, 1):
        part.pop("uniqueItems", None)
    if part.get("not") is False:
        del part["not"]
    if "if" not in part:
        part.pop("then", None)
        part.pop("else", None)
    elif "then" not in part and "else" not in part:
        del part["if"]
    if "contains" not in part:
        part.pop("minContains", None)
        part.pop("maxContains", None)
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        if part.get(key) == {}:
            del part[key]
    for key in ("unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        if part.get(key) in (True, {}):
            del part[key]


def _rewrite_names(part: Schema) -> None:
    """Put names that all have to be alike into ``patternProperties``, and requirements that always
    hold into ``required``."""
    names = part.get("propertyNames")
    others = {"properties", "patternProperties", "required"}
    if isinstance(names, dict) and not part.keys() & others:
        keys = names.keys() - {"type", "title", "description"}
        pattern: str | None = None
        if names.get("type", "string") == "string" and len(keys) <= 1:
            enum = names.get("enum")
            if isinstance(names.get("pattern"), str):
                pattern = names["pattern"]
            elif _are_texts(enum):
                pattern = "^(" + "|".join(map(re.escape, enum)) + ")$"
            elif not keys:
                pattern = ""
        if pattern is not None:
            del part["propertyNames"]
            if pattern:
                part["patternProperties"] = {pattern: part.pop("additionalProperties", {})}
                part["additionalProperties"] = False
    needs = part.get("dependentRequired")
    if not isinstance(needs, dict) or not all(map(_are_texts, needs.values())):
        return
    if needs.keys() <= set(_required(part)):
        del part["dependentRequired"]
        more = [name for names in needs.values() for name in names]
        part["required"] = list(dict.fromkeys([*_required(part), *more]))


def _are_texts(values: Any) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


def _required(part: Schema) -> list[str]:
    required = part.get("required")
    return list(dict.fromkeys(required)) if _are_texts(required) else []


def _has_in_place(part: Schema) -> bool:
    return any(key in part for key in (*_IN_PLACE, "$ref", "if", "not", "dependentSchemas"))


def _check_type(part: Schema, place: str) -> None:
    kinds = part.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise ConstraintError(
                f"has at {place}/type {kind!r:.60}, which is no type; {', '.join(sorted(_TYPES))} "
                "are"
            )


def _rewrite_format(part: Schema, place: str) -> None:
    name = part.get("format")
    if name in ("date", "date-time"):
        _add_pattern(part, _YEAR)
    if name is None or name in _FORMATS:
        return
    if not isinstance(name, str):
        raise ConstraintError(f"has at {place}/format {name!r:.60}, which is no text")
    if name in _NARROWER:
        part["format"] = _NARROWER[name]
        return
    del part["format"]
    if name in _PATTERNS:
        _add_pattern(part, _PATTERNS[name])
    elif name in _INTEGERS:
        low, high = _INTEGERS[name]
        part["minimum"] = max(low, part.get("minimum", low))
        part["maximum"] = min(high, part.get("maximum", high))
    elif name not in _ANY_TEXT and name not in _FLOATS:
        raise ConstraintError(
            f"the format {name!r:.60} at {place} is not supported", None, "unsupported"
        )


def _add_pattern(part: Schema, pattern: str) -> None:
    if "pattern" in part:
        part.setdefault("allOf", []).append({"pattern": pattern})
    else:
        part["pattern"] = pattern


def _unsupported(key: str, place: str) -> ConstraintError:
    return ConstraintError(f"{key!r} at {place} is not supported", None, "unsupported")


# -- objects without further properties ----------------------------------------------------------


def _close_objects(schema: Schema) -> None:
    """Say of objects that they have no further properties, where they do not say.

    What holds for the same value as the schema that it is in is left open there, or it would forbid
    the properties of the others; the whole knows the names of all.
    """
    parts = [part for _, part in reachable(schema)]
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
        if (reference := _local_reference(each)) is not None:
            below.append(_referred(schema, reference, "#"))
        for one in below:
            if isinstance(one, dict) and id(one) not in found:
                found[id(one)] = one
                waiting.append(one)
    return list(found.values())


def whitespace_pattern(*, is_bounded: bool, asked: str | None) -> Mapping[str, Any]:
    """Return llguidance's option for the white space between the parts of JSON."""
    if asked is not None:
        return {"whitespace_pattern": asked}
    return {"whitespace_pattern": rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}"} if is_bounded else {}
