"""JSON schemas of tools, as grammars take them and as values are read by them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from octavo.base.errors import InvalidRequestError
from octavo.chat_formats.tools import Tool

DEFINITIONS = frozenset({"$defs", "definitions"})  # keywords of what references point to
_ANNOTATIONS = {"description", "title", "examples", "example", "default", "$comment", "deprecated",
                "readOnly", "writeOnly", "$schema"}  # fmt: skip
_SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties", "not", "if", "then", "else", "contains",
            "propertyNames", "unevaluatedProperties", "unevaluatedItems"}  # fmt: skip
# In regular expressions: what needs them to be tried in several ways.
BACKTRACKING = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]")
# Keywords beside which a closed object could be one that nothing satisfies.
_COMBINING = {"anyOf", "oneOf", "allOf", "not", "if", "$ref", "patternProperties",
              "dependentSchemas", "dependentRequired", "propertyNames", "minProperties",
              "unevaluatedProperties", "additionalProperties"}  # fmt: skip


def without_annotations(schema: Any) -> Any:
    """Return a schema without what only people read."""
    return _changed(schema, lambda key, value: key not in _ANNOTATIONS)


def without_backtracking(schema: Any) -> Any:
    """Return a schema without patterns that no grammar can follow."""
    return _changed(
        schema,
        lambda key, value: key != "pattern" or not BACKTRACKING.search(str(value)),
    )


def _changed(schema: Any, keeps: Callable[[str, Any], bool]) -> Any:
    """Return a schema with those of its keywords, and of the schemas in it, that are kept."""
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if not keeps(key, value):
            continue
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            value = {name: _changed(each, keeps) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            value = [_changed(each, keeps) for each in value]
        elif key in _SCHEMAS:
            value = _changed(value, keeps)
        kept[key] = value
    return kept


def closed(schema: Any) -> Any:
    """Return a schema in which objects have the properties that are named and no others, where it
    leaves that open. All that it allows, the first does."""
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    if "items" in result:
        result["items"] = closed(result["items"])
    properties = result.get("properties")
    if not isinstance(properties, Mapping) or _COMBINING & result.keys():
        return result
    result["properties"] = {name: closed(each) for name, each in properties.items()}
    if all(name in properties for name in result.get("required") or ()):
        result["additionalProperties"] = False
    return result


JSON_TYPES = frozenset({"string", "number", "boolean", "null", "array", "object"})
_MAX_REFS = 16


class Argument(NamedTuple):
    """A named argument of a tool.

    Args:
        schema: with the definitions that it refers to.
    """

    name: str
    schema: Mapping[str, Any]
    is_required: bool


def arguments_of(tool: Tool, names: re.Pattern[str], *, is_lenient: bool) -> tuple[Argument, ...]:
    """Return the arguments of a tool one by one, for formats that write them so.

    Args:
        names: the names that the format can write.
        is_lenient: whether keywords on several arguments together may be forgotten.

    Raises:
        InvalidRequestError: the schema has such a keyword, or another name.
    """
    schema = resolved(without_annotations(tool.parameters), tool.parameters)
    for keyword in () if is_lenient else schema:
        if keyword in _COMBINING - {"additionalProperties"}:
            raise InvalidRequestError(
                f"{keyword!r} on all arguments of {tool.name!r} cannot be enforced in the format "
                "in which this model writes calls: give each argument a schema of its own",
                "tools",
            )
    definitions = {key: schema[key] for key in DEFINITIONS & schema.keys()}
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    named = {**properties, **{name: {} for name in required if name not in properties}}
    for name in named:
        if not names.fullmatch(name):
            raise InvalidRequestError(
                f"the name of the argument {name!r:.80} of {tool.name!r} cannot be written in the "
                "format in which this model writes calls",
                "tools",
            )
    return tuple(
        Argument(
            name,
            {**definitions, **resolved(each, schema)} if isinstance(each, Mapping) else {},
            name in required,
        )
        for name, each in named.items()
    )


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema whose outermost ``$ref``, and a combination of just one, are replaced by what
    they mean, unless a keyword is there twice then."""
    for _ in range(_MAX_REFS):
        rest = dict(schema)
        single = next(
            (key for key in ("allOf", "anyOf", "oneOf") if len(rest.get(key) or ()) == 1), None
        )
        if "$ref" in rest:
            found = _referred(rest.pop("$ref"), root)
        elif single is not None:
            (found,) = rest.pop(single)
        else:
            return schema
        if not isinstance(found, Mapping):
            return schema
        found = without_annotations(found)
        if any(found[key] != rest[key] for key in found.keys() & rest.keys()):
            return schema
        schema = {**found, **rest}
    return schema


def _referred(reference: Any, root: Any) -> Any:
    """Return what a reference within a schema points to; None if it does not."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def types_of(schema: Any, root: Mapping[str, Any] | None = None, depth: int = 0) -> frozenset[str]:
    """Return the types of JSON that a schema allows, of `JSON_TYPES`; maybe too many."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFS:
        return JSON_TYPES
    root = schema if root is None else root
    schema = resolved(schema, root)
    types = JSON_TYPES
    named = schema.get("type")
    if named is not None:
        names = [named] if isinstance(named, str) else named
        types &= {"number" if name == "integer" else name for name in names}
    if "const" in schema:
        types &= {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        types &= {type_of(value) for value in schema["enum"]}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            each = (types_of(one, root, depth + 1) for one in schema[keyword])
            types &= frozenset().union(*each)
    if isinstance(schema.get("allOf"), list):
        types = types.intersection(*(types_of(one, root, depth + 1) for one in schema["allOf"]))
    return types


def type_of(value: Any) -> str:
    """Return the type of JSON that a value of Python's is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, Mapping):
        return "object"
    return "array" if isinstance(value, list | tuple) else "number"
